"""Quantise query rows as keys are for a cache of the same format, in one pass over memory. A warp has one row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from tsmla.identity.call import QUANTIZE_Q
from tsmla.identity.dtype import bytes_of
from tsmla.identity.support import LATENT_DIM
from tsmla.identity.variant import QuantizeQVariant

from ..entry import host_entry
from .quantize import Quantizer
from .rows import HALVES, ROPE_VECTOR, Row, begin_row, latent_column, launch, rope_column, row_address, vector


class QuantizeQKernel:
    """The quantiser of one variant; calling it inside the compiler emits the launch."""

    def __init__(self, variant: QuantizeQVariant):
        self.quantizer = Quantizer.of(variant)

    __call__ = host_entry(QUANTIZE_Q)

    def launch(self, given):
        """Launch the quantiser. given: what the call's table lists, by name."""
        *arguments, pdl, stream = given
        batch, q_len, heads, _ = given.query.shape
        rows = batch * q_len * heads
        divisors = cute.FastDivmodDivisorV2(cutlass.max(q_len, 1)), cute.FastDivmodDivisorV2(cutlass.max(heads, 1))
        launch(self.kernel(*arguments, rows, *divisors), rows, pdl, stream)

    @cute.kernel
    def kernel(
        self,
        query: cute.Tensor,
        q_pe: cute.Tensor,
        nope_out: cute.Tensor,
        rope_out: cute.Tensor,
        scale_out: cute.Tensor,
        power_of_two_scales: Int32,
        rows: Int32,
        q_len: cute.FastDivmodDivisorV2,
        heads: cute.FastDivmodDivisorV2,
    ):
        lane, index = begin_row()
        if index < rows:
            line, head = divmod(index, heads)
            request, token = divmod(line, q_len)
            place = request, token, head
            dtype = self.quantizer.dtype
            start = row_address(query, *place)
            rope_start = start + bytes_of(dtype.width, LATENT_DIM)
            if query.shape[3] == LATENT_DIM:
                rope_start = row_address(q_pe, *place)
            latent = [vector(dtype, start, latent_column(half, lane)).load() for half in range(HALVES)]
            rope = vector(dtype, rope_start, rope_column(lane), ROPE_VECTOR).load()
            scales = self.quantizer.scales(latent, None, power_of_two_scales)
            row = Row.of(self.quantizer.row, (nope_out, rope_out, scale_out), *place)
            self.quantizer.store_latent(row, lane, latent, scales)
            self.quantizer.store_rope(row, lane, rope, scales)
