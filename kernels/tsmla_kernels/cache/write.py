"""Write keys to a paged cache: quantise and scatter in one pass over memory.

A warp writes one row. It loads its key before it knows the slot, finds largest magnitudes by shuffles, and stores
pieces and scales. Divisions are rounded to nearest, as PyTorch's are, so that the bytes are those of the formulas that
`mla_write_cache` states.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import Numeric, select_
from tsmla.call import WRITE_CACHE
from tsmla.row_format import LARGEST_E4M3, LEAST_AMAX, LEAST_SCALE
from tsmla.variant import WriteCacheVariant

from ..entry import host_entry
from ..parts.precision import numeric
from .rows import (
    HALVES,
    LANES,
    ROPE_LANES,
    VECTOR,
    WARPS,
    Row,
    exists,
    latent_column,
    rope_column,
    row_vector,
)


class WriteCacheKernel:
    """The writer of one variant; calling it inside the compiler emits the launch."""

    def __init__(self, variant: WriteCacheVariant):
        self.row = variant.row
        self.dtype = numeric(variant.dtype)
        self.latent_dtype, self.rope_dtype = numeric(variant.cache_dtype), numeric(variant.rope_dtype)
        columns = self.row.scales.columns if self.row.scales else 0
        self.scale_halves = HALVES if columns <= LANES * VECTOR else 1
        self.scale_lanes = min(columns // VECTOR, LANES)

    __call__ = host_entry(WRITE_CACHE)

    def launch(self, given):
        """The launch. given: what the call's table lists, by name."""
        *arguments, pdl, stream = given
        page_size = cute.FastDivmodDivisorV2(cutlass.max(given.cache.shape[1], 1))
        self.kernel(*arguments, page_size).launch(
            grid=(cute.ceil_div(given.kv_c.shape[0], WARPS), 1, 1),
            block=(LANES * WARPS, 1, 1),
            stream=stream,
            use_pdl=pdl,
        )

    @cute.kernel
    def kernel(
        self,
        kv_c: cute.Tensor,
        k_pe: cute.Tensor,
        slot_mapping: cute.Tensor,
        cache: cute.Tensor,
        rope_cache: cute.Tensor,
        scale_cache: cute.Tensor,
        scale: Float32,
        power_of_two_scales: Int32,
        page_size: cute.FastDivmodDivisorV2,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, token = thread % LANES, cta * WARPS + thread // LANES
        # Plain loads only: with dependent launch this kernel exists before its predecessor has finished. Every CTA
        # waits, so whoever waits for this kernel has waited for that predecessor, too.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if token < kv_c.shape[0]:
            slot = slot_mapping[token]
            latent = [row_vector(kv_c, token, latent_column(half, lane)).load() for half in range(HALVES)]
            rope = row_vector(k_pe, token, rope_column(lane)).load()
            cute.arch.sync_warp()  # keeps the loads here: the compiler would move them behind the slot's
            scales = self._scales(latent, scale, power_of_two_scales)
            if exists(slot, cache.shape[0], cache.shape[1]):
                page, place = divmod(Int32(slot), page_size)
                row = Row.of(self.row, (cache, rope_cache, scale_cache), page, place)
                for half in cutlass.range_constexpr(HALVES):
                    quotients = self._stored(latent[half], scales[half], self.latent_dtype)
                    row.latent_vector(self.latent_dtype, half, lane).store(quotients)
                if lane < ROPE_LANES:
                    last = self._stored(rope, self._rope_scale(scales), self.rope_dtype)
                    row.rope_vector(self.rope_dtype, lane).store(last)
                if cutlass.const_expr(self.row.scales is not None):
                    if lane % self.scale_lanes == 0:
                        for half in cutlass.range_constexpr(self.scale_halves):
                            row.store_scale(half, lane, scales[half])

    def _scales(self, latent: list[cute.TensorSSA], scale: Float32, power_of_two: Int32) -> list[Float32]:
        """What the lane's columns of each half are divided by."""
        scales = self.row.scales
        if scales is None:
            return [scale] * HALVES
        largest = [_largest(part) for part in latent]
        if self.scale_halves < HALVES:
            largest = [cute.arch.fmax(*largest)]
        found = []
        for amax in largest:
            for step in range(self.scale_lanes.bit_length() - 1):
                amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
            found.append(_scale_of(amax, power_of_two, scales.whole_row))
        return (found * HALVES)[:HALVES]

    def _rope_scale(self, scales: list[Float32]) -> Float32 | None:
        """What the rope piece is divided by; None where it is stored as it is."""
        if self.row.scales is None:
            return scales[0]
        return scales[0] if self.row.scales.whole_row else None

    def _stored(self, values: cute.TensorSSA, scale: Float32 | None, dtype: type[Numeric]) -> cute.TensorSSA:
        """The values as a row has them: bytes as they are, or quotients rounded to nearest. An element of e4m3 beyond
        its range becomes the largest of its sign."""
        if scale is None or dtype is self.dtype and self.row.scales is None:
            return values
        return (values.to(Float32) / scale).to(dtype)


def _largest(values: cute.TensorSSA) -> Float32:
    """The largest magnitude of the lane's values. NaN counts for nothing."""
    largest = Float32(0.0)
    for i in range(VECTOR):
        value = Float32(values[i])
        largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
    return largest


def _scale_of(amax: Float32, power_of_two: Int32, whole_row: bool) -> Float32:
    """The scale of values of which `amax` is the largest magnitude, as `mla_write_cache` defines it."""
    if whole_row:
        quotient = cute.arch.fmax(amax, LEAST_AMAX) / LARGEST_E4M3
    else:
        quotient = cute.arch.fmax(amax / LARGEST_E4M3, LEAST_SCALE)
    above = ((quotient.bitcast(Int32) + _MANTISSA) & ~_MANTISSA).bitcast(Float32)
    scale = Float32(select_(power_of_two != 0, above, quotient))
    return Float32(select_(amax == 0.0, Float32(1.0), scale)) if whole_row else scale


_MANTISSA = (1 << 23) - 1
"""Bits of a float32 below its exponent: adding them carries into it unless the number is a power of two."""
