"""Role `attend` of the Hopper prefill: one warpgroup, 64 query rows, all of their KV tiles."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup
from tsmla.identity.variant import PrefillVariant

from ...limits import WARPGROUP
from ...parts.hopper import lazy_softmax, mma
from ...parts.hopper.epilogue import add_earlier, load_lse, store_lse, store_output
from ...parts.hopper.fragment import rows_columns
from ...parts.hopper.softmax import quad_sum, scale_rows
from ...parts.logarithm import LOG2_E
from ...parts.pipeline import TmaEdge, WarpEdge
from ...parts.precision import Probabilities
from ...parts.row_end import NATURAL, Earlier, Ending, RowEnd, count_earlier, count_sink, end_of_row
from ...prefill.call import PrefillResults
from ...prefill.visits import KeyMask
from ...prefill.work_range import WorkRange, partial_tile, tile_at
from .key_mask import masked_rows
from .policy import policy_of
from .steps import Edges, PrefillState, RowStates, first_tile, start_values, step
from .storage import Shared
from .tasks import Tasks


class Ends(NamedTuple):
    """What becomes of the rows' outputs, earlier ones and LSE, and what of a call says so."""

    factor: cute.Tensor
    kept: cute.Tensor
    row_lse: cute.Tensor
    lse: cute.Tensor | None
    scale: Float32
    ending: Ending
    earlier: Earlier | None


@cute.jit
def attend(
    variant: cutlass.Constexpr[PrefillVariant], mmas, shared: Shared, tasks: Tasks, results: PrefillResults,
    softmax_scale: Float32, mask: KeyMask | None,
):  # fmt: skip
    """Attend all tasks of the CTA. `mmas` are the score and value MMAs."""
    filled = Int32(0)
    tiles_before = Int32(0)
    for task in cutlass.range(tasks.count, unroll=1):
        tile = tasks.tile(task)
        work = tasks.work(task, tile)
        if tile.q.length > 0:
            state, ends = begin_task(
                variant, mmas, shared, tile, work, results, softmax_scale, filled, tiles_before, mask
            )
            attend_tiles(shared, state, ends)
            end_task(variant, mmas, state, ends, results)
        filled += cutlass.min(work.tiles, 1)
        tiles_before += work.tiles


@cute.jit
def attend_tiles(shared: Shared, state: PrefillState, ends: Ends):
    """Attend a task's tiles, and find the ends of its rows."""
    work, tiles_before = state.work, state.tiles_before
    start = tiles_before
    if work.tiles > 0:
        shared.q_edge.wait_full(state.query)
        if const_expr(state.policy.passes):
            start += _hidden(state)
            if start < tiles_before + work.tiles:
                _pass(shared.k_edge, tiles_before, start)
                _visit(state, ends, start)
            if start == tiles_before + work.tiles:
                shared.q_edge.release(state.query)
                for count in cutlass.range(tiles_before, start, unroll=1):  # both in turn, or rings fill up
                    _pass(shared.k_edge, count, count + 1)
                    _pass(shared.values_edge, count, count + 1)
        else:
            _visit(state, ends, start)
    if const_expr(state.policy.ends_early):
        if start == tiles_before + work.tiles:
            _end_rows(state, ends)

    if const_expr(not state.policy.ends_early):
        _end_rows(state, ends)


@cute.jit
def begin_task(
    variant: cutlass.Constexpr[PrefillVariant], mmas, shared: Shared, tile, work: WorkRange, results: PrefillResults,
    softmax_scale: Float32, filled: Int32, tiles_before: Int32, mask: KeyMask | None,
) -> tuple[PrefillState, Ends]:  # fmt: skip
    """Make the state of a task before its first tile, and what ends its rows."""
    _, lse, ending, earlier = results
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP) - 1
    policy = policy_of(variant)
    mma_qk, mma_pv = mmas
    tile_q = cute.size(shared.q, mode=[2]) * 64
    tile_kv, d_v = cute.size(shared.v, mode=[0]), cute.size(shared.v, mode=[1])
    first_row = tile.tile * tile_q + group * 64
    if const_expr(not (variant.lse or variant.causal)):
        first_row = _here(first_row)

    qk, pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
    output = cute.make_rmem_tensor(mma_pv.partition_shape_C((64, d_v)), Float32)
    coordinates = rows_columns(mma_qk.get_slice(thread).partition_C(cute.make_identity_tensor((64, tile_kv))))
    rows = cute.size(coordinates, mode=[0])
    reference, row_sum, rescale, factor, row_lse, kept = (cute.make_rmem_tensor(rows, Float32) for _ in range(6))
    ends = Ends(
        factor=factor,
        kept=kept,
        row_lse=row_lse,
        lse=lse,
        scale=softmax_scale,
        ending=ending,
        earlier=earlier,
    )
    operands = mma.Operands(
        qk_op=mma_qk.op,
        pv_op=mma_pv.op,
        q=qk.make_fragment_A(qk.partition_A(shared.q[None, None, group])),
        k=qk.make_fragment_B(qk.partition_B(shared.k)),
        v=pv.make_fragment_B(pv.partition_B(shared.values)),
        scores_shape=mma_qk.partition_shape_C((64, tile_kv)),
    )
    masked = None
    if const_expr(mask is not None):
        masked = masked_rows(mask, tile.q, tile.kv.length, first_row, coordinates, tile_kv)
    state = PrefillState(
        operands=operands,
        edges=Edges(shared.q_edge, shared.k_edge, shared.values_edge),
        rows=RowStates(output, reference, row_sum, rescale),
        coordinates=coordinates,
        probabilities=pv.make_fragment_A(pv.partition_shape_A((64, tile_kv))),
        first_row=first_row,
        tile=tile,
        work=work,
        tiles_before=tiles_before,
        query=filled * cute.size(shared.q, mode=[2]) + group,
        scale_log2=softmax_scale * LOG2_E,
        tile_kv=tile_kv,
        causal=variant.causal,
        policy=policy,
        precision=Probabilities.of(variant.dtype, policy.wide_stages > 0),
        masked=masked,
    )
    output.fill(0.0)
    reference.fill(lazy_softmax.NO_KEYS if variant.dtype.bits == 8 else -Float32.inf)
    row_sum.fill(0.0)
    return state, ends


@cute.jit
def end_task(
    variant: cutlass.Constexpr[PrefillVariant], mmas, state: PrefillState, ends: Ends, results: PrefillResults
):
    """Multiply the rows' outputs by their factors, add earlier ones, and store rows and, unless done, LSEs."""
    out, lse, _, earlier = results
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    output, tile, first_row = state.rows.output, state.tile, state.first_row
    scale_rows(rows_columns(output), ends.factor)
    if const_expr(variant.lse):
        if earlier.merges != 0:
            add_earlier(mmas[1], thread, output, ends.factor, ends.kept, earlier.out, tile.head, tile.q, first_row)
            cute.arch.sync_warp()  # other lanes of the quad store what this one has read
        if const_expr(not state.policy.ends_early):
            store_lse(lse, ends.row_lse, state.coordinates, tile.head, tile.q, first_row)
    store_output(output, out, state.coordinates, tile.head, tile.q, first_row)


@cute.jit
def _end_rows(state: PrefillState, ends: Ends):
    """Find what the output is multiplied by, and the rows' LSE, which wide heads store here."""
    rows = cute.size(state.rows.reference)
    head, logs = state.tile.head, const_expr(ends.lse is not None)
    totals = [quad_sum(state.rows.total[row]) for row in range(rows)]
    if const_expr(logs):
        ends.row_lse.fill(-Float32.inf)
        if ends.earlier.merges != 0:
            load_lse(ends.lse, ends.row_lse, state.coordinates, head, state.tile.q, state.first_row)
    for row in cutlass.range_constexpr(rows):
        end = end_of_row(
            state.rows.reference[row], ends.scale, totals[row], state.precision.bias, NATURAL, ends.ending.output_scale
        )
        if const_expr(logs):
            if ends.earlier.merges != 0:
                end, share = count_earlier(end, ends.row_lse[row])
                ends.kept[row] = count_sink(ends.ending, head, RowEnd(share, end.log_sum), NATURAL, False).factor
        end = count_sink(ends.ending, head, end, NATURAL, logs)
        ends.factor[row], ends.row_lse[row] = end.factor, end.log_sum * ends.ending.lse_factor
    if const_expr(logs and state.policy.ends_early):
        store_lse(ends.lse, ends.row_lse, state.coordinates, head, state.tile.q, state.first_row)


@cute.jit
def _visit(state: PrefillState, ends: Ends, start: Int32):
    """Visit the tiles from `start` on; those before it, fewer than stages, are hidden."""
    if const_expr(state.masked is None):
        first_tile(state, start)
        _visit_range(state, start)
    else:
        _visit_list(state)
    if const_expr(not state.policy.starts_early):
        state.edges.q.release(state.query)
    _last_tile(state, ends)


@cute.jit
def _visit_range(state: PrefillState, start: Int32):
    """Visit the tiles behind the first, `start`: those that some row may not see all of, then the others."""
    tiles_before, masked = state.tiles_before, state.work.masked
    if const_expr(state.policy.ends_early):
        _pass(state.edges.v, tiles_before, start)
        if const_expr(state.causal):
            masked = _masked(state)
    unmasked = tiles_before + cutlass.max(masked, 1)
    if const_expr(state.policy.passes):
        if const_expr(not state.policy.ends_early):  # here, or ptxas allocates other registers than where it was timed
            _pass(state.edges.v, tiles_before, start)
        unmasked = cutlass.max(unmasked, start + 1)
    if const_expr(state.causal):
        for count in cutlass.range(start + 1, unmasked, unroll=1):
            step(state, count, True)
    for count in cutlass.range(unmasked, tiles_before + state.work.tiles, unroll=1):
        step(state, count, False)


@cute.jit
def _visit_list(state: PrefillState):
    """Visit the tiles that are listed: partial ones, whose numbers are read two tiles ahead, and the mask's words one,
    then whole ones."""
    work, before = state.work, state.tiles_before
    tile, upcoming = tile_at(work, Int32(0)), partial_tile(work, Int32(1))
    first_tile(state, before, (tile, upcoming))
    whole = cutlass.max(work.masked, 1)
    for index in cutlass.range(1, whole, unroll=1):
        tile, upcoming = upcoming, partial_tile(work, index + 1)
        step(state, before + index, True, (tile, upcoming))
    for count in cutlass.range(before + whole, before + work.tiles, unroll=1):
        step(state, count, False)


@cute.jit
def _hidden(state: PrefillState) -> Int32:
    """Count the tiles, of those that the CTA visits first, of which this warpgroup's rows see nothing: all, if it has
    no rows."""
    q, kv, tiles = state.tile.q, state.tile.kv, state.work.tiles
    end = kv.length
    if const_expr(state.causal):
        end = cutlass.min(end, cutlass.min(state.first_row + 64, q.length) + kv.length - q.length)
    seen = (cutlass.max(end, 0) + state.tile_kv - 1) // state.tile_kv
    return tiles - cutlass.select_(state.first_row < q.length, cutlass.min(seen, tiles), 0)


@cute.jit
def _masked(state: PrefillState) -> Int32:
    """Count the tiles, of those that the CTA masks, that hold a column which some row of this warpgroup may not see."""
    q, kv = state.tile.q, state.tile.kv
    end = cutlass.min(kv.length, state.first_row + kv.length - q.length + 1)
    return state.work.tiles - cutlass.max(end, 0) // state.tile_kv


@cute.jit
def _pass(edge: TmaEdge | WarpEdge, first: Int32, start: Int32):
    """Release the tiles from `first` to before `start`, each when it is there: an edge counts arrivals of one tile."""
    for count in cutlass.range(first, start, unroll=1):
        edge.wait_full(count)
        edge.release(count)


@cute.jit
def _here(row: Int32) -> Int32:
    """Return the row, computed here. Where nothing but the end of rows asks for it, LLVM computes it there; ptxas then
    holds the warpgroup's number in a vector register, believes that threads part at each wait, and computes descriptors
    of products in vector registers: 620 instructions a step of 16 bits instead of 481."""
    fragment = cute.make_rmem_tensor(1, Int32)
    fragment[0] = row
    mma.pin(fragment)
    return fragment[0]


@cute.jit
def _last_tile(state: PrefillState, ends: Ends):
    """Add values of the last tile; wide heads find the ends of the rows meanwhile. Where no warpgroup passes over
    tiles, ptxas would keep the tile's number in vector registers for these ends, and compute descriptors there (see
    `_here`)."""
    last = state.tiles_before + state.work.tiles - 1
    start_values(state, last)
    if const_expr(state.policy.ends_early):
        _end_rows(state, ends)
    warpgroup.wait_group(0)
    state.edges.v.release(last)
