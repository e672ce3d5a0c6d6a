"""Combine: the partial results of split units become rows of the output.

Launched behind every attention kernel, as its dependent: it is there when the last attention CTA ends. A CTA reads one
record (`parts/partials.py`) and takes some of its rows, or leaves where there is nothing to combine. With w_i =
2^(lse_i - max): out = output_scale sum w_i out_i / sum w_i, LSE = max + log2 sum w_i; where heads have sinks, these
count as `parts/row_end.py` says.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..limits import SHARED_BYTES_PER_SM
from ..parts.alignment import aligned
from ..parts.partials import Partials, Record, partial_slot, read_record, tail_slot_of
from ..parts.row_end import BASE_2, Ending, count_sink, end_of_row

WARPS = 8
LANE_WORDS = 32
"""float32 words that a lane has on their way at a time."""
VECTOR = 4
"""Words of one load where a warp has a row to itself."""
FEW_PARTIALS = 4
"""Up to so many partials a warp has a row to itself."""
SMS = 132
"""Of an H200."""
CTAS = 3 * SMS
"""To spread the rows of all records over."""


@cute.jit
def launch_combine(
    pdl: cutlass.Constexpr[bool],
    partials: Partials,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    ending: Ending,
    stream,
):
    """Launch behind the attention kernel that had the same `partials`."""
    records, stored = partials.records.shape[0], partials.rows.shape[1]
    blocks = cutlass.max(cutlass.min(CTAS // records, stored), 1)
    # CTAs crowd on the SMs that attention leaves first. So each asks for shared memory, which it does not use, of which
    # an SM has enough for its share of them only.
    most_on_sm = (records * blocks + SMS - 1) // SMS
    _combine(pdl, partials, out.iterator, lse.iterator if const_expr(lse is not None) else None, ending).launch(
        grid=(records, blocks, 1),
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
    number, block, _ = cute.arch.block_idx()
    _, blocks, _ = cute.arch.grid_dim()
    record = read_record(partials.records, number)
    if record.partials > FEW_PARTIALS:
        for row in cutlass.range(block, record.rows, blocks, unroll=1):
            thread, _, _ = cute.arch.thread_idx()
            # Every lane has its columns of all partials.
            vector = const_expr(partials.rows.shape[2] // (32 * WARPS))
            _combine_row(vector, 32 * WARPS, partials, record, row, thread, out, lse, ending)
    elif record.partials > 0:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for row in cutlass.range(block + warp * blocks, record.rows, WARPS * blocks, unroll=1):
            _combine_row(VECTOR, 32, partials, record, row, cute.arch.lane_idx(), out, lse, ending)


@cute.jit
def _combine_row(
    vector: cutlass.Constexpr[int],
    lanes: cutlass.Constexpr[int],
    partials: Partials,
    record: Record,
    row: Int32,
    lane: Int32,
    out: cute.Pointer,
    lse: cute.Pointer | None,
    ending: Ending,
):
    """Row `row` of the record's rows, by `lanes` lanes of whole warps with loads of `vector` words; `lane` counts them.
    The first rows are on their way before the highest LSE is looked for."""
    columns = const_expr(partials.rows.shape[2])
    vectors = const_expr(columns // (lanes * vector))
    together = const_expr(LANE_WORDS // (vectors * vector))
    loaded = cute.make_rmem_tensor(cute.make_layout((vector, vectors, together)), Float32)
    sums = cute.make_rmem_tensor(cute.make_layout((vector, vectors)), Float32)
    sums.fill(0.0)
    highest, total = Float32(0.0), Float32(0.0)
    for first in cutlass.range(0, record.partials, together, unroll=1):
        for i in cutlass.range_constexpr(together):
            # The last partial stands for those that there are not. Only the first lies apart from the others.
            number = first if const_expr(i == 0) else cutlass.min(first + i, record.partials - 1)
            slot = partial_slot(record, number) if const_expr(i == 0) else tail_slot_of(record, number)
            # The workspace has less than 2 GiB, so 32 bits suffice.
            place = (slot * partials.rows.shape[1] + row) * columns
            for j in cutlass.range_constexpr(vectors):
                column = (j * lanes + lane) * vector
                cute.autovec_copy(_vector(partials.rows.iterator, place + column, vector), loaded[None, j, i])
        if first == 0:
            highest = _highest_lse(partials, record, row)
        mine = Float32(0.0)
        number = first + cute.arch.lane_idx() % together
        if number < record.partials:
            mine = cute.math.exp2(partials.lse[partial_slot(record, number), row] - highest, fastmath=True)
        for i in cutlass.range_constexpr(together):
            weight = cute.arch.shuffle_sync(mine, i)
            total += weight
            for j in cutlass.range_constexpr(vectors):
                sums[None, j].store(sums[None, j].load() + loaded[None, j, i].load() * weight)
    out_row = record.row + row
    end = end_of_row(highest, 1.0, total, 0, BASE_2, ending.output_scale)
    end = count_sink(ending, out_row, end, BASE_2, const_expr(lse is not None))
    for j in cutlass.range_constexpr(vectors):
        rounded = cute.make_rmem_tensor(vector, out.dtype)
        rounded.store((sums[None, j].load() * end.factor).to(out.dtype))
        target = out + Int64(out_row) * columns
        cute.autovec_copy(rounded, _vector(target, (j * lanes + lane) * vector, vector))
    if const_expr(lse is not None):
        if lane == 0:
            cute.make_tensor(lse + out_row, 1)[0] = end.log_sum


@cute.jit
def _vector(first: cute.Pointer, offset: Int32, size: cutlass.Constexpr[int]) -> cute.Tensor:
    """`size` elements at an offset that is a multiple of it."""
    return cute.make_tensor(aligned(first + offset, size * first.dtype.width // 8), size)


@cute.jit
def _highest_lse(partials: Partials, record: Record, row: Int32) -> Float32:
    """The highest LSE of a row's partials, 0 where all are -inf, on every lane of the warp."""
    highest = -Float32.inf
    for number in cutlass.range(cute.arch.lane_idx(), record.partials, 32, unroll=1):
        highest = cute.arch.fmax(highest, partials.lse[partial_slot(record, number), row])
    highest = cute.arch.warp_reduction_max(highest)
    return Float32(0.0) if highest == -Float32.inf else highest
