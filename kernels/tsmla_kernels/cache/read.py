"""Read keys from a paged cache: gather and dequantise in one pass over memory.

A warp reads one row. Where page tables say which rows to read, it finds the request that its row belongs to in the
cumulative lengths. A row that has no key, because nothing names one or the cache does not have it, is 0."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from tsmla.identity.call import READ_CACHE
from tsmla.identity.variant import ReadCacheVariant

from ..entry import host_entry
from ..parts.precision import multiplied, numeric
from .rows import (
    HALVES,
    ROPE_VECTOR,
    VECTOR,
    Row,
    begin_row,
    exists,
    latent_column,
    launch_keys,
    rope_column,
    row_vector,
)


class ReadCacheKernel:
    """The reader of one variant; calling it inside the compiler emits the launch."""

    def __init__(self, variant: ReadCacheVariant):
        self.row = variant.row
        self.dtype = numeric(variant.dtype)
        self.latent_dtype = numeric(variant.cache_dtype)
        self.rope_dtype = numeric(variant.rope_dtype) if self.row.has("rope") else None

    __call__ = host_entry(READ_CACHE)

    def launch(self, given):
        """Launch the reader. given: what the call's table lists, by name."""
        launch_keys(self.kernel, given)

    @cute.kernel
    def kernel(
        self,
        kv_c: cute.Tensor,
        k_pe: cute.Tensor | None,
        cache: cute.Tensor,
        rope_cache: cute.Tensor | None,
        scale_cache: cute.Tensor,
        indices: cute.Tensor,
        block_tables: cute.Tensor,
        cum_seq_lens: cute.Tensor,
        seq_starts: cute.Tensor,
        scale: Float32,
        page_size: cute.FastDivmodDivisorV2,
    ):
        lane, token = begin_row()
        if token < kv_c.shape[0]:
            page, place = Int32(-1), Int32(0)
            if indices.shape[0] > 0:
                slot = indices[token]
                if exists(slot, cache.shape[0], cache.shape[1]):
                    page, place = divmod(Int32(slot), page_size)
            else:
                request, position = _position_of(token, cum_seq_lens, seq_starts)
                if (position >= 0) & (position < Int64(block_tables.shape[1]) * Int64(cache.shape[1])):
                    column, place = divmod(Int32(position), page_size)
                    page = block_tables[request, column]
            counts = (*[VECTOR] * HALVES, *[ROPE_VECTOR] * self.row.has("rope"))
            numbers = [cute.make_rmem_tensor(count, self.dtype) for count in counts]
            for each in numbers:
                each.fill(0.0)
            if (page >= 0) & (page < cache.shape[0]):
                row = Row.of(self.row, (cache, rope_cache, scale_cache), page, place)
                for half in cutlass.range_constexpr(HALVES):
                    latent = row.latent_vector(self.latent_dtype, half, lane).load()
                    numbers[half].store(self._read(latent, self._scale(row, half, lane, scale)))
                if const_expr(k_pe is not None):
                    rope = row.rope_vector(self.rope_dtype, lane).load()
                    numbers[HALVES].store(self._read(rope, self._rope_scale(row, lane, scale)))
            for half in cutlass.range_constexpr(HALVES):
                row_vector(kv_c, token, latent_column(half, lane)).store(numbers[half].load())
            if const_expr(k_pe is not None):
                row_vector(k_pe, token, rope_column(lane), ROPE_VECTOR).store(numbers[HALVES].load())

    def _scale(self, row: Row, half: int, lane: Int32, scale: Float32) -> Float32 | None:
        """The factor of a half of the latent piece; None where it is read as it is."""
        if self.row.scales is None:
            return None if self.latent_dtype is self.dtype else scale
        return row.scale(half, lane)[0]

    def _rope_scale(self, row: Row, lane: Int32, scale: Float32) -> Float32 | None:
        if self.row.scales is not None and not self.row.scales.whole_row:
            return None
        return self._scale(row, 0, lane, scale)

    def _read(self, values: cute.TensorSSA, scale: Float32 | None) -> cute.TensorSSA:
        return values if scale is None else multiplied(values, scale, self.dtype)


@cute.jit
def _position_of(token: Int32, cum_seq_lens: cute.Tensor, seq_starts: cute.Tensor) -> tuple[Int32, Int64]:
    """The request that a row belongs to and its key's position there; the position is -1 where the row is no request's,
    whatever the lengths are."""
    first, end = Int32(0), cutlass.max(cum_seq_lens.shape[0] - 1, 0)
    while first + 1 < end:
        middle = (first + end) >> 1
        if cum_seq_lens[middle] <= token:
            first = middle
        else:
            end = middle
    position = Int64(-1)
    if first < end:
        start = cum_seq_lens[first]
        if (start <= token) & (token < cum_seq_lens[first + 1]):
            position = Int64(token) - Int64(start)
            if seq_starts.shape[0] > 0:
                position += Int64(seq_starts[first])
    return first, position
