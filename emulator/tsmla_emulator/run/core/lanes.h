// One lane-wise instruction over a warp: accessors for the 32-lane register slots and the masked loops.
#pragma once
#include <limits>
#include <type_traits>

#include "machine.h"
#include "special_functions.h"

// A slot holds 32 lanes of 32 bits; 64-bit registers take two slots, low halves first; a predicate lane is 0 or ~0.
struct U32 {
  using T = u32;
  static T get(const u32* p, int i) { return p[i]; }
  static void set(u32* p, int i, T v) { p[i] = v; }
};
struct S32 {
  using T = s32;
  static T get(const u32* p, int i) { return s32(p[i]); }
  static void set(u32* p, int i, T v) { p[i] = u32(v); }
};
struct F32 {
  using T = f32;
  static T get(const u32* p, int i) { return bits<f32>(p[i]); }
  static void set(u32* p, int i, T v) { p[i] = bits<u32>(v); }
};
struct U16 {
  using T = u16;
  static T get(const u32* p, int i) { return u16(p[i]); }
  static void set(u32* p, int i, T v) { p[i] = v; }
};
struct S16 {
  using T = s16;
  static T get(const u32* p, int i) { return s16(u16(p[i])); }
  static void set(u32* p, int i, T v) { p[i] = u16(v); }
};
struct Pred {
  using T = bool;
  static T get(const u32* p, int i) { return p[i] != 0; }
  static void set(u32* p, int i, T v) { p[i] = v ? ~0u : 0u; }
};
struct U64 {
  using T = u64;
  static T get(const u32* p, int i) { return u64(p[i + 32]) << 32 | p[i]; }
  static void set(u32* p, int i, T v) { p[i] = u32(v), p[i + 32] = u32(v >> 32); }
};
struct S64 {
  using T = s64;
  static T get(const u32* p, int i) { return s64(U64::get(p, i)); }
  static void set(u32* p, int i, T v) { U64::set(p, i, u64(v)); }
};

template <class R, class F>
inline void loop(u32* d, u32 mask, F f) {
  using T = typename R::T;
  if (mask == ~0u) {
#pragma clang loop vectorize(assume_safety)
    for (int i = 0; i < 32; i++) R::set(d, i, T(f(i)));
  } else {
    for (u32 rest = mask; rest; rest &= rest - 1) {
      int i = __builtin_ctz(rest);
      R::set(d, i, T(f(i)));
    }
  }
}

template <class R, class A, class F>
inline void lanes(const Insn& in, Warp& w, u32 mask, F f) {
  const u32* a = w.read(in.a);
  loop<R>(w.write(in.d), mask, [=](int i) { return f(A::get(a, i)); });
}
template <class R, class A, class B, class F>
inline void lanes(const Insn& in, Warp& w, u32 mask, F f) {
  const u32 *a = w.read(in.a), *b = w.read(in.b);
  loop<R>(w.write(in.d), mask, [=](int i) { return f(A::get(a, i), B::get(b, i)); });
}
template <class R, class A, class B, class C, class F>
inline void lanes(const Insn& in, Warp& w, u32 mask, F f) {
  const u32 *a = w.read(in.a), *b = w.read(in.b), *c = w.read(in.c);
  loop<R>(w.write(in.d), mask, [=](int i) { return f(A::get(a, i), B::get(b, i), C::get(c, i)); });
}
template <class R, class A, class B, class C, class D, class F>
inline void lanes(const Insn& in, Warp& w, u32 mask, F f) {
  const u32 *a = w.read(in.a), *b = w.read(in.b), *c = w.read(in.c), *d = w.read(in.e);
  loop<R>(w.write(in.d), mask, [=](int i) { return f(A::get(a, i), B::get(b, i), C::get(c, i), D::get(d, i)); });
}

// Two packed values: the low and the high slot are two plain f32 registers.
template <class R, class A, class B, class F>
inline void lanes2(const Insn& in, Warp& w, u32 mask, F f) {
  for (int h = 0; h < 64; h += 32) {
    const u32 *a = w.read(in.a) + h, *b = w.read(in.b) + h;
    loop<R>(w.write(in.d) + h, mask, [=](int i) { return f(A::get(a, i), B::get(b, i)); });
  }
}
template <class R, class A, class B, class C, class F>
inline void lanes2(const Insn& in, Warp& w, u32 mask, F f) {
  for (int h = 0; h < 64; h += 32) {
    const u32 *a = w.read(in.a) + h, *b = w.read(in.b) + h, *c = w.read(in.c) + h;
    loop<R>(w.write(in.d) + h, mask, [=](int i) { return f(A::get(a, i), B::get(b, i), C::get(c, i)); });
  }
}
