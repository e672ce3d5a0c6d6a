"""PTX instructions that the DSL has no operation for, or one that makes other code: each is one function here. Besides
this file, only those of tcgen05 (`blackwell/tmem.py`, `blackwell/umma.py`) write PTX.

(`cute.arch.inline_ptx` cannot say that an instruction has no side effects, so that it may be moved or left out.)"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import Numeric

_X2 = {cutlass.Float16: "f16x2", cutlass.BFloat16: "bf16x2"}
_KINDS = {cutlass.Float16: "f16", cutlass.BFloat16: "bf16"}


def pinned(word: Int32) -> Int32:
    """`mov.b32` with side effects: returns the word, computed here and once."""
    return _run("mov.b32 $0, $1;", word, results=(Int32,), has_side_effects=True)[0]


def mul_rn(a: Float32, b: Float32) -> Float32:
    """`mul.rn.f32`: a * b, never fused with a sum that it is a term of."""
    return _run("mul.rn.f32 $0, $1, $2;", Float32(a), Float32(b), results=(Float32,))[0]


def abs_x2(word: Int32, dtype: type[Numeric]) -> Int32:
    """`abs.f16x2` or `abs.bf16x2`: magnitudes of two 16-bit floats."""
    return _run(f"abs.{_X2[dtype]} $0, $1;", word, results=(Int32,))[0]


def max_x2(word: Int32, other: Int32, dtype: type[Numeric]) -> Int32:
    """`max.f16x2` or `max.bf16x2`: the larger of each two numbers in two words of two 16-bit floats; of NaN and a
    number, the number."""
    return _run(f"max.{_X2[dtype]} $0, $1, $2;", word, other, results=(Int32,))[0]


def mma_16x8x16(dtype: type[Numeric], accumulator: cute.Tensor, a: list[Int32], low: Int32, high: Int32) -> None:
    """`mma.sync.aligned.m16n8k16.row.col`: accumulator (4 float32) += a b, by a warp, in registers; a and b have this
    16-bit dtype.

    Lane l has of the accumulator rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next; of a the same rows, for k as
    these columns and 8 further on; of b column l / 4, for these k in `low` and `high`."""
    kind = _KINDS[dtype]
    sums = _run(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        *a, low, high, *(accumulator[i] for i in range(4)),
        results=(Float32,) * 4,
    )  # fmt: skip
    for i in range(4):
        accumulator[i] = sums[i]


@cute.jit
def store_if(stored: Boolean, address: Int64, offset: cutlass.Constexpr[int], values: cute.Tensor) -> None:
    """`@p st.global.v2.b32` or `.v4.b32`: store 8 or 16 bytes of registers, `offset` bytes behind `address` in global
    memory, if `stored`; the place must be a multiple of their size.

    The predicate is the instruction's own, not a branch's: addresses and values are computed in any case, so that the
    code stays one line, and a call that stores nothing runs all of it."""
    words = cute.recast_tensor(values, Int32)
    count = cute.size(words)
    assert count in (2, 4), count
    value = ", ".join(f"${2 + i}" for i in range(count))
    _run(
        f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; @p st.global.v{count}.b32 [$0+{offset}], {{{value}}}; }}",
        address, Int32(stored), *(words[i] for i in range(count)),
        has_side_effects=True,
    )  # fmt: skip


def load_if(wanted: Boolean, address: Int64, offset: int, count: int) -> list[Int32]:
    """`@p ld.global.b32`, `.v2.b32` or `.v4.b32`: load `count` words, `offset` bytes behind `address` in global memory,
    if `wanted`, else zeros; the place must be a multiple of their size.

    The predicate is the instruction's own, not a branch's: behind a branch, ptxas moves what was loaded to other
    registers, and waits for it there (kernels/log/blackwell-decode.md)."""
    assert count in (1, 2, 4), count
    words = [f"${i}" for i in range(count)]
    zeros = " ".join(f"mov.b32 {word}, 0;" for word in words)
    vector = f".v{count}.b32 {{{', '.join(words)}}}" if count > 1 else f".b32 {words[0]}"
    return _run(
        f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; {zeros} @p ld.global{vector}, [${count}+{offset}]; }}",
        address, Int32(wanted),
        results=(Int32,) * count, has_side_effects=True, written_early=True,
    )  # fmt: skip


def bulk_copy(target: Int32, source: Int64, size: int, barrier: Int32, policy: int) -> None:
    """`cp.async.bulk.shared::cluster.global` with an L2 cache policy, by one lane: start copying `size` bytes from
    global memory to this CTA's shared memory, which complete on the barrier."""
    _run(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [$0], [$1], $2, [$3], $4;",
        target, source, Int32(size), barrier, Int64(policy),
        has_side_effects=True,
    )  # fmt: skip


def copy_vector(target: Int32, target_offset: int, source: Int64, source_offset: int, size: Int32) -> None:
    """`cp.async.cg.shared.global`: start copying 16 bytes of global memory to shared memory, by each lane. Of the
    source, only `size` bytes are read; the others are zeros."""
    _run(
        f"cp.async.cg.shared.global [$0+{target_offset}], [$1+{source_offset}], 16, $2;",
        target, source, size,
        has_side_effects=True,
    )  # fmt: skip


def copy_word(target: Int32, source: Int64, size: Int32) -> None:
    """`cp.async.ca.shared.global`: start copying 4 bytes of global memory to shared memory, by each lane. Of the
    source, only `size` bytes are read; the others are zeros."""
    _run("cp.async.ca.shared.global [$0], [$1], 4, $2;", target, source, size, has_side_effects=True)


def arrive_behind_copies(barrier: Int32) -> None:
    """`cp.async.mbarrier.arrive.noinc.shared.b64`: arrive, for each lane, when the copies that it has started with
    `copy_vector` and `copy_word` are there."""
    _run("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", barrier, has_side_effects=True)


def bulk_copy_between_ctas(target: Int32, source: Int32, size: int, barrier: Int32) -> None:
    """`cp.async.bulk.shared::cluster.shared::cta`, by one lane: start copying `size` bytes of this CTA's shared memory
    to a CTA of its cluster, which complete on a barrier there; `target` and `barrier` as `mapa` gives them."""
    _run(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        target, source, Int32(size), barrier,
        has_side_effects=True,
    )  # fmt: skip


def mapa(address: Int32, rank: Int32) -> Int32:
    """`mapa.shared::cluster.u32`: an address of shared memory as that of CTA `rank` of the cluster."""
    return _run("mapa.shared::cluster.u32 $0, $1, $2;", address, rank, results=(Int32,))[0]


def _run(
    instruction: str, *operands: Numeric, results: tuple[type[Numeric], ...] = (), has_side_effects: bool = False,
    written_early: bool = False,
) -> list[Numeric]:  # fmt: skip
    """Emit an instruction whose $0, $1, ... are its results and, behind these, its operands. Without side effects it
    may be moved, and left out where nobody needs its results. written_early: the text is several instructions, some of
    which write results before others read operands."""
    types = [result.mlir_type for result in results]
    made = types[0] if len(types) == 1 else None
    if len(types) > 1:
        made = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, types))})>")
    written = "=&" if written_early else "="
    constraints = [written + _register(result) for result in results] + [_register(type(value)) for value in operands]
    value = llvm.inline_asm(
        made, [operand.ir_value() for operand in operands], instruction, ",".join(constraints),
        has_side_effects=has_side_effects, is_align_stack=False,
    )  # fmt: skip
    if len(results) > 1:
        return [result(llvm.extractvalue(types[i], value, [i])) for i, result in enumerate(results)]
    return [result(value) for result in results]


def _register(dtype: type[Numeric]) -> str:
    """What LLVM calls registers of a type."""
    return {Float32: "f", Int32: "r", Int64: "l"}[dtype]
