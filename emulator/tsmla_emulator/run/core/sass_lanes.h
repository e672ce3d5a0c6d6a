// Operands and loops of the lane-wise operations of machine code.
#pragma once
#include "machine.h"
#include "sass_numbers.h"

// What an operand is, with the signs that it may have: i32 negated or inverted; c32 the same as a sum of 33 bits, of
// which a carry counts; f32 negated, absolute; b32 the bits of such a float; pred inverted.
enum class Sass { u32, s32, i32, c32, u64, s64, f32, b32, pred };

// in.flags has two bits for each of the first four sources, 1 for a minus, 2 for an absolute value or an inversion; and
// bit 8 + i for a predicate that is inverted.
inline u32 signs_of(const Insn& in, u32 source) { return source < 4 ? in.flags >> 2 * source & 3 : 0; }

template <Sass kind>
struct From;
template <>
struct From<Sass::u32> {
  const u32* p;
  From(const Insn&, const u32* p, u32) : p(p) {}
  u32 operator()(int i) const { return p[i]; }
};
template <>
struct From<Sass::s32> {
  const u32* p;
  From(const Insn&, const u32* p, u32) : p(p) {}
  s32 operator()(int i) const { return s32(p[i]); }
};
template <>
struct From<Sass::u64> {
  const u32* p;
  From(const Insn&, const u32* p, u32) : p(p) {}
  u64 operator()(int i) const { return u64(p[i + 32]) << 32 | p[i]; }
};
template <>
struct From<Sass::i32> {
  const u32* p;
  u32 flip, more;
  From(const Insn& in, const u32* p, u32 n)
      : p(p), flip(signs_of(in, n) ? ~0u : 0), more(signs_of(in, n) == 1) {}
  u32 operator()(int i) const { return (p[i] ^ flip) + more; }
};
template <>
struct From<Sass::c32> {
  const u32* p;
  u32 flip, more;
  From(const Insn& in, const u32* p, u32 n)
      : p(p), flip(signs_of(in, n) ? ~0u : 0), more(signs_of(in, n) == 1) {}
  u64 operator()(int i) const { return u64(p[i] ^ flip) + more; }
};
template <>
struct From<Sass::b32> {
  const u32* p;
  u32 keep, flip;
  From(const Insn& in, const u32* p, u32 n)
      : p(p), keep(signs_of(in, n) & 2 ? 0x7fffffffu : ~0u), flip(signs_of(in, n) & 1 ? 0x80000000u : 0) {}
  u32 operator()(int i) const { return (p[i] & keep) ^ flip; }
};
template <>
struct From<Sass::f32> : From<Sass::b32> {
  using From<Sass::b32>::From;
  f32 operator()(int i) const { return bits<f32>(From<Sass::b32>::operator()(i)); }
};
template <>
struct From<Sass::pred> {
  const u32* p;
  u32 flip;
  From(const Insn& in, const u32* p, u32 n) : p(p), flip(in.flags >> (8 + n) & 1 ? ~0u : 0) {}
  bool operator()(int i) const { return (p[i] ^ flip) != 0; }
};

template <Sass kind>
struct To {
  u32* p;
  void operator()(int i, u32 v) const { p[i] = v; }
};
template <>
struct To<Sass::s32> {
  u32* p;
  void operator()(int i, s32 v) const { p[i] = u32(v); }
};
template <>
struct To<Sass::u64> {
  u32* p;
  void operator()(int i, u64 v) const { p[i] = u32(v), p[i + 32] = u32(v >> 32); }
};
template <>
struct To<Sass::f32> {
  u32* p;
  void operator()(int i, f32 v) const { p[i] = bits<u32>(v); }
};
template <>
struct To<Sass::pred> {
  u32* p;
  void operator()(int i, bool v) const { p[i] = v ? ~0u : 0u; }
};

template <class Body>
inline void each(u32 mask, Body body) {
  if (mask == ~0u) {
#pragma clang loop vectorize(assume_safety)
    for (int i = 0; i < 32; i++) body(i);
  } else {
    for (u32 rest = mask; rest; rest &= rest - 1) body(__builtin_ctz(rest));
  }
}
