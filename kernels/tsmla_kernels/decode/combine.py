"""Combine: the partial results of split units become rows of the output.

Launched behind every attention kernel, as its dependent: it is there when the last attention CTA ends. A CTA looks at
one unit that may have been split, or at one end of a chunk, and at a block of the unit's rows; where nothing was split
it has nothing to do. With w_i = 2^(lse_i - max): out = output_scale sum w_i out_i / sum w_i, LSE = max + log2 sum w_i.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from tsmla.plan import MAX_GROUP, Deal
from tsmla.support import LATENT_DIM

from ..parts.decode_work import Unit, deal_work, head_slot, pieces_of, tail_slot, unit_at, unit_numbered
from ..parts.partials import Partials, partials_of
from ..parts.visible import Visibility

WARPS = 8
VECTOR = 4
"""float32 words of one load."""
LANE_VECTORS = LATENT_DIM // (32 * VECTOR)
PIECES_IN_FLIGHT = 2
WIDE_PIECES = 4
"""Up to so many pieces one warp combines a row; all warps of the CTA share a row that has more."""
TARGET_CTAS = 512
"""CTAs to spread the rows of split units over: about one wave of what fits on a GPU."""


@cute.jit
def launch_combine(
    deal: cutlass.Constexpr[Deal],
    pdl: cutlass.Constexpr[bool],
    view: Visibility,
    heads: Int32,
    parts: Int32,
    workspace: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    output_scale: Float32,
    stream,
):
    """Launch behind the attention kernel that had the same `view`, `parts` and `workspace`."""
    rows = view.q_len * heads
    row_tiles = (rows + deal.row_tile - 1) // deal.row_tile
    rounds = (row_tiles + MAX_GROUP - 1) // MAX_GROUP
    group = (row_tiles + rounds - 1) // rounds
    candidates = cutlass.max(cutlass.min(view.seq_lens.shape[0] * rounds, parts // group - 1), 1)
    stored = cutlass.min(rows, deal.row_tile)
    row_blocks = cutlass.max(cutlass.min(TARGET_CTAS // (candidates * group), stored), 1)
    _combine(deal, pdl, view, heads, parts, workspace, out, lse, output_scale).launch(
        grid=(candidates * group, row_blocks, 1),
        block=(32 * WARPS, 1, 1),
        smem=WARPS * LATENT_DIM * 4,
        stream=stream,
        use_pdl=True,
    )


@cute.kernel
def _combine(
    deal: cutlass.Constexpr[Deal],
    pdl: cutlass.Constexpr[bool],
    view: Visibility,
    heads: Int32,
    parts: Int32,
    workspace: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    output_scale: Float32,
):
    cute.arch.griddepcontrol_wait()
    if const_expr(pdl):
        cute.arch.griddepcontrol_launch_dependents()
    block, row_block, _ = cute.arch.block_idx()
    _, row_blocks, _ = cute.arch.grid_dim()
    rows = view.q_len * heads
    partials = partials_of(deal, workspace, rows)
    row_tiles = (rows + deal.row_tile - 1) // deal.row_tile
    rounds = (row_tiles + MAX_GROUP - 1) // MAX_GROUP
    group = (row_tiles + rounds - 1) // rounds
    # Any part of the column will do: what is asked is where the pieces lie.
    work = deal_work(deal, view, heads, parts, partials.slots, block % group)
    candidate = block // group
    if (work.unit_length == 0 or work.chunk < work.unit_length) and candidate < work.groups:
        by_number = work.batch * work.rounds < work.groups
        unit = Unit(Int32(0), Int32(0), Int32(0), Int32(0))
        if by_number:
            unit = unit_numbered(deal, work, view, cutlass.min(candidate, work.batch * work.rounds - 1))
        else:
            unit = unit_at(deal, work, view, (candidate + 1) * work.chunk - 1)
        pieces = pieces_of(deal, work, view, unit)
        if pieces.count > 1 and (by_number or pieces.first == candidate):
            first_row = (unit.turn * work.group + work.column) * deal.row_tile
            unit_rows = cutlass.min(work.rows - first_row, deal.row_tile)
            block_rows = (unit_rows + row_blocks - 1) // row_blocks
            begin = row_block * block_rows
            _combine_rows(
                partials,
                head_slot(work, unit, pieces.first) * work.group + work.column,
                tail_slot(pieces.first + 1) * work.group + work.column,
                work.group,
                pieces.count,
                begin,
                cutlass.min(begin + block_rows, unit_rows),
                _rows_from(out, unit.request, first_row, work.rows),
                _lse_from(lse, unit.request, first_row, work.rows) if const_expr(lse is not None) else None,
                output_scale,
            )


@cute.jit
def _rows_from(out: cute.Tensor, request: Int32, first_row: Int32, rows: Int32) -> cute.Tensor:
    """(rows, LATENT_DIM) of a request from its row `first_row` on."""
    offset = (Int64(request) * rows + first_row) * LATENT_DIM
    return cute.make_tensor(out.iterator + offset, cute.make_layout((rows, LATENT_DIM), stride=(LATENT_DIM, 1)))


@cute.jit
def _lse_from(lse: cute.Tensor, request: Int32, first_row: Int32, rows: Int32) -> cute.Tensor:
    return cute.make_tensor(lse.iterator + (Int64(request) * rows + first_row), cute.make_layout(rows))


@cute.jit
def _combine_rows(
    partials: Partials,
    head: Int32,
    tails: Int32,
    stride: Int32,
    count: Int32,
    begin: Int32,
    end: Int32,
    out: cute.Tensor,
    lse: cute.Tensor | None,
    output_scale: Float32,
):
    """Rows `begin .. end - 1` of a unit whose pieces lie in slot `head`, then in `tails`, `tails + stride`, ..."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.lane_idx()
    wide = count > WIDE_PIECES
    row = begin if wide else begin + warp
    row_step = Int32(1) if wide else Int32(WARPS)
    first_piece = warp if wide else Int32(0)
    piece_step = Int32(WARPS) if wide else Int32(1)
    shared = cute.make_tensor(
        cute.arch.get_dyn_smem(Float32, alignment=16), cute.make_layout((WARPS, LATENT_DIM), stride=(LATENT_DIM, 1))
    )
    while row < end:
        highest, total = _row_total(partials, head, tails, stride, count, row, lane)
        inverse = Float32(0.0) if total == 0.0 else output_scale * cute.arch.rcp_approx(total)
        sums = cute.make_rmem_tensor(cute.make_layout((VECTOR, LANE_VECTORS)), Float32)
        sums.fill(0.0)
        for piece in cutlass.range(first_piece, count, piece_step, unroll=PIECES_IN_FLIGHT):
            slot = _slot(head, tails, stride, piece)
            weight = cute.math.exp2(partials.lse[slot, row] - highest, fastmath=True) * inverse
            for i in cutlass.range_constexpr(LANE_VECTORS):
                loaded = _vector(partials.rows[slot, row, None], i, lane).load()
                sums[None, i].store(sums[None, i].load() + loaded * weight)
        if wide:
            for i in cutlass.range_constexpr(LANE_VECTORS):
                _vector(shared[warp, None], i, lane).store(sums[None, i].load())
            cute.arch.sync_threads()
            pair = 2 * cute.arch.thread_idx()[0]
            columns = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            columns.fill(0.0)
            for other in cutlass.range_constexpr(WARPS):
                columns.store(columns.load() + _part(shared[other, None], pair, 2).load())
            _part(out[row, None], pair, 2).store(columns.load().to(out.element_type))
            cute.arch.sync_threads()
        else:
            for i in cutlass.range_constexpr(LANE_VECTORS):
                _vector(out[row, None], i, lane).store(sums[None, i].load().to(out.element_type))
        if const_expr(lse is not None):
            if lane == 0 and first_piece == 0:
                lse[row] = -Float32.inf if total == 0.0 else highest + cute.math.log2(total, fastmath=True)
        row += row_step


@cute.jit
def _row_total(
    partials: Partials, head: Int32, tails: Int32, stride: Int32, count: Int32, row: Int32, lane: Int32
) -> tuple[Float32, Float32]:
    """The highest LSE of a row's pieces (0 where all are -inf) and the sum of 2^(LSE - highest), on every lane."""
    highest = -Float32.inf
    for piece in cutlass.range(lane, count, 32, unroll=1):
        highest = cute.arch.fmax(highest, partials.lse[_slot(head, tails, stride, piece), row])
    highest = cute.arch.warp_reduction_max(highest)
    highest = Float32(0.0) if highest == -Float32.inf else highest
    total = Float32(0.0)
    for piece in cutlass.range(lane, count, 32, unroll=1):
        total += cute.math.exp2(partials.lse[_slot(head, tails, stride, piece), row] - highest, fastmath=True)
    return highest, cute.arch.warp_reduction_sum(total)


@cute.jit
def _slot(head: Int32, tails: Int32, stride: Int32, piece: Int32) -> Int32:
    return head if piece == 0 else tails + (piece - 1) * stride


@cute.jit
def _vector(row: cute.Tensor, number: cutlass.Constexpr[int], lane: Int32) -> cute.Tensor:
    """This lane's part of the row's `number`-th stretch of 32 vectors."""
    return _part(row, (number * 32 + lane) * VECTOR, VECTOR)


@cute.jit
def _part(row: cute.Tensor, column: Int32, size: cutlass.Constexpr[int]) -> cute.Tensor:
    """`size` elements from a column that is a multiple of it."""
    pointer = (row.iterator + column).align(size * row.element_type.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(size))
