"""Table of the lane-wise operations that machine code has and PTX has not: results, sources and the C++ of one lane.

The build turns it into a switch of the interpreter (`switch_text`); the lowering takes widths and numbers from it.

Kinds of sources: u32, s32 and u64 as they lie in registers; i32 with the sign or inversion that an operand may have;
c32 the same as a 33-bit sum, whose carry counts; f32 with sign and absolute value; b32 bits of such a float; pred with
its inversion. `imm` is the number of the instruction, `d`, `p`, `q` are the results in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

RESULTS = "dpq"
SOURCES = "abcxyzuv"


@dataclass(frozen=True)
class LaneOp:
    """A lane-wise operation. code: C++ statements that set the results from the sources."""

    results: tuple[str, ...]
    sources: tuple[str, ...]
    code: str


def _table() -> dict[str, LaneOp]:
    table: dict[str, LaneOp] = {}

    def op(name: str, results: str, sources: str, code: str) -> None:
        table[name] = LaneOp(tuple(results.split()), tuple(sources.split()), code)

    _integer(op)
    _shifts(op)
    _predicates(op)
    _floats(op)
    _conversions(op)
    _halves(op)
    return table


def _integer(op) -> None:
    op("add3", "u32", "i32 i32 i32", "d = a + b + c")
    op("add3_carry", "u32 pred pred", "c32 c32 c32 pred pred",
       "u64 s = a + b + c + x + y; d = u32(s); p = (s >> 32) > 0; q = (s >> 32) > 1")  # fmt: skip
    op("add_64", "u64", "u64 u64 u64", "d = a + b + c")
    op("sub_64", "u64", "u64 u64 u64", "d = a - b + c")
    op("mad", "u32", "i32 i32 i32", "d = a * b + c")
    op("mad_carry", "u32", "i32 i32 i32 pred", "d = a * b + c + x")
    for sign, wide in (("s32", "s64"), ("u32", "u64")):
        op(f"mad_hi_{sign}", "u32", f"{sign} {sign} u64", f"d = u32((u64({wide}(a) * {wide}(b)) + c) >> 32)")
        op(f"mad_wide_{sign}", "u64", f"{sign} {sign} u64", f"d = u64({wide}(a) * {wide}(b)) + c")
        op(f"mad_wide_minus_{sign}", "u64", f"{sign} {sign} u64", f"d = u64({wide}(a) * {wide}(b)) - c")
        for name, sign_of in (("min", "<"), ("max", ">")):
            least = f"{name}3_{sign}"
            op(least, sign, f"{sign} {sign} {sign}",
               f"{sign} m = a {sign_of} b ? a : b; d = m {sign_of} c ? m : c")  # fmt: skip
            op(f"add_{name}_{sign}", sign, f"i32 i32 {sign}", f"{sign} m = {sign}(a + b); d = m {sign_of} c ? m : c")
    op("lea", "u32", "u32 i32", "d = (a << imm) + b")
    op("lea_carry", "u32 pred", "u32 c32", "u64 s = u64(u32(a << imm)) + b; d = u32(s); p = s >> 32")
    op("lea_hi", "u32", "u32 i32 u32", "d = u32((u64(c) << 32 | a) << imm >> 32) + b")
    op("lea_hi_carry", "u32", "u32 i32 u32 pred", "d = u32((u64(c) << 32 | a) << imm >> 32) + b + x")
    op("lea_hi_carries", "u32 pred", "u32 c32 u32",
       "u64 s = u64(u32((u64(c) << 32 | a) << imm >> 32)) + b; d = u32(s); p = s >> 32")  # fmt: skip
    op("lea_hi_sx", "u32", "s32 i32", "d = u32(u64(s64(a)) << imm >> 32) + b")
    op("lea_hi_sx_carry", "u32", "s32 i32 pred", "d = u32(u64(s64(a)) << imm >> 32) + b + c")
    terms = " | ".join(f"((imm >> {row} & 1 ? ~0u : 0u) & {_term(row)})" for row in range(8))
    op("lop3", "u32", "i32 i32 i32", f"d = {terms}")
    op("lop3_test", "u32 pred", "i32 i32 i32", f"d = {terms}; p = d != 0")


def _term(row: int) -> str:
    """The bits where a, b and c are those of a row of a table of three."""
    return " & ".join(("" if row >> 2 - i & 1 else "~") + name for i, name in enumerate("abc"))


def _shifts(op) -> None:
    op("shift_left_high", "u32", "u32 u32 u32", "u64 v = u64(c) << 32 | a; d = u32((b > 63 ? 0 : v << b) >> 32)")
    op("funnel_left_wrap", "u32", "u32 u32 u32", "d = u32((u64(c) << 32 | a) << (b & 31) >> 32)")
    op("shift_left_wrap", "u32", "u32 u32", "d = a << (b & 31)")
    op("shift_right_wrap", "u32", "u32 u32", "d = a >> (b & 31)")
    op("shift_right_low", "u32", "u32 u32 u32", "u64 v = u64(c) << 32 | a; d = u32(b > 63 ? 0 : v >> b)")
    op("shift_right_low_s64", "u32", "u32 u32 u32", "s64 v = s64(u64(c) << 32 | a); d = u32(v >> (b > 63 ? 63 : b))")


def _predicates(op) -> None:
    op("lut_of_predicates", "pred", "pred pred pred", "d = imm >> (a << 2 | b << 1 | u32(c)) & 1")
    op("read_bit", "pred", "u32", "d = a >> imm & 1")
    bits = " | ".join(f"u32({name}) << {i}" for i, name in enumerate("bcxyzuv"))
    op("predicates_to_bits", "u32", "u32" + 7 * " pred", f"d = (a & ~u32(imm)) | (({bits}) & u32(imm))")
    for kind in ("s32", "u32"):
        below = "(a < b ? imm & 1 : a == b ? imm >> 1 & 1 : imm >> 2 & 1) != 0"
        extended = "(a < b ? imm & 1 : a == b ? u32(x) : imm >> 2 & 1) != 0"
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            both = f"d = k {sign} c; p = !k {sign} c"
            op(f"set_{kind}_{name}", "pred pred", f"{kind} {kind} pred", f"bool k = {below}; {both}")
            op(f"set_ex_{kind}_{name}", "pred pred", f"{kind} {kind} pred pred", f"bool k = {extended}; {both}")
    for kind, flushed in (("", "{0}"), ("_ftz", "flush({0})")):
        left, right = flushed.format("a"), flushed.format("b")
        relation = (
            f"f32 l = {left}, r = {right}; "
            "bool k = (l < r ? imm & 1 : l == r ? imm >> 1 & 1 : l > r ? imm >> 2 & 1 : imm >> 3 & 1) != 0; "
        )
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            op(f"set_f32{kind}_{name}", "pred pred", "f32 f32 pred", f"{relation}d = k {sign} c; p = !k {sign} c")


def _floats(op) -> None:
    for kind, inside, result in (("", "{0}", "{0}"), ("_ftz", "flush({0})", "flush({0})")):
        a, b, c = (inside.format(name) for name in "abc")
        for name, expression in (("fadd", f"{a} + {b}"), ("fmul", f"{a} * {b}"), ("ffma", f"std::fma({a}, {b}, {c})")):
            sources = "f32 f32 f32" if name == "ffma" else "f32 f32"
            op(name + kind, "f32", sources, f"d = {result.format(f'canonical({expression})')}")
        for name in ("max", "min"):
            for nan, function in (("", f"{name}_number"), ("_nan", f"{name}_nan")):
                op(f"f{name}{nan}{kind}", "f32", "f32 f32", f"d = {function}({a}, {b})")
                op(f"f{name}3{nan}{kind}", "f32", "f32 f32 f32", f"d = {function}({function}({a}, {b}), {c})")
    for mode, number in (("rm", "-1"), ("rp", "1"), ("rz", "0")):
        op(f"ffma_{mode}", "f32", "f32 f32 f32", f"d = fma_directed(a, b, c, {number})")
        op(f"fmul_{mode}", "f32", "f32 f32", f"d = fma_directed(a, b, -0.0f, {number})")
    op("fsel", "u32", "b32 b32 pred", "d = c ? a : b")
    op("mufu_ex2", "f32", "f32", "d = exp2_flushed(a)")
    op("mufu_lg2", "f32", "f32", "d = log2_flushed(a)")
    op("mufu_rcp", "f32", "f32", "d = reciprocal_flushed(a)")
    op("mufu_rsq", "f32", "f32", "d = canonical(float(1.0 / std::sqrt(double(flush(a)))))")
    op("division_is_hard", "pred", "f32 f32", "d = division_is_hard(a, b)")


def _conversions(op) -> None:
    for kind in ("u32", "s32"):
        op(f"to_float_{kind}", "f32", kind, "d = float(a)")
        op(f"to_float_{kind}_rp", "f32", kind, "d = float_of_integer(s64(a), 1)")
        op(f"to_float_{kind}_rz", "f32", kind, "d = float_of_integer(s64(a), 0)")
        op(f"to_integer_{kind}", kind, "f32", f"d = to_integer<{kind}>(std::trunc(a))")
        op(f"to_integer_{kind}_ftz", kind, "f32", f"d = to_integer<{kind}>(std::trunc(flush(a)))")
    for half in ("bf16", "f16"):
        op(f"pack_{half}", "u32", "f32 f32", f"d = u32(to_{half}(a)) << 16 | to_{half}(b)")
    for small in ("e4m3", "e5m2"):
        op(f"pack_{small}", "u32", "f32 f32 u32", f"d = c << 16 | u32(to_{small}(a)) << 8 | to_{small}(b)")
        op(f"unpack_{small}", "u32", "u32",
           f"u32 v = a >> imm; d = u32(to_f16(from_{small}(v >> 8 & 0xff))) << 16 | to_f16(from_{small}(v & 0xff))"
           )  # fmt: skip
    op("half_to_float", "f32", "u32", "d = canonical(from_f16(u16(a >> imm)))")


def _halves(op) -> None:
    """Operations on two 16-bit floats; half selection and signs of operands were made before (`half_operand`)."""
    op("half_operand", "u32", "u32", "d = half_operand(a, imm)")
    for half in ("f16", "bf16"):
        for name in ("max", "min"):
            op(
                f"h{name}_{half}",
                "u32",
                "u32 u32",
                f"d = halves(a, b, [](u16 l, u16 r) {{ return {name}_of_{half}(l, r); }})",
            )
        op(
            f"hfma_{half}",
            "u32",
            "u32 u32 u32",
            f"d = fma_of_{half}(a, b, c) | fma_of_{half}(a >> 16, b >> 16, c >> 16) << 16",
        )


LANE_OPS = _table()
_NUMBERS = {name: number for number, name in enumerate(LANE_OPS)}
_C_KINDS = {"pred": "bool", "c32": "u64", "i32": "u32", "b32": "u32"}


def lane_number(name: str) -> int:
    """The operation's number among those of this table."""
    return _NUMBERS[name]


def switch_text() -> str:
    """The C++ cases of the interpreter's switch, one line each."""
    return "\n".join(_case(number, op) for number, op in enumerate(LANE_OPS.values())) + "\n"


def _case(number: int, op: LaneOp) -> str:
    behind = len(op.results) - 1
    lines = [] if len(op.sources) <= 4 and not behind else ["const s32* list = w.cta->cluster->program.list(in);"]
    for i, kind in enumerate(op.sources):
        slot = f"in.{'abce'[i]}" if i < 4 else f"list[{behind + i - 4}]"
        lines.append(f"const From<Sass::{kind}> s{i}(in, w.read({slot}), {i});")
    for i, kind in enumerate(op.results):
        lines.append(f"const To<Sass::{kind}> r{i}{{w.write({f'list[{i - 1}]' if i else 'in.d'})}};")
    read = [f"const {_C_KINDS.get(kind, kind)} {SOURCES[i]} = s{i}(i);" for i, kind in enumerate(op.sources)]
    made = [f"{_C_KINDS.get(kind, kind)} {RESULTS[i]};" for i, kind in enumerate(op.results)]
    stored = [f"r{i}(i, {RESULTS[i]});" for i in range(len(op.results))]
    number_used = ["const s64 imm = in.imm;"] if "imm" in op.code else []
    body = " ".join([*read, *made, f"{op.code};", *stored])
    return f"case {number}: {{ {' '.join([*lines, *number_used])} each(mask, [=](int i) {{ {body} }}); break; }}"
