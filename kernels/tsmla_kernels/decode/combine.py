"""Combine: the partial results of split units become rows of the output.

Launched behind every attention kernel, as its dependent: it is there when the last attention CTA ends. A CTA reads one
record (`parts/partials.py`) and takes some of its rows or of their columns, or leaves where there is nothing to
combine. With w_i = 2^(lse_i - max): out = output_scale sum w_i out_i / sum w_i, LSE = max + log2 sum w_i; where heads
have sinks, these count as `parts/row_end.py` says.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..limits import SHARED_BYTES_PER_SM
from ..parts.alignment import aligned
from ..parts.partials import Partials, Record, partial_slot, read_record, tail_slot_of
from ..parts.row_end import BASE_2, Ending, count_sink, end_of_row

WARPS = 8
LANE_WORDS = 32
"""32-bit words that a lane has on their way at a time."""
VECTOR = 4
"""Columns of one load."""
WARP_COLUMNS = 32 * VECTOR
"""What a warp loads of a row at once."""
FEW_PARTIALS = 4
"""Up to so many partials a warp has a row to itself; of more, warps share the partials and the columns."""
SMS = 132
"""Of an H200."""
CTAS = 3 * SMS
"""To spread the rows of all records over."""
MOST_SLICES = 4
"""Of a row's columns, for CTAs of their own: as many as there may be of WARP_COLUMNS."""


class WeightedSum(NamedTuple):
    """Of some partials of a row: sum w_i out_i, [VECTOR, vectors] of each lane; sum w_i; and the row's highest LSE."""

    rows: cute.Tensor
    weights: Float32
    highest: Float32


@cute.jit
def launch_combine(
    pdl: cutlass.Constexpr[bool],
    partials: Partials,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    ending: Ending,
    stream,
    bias: cutlass.Constexpr[int] = 0,
    crowd: cutlass.Constexpr[int] = 1,
):
    """Launch behind the attention kernel that had the same `partials`, whose rows are times 2 ** `bias`. crowd: CTAs an
    SM, up to which columns are cut into slices."""
    ending = ending._replace(output_scale=ending.output_scale * 0.5**bias)
    records, stored = partials.records.shape[0], partials.rows.shape[1]
    blocks = cutlass.max(cutlass.min(CTAS // records, stored), 1)
    slices = Int32(1)
    while slices < MOST_SLICES and 2 * slices * records * blocks <= crowd * SMS:
        slices *= 2
    # CTAs crowd on the SMs that attention leaves first. So each asks for shared memory, most of which it does not use,
    # of which an SM has enough for its share of them only.
    most_on_sm = (records * blocks * slices + SMS - 1) // SMS
    _combine(pdl, partials, out.iterator, lse.iterator if const_expr(lse is not None) else None, ending).launch(
        grid=(records, blocks, slices),
        block=(32 * WARPS, 1, 1),
        stream=stream,
        smem=SHARED_BYTES_PER_SM // (most_on_sm + 1),
        use_pdl=True,
    )


@cute.kernel
def _combine(
    pdl: cutlass.Constexpr[bool],
    partials: Partials,
    out: cute.Pointer,
    lse: cute.Pointer | None,
    ending: Ending,
):
    cute.arch.griddepcontrol_wait()
    if const_expr(pdl):
        cute.arch.griddepcontrol_launch_dependents()
    number, block, slice_number = cute.arch.block_idx()
    _, blocks, slices = cute.arch.grid_dim()
    record = read_record(partials.records, number)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if record.partials > FEW_PARTIALS:
        for row in cutlass.range(block, record.rows, blocks, unroll=1):
            _combine_together(partials, record, row, slice_number, slices, warp, out, lse, ending)
    elif record.partials > 0:
        first, step = block + (warp * slices + slice_number) * blocks, WARPS * slices * blocks
        for row in cutlass.range(first, record.rows, step, unroll=1):
            vectors = const_expr(partials.rows.shape[2] // WARP_COLUMNS)
            found = _weighted_sum(vectors, partials, record, row, Int32(0), Int32(0), Int32(1))
            _end_row(vectors, record, row, Int32(0), partials.rows.shape[2], found, True, out, lse, ending)


@cute.jit
def _combine_together(
    partials: Partials,
    record: Record,
    row: Int32,
    slice_number: Int32,
    slices: Int32,
    warp: Int32,
    out: cute.Pointer,
    lse: cute.Pointer | None,
    ending: Ending,
):
    """A slice of a row's columns by all warps: each takes WARP_COLUMNS of it and its turn of the partials. Those whose
    turn is the first add up what all have."""
    columns = const_expr(partials.rows.shape[2])
    column_warps = columns // WARP_COLUMNS // slices
    turns, turn = WARPS // column_warps, warp // column_warps
    column = (slice_number * column_warps + warp % column_warps) * WARP_COLUMNS
    rows, weights = _exchanged()
    found = _weighted_sum(1, partials, record, row, column, turn, turns)
    lane = cute.arch.lane_idx()
    if turn > 0:
        cute.autovec_copy(found.rows, rows[None, lane, warp])
        if lane == 0:
            weights[warp] = found.weights
    cute.arch.sync_threads()
    if turn == 0:
        total = found.weights
        for other in cutlass.range(warp + column_warps, WARPS, column_warps, unroll=1):
            theirs = cute.make_rmem_tensor(found.rows.layout, Float32)
            cute.autovec_copy(rows[None, lane, other], theirs)
            found.rows.store(found.rows.load() + theirs.load())
            total += weights[other]
        _end_row(1, record, row, column, columns, found._replace(weights=total), column == 0, out, lse, ending)
    cute.arch.sync_threads()


@cute.jit
def _exchanged() -> tuple[cute.Tensor, cute.Tensor]:
    """In shared memory, what warps have of a row [VECTOR, lanes, warps], and their weights [warps]."""
    base = cute.arch.get_dyn_smem(Float32, alignment=16)
    rows = cute.make_layout((VECTOR, 32, WARPS))
    return cute.make_tensor(base, rows), cute.make_tensor(base + cute.size(rows), cute.make_layout(WARPS))


@cute.jit
def _weighted_sum(
    vectors: cutlass.Constexpr[int],
    partials: Partials,
    record: Record,
    row: Int32,
    column: Int32,
    turn: Int32,
    turns: Int32,
) -> WeightedSum:
    """A warp's part of row `row` of the record's rows: `vectors` x WARP_COLUMNS from `column` on, of as many partials
    as are on their way together, then of `turns` times as many further on, and so on; `turn` says which are the first.
    These are on their way before the highest LSE is looked for."""
    dtype = partials.rows.element_type
    together = const_expr(LANE_WORDS * 32 // dtype.width // (vectors * VECTOR))
    loaded = cute.make_rmem_tensor(cute.make_layout((VECTOR, vectors, together)), dtype)
    sums = cute.make_rmem_tensor(cute.make_layout((VECTOR, vectors)), Float32)
    sums.fill(0.0)
    lane = cute.arch.lane_idx()
    highest, total = Float32(0.0), Float32(0.0)
    for first in cutlass.range(turn * together, record.partials, turns * together, unroll=1):
        for i in cutlass.range_constexpr(together):
            # The last partial stands for those that there are not. Only the first lies apart from the others.
            number = first if const_expr(i == 0) else cutlass.min(first + i, record.partials - 1)
            slot = partial_slot(record, number) if const_expr(i == 0) else tail_slot_of(record, number)
            # The workspace has less than 2 GiB, so 32 bits suffice.
            place = (slot * partials.rows.shape[1] + row) * partials.rows.shape[2] + column
            for j in cutlass.range_constexpr(vectors):
                cute.autovec_copy(
                    _vector(partials.rows.iterator, place + j * WARP_COLUMNS + lane * VECTOR), loaded[None, j, i]
                )
        if first == turn * together:
            highest = _highest_lse(partials, record, row)
        mine = Float32(0.0)
        number = first + lane % together
        if number < record.partials:
            mine = cute.math.exp2(partials.lse[partial_slot(record, number), row] - highest, fastmath=True)
        for i in cutlass.range_constexpr(together):
            weight = cute.arch.shuffle_sync(mine, i)
            total += weight
            for j in cutlass.range_constexpr(vectors):
                sums[None, j].store(sums[None, j].load() + loaded[None, j, i].load().to(Float32) * weight)
    return WeightedSum(sums, total, highest)


@cute.jit
def _end_row(
    vectors: cutlass.Constexpr[int],
    record: Record,
    row: Int32,
    column: Int32,
    columns: cutlass.Constexpr[int],
    found: WeightedSum,
    with_lse: Boolean,
    out: cute.Pointer,
    lse: cute.Pointer | None,
    ending: Ending,
):
    """A warp's part of a row of the output, of `columns` columns, and its LSE if it is asked to write that."""
    out_row = record.row + row
    end = end_of_row(found.highest, 1.0, found.weights, 0, BASE_2, ending.output_scale)
    end = count_sink(ending, out_row, end, BASE_2, const_expr(lse is not None))
    target = out + Int64(out_row) * columns + column
    for j in cutlass.range_constexpr(vectors):
        rounded = cute.make_rmem_tensor(VECTOR, out.dtype)
        rounded.store((found.rows[None, j].load() * end.factor).to(out.dtype))
        cute.autovec_copy(rounded, _vector(target, j * WARP_COLUMNS + cute.arch.lane_idx() * VECTOR))
    if const_expr(lse is not None):
        if with_lse and cute.arch.lane_idx() == 0:
            cute.make_tensor(lse + out_row, 1)[0] = end.log_sum


@cute.jit
def _vector(first: cute.Pointer, offset: Int32) -> cute.Tensor:
    """VECTOR elements at an offset that is a multiple of it."""
    return cute.make_tensor(aligned(first + offset, VECTOR * first.dtype.width // 8), VECTOR)


@cute.jit
def _highest_lse(partials: Partials, record: Record, row: Int32) -> Float32:
    """The highest LSE of a row's partials, 0 where all are -inf, on every lane of the warp."""
    highest = -Float32.inf
    for number in cutlass.range(cute.arch.lane_idx(), record.partials, 32, unroll=1):
        highest = cute.arch.fmax(highest, partials.lse[partial_slot(record, number), row])
    highest = cute.arch.warp_reduction_max(highest)
    return Float32(0.0) if highest == -Float32.inf else highest
