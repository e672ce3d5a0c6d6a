"""Absorbed MLA decode for Blackwell: the host entry.

Requests of up to 64 query rows (query tokens x heads) go to single CTAs, which load a key once and use it as value too;
those of more go to pairs of CTAs. The host chooses at run time, so that one variant serves both. 16-bit caches whose
keys are not gathered use a pair of CTAs even for few rows (one SM holds only two tiles of them), but the deal of few
rows."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr
from tsmla.identity.call import DECODE
from tsmla.identity.variant import DecodeVariant

from ...decode.combine import launch_combine
from ...decode.partials import most_split, partials_of
from ...entry import host_entry
from ...parts.keys.listed import listed_keys
from ...parts.keys.source import key_source, visibility_in
from ...parts.logarithm import LOG2_E
from ...parts.row_end import ending_of, log_sums_of
from .attention import AttentionKernel
from .geometry import CTA_ROWS, DecodeGeometry

CROWD = 4
"""CTAs of the combine that an SM may have for one row's columns: more partial results of it are then on their way."""


class DecodeKernel:
    """The Blackwell decode of one variant. Run-time facts: batch, heads, q_len, page size, lengths, mask, scales,
    workers."""

    def __init__(self, variant: DecodeVariant):
        self.variant = variant
        self.few = AttentionKernel(variant, DecodeGeometry.few(variant))
        self.pair = AttentionKernel(variant, DecodeGeometry.pair(variant))

    __call__ = host_entry(DECODE)

    @cute.jit
    def launch(self, given):
        """Launch attention, on the CTAs or pairs that suit the call, and the combine. given: what the call's table
        lists, by name."""
        heads = given.query.shape[2]
        # Which of the two takes a call must not depend on the other requests of a batch.
        few_rows = (given.q_len * heads <= CTA_ROWS) & (given.batch_invariant == 0)
        source = key_source(given.kv_cache, given.block_tables)
        if const_expr(self.variant.gathers):
            source = listed_keys(given, self.variant.rope_at)
        view = visibility_in(source, given)
        scale_log2 = given.softmax_scale * LOG2_E
        ending = ending_of(given, heads)
        row_tile = Int32(self.pair.geometry.deal.row_tile)
        if few_rows:
            row_tile = Int32(self.few.geometry.deal.row_tile)
        kept = self.few.geometry.partial_rows
        partials = partials_of(self.variant.row.value_columns, row_tile, given, view, kept)
        if few_rows:
            self.few.launch(given, source, view, partials, scale_log2, ending)
        else:
            self.pair.launch(given, source, view, partials, scale_log2, ending)
        lse = log_sums_of(given.lse)
        split = most_split(partials, view, heads, row_tile)
        launch_combine(partials, split, given.out, lse, ending, given.stream, kept, crowd=CROWD)
