"""Quantising: how a row of a cache's format is made of a key or a query, by one warp a row. Largest magnitudes are
found by shuffles, and divisions are rounded to nearest, as PyTorch's are, so that the bytes are those of the formulas
that `mla_write_cache` states."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import Numeric, select_
from tsmla.identity.row_format import LEAST_AMAX, LEAST_SCALE, RowFormat
from tsmla.identity.variant import QuantizeQVariant, WriteCacheVariant

from ..parts.precision import numeric
from .quotient import of_largest_e4m3, quotients, reciprocal_of, short_quotients
from .rows import HALVES, LANES, VECTOR, Row


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """Makes rows of a format from elements of `dtype`. A lane has VECTOR columns of each half of the latent piece, and
    ROPE_VECTOR of the rope piece, if there is one. scale_halves: halves of the latent piece that have scales of their
    own; 1 where they share one. scale_lanes: lanes that share a scale."""

    row: RowFormat
    dtype: type[Numeric]
    latent_dtype: type[Numeric]
    rope_dtype: type[Numeric] | None
    scale_halves: int
    scale_lanes: int

    @classmethod
    def of(cls, variant: WriteCacheVariant | QuantizeQVariant) -> Quantizer:
        columns = variant.row.scales.columns if variant.row.scales else 0
        return cls(
            variant.row,
            numeric(variant.dtype),
            numeric(variant.cache_dtype),
            numeric(variant.rope_dtype) if variant.row.has("rope") else None,
            HALVES if columns <= LANES * VECTOR else 1,
            min(columns // VECTOR, LANES),
        )

    def scales(self, latent: list[cute.TensorSSA], scale: Float32 | None, power_of_two: Int32) -> list[Float32]:
        """What the lane's columns of each half are divided by. scale: that of the whole cache, where its rows have
        none."""
        scales = self.row.scales
        if scales is None:
            return [scale] * HALVES
        largest = [_largest(columns) for columns in latent]
        if self.scale_halves < HALVES:
            largest = [cute.arch.fmax(*largest)]
        found = []
        for amax in largest:
            for step in range(self.scale_lanes.bit_length() - 1):
                amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1 << step))
            found.append(_scale_of(amax, power_of_two, scales.whole_row))
        return (found * HALVES)[:HALVES]

    @cute.jit
    def store_latent(
        self, row: cutlass.Constexpr[Row], lane: Int32, latent: list[cute.TensorSSA], scales: list[Float32]
    ) -> None:
        """Write a row's latent piece, and its scales where it has any."""
        for half in cutlass.range_constexpr(HALVES):
            columns = latent[half]
            if cutlass.const_expr(self.latent_dtype is not self.dtype):
                columns = quotients(columns, reciprocal_of(scales[half]))
            row.latent_vector(self.latent_dtype, half, lane).store(columns.to(self.latent_dtype))
        if cutlass.const_expr(self.row.scales is not None):
            if lane % self.scale_lanes == 0:
                for half in cutlass.range_constexpr(self.scale_halves):
                    row.store_scale(half, lane, scales[half])

    @cute.jit
    def store_rope(self, row: cutlass.Constexpr[Row], lane: Int32, rope: cute.TensorSSA, scales: list[Float32]) -> None:
        """Write a row's rope piece."""
        if cutlass.const_expr(self.rope_dtype is not self.dtype):
            rope = quotients(rope, reciprocal_of(scales[0]))
        elif cutlass.const_expr(self.row.scales is not None and self.row.scales.whole_row):
            rope = short_quotients(rope, reciprocal_of(scales[0]))
        row.rope_vector(self.rope_dtype, lane).store(rope.to(self.rope_dtype))


def _largest(values: cute.TensorSSA) -> Float32:
    """The largest magnitude of the lane's values. NaN counts for nothing."""
    largest = Float32(0.0)
    for i in range(VECTOR):
        largest = cute.arch.fmax(largest, cute.math.abs(Float32(values[i])))
    return largest


def _scale_of(amax: Float32, power_of_two: Int32, whole_row: bool) -> Float32:
    """The scale of values of which `amax` is the largest magnitude, as `mla_write_cache` defines it."""
    if whole_row:
        quotient = of_largest_e4m3(cute.arch.fmax(amax, LEAST_AMAX))
    else:
        quotient = cute.arch.fmax(of_largest_e4m3(amax), LEAST_SCALE)
    above = ((quotient.bitcast(Int32) + _MANTISSA) & ~_MANTISSA).bitcast(Float32)
    scale = Float32(select_(power_of_two != 0, above, quotient))
    return Float32(select_(amax == 0.0, Float32(1.0), scale)) if whole_row else scale


_MANTISSA = (1 << 23) - 1
"""Bits of a float32 below its exponent: adding them carries into it unless the number is a power of two."""
