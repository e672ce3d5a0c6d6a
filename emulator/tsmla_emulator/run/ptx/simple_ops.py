"""Table of the lane-wise instructions: opcode -> result type, source types and the C++ expression of one lane.

The build turns it into the interpreter's switch (`switch_text`), the lowering takes operand widths and numbers from it.
Types: u16 s16 u32 s32 u64 s64 f32 pred; x2 is two packed f32 that are computed one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimpleOp:
    """A lane-wise instruction. expression: computes the result from a, b, c (and d) of the `sources` types."""

    result: str
    sources: tuple[str, ...]
    expression: str


def _table() -> dict[str, SimpleOp]:
    table: dict[str, SimpleOp] = {}

    def op(names: str, result: str, sources: str, expression: str) -> None:
        for name in names.split():
            table[name] = SimpleOp(result, tuple(sources.split()), expression)

    _integer(op)
    _bits(op)
    _float(op)
    _conversions(op)
    _selection(op)
    return table


def _integer(op) -> None:
    for width in ("16", "32", "64"):
        u, s = f"u{width}", f"s{width}"
        for name, sign in (("add", "+"), ("sub", "-")):
            op(f"{name}.{s} {name}.{u}", u, f"{u} {u}", f"{u}(a {sign} b)")
        op(f"mul.lo.{s} mul.lo.{u}", u, f"{u} {u}", f"{u}(u64(a) * b)")
        op(f"mad.lo.{s} mad.lo.{u}", u, f"{u} {u} {u}", f"{u}(u64(a) * b + c)")
        op(f"neg.{s}", u, u, f"{u}(-a)")
        op(f"abs.{s}", u, s, f"{u}(a < 0 ? -{u}(a) : {u}(a))")
        for t in (u, s):
            op(f"min.{t}", t, f"{t} {t}", "a < b ? a : b")
            op(f"max.{t}", t, f"{t} {t}", "a < b ? b : a")
            op(f"div.{t}", t, f"{t} {t}", f"divide<{t}>(a, b)")
            op(f"rem.{t}", t, f"{t} {t}", f"remainder<{t}>(a, b)")
    op("min.relu.s32", "s32", "s32 s32", "std::max(std::min(a, b), s32(0))")
    op("max.relu.s32", "s32", "s32 s32", "std::max(std::max(a, b), s32(0))")
    for narrow, wide in (("16", "32"), ("32", "64")):
        for t in "us":
            n, w = t + narrow, t + wide
            op(f"mul.wide.{n}", w, f"{n} {n}", f"{w}({w}(a) * {w}(b))")
            op(f"mad.wide.{n}", w, f"{n} {n} {w}", f"{w}(u64({w}(a) * {w}(b)) + u64(c))")
            op(f"mul.hi.{n}", n, f"{n} {n}", f"{n}(({w}(a) * {w}(b)) >> {narrow})")
    op("mad.hi.u32", "u32", "u32 u32 u32", "u32((u64(a) * b) >> 32) + c")
    op("mad.hi.s32", "u32", "s32 s32 u32", "u32((s64(a) * b) >> 32) + c")
    op("mul.hi.u64", "u64", "u64 u64", "u64((unsigned __int128)(a) * b >> 64)")
    op("mul.hi.s64", "s64", "s64 s64", "s64((__int128)(a) * b >> 64)")
    op("mul24.lo.u32", "u32", "u32 u32", "(a & 0xffffff) * (b & 0xffffff)")


def _bits(op) -> None:
    for width in ("16", "32", "64"):
        u, s = f"u{width}", f"s{width}"
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            op(f"{name}.b{width}", u, f"{u} {u}", f"{u}(a {sign} b)")
        op(f"not.b{width}", u, u, f"{u}(~a)")
        op(f"shl.b{width}", u, f"{u} u32", f"b >= {width} ? {u}(0) : {u}(a << (b & {int(width) - 1}))")
        op(f"shr.u{width} shr.b{width}", u, f"{u} u32", f"b >= {width} ? {u}(0) : {u}(a >> (b & {int(width) - 1}))")
        op(f"shr.s{width}", s, f"{s} u32", f"{s}(a >> (b >= {width} ? {int(width) - 1} : b))")
    for name, expression in (("and", "a && b"), ("or", "a || b"), ("xor", "a != b")):
        op(f"{name}.pred", "pred", "pred pred", expression)
    op("not.pred", "pred", "pred", "!a")
    op("popc.b32", "u32", "u32", "u32(__builtin_popcount(a))")
    op("popc.b64", "u32", "u64", "u32(__builtin_popcountll(a))")
    op("clz.b32", "u32", "u32", "a ? u32(__builtin_clz(a)) : 32u")
    op("brev.b32", "u32", "u32", "reverse_bits(a)")
    op("bfind.u32", "u32", "u32", "a ? 31u - u32(__builtin_clz(a)) : ~0u")
    op("bfe.u32", "u32", "u32 u32 u32", "extract_bits(a, b, c)")
    op("bfe.s32", "s32", "s32 u32 u32", "extract_bits_signed(a, b, c)")
    op("bfi.b32", "u32", "u32 u32 u32 u32", "insert_bits(a, b, c, d)")
    op("prmt.b32", "u32", "u32 u32 u32", "permute_bytes(a, b, c)")
    op("lop3.b32", "u32", "u32 u32 u32 u32", "any_of_three(a, b, c, d)")
    op("shf.l.wrap.b32", "u32", "u32 u32 u32", "u32(((u64(b) << 32 | a) << (c & 31)) >> 32)")
    op("shf.r.wrap.b32", "u32", "u32 u32 u32", "u32((u64(b) << 32 | a) >> (c & 31))")
    op("shf.l.clamp.b32", "u32", "u32 u32 u32", "c >= 32 ? a : u32(((u64(b) << 32 | a) << c) >> 32)")
    op("shf.r.clamp.b32", "u32", "u32 u32 u32", "c >= 32 ? b : u32((u64(b) << 32 | a) >> c)")


def _float(op) -> None:
    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
        for ending, kind in (("f32", "f32"), ("f32x2", "x2")):
            f = f"canonical(a {sign} b)"
            names = f"{name}.rn.{ending}" + (f" {name}.f32" if kind == "f32" else f" {name}.f32x2")
            op(names, kind, f"{kind} {kind}", f)
            flushed = f"flush(canonical(flush(a) {sign} flush(b)))"
            op(f"{name}.rn.ftz.{ending} {name}.ftz.{ending}", kind, f"{kind} {kind}", flushed)
    for ending, kind in (("f32", "f32"), ("f32x2", "x2")):
        op(f"fma.rn.{ending}", kind, f"{kind} {kind} {kind}", "canonical(std::fma(a, b, c))")
        flushed = "flush(canonical(std::fma(flush(a), flush(b), flush(c))))"
        op(f"fma.rn.ftz.{ending}", kind, f"{kind} {kind} {kind}", flushed)
        op(f"add.rm.{ending}", kind, f"{kind} {kind}", "add_down(a, b)")
        op(f"add.rm.ftz.{ending}", kind, f"{kind} {kind}", "flush(add_down(flush(a), flush(b)))")
    op("neg.f32", "u32", "u32", "a ^ 0x80000000u")
    op("abs.f32", "u32", "u32", "a & 0x7fffffffu")
    op("neg.ftz.f32", "f32", "f32", "-flush(a)")
    op("copysign.f32", "u32", "u32 u32", "(b & 0x7fffffffu) | (a & 0x80000000u)")
    for name in ("max", "min"):
        op(f"{name}.f32", "f32", "f32 f32", f"{name}_number(a, b)")
        op(f"{name}.ftz.f32", "f32", "f32 f32", f"{name}_number(flush(a), flush(b))")
        op(f"{name}.NaN.f32", "f32", "f32 f32", f"{name}_nan(a, b)")
        op(f"{name}3.f32", "f32", "f32 f32 f32", f"{name}_number({name}_number(a, b), c)")
        op(f"{name}3.NaN.f32", "f32", "f32 f32 f32", f"{name}_nan({name}_nan(a, b), c)")
    for half in ("bf16", "f16"):
        op(f"abs.{half}", "u16", "u16", "u16(a & 0x7fff)")
        for name in ("max", "min"):
            op(f"{name}.{half}", "u16", "u16 u16", f"to_{half}({name}_number(from_{half}(a), from_{half}(b)))")
            low, high = (
                f"to_{half}({name}_number(from_{half}({a}), from_{half}({b})))"
                for a, b in (("u16(a)", "u16(b)"), ("u16(a >> 16)", "u16(b >> 16)"))
            )
            op(f"{name}.{half}x2", "u32", "u32 u32", f"u32({high}) << 16 | {low}")
    op("abs.f16x2 abs.bf16x2", "u32", "u32", "a & 0x7fff7fff")
    op("div.rn.f32 div.full.f32 div.approx.f32", "f32", "f32 f32", "canonical(a / b)")
    op("div.approx.ftz.f32 div.full.ftz.f32", "f32", "f32 f32", "flush(canonical(flush(a) / flush(b)))")
    op("rcp.rn.f32 rcp.approx.f32", "f32", "f32", "canonical(1.0f / a)")
    op("rcp.approx.ftz.f32", "f32", "f32", "reciprocal_flushed(a)")
    op("sqrt.rn.f32 sqrt.approx.f32", "f32", "f32", "canonical(std::sqrt(a))")
    op("rsqrt.approx.f32 rsqrt.approx.ftz.f32", "f32", "f32", "canonical(float(1.0 / std::sqrt(double(a))))")
    op("ex2.approx.ftz.f32", "f32", "f32", "exp2_flushed(a)")
    op("ex2.approx.f32", "f32", "f32", "canonical(float(std::exp2(double(a))))")
    op("lg2.approx.ftz.f32", "f32", "f32", "log2_flushed(a)")
    op("lg2.approx.f32", "f32", "f32", "log2_of_any(a)")
    op("tanh.approx.f32", "f32", "f32", "canonical(float(std::tanh(double(a))))")


def _conversions(op) -> None:
    op("cvt.u32.u16 cvt.s32.u16 mov.b16 mov.u16 mov.s16", "u32", "u16", "a")
    op("mov.b32 mov.u32 mov.s32 mov.f32", "u32", "u32", "a")
    op("mov.b64 mov.u64 mov.s64 mov.f64", "u64", "u64", "a")
    op("mov.pred", "pred", "pred", "a")
    op("cvt.u32.s16 cvt.s32.s16", "s32", "s16", "a")
    op("cvt.u16.u32 cvt.u16.s32 cvt.s16.s32 cvt.s16.u32", "u16", "u32", "u16(a)")
    op("cvt.u16.u64 cvt.s16.s64 cvt.u16.s64", "u16", "u64", "u16(a)")
    op("cvt.u32.u64 cvt.u32.s64 cvt.s32.s64 cvt.s32.u64", "u32", "u64", "u32(a)")
    op("cvt.u64.u32 cvt.s64.u32", "u64", "u32", "a")
    op("cvt.s64.s32 cvt.u64.s32", "s64", "s32", "a")
    op("cvt.u64.u16 cvt.s64.u16", "u64", "u16", "a")
    op("cvt.s64.s16 cvt.u64.s16", "s64", "s16", "a")
    op("cvt.u32.u8 cvt.s32.u8", "u32", "u32", "a & 0xff")
    op("cvt.u16.u8 cvt.s16.u8", "u16", "u16", "u16(a & 0xff)")
    op("cvt.u64.u8 cvt.s64.u8", "u64", "u32", "a & 0xff")
    op("cvt.s32.s8 cvt.u32.s8", "s32", "u32", "s32(int8_t(a))")
    op("cvt.s16.s8 cvt.u16.s8", "s16", "u16", "s16(int8_t(a))")
    op("cvt.s64.s8", "s64", "u32", "s64(int8_t(a))")
    op("cvt.u8.u32 cvt.u8.s32 cvt.u8.u16 cvt.u8.s16", "u32", "u32", "a & 0xff")
    op("cvt.s8.s32 cvt.s8.u32 cvt.s8.s16", "u32", "u32", "u32(s32(int8_t(a))) & 0xffff")
    for source in ("u32", "s32", "u16", "s16", "u64", "s64"):
        op(f"cvt.rn.f32.{source}", "f32", source, "float(a)")
    for t in ("u32", "s32", "u64", "s64"):
        op(f"cvt.rzi.{t}.f32", t, "f32", f"to_integer<{t}>(std::trunc(a))")
        op(f"cvt.rni.{t}.f32", t, "f32", f"to_integer<{t}>(std::nearbyint(a))")
        op(f"cvt.rmi.{t}.f32", t, "f32", f"to_integer<{t}>(std::floor(a))")
        op(f"cvt.rpi.{t}.f32", t, "f32", f"to_integer<{t}>(std::ceil(a))")
    op("cvt.rmi.f32.f32", "f32", "f32", "std::floor(a)")
    op("cvt.rni.f32.f32", "f32", "f32", "std::nearbyint(a)")
    op("cvt.rzi.f32.f32", "f32", "f32", "std::trunc(a)")
    op("cvt.rpi.f32.f32", "f32", "f32", "std::ceil(a)")
    op("cvt.f32.bf16", "f32", "u16", "from_bf16(a)")
    op("cvt.f32.f16", "f32", "u16", "from_f16(a)")
    op("cvt.rn.bf16.f32", "u16", "f32", "to_bf16(a)")
    op("cvt.rn.f16.f32", "u16", "f32", "to_f16(a)")
    for half in ("bf16", "f16"):
        op(f"cvt.rn.{half}x2.f32", "u32", "f32 f32", f"u32(to_{half}(a)) << 16 | to_{half}(b)")
        op(f"cvt.rn.relu.{half}x2.f32", "u32", "f32 f32", f"u32(to_{half}(relu(a))) << 16 | to_{half}(relu(b))")
    for small in ("e4m3", "e5m2"):
        op(f"cvt.rn.satfinite.{small}x2.f32", "u16", "f32 f32", f"u16(to_{small}(a) << 8 | to_{small}(b))")
        op(
            f"cvt.rn.satfinite.relu.{small}x2.f32",
            "u16",
            "f32 f32",
            f"u16(to_{small}(relu(a)) << 8 | to_{small}(relu(b)))",
        )
        op(
            f"cvt.rn.satfinite.{small}x2.f16x2",
            "u16",
            "u32",
            f"u16(to_{small}(from_f16(u16(a >> 16))) << 8 | to_{small}(from_f16(u16(a))))",
        )
        op(
            f"cvt.rn.f16x2.{small}x2",
            "u32",
            "u16",
            f"u32(to_f16(from_{small}(a >> 8))) << 16 | to_f16(from_{small}(a & 0xff))",
        )


def _selection(op) -> None:
    for width in ("16", "32", "64"):
        u, s = f"u{width}", f"s{width}"
        op(f"selp.b{width} selp.u{width} selp.s{width} selp.f{width}", u, f"{u} {u} pred", "c ? a : b")
        _compare(op, (u,), {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="})
        _compare(op, (u,), {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="})
        _compare(op, (s,), {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="})
        _compare(op, (u, f"b{width}"), {"eq": "==", "ne": "!="})
    ordered = {"lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b", "eq": "a == b", "ne": "(a < b || a > b)"}
    unordered = {"ltu": "!(a >= b)", "leu": "!(a > b)", "gtu": "!(a <= b)", "geu": "!(a < b)", "neu": "!(a == b)"}
    others = {"equ": "!(a < b || a > b)", "num": "(a == a && b == b)", "nan": "(a != a || b != b)"}
    for name, expression in (ordered | unordered | others).items():
        _boolean_forms(op, f"setp.{name}", "f32", "f32", expression)
        _boolean_forms(
            op, f"setp.{name}.ftz", "f32", "f32", expression.replace("a", "flush(a)").replace("b", "flush(b)")
        )


def _compare(op, names: tuple[str, ...], comparisons: dict[str, str]) -> None:
    for name, sign in comparisons.items():
        _boolean_forms(op, f"setp.{name}", names[-1], names[0], f"a {sign} b")


def _boolean_forms(op, stem: str, ending: str, kind: str, expression: str) -> None:
    op(f"{stem}.{ending}", "pred", f"{kind} {kind}", expression)
    for name, sign in (("and", "&&"), ("or", "||"), ("xor", "!=")):
        op(f"{stem}.{name}.{ending}", "pred", f"{kind} {kind} pred", f"({expression}) {sign} c")


SIMPLE_OPS: dict[str, SimpleOp] = _table()
_DISTINCT: dict[SimpleOp, int] = {}
for _op in SIMPLE_OPS.values():
    _DISTINCT.setdefault(_op, len(_DISTINCT))

WIDE = ("u64", "s64", "x2")


def number_of(opcode: str) -> int:
    """The interpreter's number of a lane-wise opcode; equal expressions share one."""
    return _DISTINCT[SIMPLE_OPS[opcode]]


def simple_count() -> int:
    """How many numbers lane-wise instructions take; the others start there."""
    return len(_DISTINCT)


def switch_text() -> str:
    """The C++ cases of the interpreter's switch, one line each."""
    lines = []
    for op, number in _DISTINCT.items():
        element = {"x2": "f32"}
        kinds = [element.get(s, s) for s in op.sources]
        result = element.get(op.result, op.result)
        parameters = ", ".join(f"{'bool' if k == 'pred' else k} {n}" for k, n in zip(kinds, "abcd", strict=False))
        returned = "bool" if result == "pred" else result
        call = "lanes2" if op.result == "x2" else "lanes"
        names = ", ".join(_accessor(k) for k in [result, *kinds])
        lane = f"[]({parameters}) -> {returned} {{ return {op.expression}; }}"
        lines.append(f"case {number}: {call}<{names}>(in, w, mask, {lane}); break;")
    return "\n".join(lines) + "\n"


def _accessor(kind: str) -> str:
    return "Pred" if kind == "pred" else kind.capitalize()
