"""Kernels that are one part of a decode: one that writes down what it was dealt, and the combine by itself."""

from __future__ import annotations

import functools
import tempfile
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from decode_deal import WORDS
from tsmla.identity.arch import Arch, Deal
from tsmla.identity.call import DECODE
from tsmla.identity.variant import DecodeVariant
from tsmla_kernels.decode.combine import launch_combine
from tsmla_kernels.decode.line import LaneWork, Terms, Work, deal_work, in_lanes, of_equal_lengths, terms_of
from tsmla_kernels.decode.partial_rows import PartialRows
from tsmla_kernels.decode.partials import begin_records, most_split, partials_of, record_unit
from tsmla_kernels.decode.segments import Segment, Unit, begin, for_each_unit
from tsmla_kernels.entry import fake_arguments, host_entry
from tsmla_kernels.parts.keys.source import key_source, visibility_in
from tsmla_kernels.parts.keys.visible import LARGEST, Visibility, keys_of_row, tokens_behind, varies, visibility
from tsmla_kernels.parts.row_end import ending_of, log_sums_of

FIELDS = ("request", "row_tile", "first_tile", "tiles", "slot", "rows", "first_row", "end_token")
"""What is listed of a segment."""


class Given(NamedTuple):
    """What decides which keys are seen, by its names in the table of a decode call."""

    seq_lens: cute.Tensor
    causal_seqs: cute.Tensor
    cum_seq_lens_q: cute.Tensor
    visible: cute.Tensor
    causal: Int32
    window_left: Int32
    cp_world: Int32
    cp_rank: Int32
    cp_interleave: Int32
    q_len: Int32


class SegmentLister:
    """One warp per worker asks for its segments, as Hopper's dealing warp does, and writes the records."""

    def __init__(self, deal: Deal):
        self.deal = deal

    @cute.jit
    def __call__(
        self,
        seq_lens,
        causal_seqs,
        cum_seq_lens_q,
        visible,
        out_counts,
        out_segments,
        out_keys,
        out_records,
        causal: Int32,
        window_left: Int32,
        cp_world: Int32,
        cp_rank: Int32,
        cp_interleave: Int32,
        q_len: Int32,
        heads: Int32,
        workers: Int32,
        slots: Int32,
        stream,
    ):
        given = Given(
            seq_lens, causal_seqs, cum_seq_lens_q, visible, causal, window_left, cp_world, cp_rank, cp_interleave, q_len
        )
        view = visibility(given, out_keys.shape[0], Int64(LARGEST))
        terms = terms_of(self.deal, view, heads, workers, slots)
        self.kernel(view, out_counts, out_segments, out_keys, out_records, terms).launch(
            grid=(workers, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        view: Visibility,
        out_counts: cute.Tensor,
        out_segments: cute.Tensor,
        out_keys: cute.Tensor,
        out_records: cute.Tensor,
        terms: Terms,
    ):
        worker, _, _ = cute.arch.block_idx()
        if varies(view):
            work = in_lanes(deal_work(self.deal, view, terms, worker))
            self._list(work, worker, out_counts, out_segments, out_records)
        else:
            work = deal_work(self.deal, *of_equal_lengths(view, terms), worker)
            self._list(work, worker, out_counts, out_segments, out_records)
        if worker == 0:
            before = Int32(0)
            for request in cutlass.range(view.seq_lens.shape[0], unroll=1):
                tokens = tokens_behind(view, request, before)
                before = tokens.start
                end = tokens.start + tokens.length
                for token in cutlass.range(tokens.start, end, unroll=1):
                    keys = keys_of_row(view, request, end, token)
                    out_keys[token, 0] = keys.first
                    out_keys[token, 1] = keys.end

    def _list(self, work: Work | LaneWork, worker: Int32, counts, segments, records):
        begin_records(work, records)
        work, unit = begin(self.deal, work)

        @cute.jit
        def act(work: Work | LaneWork, unit: Unit, segment: Segment, count: Int32) -> Int32:
            if segment.valid:
                place = segments[worker, count, None]
                for i in cutlass.range_constexpr(len(FIELDS)):
                    place[i] = getattr(segment, FIELDS[i])
                count += 1
            record_unit(self.deal, work, records, unit, segment)
            return count

        counts[worker] = for_each_unit(self.deal, work, unit, act, Int32(0))


class Combiner:
    """What every decode kernel launches behind its attention."""

    def __init__(self, deal: Deal, variant: DecodeVariant, kept: PartialRows):
        self.deal = deal
        self.kept = kept
        self.in_chunks = variant.arch is Arch.SM90A

    __call__ = host_entry(DECODE)

    def launch(self, given):
        view = visibility_in(key_source(given.kv_cache, given.block_tables), given)
        columns, row_tile = given.out.shape[3], Int32(self.deal.row_tile)
        partials = partials_of(columns, row_tile, given, view, self.kept)
        ending = ending_of(given, given.query.shape[2])
        lse = log_sums_of(given.lse)
        split = most_split(partials, view, given.query.shape[2], row_tile)
        launch_combine(partials, split, given.out, lse, ending, given.stream, self.kept, self.in_chunks)


@functools.lru_cache(maxsize=8)
def compiled_combiner(deal: Deal, variant: DecodeVariant, kept: PartialRows):
    """The combiner for one deal as `Emulation.adopt` takes it, with a decode kernel's arguments."""
    return cute.compile(Combiner(deal, variant, kept), *fake_arguments(variant), options=_options(variant.arch))


@functools.lru_cache(maxsize=8)
def compiled_lister(deal: Deal, arch: str):
    """The lister for one deal as `Emulation.adopt` takes it."""
    batch, ends, rows, columns, tokens, workers, most, records = (cute.sym_int() for _ in range(8))

    def ints(*shape):
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return make_fake_tensor(Int32, shape, strides, assumed_align=4)

    arguments = (
        ints(batch), ints(batch), ints(ends), ints(rows, columns), ints(workers), ints(workers, most, len(FIELDS)),
        ints(tokens, 2), ints(records, WORDS), *(Int32(0) for _ in range(9)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip
    return cute.compile(SegmentLister(deal), *arguments, options=_options(arch))


def _options(arch: str) -> str:
    return f"--enable-tvm-ffi --keep-ptx --gpu-arch {arch} --dump-dir={tempfile.mkdtemp()}"
