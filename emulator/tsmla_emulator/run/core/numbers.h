// Lane arithmetic with the GPU's results: NaN forms, rounding, saturation, small float formats.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline f32 canonical(f32 x) { return x == x ? x : bits<f32>(0x7fffffffu); }
inline f32 flush(f32 x) {
  u32 b = bits<u32>(x);
  return (b & 0x7f800000u) ? x : bits<f32>(b & 0x80000000u);
}
inline f32 relu(f32 x) { return x > 0 || x != x ? x : 0.0f; }

inline f32 max_number(f32 a, f32 b) {
  f32 larger = a > b ? a : b;
  if (a == b) larger = bits<f32>(bits<u32>(a) & bits<u32>(b));
  if (a != a) larger = canonical(b);
  if (b != b) larger = canonical(a);
  return larger;
}
inline f32 min_number(f32 a, f32 b) {
  f32 smaller = a < b ? a : b;
  if (a == b) smaller = bits<f32>(bits<u32>(a) | bits<u32>(b));
  if (a != a) smaller = canonical(b);
  if (b != b) smaller = canonical(a);
  return smaller;
}
inline f32 max_nan(f32 a, f32 b) { return a != a || b != b ? bits<f32>(0x7fffffffu) : max_number(a, b); }
inline f32 min_nan(f32 a, f32 b) { return a != a || b != b ? bits<f32>(0x7fffffffu) : min_number(a, b); }

// a + b rounded to minus infinity: the rounding error of the nearest sum (Knuth's two-sum) says whether to step down.
inline f32 add_down(f32 a, f32 b) {
  f32 sum = a + b;
  if (!(std::fabs(sum) <= 3.4028235e38f)) return canonical(sum);
  f32 part = sum - a;
  f32 error = (a - (sum - part)) + (b - part);
  if (error < 0) return std::nextafter(sum, -INFINITY);
  if (sum == 0 && error == 0 && (std::signbit(a) || std::signbit(b))) return -0.0f;
  return sum;
}

template <class T>
inline T divide(T a, T b) {
  if (b == 0) return T(-1);
  if constexpr (T(-1) < T(0)) {
    if (b == T(-1)) return T(0 - std::make_unsigned_t<T>(a));
  }
  return T(a / b);
}
template <class T>
inline T remainder(T a, T b) {
  if (b == 0) return a;
  if constexpr (T(-1) < T(0)) {
    if (b == T(-1)) return T(0);
  }
  return T(a % b);
}
template <class T>
inline T to_integer(f32 x) {
  if (x != x) return T(0);
  constexpr T low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  if (double(x) <= double(low)) return low;
  if (double(x) >= double(high)) return high;
  return T(x);
}

inline u32 reverse_bits(u32 x) {
  u32 r = 0;
  for (int i = 0; i < 32; i++) r |= ((x >> i) & 1u) << (31 - i);
  return r;
}
inline u32 extract_bits(u32 a, u32 position, u32 length) {
  position &= 0xff, length &= 0xff;
  if (position > 31 || length == 0) return 0;
  return length >= 32 ? a >> position : (a >> position) & ((1u << length) - 1);
}
inline s32 extract_bits_signed(s32 a, u32 position, u32 length) {
  position &= 0xff, length &= 0xff;
  if (length == 0) return 0;
  u32 top = std::min(position + length - 1, 31u);
  u32 sign = (u32(a) >> top) & 1u ? ~0u : 0u;
  u32 kept = extract_bits(u32(a), position, length);
  u32 width = position > 31 ? 0 : std::min(length, 32 - position);
  return s32(width >= 32 ? kept : kept | (sign << width));
}
inline u32 insert_bits(u32 a, u32 b, u32 position, u32 length) {
  position &= 0xff, length &= 0xff;
  if (position > 31 || length == 0) return b;
  u32 mask = (length >= 32 ? ~0u : (1u << length) - 1) << position;
  return (b & ~mask) | ((a << position) & mask);
}
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
  u64 pool = u64(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 nibble = (selector >> (4 * i)) & 0xf;
    u32 byte = u32(pool >> (8 * (nibble & 7))) & 0xff;
    if (nibble & 8) byte = byte & 0x80 ? 0xff : 0;
    r |= byte << (8 * i);
  }
  return r;
}
inline u32 any_of_three(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  if (table & 0x01) r |= ~a & ~b & ~c;
  if (table & 0x02) r |= ~a & ~b & c;
  if (table & 0x04) r |= ~a & b & ~c;
  if (table & 0x08) r |= ~a & b & c;
  if (table & 0x10) r |= a & ~b & ~c;
  if (table & 0x20) r |= a & ~b & c;
  if (table & 0x40) r |= a & b & ~c;
  if (table & 0x80) r |= a & b & c;
  return r;
}

inline u16 to_bf16(f32 x) {
  u32 b = bits<u32>(x);
  u32 rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return u16(x == x ? rounded : 0x7fffu);
}
inline f32 from_bf16(u16 h) { return bits<f32>(u32(h) << 16); }

inline u16 to_f16(f32 x) {
  if (x != x) return 0x7fff;
  u32 b = bits<u32>(x), sign = (b >> 16) & 0x8000u, magnitude = b & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) return u16(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    f32 scaled = bits<f32>(magnitude) + 0.5f;  // ulp of 0.5 is the f16 subnormal step: rounds to nearest even
    return u16(sign | (bits<u32>(scaled) - 0x3f000000u));
  }
  u32 rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return u16(sign | ((rounded - 0x38000000u) >> 13));
}
inline f32 from_f16(u16 h) {
  u32 sign = u32(h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00u) return bits<f32>(sign | (rest == 0x7c00u ? 0x7f800000u : 0x7fffffffu));
  // The exponent is moved by a multiplication, which is exact for subnormals too.
  return bits<f32>(sign | bits<u32>(bits<f32>(rest << 13) * 5.192296858534828e33f));
}

// e4m3: finite only up to 448, NaN 0x7f. Rounds to nearest even, saturates.
inline u16 to_e4m3(f32 x) {
  if (x != x) return 0x7f;
  u32 b = bits<u32>(x), sign = (b >> 24) & 0x80u;
  f32 magnitude = std::fabs(x);
  if (magnitude >= 464.0f) return u16(sign | 0x7eu);
  if (magnitude < 0.015625f) {
    f32 scaled = magnitude + 16384.0f;  // ulp of 2^14 is 2^-9, the subnormal step
    return u16(sign | (bits<u32>(scaled) - 0x46800000u));
  }
  u32 m = b & 0x7fffffffu;
  u32 rounded = m + 0x7ffffu + ((m >> 20) & 1u);
  return u16(sign | std::min((rounded - 0x3c000000u) >> 20, 0x7eu));
}
// e5m2: infinities exist, but satfinite clamps to 57344.
inline u16 to_e5m2(f32 x) {
  if (x != x) return 0x7f;
  u32 b = bits<u32>(x), sign = (b >> 24) & 0x80u;
  f32 magnitude = std::fabs(x);
  if (magnitude >= 57344.0f) return u16(sign | 0x7bu);
  if (magnitude < 6.103515625e-05f) {
    f32 scaled = magnitude + 128.0f;  // ulp of 2^7 is 2^-16, the subnormal step
    return u16(sign | (bits<u32>(scaled) - 0x43000000u));
  }
  u32 m = b & 0x7fffffffu;
  u32 rounded = m + 0xfffffu + ((m >> 21) & 1u);
  return u16(sign | std::min((rounded - 0x38000000u) >> 21, 0x7bu));
}
inline f32 from_e4m3(u32 v) {
  u32 sign = (v & 0x80u) << 24, rest = v & 0x7fu;
  if (rest == 0x7fu) return bits<f32>(0x7fffffffu);
  return bits<f32>(sign | bits<u32>(bits<f32>(rest << 20) * 1.329227995784916e36f));  // 2^120
}
inline f32 from_e5m2(u32 v) { return from_f16(u16((v & 0xffu) << 8)); }
