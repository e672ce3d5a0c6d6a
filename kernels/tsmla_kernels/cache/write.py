"""Write keys to a paged cache: rotate, quantise and scatter in one pass over memory.

A warp writes one row. It loads its key before it knows the slot, and writes the latent piece while a rotation's
factors are on their way. Rows without a rope piece come without the arguments that concern it.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from tsmla.identity.call import WRITE_CACHE
from tsmla.identity.variant import WriteCacheVariant

from ..entry import host_entry
from .quantize import Quantizer
from .rotary import factors, position_of, rotated
from .rows import HALVES, ROPE_VECTOR, Row, begin_row, exists, latent_column, launch_keys, rope_column, row_vector


class WriteCacheKernel:
    """The writer of one variant; calling it inside the compiler emits the launch."""

    def __init__(self, variant: WriteCacheVariant):
        self.quantizer = Quantizer.of(variant)

    __call__ = host_entry(WRITE_CACHE)

    def launch(self, given):
        """Launch the writer. given: what the call's table lists, by name."""
        launch_keys(self.kernel, given)

    @cute.kernel
    def kernel(
        self,
        kv_c: cute.Tensor,
        k_pe: cute.Tensor | None,
        slot_mapping: cute.Tensor,
        cache: cute.Tensor,
        rope_cache: cute.Tensor | None,
        scale_cache: cute.Tensor,
        positions: cute.Tensor | None,
        cos_sin: cute.Tensor | None,
        scale: Float32,
        power_of_two_scales: Int32,
        rope_interleaved: Int32,
        page_size: cute.FastDivmodDivisorV2,
    ):
        lane, token = begin_row()
        if token < kv_c.shape[0]:
            slot = slot_mapping[token]
            latent = [row_vector(kv_c, token, latent_column(half, lane)).load() for half in range(HALVES)]
            if const_expr(k_pe is not None):
                rope = row_vector(k_pe, token, rope_column(lane), ROPE_VECTOR).load()
                position = position_of(positions, token)
            cute.arch.sync_warp()  # keeps the loads here: the compiler would move them behind the slot's
            if const_expr(k_pe is not None):
                cos, sin = factors(cos_sin, position, lane, rope_interleaved, kv_c.element_type)
            scales = self.quantizer.scales(latent, scale, power_of_two_scales)
            if exists(slot, cache.shape[0], cache.shape[1]):
                page, place = divmod(Int32(slot), page_size)
                row = Row.of(self.quantizer.row, (cache, rope_cache, scale_cache), page, place)
                self.quantizer.store_latent(row, lane, latent, scales)
                if const_expr(k_pe is not None):
                    if positions.shape[0] > 0:
                        rope = rotated(rope, cos, sin, lane, rope_interleaved)
                    self.quantizer.store_rope(row, lane, rope, scales)
