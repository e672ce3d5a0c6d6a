"""tcgen05 MMAs written as PTX: 128 or 64 rows a CTA, accumulators in tensor memory, operands K-major or MN-major.

Operands in shared memory are slots: rows of one swizzle width (64 or 128 bytes), as many as there are, 8 rows to the
swizzle atom. Descriptors are laid out as in the PTX ISA, tcgen05 shared memory and instruction descriptors. All
functions are for one thread, always the same: MMAs complete in the order in which it issues them, and its commits
cover them.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64
from tsmla.identity.variant import Dtype

ONE = "cta_group::1"
"""Form with 128 rows of one CTA: row r is lane r of the accumulator, a column is a column."""
ONE_HALVED = "ws.cta_group::1"
"""Form with 64 rows of one CTA: row r is lane r for the first half of the columns, and lane 64 + r of the same tensor
memory columns for the second half (PTX ISA, tcgen05 data path layout E)."""
PAIR = "cta_group::2"
"""Form with 256 rows, 128 in each CTA of a pair, of which the even one issues: row r of a CTA is lane r, a column is a
column (PTX ISA, tcgen05 data path layout A). B's rows are divided between the CTAs."""
PAIR_HALVED = "cta_group::2"
"""Form with 128 rows, 64 in each CTA of a pair, of which the even one issues; lanes as for ONE_HALVED (layout B). B's
rows are divided between the CTAs."""
K_BYTES = 32
"""Bytes of A and B along K that one instruction takes."""
_VERSION = 1 << 46
_SWIZZLE = {128: 2 << 61, 64: 4 << 61}
_FORMAT = {Dtype.FP16: 0, Dtype.BF16: 1, Dtype.E4M3: 0, Dtype.E5M2: 1}
_F32 = 1 << 4


def instruction(a: Dtype, b: Dtype, rows: int, columns: int, b_mn_major: bool) -> int:
    """Instruction descriptor of a `rows` x `columns` product with f32 accumulation; A is K-major."""
    return _F32 | _FORMAT[a] << 7 | _FORMAT[b] << 10 | b_mn_major << 16 | columns >> 3 << 17 | rows >> 4 << 24


def operand(row_bytes: int, group_bytes: int | None = None, chunk_bytes: int = 0) -> int:
    """What the descriptors of all slots with rows of `row_bytes` share; `at` adds the address. group_bytes: from 8 rows
    to the next 8, where those are not side by side. chunk_bytes: for MN-major operands wider than a row, from one row's
    worth of M or N to the next."""
    group_bytes = group_bytes or 8 * row_bytes
    return _VERSION | _SWIZZLE[row_bytes] | group_bytes >> 4 << 32 | chunk_bytes >> 4 << 16


def at(shared: int, address: Int32) -> Int64:
    """The descriptor of the slot at a shared memory address; `shared` is from `operand`."""
    return Int64(shared) | Int64((address & 0x3FFFF) >> 4)


def k_step_k_major() -> int:
    """What to add to a K-major operand's descriptor for the next K step: along the swizzled row."""
    return K_BYTES >> 4


def k_step_mn_major(element_bytes: int, row_bytes: int) -> int:
    """What to add to an MN-major operand's descriptor for the next K step: rows are along K."""
    return K_BYTES // element_bytes * row_bytes >> 4


def multiply(kind: str, accumulator: Int32, a: Int64, b: Int64, instruction: int, keep, form: str = ONE) -> None:
    """accumulator (a tensor memory address) = a b^T, plus the accumulator when `keep`; a and b in shared memory.
    `form` is ONE, ONE_HALVED, PAIR or PAIR_HALVED."""
    _issue(kind, form, accumulator, "{$r1}", a, b, instruction, keep)


def multiply_tmem(kind: str, accumulator: Int32, a: Int32, b: Int64, instruction: int, keep, form: str = ONE) -> None:
    """accumulator = a b^T, plus the accumulator when `keep`, with a in tensor memory: K consecutive in a lane's
    columns; b in shared memory. `form` is ONE, PAIR or ONE_HALVED, for which lanes 64 + r hold what lanes r do."""
    _issue(kind, form, accumulator, "[{$r1}]", a, b, instruction, keep)


def _issue(kind: str, form: str, accumulator: Int32, place: str, a, b: Int64, instruction: int, keep) -> None:
    code = (
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, {$r4}, 0;\n"
        f"tcgen05.mma.{form}.kind::{kind} [{{$r0}}], {place}, {{$r2}}, {{$r3}}, keep;\n}}"
    )
    cute.arch.inline_ptx(code, read_only_args=[accumulator, a, b, Int32(instruction), Int32(keep)])


def kind_of(dtype: Dtype) -> str:
    """The instruction's kind for operands of this size; 8-bit types mix freely."""
    return "f8f6f4" if dtype.bits == 8 else "f16"
