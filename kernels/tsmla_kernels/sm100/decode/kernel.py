"""Absorbed MLA decode for Blackwell: the host entry.

Requests of up to 64 query rows (query tokens x heads) go to single CTAs, which load a key once and use it as value too;
those of more go to pairs of CTAs. Which, is a run-time choice of the host, so that one variant serves both.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from tsmla.variant import DecodeVariant

from ...decode.arguments import decode_arguments
from ...decode.combine import launch_combine
from ...parts.key_source import key_source, visibility_in
from ...parts.logarithm import LOG2_E
from ...parts.partials import partials_of
from ...parts.row_end import Ending
from .attention import Attention
from .geometry import ROWS, DecodeGeometry


class DecodeKernel:
    """Compiles one DecodeVariant. Run-time facts: batch, heads, q_len, page size, lengths, mask, scales, parts."""

    def __init__(self, variant: DecodeVariant):
        self.variant = variant
        self.solo = Attention(variant, DecodeGeometry.solo(variant))
        self.pair = Attention(variant, DecodeGeometry.pair(variant))

    def fake_arguments(self) -> tuple:
        """Arguments in calling order, shapes and strides symbolic, as `decode_arguments` states them."""
        return decode_arguments(self.variant)

    @cute.jit
    def __call__(
        self,
        query: cute.Tensor,
        kv_cache: cute.Tensor,
        block_tables: cute.Tensor,
        seq_lens: cute.Tensor,
        causal_seqs: cute.Tensor,
        visible: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        workspace: cute.Tensor,
        softmax_scale: Float32,
        output_scale: Float32,
        causal: Int32,
        window_left: Int32,
        cp_world: Int32,
        cp_rank: Int32,
        cp_interleave: Int32,
        parts: Int32,
        stream,
    ):
        batch, q_len, heads, _ = query.shape
        rows = q_len * heads
        view = visibility_in(
            key_source(kv_cache, block_tables), seq_lens, causal_seqs, visible, q_len,
            causal, window_left, cp_world, cp_rank, cp_interleave,
        )  # fmt: skip
        scale_log2 = softmax_scale * LOG2_E
        ending = Ending(output_scale)
        row_tile = Int32(self.solo.geometry.deal.row_tile)
        if rows > ROWS:
            row_tile = Int32(self.pair.geometry.deal.row_tile)
        partials = partials_of(self.variant.row.value_columns, row_tile, workspace, batch, rows, parts)
        if rows <= ROWS:
            self.solo.launch(
                query, kv_cache, block_tables, view, out, lse, partials, scale_log2, ending, parts, stream
            )
        else:
            self.pair.launch(
                query, kv_cache, block_tables, view, out, lse, partials, scale_log2, ending, parts, stream
            )
        launch_combine(self.variant.pdl, partials, out, lse, ending, stream)
