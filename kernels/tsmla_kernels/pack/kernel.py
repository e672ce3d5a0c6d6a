"""K/V pack: k_out = fp8(cat(k_nope, broadcast k_pe) * k_scale_inv), v_out = fp8(v * v_scale_inv).

Memory bound, so the whole design is about addresses. A row is one head of a token; its k_out and v_out are cut
into columns of VECTOR elements. A thread keeps one column for life: where it reads, where it writes and the scale
are chosen once, and reading k_pe is reading with a head stride of 0. What is left per row is one multiply-high
division (row -> token, head) and two multiply-adds. Neighbouring threads have neighbouring columns, so a row's
loads and stores are contiguous, and all heads of a token read k_pe from L1 or L2.
"""

from __future__ import annotations

import dataclasses

import cutlass
from cutlass import cute
from tsmla.identity.call import PACK
from tsmla.identity.dtype import bytes_of
from tsmla.identity.support import PACK_VECTOR as VECTOR
from tsmla.identity.variant import PackVariant

from ..entry import host_entry
from ..parts.dependent_launch import follow_predecessor
from ..parts.precision import numeric

ALIGNMENT = 16
"""Bytes that every address must be a multiple of, for 128-bit loads and stores."""
THREADS = 320
"""Most threads of a CTA; the 20 columns of head dims 128 + 64 + 128 fill ten warps exactly."""
ROWS_PER_THREAD = 4
"""Independent rows of a thread, all loaded before the first is converted: 128 bytes in flight per thread."""


@dataclasses.dataclass(frozen=True)
class _Column:
    """One column of a [tokens, heads, d] or [tokens, d] tensor as 64-bit byte addresses, so that a thread can choose
    between columns of differently laid out tensors at run time."""

    base: cutlass.Int64
    token_stride: cutlass.Int64
    head_stride: cutlass.Int64

    @classmethod
    def of(cls, tensor: cute.Tensor, first: cutlass.Int32) -> _Column:
        """The column that starts at element `first` of the last dimension; [tokens, d] is shared by all heads."""
        size = bytes_of(tensor.element_type.width)
        outer = [cutlass.Int64(stride) * size for stride in tensor.stride[:-1]]
        token_stride, head_stride = outer if len(outer) == 2 else (outer[0], cutlass.Int64(0))
        return cls(tensor.iterator.toint() + cutlass.Int64(first) * size, token_stride, head_stride)

    def unless(self, condition: cutlass.Boolean, other: _Column) -> _Column:
        """`other` where the condition holds, else this column."""

        def choose(yes: cutlass.Int64, no: cutlass.Int64) -> cutlass.Int64:
            return cutlass.Int64(cutlass.select_(condition, yes, no))

        return _Column(
            choose(other.base, self.base),
            choose(other.token_stride, self.token_stride),
            choose(other.head_stride, self.head_stride),
        )

    def vector(self, dtype: type[cutlass.Numeric], token: cutlass.Int32, head: cutlass.Int32) -> cute.Tensor:
        """The VECTOR elements of this column in one row, in global memory."""
        address = self.base + cutlass.Int64(token) * self.token_stride + cutlass.Int64(head) * self.head_stride
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=ALIGNMENT)
        return cute.make_tensor(pointer, cute.make_layout(VECTOR))


class PackKernel:
    """The pack of one variant; calling it inside the compiler emits the launch."""

    def __init__(self, variant: PackVariant):
        self.dtype = numeric(variant.dtype)
        self.out_dtype = numeric(variant.out_dtype)
        self.d_nope = variant.d_nope
        self.d_rope = variant.d_rope
        self.d_v = variant.d_v
        self.columns = (variant.d_nope + variant.d_rope + variant.d_v) // VECTOR
        self.rows_per_pass = max(1, THREADS // self.columns)
        self.threads = self.columns * self.rows_per_pass
        self.rows_per_cta = self.rows_per_pass * ROWS_PER_THREAD

    __call__ = host_entry(PACK)

    def launch(self, given):
        """Launch the pack. given: what the call's table lists, by name."""
        *arguments, pdl, stream = given
        tokens, heads, _ = given.k_nope.shape
        rows = tokens * heads
        self.kernel(*arguments, rows, cute.FastDivmodDivisorV2(heads)).launch(
            grid=(cute.ceil_div(rows, self.rows_per_cta), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=pdl,
            # Without a stated occupancy ptxas saves registers by sinking loads below the first conversions.
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        k_nope: cute.Tensor,
        k_pe: cute.Tensor,
        v: cute.Tensor,
        k_out: cute.Tensor,
        v_out: cute.Tensor,
        k_scale_inv: cutlass.Float32,
        v_scale_inv: cutlass.Float32,
        rows: cutlass.Int32,
        heads: cute.FastDivmodDivisorV2,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        column = thread % self.columns
        first_row = cta * self.rows_per_cta + thread // self.columns

        rope = column * VECTOR - self.d_nope
        value = rope - self.d_rope
        source = _Column.of(k_nope, column * VECTOR).unless(rope >= 0, _Column.of(k_pe, rope))
        source = source.unless(value >= 0, _Column.of(v, value))
        target = _Column.of(k_out, column * VECTOR).unless(value >= 0, _Column.of(v_out, value))
        scale = cutlass.Float32(cutlass.select_(value >= 0, v_scale_inv, k_scale_inv))

        follow_predecessor()

        places, loaded = [], []
        for i in cutlass.range_constexpr(ROWS_PER_THREAD):
            # Rows past the end repeat the last one: the same bytes to the same place, and no branch.
            token, head = divmod(cutlass.min(first_row + i * self.rows_per_pass, rows - 1), heads)
            places.append((token, head))
            loaded.append(source.vector(self.dtype, token, head).load())
        for i in cutlass.range_constexpr(ROWS_PER_THREAD):
            scaled = loaded[i].to(cutlass.Float32) * scale
            target.vector(self.out_dtype, *places[i]).store(scaled.to(self.out_dtype))
