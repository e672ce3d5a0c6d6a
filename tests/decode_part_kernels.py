"""Kernels that are one part of a decode: one that writes down what it was dealt, and the combine by itself."""

from __future__ import annotations

import functools
import tempfile
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from decode_records import WORDS
from tsmla.call import DECODE
from tsmla.plan import Deal
from tsmla.variant import DecodeVariant
from tsmla_kernels.decode.combine import launch_combine
from tsmla_kernels.entry import fake_arguments, host_entry
from tsmla_kernels.parts.decode_line import Terms, deal_work, terms_of
from tsmla_kernels.parts.decode_work import first_unit, next_unit, segment_of
from tsmla_kernels.parts.partials import begin_records, partials_of, record_unit
from tsmla_kernels.parts.row_end import ending_of
from tsmla_kernels.parts.visible import LARGEST, Visibility, keys_of_row, visibility

FIELDS = 6
"""Per segment: request, row tile, first tile, tiles, slot, rows."""


class Given(NamedTuple):
    """What decides which keys are seen, by its names in the table of a decode call."""

    seq_lens: cute.Tensor
    causal_seqs: cute.Tensor
    visible: cute.Tensor
    causal: Int32
    window_left: Int32
    cp_world: Int32
    cp_rank: Int32
    cp_interleave: Int32


class SegmentLister:
    """One warp per part asks for its segments, and writes the records."""

    def __init__(self, deal: Deal):
        self.deal = deal

    @cute.jit
    def __call__(
        self, seq_lens, causal_seqs, visible, out_counts, out_segments, out_keys, out_records, causal: Int32,
        window_left: Int32, cp_world: Int32, cp_rank: Int32, cp_interleave: Int32, heads: Int32, parts: Int32,
        slots: Int32, stream,
    ):  # fmt: skip
        given = Given(seq_lens, causal_seqs, visible, causal, window_left, cp_world, cp_rank, cp_interleave)
        view = visibility(given, visible.shape[1], Int64(LARGEST))
        terms = terms_of(self.deal, seq_lens.shape[0], visible.shape[1], heads, parts, slots)
        self.kernel(view, out_counts, out_segments, out_keys, out_records, terms).launch(
            grid=(parts, 1, 1), block=(32, 1, 1), stream=stream
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
        part, _, _ = cute.arch.block_idx()
        work = deal_work(self.deal, view, terms, part)
        begin_records(work, out_records)
        count = Int32(0)
        unit = first_unit(self.deal, work, view)
        while unit.start < work.end:
            segment = segment_of(self.deal, work, view, unit)
            if segment.valid:
                place = out_segments[part, count, None]
                values = (segment.request, segment.row_tile, segment.first_tile, segment.tiles, segment.slot)
                for i in cutlass.range_constexpr(FIELDS - 1):
                    place[i] = values[i]
                place[FIELDS - 1] = segment.rows
                count += 1
            record_unit(work, out_records, unit, segment)
            unit = next_unit(self.deal, work, view, unit)
        out_counts[part] = count
        if part == 0:
            for index in cutlass.range(view.seq_lens.shape[0] * view.q_len, unroll=1):
                request, token = index // view.q_len, index % view.q_len
                keys = keys_of_row(view, request, token)
                out_keys[request, token, 0] = keys.first
                out_keys[request, token, 1] = keys.end


class Combiner:
    """What every decode kernel launches behind its attention."""

    def __init__(self, deal: Deal, pdl: bool):
        self.deal = deal
        self.pdl = pdl

    __call__ = host_entry(DECODE)

    def launch(self, given):
        batch, q_len, heads, _ = given.query.shape
        columns, row_tile = given.out.shape[3], Int32(self.deal.row_tile)
        partials = partials_of(columns, row_tile, given.workspace, batch, q_len * heads, given.parts)
        launch_combine(self.pdl, partials, given.out, given.lse, ending_of(given), given.stream)


@functools.lru_cache(maxsize=8)
def compiled_combiner(deal: Deal, variant: DecodeVariant):
    """The combiner for one deal as `Emulation.adopt` takes it, with a decode kernel's arguments."""
    return cute.compile(Combiner(deal, variant.pdl), *fake_arguments(variant), options=_options(variant.arch))


@functools.lru_cache(maxsize=8)
def compiled_lister(deal: Deal, arch: str):
    """The lister for one deal as `Emulation.adopt` takes it."""
    batch, q_len, parts, most, records = (cute.sym_int() for _ in range(5))

    def ints(*shape):
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        return make_fake_tensor(Int32, shape, strides, assumed_align=4)

    arguments = (
        ints(batch), ints(batch), ints(batch, q_len), ints(parts), ints(parts, most, FIELDS), ints(batch, q_len, 2),
        ints(records, WORDS), *(Int32(0) for _ in range(8)), make_fake_stream(use_tvm_ffi_env_stream=True),
    )  # fmt: skip
    return cute.compile(SegmentLister(deal), *arguments, options=_options(arch))


def _options(arch: str) -> str:
    return f"--enable-tvm-ffi --keep-ptx --gpu-arch {arch} --dump-dir={tempfile.mkdtemp()}"
