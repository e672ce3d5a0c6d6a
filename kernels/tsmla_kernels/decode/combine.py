"""Combine: the partial results of split units become rows of the output.

Launched behind every attention kernel that may split units, as its dependent: it is there when the last attention CTA
ends. A CTA reads one record (`parts/partials.py`) and takes some of its rows or of their columns, or leaves where there
is nothing to combine. With w_i = 2^(lse_i - max): out = output_scale sum w_i out_i / sum w_i, LSE = max + log2 sum w_i;
where heads have sinks, these count as `parts/row_end.py` says. Where rows are lifted, w_i also takes that out of a
lane's columns."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import Numeric, select_

from ..limits import SHARED_BYTES_PER_SM
from ..parts.alignment import aligned
from ..parts.hopper.fragment import QUAD
from ..parts.partials import Partials, Record, partial_slot, read_record, tail_slot_of
from ..parts.precision import LIFTED_COLUMNS, PartialRows
from ..parts.row_end import BASE_2, Ending, LogSums, count_sink, end_of_row, write_log_sum

WARPS = 8
LANE_WORDS = 32
"""32-bit words that a lane has on their way at a time."""
FEW_PARTIALS = 4
"""With up to this many partials, a warp has a row to itself; with more, warps share the partials and the columns."""
FEW_FOR_CHUNKS = 8
"""With 5 to this many partials, a warp may take one chunk of a row and read that chunk of all partials at once; warps
share nothing. A chunk is what a warp loads of one partial at once."""
LSE_EACH = 2
"""LSE of a row that a lane reads together to find the highest, where warps have no chunks: all of up to 64 partials."""
MANY_PARTIALS = 2**31 - 1
H200_SMS = 132
"""SMs of an H200. The grid counts on this many on Blackwell, too, whose GPUs have more."""
CTAS = 3 * H200_SMS
"""CTAs to spread the rows of all records over."""
CTAS_IN_CHUNKS = 2 * H200_SMS
"""CTAs to spread the rows over where warps may have chunks of rows: a call on half of the SMs leaves room for this many
on the others."""
FLOAT32 = PartialRows()


def vector_of(dtype: type[Numeric]) -> int:
    """Columns of one load: 16 bytes."""
    return 128 // dtype.width


def warp_columns(partials: Partials) -> int:
    """Columns of a row that a warp loads at once."""
    return 32 * vector_of(partials.rows.element_type)


class WeightedSum(NamedTuple):
    """What some partials of a row add up to: sum w_i out_i, [columns of a load, vectors] of each lane; sum w_i; the
    highest LSE."""

    rows: cute.Tensor
    weights: Float32
    highest: Float32


@cute.jit
def launch_combine(
    partials: Partials,
    out: cute.Tensor,
    lse: LogSums | None,
    ending: Ending,
    stream,
    kept: cutlass.Constexpr[PartialRows] = FLOAT32,
    in_chunks: cutlass.Constexpr[bool] = False,
    crowd: cutlass.Constexpr[int] = 1,
):
    """Launch the combine behind the attention kernel that had the same `partials`, `kept` so, unless it had no slots
    for any. in_chunks: whether warps have chunks of rows of up to `FEW_FOR_CHUNKS` partials. crowd: CTAs an SM, up to
    which a row's columns are cut into slices, one for each CTA."""
    ending = ending._replace(output_scale=ending.output_scale * 0.5**kept.bias)
    records, stored = partials.records.shape[0], partials.rows.shape[1]
    ctas = CTAS_IN_CHUNKS if const_expr(in_chunks) else CTAS
    blocks = cutlass.max(cutlass.min(ctas // records, stored), 1)
    slices = Int32(1)
    # A slice, a CTA's part of a row's columns, has one chunk at least.
    most = const_expr(partials.rows.shape[2] // warp_columns(partials))
    while slices < most and 2 * slices * records * blocks <= crowd * H200_SMS:
        slices *= 2
    # CTAs crowd on the SMs that attention leaves first. Each therefore asks for shared memory, mostly unused, so that
    # an SM has room for its share of them only.
    most_on_sm = (records * blocks * slices + H200_SMS - 1) // H200_SMS
    if partials.slots > 0:
        _combine(kept.in_quads, in_chunks, partials, out.iterator, lse, ending).launch(
            grid=(records, blocks, slices),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            smem=SHARED_BYTES_PER_SM // (most_on_sm + 1),
            use_pdl=True,
        )


@cute.kernel
def _combine(
    in_quads: cutlass.Constexpr[bool],
    in_chunks: cutlass.Constexpr[bool],
    partials: Partials,
    out: cute.Pointer,
    lse: LogSums | None,
    ending: Ending,
):
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()
    number, block, slice_number = cute.arch.block_idx()
    _, blocks, slices = cute.arch.grid_dim()
    record = read_record(partials.records, number)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lse_each = const_expr(1 if in_chunks else LSE_EACH)
    if record.partials > const_expr(FEW_FOR_CHUNKS if in_chunks else FEW_PARTIALS):
        for row in cutlass.range(block, record.rows, blocks, unroll=1):
            _combine_together(in_quads, lse_each, partials, record, row, slice_number, slices, warp, out, lse, ending)
    elif record.partials > 0:
        first, step = block + (warp * slices + slice_number) * blocks, WARPS * slices * blocks
        columns, has_row = const_expr(partials.rows.shape[2]), Boolean(True)
        if const_expr(in_chunks):
            has_row = record.partials <= FEW_PARTIALS
        if has_row:
            for row in cutlass.range(first, record.rows, step, unroll=1):
                vectors = const_expr(columns // warp_columns(partials))
                found = _weighted_sum(vectors, partials, record, row, Int32(0), Int32(0), Int32(1), FEW_PARTIALS)
                _end_row(in_quads, vectors, record, row, Int32(0), columns, found, True, out, lse, ending)
        else:
            _combine_chunks(in_quads, partials, record, first, step, out, lse, ending)


@cute.jit
def _combine_chunks(
    in_quads: cutlass.Constexpr[bool],
    partials: Partials,
    record: Record,
    first: Int32,
    step: Int32,
    out: cute.Pointer,
    lse: LogSums | None,
    ending: Ending,
):
    """Combine a warp's chunks of rows: number `first`, `first + step`, and so on."""
    columns, chunk = const_expr(partials.rows.shape[2]), const_expr(warp_columns(partials))
    for number in cutlass.range(first, record.rows * (columns // chunk), step, unroll=1):
        row = number // (columns // chunk)
        column = number % (columns // chunk) * chunk
        found = _weighted_sum(1, partials, record, row, column, Int32(0), Int32(1), FEW_FOR_CHUNKS)
        _end_row(in_quads, 1, record, row, column, columns, found, column == 0, out, lse, ending)


@cute.jit
def _combine_together(
    in_quads: cutlass.Constexpr[bool],
    lse_each: cutlass.Constexpr[int],
    partials: Partials,
    record: Record,
    row: Int32,
    slice_number: Int32,
    slices: Int32,
    warp: Int32,
    out: cute.Pointer,
    lse: LogSums | None,
    ending: Ending,
):
    """Combine a slice of a row's columns by all warps: each takes a chunk, and its turn of the partials. Warps whose
    turn is the first add up what all have."""
    columns = const_expr(partials.rows.shape[2])
    column_warps = columns // warp_columns(partials) // slices
    turns, turn = WARPS // column_warps, warp // column_warps
    column = (slice_number * column_warps + warp % column_warps) * warp_columns(partials)
    rows, weights = _exchanged(vector_of(partials.rows.element_type))
    found = _weighted_sum(1, partials, record, row, column, turn, turns, lse_each=lse_each)
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
        _end_row(in_quads, 1, record, row, column, columns, found, column == 0, out, lse, ending)
    cute.arch.sync_threads()


@cute.jit
def _exchanged(vector: cutlass.Constexpr[int]) -> tuple[cute.Tensor, cute.Tensor]:
    """Shared memory for what warps have of a row [vector, lanes, warps], and their weights [warps]."""
    base = cute.arch.get_dyn_smem(Float32, alignment=16)
    rows = cute.make_layout((vector, 32, WARPS))
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
    most: cutlass.Constexpr[int] = MANY_PARTIALS,
    lse_each: cutlass.Constexpr[int] = 1,
) -> WeightedSum:
    """Add up a warp's part of row `row` of the record's rows: `vectors` chunks from `column` on. The warp takes as many
    partials as are on their way together, then those `turns` times as many further on, and so on; `turn` says which are
    the first. These, and what they are multiplied by, are on their way before the highest LSE is looked for. There are
    no more partials than `most`."""
    dtype = partials.rows.element_type
    vector = const_expr(vector_of(dtype))
    together = const_expr(LANE_WORDS * 32 // dtype.width // (vectors * vector))
    at_once = const_expr(most <= together)  # lanes then have the LSE of all, and there is but one turn
    block = const_expr(LIFTED_COLUMNS // vector)  # lanes that have a block of columns, each with its factor
    alike = True  # a lane's blocks
    if const_expr(partials.downs is not None):
        alike = const_expr(partials.downs.stride[2][1] == 0)
        assert 2 * vectors * together <= 32 == 2 * block
    loaded = cute.make_rmem_tensor(cute.make_layout((vector, vectors, together)), dtype)
    sums = cute.make_rmem_tensor(cute.make_layout((vector, vectors)), Float32)
    sums.fill(0.0)
    lane = cute.arch.lane_idx()
    highest, total = Float32(0.0), Float32(0.0)
    for first in cutlass.range(turn * together, record.partials, turns * together, unroll=1):
        for i in cutlass.range_constexpr(together):
            # Numbers beyond the last partial read the last. Only the first lies apart from the others.
            number = first if const_expr(i == 0) else cutlass.min(first + i, record.partials - 1)
            slot = partial_slot(record, number) if const_expr(i == 0) else tail_slot_of(record, number)
            # The workspace has less than 2 GiB, so 32 bits suffice.
            place = (slot * partials.rows.shape[1] + row) * partials.rows.shape[2] + column
            for j in cutlass.range_constexpr(vectors):
                source = _vector(partials.rows.iterator, place + (j * 32 + lane) * vector, vector)
                cute.autovec_copy(source, loaded[None, j, i])
        number = first + lane % together
        mine, down = -Float32.inf, Float32(0.0)
        if number < record.partials:
            slot = partial_slot(record, number)
            mine = partials.lse[slot, row]
            if const_expr(partials.downs is not None):
                of = lane // block if const_expr(alike) else column // LIFTED_COLUMNS + lane // together % (2 * vectors)
                down = partials.downs[slot, row, of]
        if const_expr(at_once):
            highest = _or_zero(cute.arch.warp_reduction_max(mine))
        elif first == turn * together:
            highest = _highest_lse(lse_each, partials, record, row)
        mine = cute.math.exp2(mine - highest, fastmath=True)
        down = mine * down
        for i in cutlass.range_constexpr(together):
            weight = cute.arch.shuffle_sync(mine, i)
            total += weight
            if const_expr(partials.downs is not None and alike):
                weight = cute.arch.shuffle_sync(down, lane // block * block + i)
            for j in cutlass.range_constexpr(vectors):
                if const_expr(not alike):
                    weight = cute.arch.shuffle_sync(down, (2 * j + lane // block) * together + i)
                sums[None, j].store(sums[None, j].load() + loaded[None, j, i].load().to(Float32) * weight)
    return WeightedSum(sums, total, highest)


@cute.jit
def _end_row(
    in_quads: cutlass.Constexpr[bool],
    vectors: cutlass.Constexpr[int],
    record: Record,
    row: Int32,
    column: Int32,
    columns: cutlass.Constexpr[int],
    found: WeightedSum,
    with_lse: Boolean,
    out: cute.Pointer,
    lse: LogSums | None,
    ending: Ending,
):
    """Write a warp's part of a row of the output, of `columns` columns, and the row's LSE if `with_lse`."""
    out_row = record.row + row
    end = end_of_row(found.highest, 1.0, found.weights, 0, BASE_2, ending.output_scale)
    end = count_sink(ending, out_row, end, BASE_2, const_expr(lse is not None))
    target = out + Int64(out_row) * columns + column
    vector = const_expr(cute.size(found.rows, mode=[0]))
    for j in cutlass.range_constexpr(vectors):
        rounded = cute.make_rmem_tensor(vector, out.dtype)
        rounded.store((found.rows[None, j].load() * end.factor).to(out.dtype))
        first = (j * 32 + cute.arch.lane_idx()) * vector
        if const_expr(in_quads):
            pairs = cute.logical_divide(rounded, cute.make_layout(2))
            first = first // (QUAD * vector) * (QUAD * vector) + cute.arch.lane_idx() % QUAD * 2
            for pair in cutlass.range_constexpr(vector // 2):
                cute.autovec_copy(pairs[None, pair], _vector(target, first + pair * vector, 2))
        else:
            cute.autovec_copy(rounded, _vector(target, first, vector))
    if const_expr(lse is not None):
        if with_lse and cute.arch.lane_idx() == 0:
            write_log_sum(lse, ending, out_row, end.log_sum)


@cute.jit
def _vector(first: cute.Pointer, offset: Int32, size: cutlass.Constexpr[int]) -> cute.Tensor:
    """`size` elements at an offset that is a multiple of it."""
    return cute.make_tensor(aligned(first + offset, size * first.dtype.width // 8), size)


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
