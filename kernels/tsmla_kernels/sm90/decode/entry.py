"""Absorbed MLA decode over a paged cache for Hopper: host entry, which chooses the kernel that takes a call."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from tsmla.identity.call import DECODE
from tsmla.identity.plan import DEALS
from tsmla.identity.variant import DecodeVariant

from ...decode.combine import launch_combine
from ...decode.line import Terms, on_the_line, terms_of
from ...decode.partials import most_split, partials_of
from ...decode.results import Results
from ...entry import host_entry
from ...parts.keys.listed import ListedKeys, listed_keys
from ...parts.keys.source import KeySource, key_source, visibility_in
from ...parts.keys.visible import Visibility, varies
from ...parts.query import query_of, query_rows
from ...parts.row_end import ending_of, log_sums_of
from .forms import FEW_ROWS, ONE_CTA, PAIR_OF_CTAS, WARP_PRODUCTS, form_of_few_rows, forms_of
from .row16.kernel import FewRowsKernel
from .row64.geometry import PAIR
from .row64.kernel import Row64Kernel

PAIRED_UNITS = 8
"""CTAs work in pairs only if more than one group in this many has a unit: below, single CTAs are 1 to 3 % faster."""


class DecodeKernel:
    """The Hopper decode of one variant. Run-time facts: lengths, heads, q_len, pages and their size, masks, workers,
    scales."""

    def __init__(self, variant: DecodeVariant):
        self.variant = variant
        self.deal = DEALS[variant.arch]
        self.of_few_rows = form_of_few_rows(variant)
        self.kernels = {
            form: (FewRowsKernel if form == WARP_PRODUCTS else Row64Kernel)(geometry, self.deal)
            for form, geometry in forms_of(variant).items()
        }

    __call__ = host_entry(DECODE)

    @cute.jit
    def launch(self, given):
        """Launch attention in the form that takes the call, and the combine. given: what the call's table lists, by
        name."""
        _, q_len, heads, _ = given.query.shape
        view = visibility_in(self._source(given), given)
        if const_expr(self.of_few_rows == ONE_CTA):
            self._launch(given, view, ONE_CTA)
        else:
            # What takes a batch-invariant call must not depend on the other requests of the batch.
            few = (q_len * heads <= FEW_ROWS) & (given.batch_invariant == 0) & (view.vary == 0)
            if const_expr(self.kernels[self.of_few_rows].geometry.plain):
                few = few & self._has_tiles_for_all(view, given.workers)
            if few:
                self._launch(given, view, self.of_few_rows)
            else:
                self._launch(given, view, ONE_CTA)

    @cute.jit
    def _launch(self, given, view: Visibility, form: cutlass.Constexpr[str]):
        """Launch attention and combine. form: what takes the call; ONE_CTA becomes PAIR_OF_CTAS where the call's CTAs
        come in pairs."""
        heads = given.query.shape[2]
        source = self._source(given)
        kept = self.kernels[form].geometry.partial_rows
        partials = partials_of(self.variant.row.value_columns, Int32(self.deal.row_tile), given, view, kept)
        terms = terms_of(self.deal, view, heads, given.workers, partials.slots)
        view = on_the_line(self.deal, view, terms)
        results = Results(given.out, log_sums_of(given.lse), partials, ending_of(given, heads))
        dealt = (view, terms, results, given.softmax_scale)
        rows = query_rows(given, self.kernels[ONE_CTA].geometry.query_tile)
        if const_expr(form == WARP_PRODUCTS):
            self.kernels[form].launch((rows, self.kernels[form].keys(given, source), *dealt), given)
        else:
            query = query_of(rows, self.kernels[form].geometry.query_tile, cpasync.CopyBulkTensorTileG2SOp())
            keys, products = self.kernels[form].stream.keys(given, source), self.kernels[form].products()
            told = (query, keys, *dealt, products)
            if varies(view):
                self.kernels[form].launch(True, told, given)
            else:
                paired = Boolean(False)
                if const_expr(PAIR_OF_CTAS in self.kernels):
                    paired = self._comes_in_pairs(heads, terms)
                    if paired:
                        read = keys._replace(cache=given.kv_cache)
                        self.kernels[PAIR_OF_CTAS].launch(False, (query, read, *dealt, products), given)
                if not paired:
                    self.kernels[form].launch(False, told, given)
        split = most_split(partials, view, heads, Int32(self.deal.row_tile))
        launch_combine(partials, split, given.out, results.lse, results.ending, given.stream, kept, in_chunks=True)

    def _source(self, given) -> KeySource | ListedKeys:
        if self.variant.gathers:
            return listed_keys(given, self.variant.rope_at)
        return key_source(given.kv_cache, given.block_tables)

    def _has_tiles_for_all(self, view: Visibility, workers: Int32) -> Boolean:
        """Whether CTAs may have more than a tile each: with less, the kernel of many rows is done 7 to 15 % sooner (its
        code is shorter, and its tiles end in one team), with more, that of few rows 5 to 10 %."""
        tiles = (Int64(view.capacity) + self.deal.tile_kv - 1) // self.deal.tile_kv
        return view.seq_lens.shape[0] * tiles > workers

    def _comes_in_pairs(self, heads: Int32, terms: Terms) -> Boolean:
        """Whether CTAs with neighbouring numbers have row tiles of one query token, and so the same keys. With few
        requests for the GPU, single CTAs are done sooner by 1 to 3 %."""
        alike = heads % (PAIR * self.deal.row_tile) == 0
        even = (terms.group.value % PAIR == 0) & (terms.workers.value % PAIR == 0)
        return alike & even & (terms.units * PAIRED_UNITS > terms.groups)
