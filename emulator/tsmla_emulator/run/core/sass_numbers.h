// Arithmetic that machine code has and PTX has not: directed rounding, pairs of 16-bit floats with selected halves.
#pragma once
#include "special_functions.h"

// The exact value lies on the side of `f` that `beyond` (exact - f) says. direction: -1 down, 1 up, 0 to zero.
inline f32 directed(f32 f, double beyond, s32 direction) {
  if (!(std::fabs(f) <= 3.4028235e38f) || beyond == 0) return canonical(f);
  if (direction == 0) return (beyond > 0) == (f > 0) ? f : std::nextafter(f, 0.0f);
  if (direction > 0) return beyond > 0 ? std::nextafter(f, INFINITY) : f;
  return beyond < 0 ? std::nextafter(f, -INFINITY) : f;
}

// a * b + c with one rounding. The product of two floats is exact in double, and so is the error of the sum.
inline f32 fma_directed(f32 a, f32 b, f32 c, s32 direction) {
  double product = double(a) * double(b), sum = product + double(c);
  double part = sum - product, error = (product - (sum - part)) + (double(c) - part);
  f32 nearest = f32(sum);
  if (std::isinf(nearest) && std::isfinite(sum) && (direction == 0 || (direction > 0) != (sum > 0)))
    return sum > 0 ? 3.4028235e38f : -3.4028235e38f;
  return directed(nearest, (sum - double(nearest)) + error, direction);
}

inline f32 float_of_integer(s64 value, s32 direction) {
  f32 nearest = f32(value);
  return directed(nearest, double(value) - double(nearest), direction);
}

// FCHK: whether a / b leaves the range in which a reciprocal and Newton steps are right, as an H200 has it.
inline bool division_is_hard(f32 a, f32 b) {
  s32 x = s32(bits<u32>(a) >> 23 & 255), y = s32(bits<u32>(b) >> 23 & 255);
  return x < 25 || x == 255 || y < 2 || y > 251 || x - y > 126 || y - x > 124;
}

// how: 1 both halves are the low one, 2 the high one; 4 negated, 8 absolute.
inline u32 half_operand(u32 v, s64 how) {
  if (how & 1) v = v << 16 | (v & 0xffff);
  if (how & 2) v = v >> 16 | (v & 0xffff0000u);
  if (how & 8) v &= 0x7fff7fffu;
  if (how & 4) v ^= 0x80008000u;
  return v;
}

template <class F>
inline u32 halves(u32 a, u32 b, F f) {
  return u32(f(u16(a >> 16), u16(b >> 16))) << 16 | f(u16(a), u16(b));
}
inline u16 max_of_f16(u16 a, u16 b) { return to_f16(max_number(from_f16(a), from_f16(b))); }
inline u16 min_of_f16(u16 a, u16 b) { return to_f16(min_number(from_f16(a), from_f16(b))); }
inline u16 max_of_bf16(u16 a, u16 b) { return to_bf16(max_number(from_bf16(a), from_bf16(b))); }
inline u16 min_of_bf16(u16 a, u16 b) { return to_bf16(min_number(from_bf16(a), from_bf16(b))); }

// The sum of an exact product and a number, rounded to odd: rounding it again to 16 bits rounds once.
inline f32 odd_sum(double product, double c) {
  double sum = product + c, part = sum - product, error = (product - (sum - part)) + (c - part);
  f32 f = f32(sum);
  if (!std::isfinite(f)) return f;
  double beyond = (sum - double(f)) + error;
  if (beyond == 0 || bits<u32>(f) & 1) return f;
  return std::nextafter(f, beyond > 0 ? INFINITY : -INFINITY);
}
inline u32 fma_of_f16(u32 a, u32 b, u32 c) {
  return to_f16(odd_sum(double(from_f16(u16(a))) * from_f16(u16(b)), from_f16(u16(c))));
}
inline u32 fma_of_bf16(u32 a, u32 b, u32 c) {
  return to_bf16(odd_sum(double(from_bf16(u16(a))) * from_bf16(u16(b)), from_bf16(u16(c))));
}
