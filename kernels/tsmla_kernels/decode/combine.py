"""Combine: the partial results of split units become rows of the output.

Launched behind every attention kernel that may split units, as its dependent: it is there when the last attention CTA
ends. A CTA reads one record (`partials.py`) and takes some of its rows or of their columns, or leaves where there
is nothing to combine. With w_i = 2^(lse_i - max): out = output_scale sum w_i out_i / sum w_i, LSE = max + log2 sum w_i;
where heads have sinks, these count as `parts/row_end.py` says. Where rows are lifted, w_i also undoes that for a lane's
columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import select_
from tsmla.identity.dtype import bytes_of

from ..limits import SHARED_BYTES_PER_SM
from ..parts.alignment import aligned
from ..parts.row_end import BASE_2, Ending, LogSums, count_sink, end_of_row, write_log_sum
from ..parts.warp import QUAD
from .partial_rows import LIFTED_COLUMNS, PartialRows
from .partials import Partials, Record, find_record, partial_slot, read_record, tail_slot_of
from .plan import H200_SMS, WARPS, CombinePlan, Share

FLOAT32 = PartialRows()


class Target(NamedTuple):
    """Where results go, and how rows end: the output's first element, log-sum-exps."""

    out: cute.Pointer
    lse: LogSums | None
    ending: Ending


class WeightedSum(NamedTuple):
    """What some partials of a row add up to: sum w_i out_i, [columns of a load, chunks] of each lane; sum w_i; the
    highest LSE."""

    rows: cute.Tensor
    weights: Float32
    highest: Float32


@cute.jit
def launch_combine(
    partials: Partials,
    split: Int32,
    out: cute.Tensor,
    lse: LogSums | None,
    ending: Ending,
    stream,
    kept: cutlass.Constexpr[PartialRows] = FLOAT32,
    in_chunks: cutlass.Constexpr[bool] = False,
    crowd: cutlass.Constexpr[int] = 1,
):
    """Launch the combine behind the attention kernel that was given the same `partials`, unless these have no
    slots. split: as `most_split` has it. kept, in_chunks, crowd: see `CombinePlan`."""
    plan = CombinePlan(kept, partials.rows.shape[2], in_chunks, crowd)
    ending = ending._replace(output_scale=ending.output_scale * 0.5**kept.bias)
    blocks = cutlass.max(cutlass.min(plan.ctas // split, partials.rows.shape[1]), 1)
    slices = Int32(1)
    # A slice, a CTA's part of a row's columns, has one chunk at least.
    while slices < plan.chunks and 2 * slices * split * blocks <= plan.crowd * H200_SMS:
        slices *= 2
    # CTAs crowd on the SMs that attention leaves first. Each therefore asks for shared memory, mostly unused, so that
    # an SM has room for its share of them only.
    most_on_sm = (split * blocks * slices + H200_SMS - 1) // H200_SMS
    if partials.slots > 0:
        _combine(plan, partials, Target(out.iterator, lse, ending)).launch(
            grid=(split, blocks, slices),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            smem=SHARED_BYTES_PER_SM // (most_on_sm + 1),
            use_pdl=True,
        )


@cute.kernel
def _combine(plan: cutlass.Constexpr[CombinePlan], partials: Partials, target: Target):
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    number, block, slice_number = cute.arch.block_idx()
    split, blocks, slices = cute.arch.grid_dim()
    if partials.records.shape[0] > split:
        number = find_record(partials.records, number)
    record = read_record(partials.records, cutlass.max(number, 0))
    to_combine = record.partials if number >= 0 else Int32(0)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if to_combine > plan.few:
        for row in cutlass.range(block, record.rows, blocks, unroll=1):
            _combine_together(plan, partials, record, row, slice_number, slices, warp, target)
    elif to_combine > 0:
        first, step = block + (warp * slices + slice_number) * blocks, WARPS * slices * blocks
        if const_expr(not plan.in_chunks):
            _combine_alone(plan, plan.whole_row, partials, record, first, step, target)
        elif record.partials <= plan.whole_row.most:
            _combine_alone(plan, plan.whole_row, partials, record, first, step, target)
        else:
            _combine_alone(plan, plan.one_chunk, partials, record, first, step, target)


@cute.jit
def _combine_alone(
    plan: cutlass.Constexpr[CombinePlan],
    share: cutlass.Constexpr[Share],
    partials: Partials,
    record: Record,
    first: Int32,
    step: Int32,
    target: Target,
):
    """Combine a warp's shares of rows: number `first`, `first + step`, and so on."""
    shares = plan.chunks // share.chunks
    for number in cutlass.range(first, record.rows * shares, step, unroll=1):
        row, column = number // shares, number % shares * (share.chunks * plan.chunk)
        found = _weighted_sum(plan, share, partials, record, row, column, Int32(0), Int32(1))
        _end_row(plan, share, record, row, column, found, target)


@cute.jit
def _combine_together(
    plan: cutlass.Constexpr[CombinePlan],
    partials: Partials,
    record: Record,
    row: Int32,
    slice_number: Int32,
    slices: Int32,
    warp: Int32,
    target: Target,
):
    """Combine a slice of a row's columns by all warps: each takes a chunk, and its turn of the partials. Warps whose
    turn is the first add up what all have."""
    column_warps = plan.chunks // slices
    turns, turn = WARPS // column_warps, warp // column_warps
    column = (slice_number * column_warps + warp % column_warps) * plan.chunk
    rows, weights = _exchanged(plan.vector)
    found = _weighted_sum(plan, plan.in_turns, partials, record, row, column, turn, turns)
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
        found = found._replace(weights=total)
        _end_row(plan, plan.in_turns, record, row, column, found, target)
    cute.arch.sync_threads()


@cute.jit
def _exchanged(vector: cutlass.Constexpr[int]) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared memory for what warps have of a row [vector, lanes, warps], and their weights [warps]."""
    base = cute.arch.get_dyn_smem(Float32, alignment=16)
    rows = cute.make_layout((vector, 32, WARPS))
    return cute.make_tensor(base, rows), cute.make_tensor(base + cute.size(rows), cute.make_layout(WARPS))


@cute.jit
def _weighted_sum(
    plan: cutlass.Constexpr[CombinePlan],
    share: cutlass.Constexpr[Share],
    partials: Partials,
    record: Record,
    row: Int32,
    column: Int32,
    turn: Int32,
    turns: Int32,
) -> WeightedSum:
    """Add up a warp's share of row `row` of the record's rows, from `column` on. The warp takes as many partials as are
    on their way together, then those `turns` times as many further on, and so on; `turn` says which are the first.
    These, and what they are multiplied by, are on their way before the highest LSE is looked for."""
    vector, chunks, together = plan.vector, share.chunks, share.together
    loaded = cute.make_rmem_tensor(cute.make_layout((vector, chunks, together)), plan.kept.dtype)
    sums = cute.make_rmem_tensor(cute.make_layout((vector, chunks)), Float32)
    sums.fill(0.0)
    lane = cute.arch.lane_idx()
    highest, total = Float32(0.0), Float32(0.0)
    for first in cutlass.range(turn * together, record.partials, turns * together, unroll=1):
        for i in cutlass.range_constexpr(together):
            # Numbers beyond the last partial read the last. Only the first lies apart from the others.
            number = first if const_expr(i == 0) else cutlass.min(first + i, record.partials - 1)
            slot = partial_slot(record, number) if const_expr(i == 0) else tail_slot_of(record, number)
            # The workspace has less than 2 GiB, so 32 bits suffice.
            place = (slot * partials.rows.shape[1] + row) * plan.columns + column
            for j in cutlass.range_constexpr(chunks):
                source = _vector(partials.rows.iterator, place + (j * 32 + lane) * vector, vector)
                cute.autovec_copy(source, loaded[None, j, i])
        number = first + lane % together
        mine, down = -Float32.inf, Float32(0.0)
        if number < record.partials:
            slot = partial_slot(record, number)
            mine = partials.lse[slot, row]
            if const_expr(plan.kept.lifted):
                down = partials.downs[slot, row, _block_of(plan, share, column, lane)]
        if const_expr(share.in_one_turn):
            highest = _or_zero(cute.arch.warp_reduction_max(mine))
        elif first == turn * together:
            highest = _highest_lse(share.lse_each, partials, record, row)
        mine = cute.math.exp2(mine - highest, fastmath=True)
        down = mine * down
        for i in cutlass.range_constexpr(together):
            weight = cute.arch.shuffle_sync(mine, i)
            total += weight
            for j, factor in enumerate(_factors(plan, share, i, weight, down, lane)):
                sums[None, j].store(sums[None, j].load() + loaded[None, j, i].load().to(Float32) * factor)
    return WeightedSum(sums, total, highest)


def _block_of(plan: CombinePlan, share: Share, column: Int32, lane: Int32) -> Int32:
    """The block of a row, lifted, whose factor a lane reads."""
    if plan.alike:
        return lane // plan.block_lanes
    return column // LIFTED_COLUMNS + lane // share.together % (2 * share.chunks)


def _factors(
    plan: CombinePlan, share: Share, number: int, weight: Float32, down: Float32, lane: Int32
) -> Iterator[Float32]:
    """What the lane's columns of partial `number` are multiplied by, one chunk after the other: its weight, times what
    takes out by how much the block is lifted. Lanes have that as `down`, where `_block_of` says."""
    block = plan.block_lanes
    if plan.alike:
        weight = cute.arch.shuffle_sync(down, lane // block * block + number)
    for j in range(share.chunks):
        if plan.kept.lifted and not plan.alike:
            weight = cute.arch.shuffle_sync(down, (2 * j + lane // block) * share.together + number)
        yield weight


@cute.jit
def _end_row(
    plan: cutlass.Constexpr[CombinePlan],
    share: cutlass.Constexpr[Share],
    record: Record,
    row: Int32,
    column: Int32,
    found: WeightedSum,
    target: Target,
):
    """Write a warp's share of a row of the output, and the row's LSE if the share is the first."""
    out, lse, ending = target
    out_row = record.row + row
    end = end_of_row(found.highest, 1.0, found.weights, 0, BASE_2, ending.output_scale)
    end = count_sink(ending, out_row, end, BASE_2, lse is not None)
    first_element, vector = out + Int64(out_row) * plan.columns + column, plan.vector
    for j in cutlass.range_constexpr(share.chunks):
        rounded = cute.make_rmem_tensor(vector, out.dtype)
        rounded.store((found.rows[None, j].load() * end.factor).to(out.dtype))
        first = (j * 32 + cute.arch.lane_idx()) * vector
        if const_expr(plan.kept.in_quads):
            twos = cute.logical_divide(rounded, cute.make_layout(2))
            first = first // (QUAD * vector) * (QUAD * vector) + cute.arch.lane_idx() % QUAD * 2
            for number in cutlass.range_constexpr(vector // 2):
                cute.autovec_copy(twos[None, number], _vector(first_element, first + number * vector, 2))
        else:
            cute.autovec_copy(rounded, _vector(first_element, first, vector))
    if const_expr(lse is not None):
        if column == 0 and cute.arch.lane_idx() == 0:
            write_log_sum(lse, ending, out_row, end.log_sum)


@cute.jit
def _vector(first: cute.Pointer, offset: Int32, size: cutlass.Constexpr[int]) -> cute.Tensor:
    """`size` elements at an offset that is a multiple of it."""
    return cute.make_tensor(aligned(first + offset, bytes_of(first.dtype.width, size)), size)


@cute.jit
def _highest_lse(each: cutlass.Constexpr[int], partials: Partials, record: Record, row: Int32) -> Float32:
    """The highest LSE of a row's partials, 0 where all are -inf, on every lane of the warp; a lane reads `each` of them
    together."""
    highest = -Float32.inf
    if const_expr(each == 1):
        for number in cutlass.range(cute.arch.lane_idx(), record.partials, 32, unroll=1):
            highest = cute.arch.fmax(highest, partials.lse[partial_slot(record, number), row])
        highest = cute.arch.warp_reduction_max(highest)
    else:
        for first in cutlass.range(cute.arch.lane_idx(), record.partials, 32 * each, unroll=1):
            numbers = [cutlass.min(first + 32 * i, record.partials - 1) for i in range(each)]
            for lse in [partials.lse[partial_slot(record, number), row] for number in numbers]:
                highest = cute.arch.fmax(highest, lse)
        highest = _highest_of_warp(highest)
    return _or_zero(highest)


@cute.jit
def _highest_of_warp(value: Float32) -> Float32:
    """The highest value of the warp's lanes, by one integer maximum: with all bits but the sign of negative numbers
    inverted, integers are in the floats' order."""
    bits = cute.make_rmem_tensor(1, Float32)
    bits[0] = value
    words = cute.recast_tensor(bits, Int32)
    words[0] = cute.arch.warp_redux_sync(_in_order(words[0]), "max")
    words[0] = _in_order(words[0])
    return bits[0]


def _in_order(bits: Int32) -> Int32:
    """Bits of a float32 as an integer in the numbers' order, and back."""
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def _or_zero(highest: Float32) -> Float32:
    """What exponents refer to: the highest LSE, or 0 where no partial has a key."""
    return Float32(select_(highest == -Float32.inf, Float32(0.0), highest))
