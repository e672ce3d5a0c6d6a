"""Role `correct` of the Blackwell prefill: rescales the output when a row's maximum has grown, and writes it out."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...limits import WARPGROUP
from ...parts.alignment import aligned
from ...parts.blackwell import tmem
from ...parts.blackwell.epilogue import store_row
from ...parts.blackwell.row_softmax import scaled
from ...parts.row_end import Earlier, with_earlier
from ...prefill import tma
from ...prefill.tile_scheduler import QueryTile
from .geometry import PrefillGeometry
from .plan import place_of
from .schedule import CORRECT_BARRIER, PrefillSchedule
from .storage import Shared
from .work import TileWork, first_tile

HELD_COLUMNS = 32
"""Output columns that a thread holds at a time."""


@cute.jit
def correct(
    geometry: cutlass.Constexpr[PrefillGeometry],
    schedule: cutlass.Constexpr[PrefillSchedule],
    shared: Shared,
    tmem_base: Int32,
    out,
    place: QueryTile,
    works,
    tiles: Int32,
    earlier: Earlier | None,
) -> None:
    """Rescale and write the output of both query tiles. `out` is (copy atom, one head's rows); `works` are the query
    tiles' TileWork, `tiles` what the CTA visits."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    warp = cute.arch.make_warp_uniform(thread // 32)
    for count in cutlass.range(tiles, unroll=1):
        for tile in cutlass.range_constexpr(geometry.query_tiles):
            _rescale(schedule, shared, tmem_base, works[tile], tile, count, thread)
    for tile in cutlass.range_constexpr(geometry.query_tiles):
        _write(schedule, shared, tmem_base, works[tile], tile, tiles, thread, place, earlier)
        if const_expr(tile == geometry.query_tiles - 1):
            # The barrier tells the warp that deallocates that tensor memory is read no more.
            tmem.wait_loads()
            tmem.fence_before()
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=CORRECT_BARRIER, number_of_threads=WARPGROUP)
        if warp == 0:
            shape = (geometry.rows, geometry.d_v)
            source, target = tma.tiles_of(out[0], out[1], shape, shared.out)
            with cute.arch.elect_one():
                cute.copy(out[0], source[None, tile], target[None, first_tile(geometry, place) + tile])
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _rescale(
    schedule: cutlass.Constexpr[PrefillSchedule], shared: Shared, tmem_base, work: TileWork, tile: cutlass.Constexpr,
    count: Int32, thread: Int32,
) -> None:  # fmt: skip
    """Rescale the output to the new maximum before the values of KV tile number `count` are added."""
    geometry, plan = schedule.geometry, schedule.plan
    event = count - work.start
    if event > 0:
        if const_expr(plan.crossed):
            # A warp must not arrive again for others that have not arrived for the values before.
            shared.probabilities_early.wait_full(tile, event - 1)
        factor = _factor(geometry, shared, tile, event - 1, thread)
        if cute.arch.vote_any_sync(factor != 1.0):
            if const_expr(plan.ahead):
                shared.output_full.wait_full(*place_of(plan, tile, event - 1))
            tmem.fence_after()
            output = tmem.row_address(tmem_base, geometry.tmem_output + tile * geometry.d_v, thread // 32)
            for first in cutlass.range_constexpr(0, geometry.d_v, HELD_COLUMNS):
                values = tmem.load(output + first, HELD_COLUMNS)
                tmem.wait_loads()
                tmem.store(output + first, scaled(values, factor))
            tmem.wait_stores()
            tmem.fence_before()
    if event >= 0:
        shared.probabilities_early.hand_over(place_of(plan, tile, event)[0])


@cute.jit
def _factor(
    geometry: cutlass.Constexpr[PrefillGeometry], shared: Shared, tile: cutlass.Constexpr, number: Int32, thread: Int32
) -> Float32:
    """This row's factor number `number`, when it is there."""
    place = tile * geometry.factors + number % geometry.factors
    shared.factors_full.wait_full(place, number // geometry.factors)
    return shared.factors[place * geometry.rows + thread]


@cute.jit
def _write(
    schedule: cutlass.Constexpr[PrefillSchedule], shared: Shared, tmem_base, work: TileWork, tile: cutlass.Constexpr,
    tiles: Int32, thread: Int32, place: QueryTile, earlier: Earlier | None,
) -> None:  # fmt: skip
    """Write the finished rows over the query tile, which nobody reads any more: its last scores have been computed. A
    query tile without scores is loaded all the same if the CTA has `tiles` to visit; then zeros, or the rows of an
    earlier result, take its place when it has landed. In a pair, both CTAs have scores of all tiles."""
    geometry = schedule.geometry
    target = shared.out[thread, None, tile]
    output = tmem.row_address(tmem_base, geometry.tmem_output + tile * geometry.d_v, thread // 32)
    factor = Float32(0.0)
    if work.events > 0:
        factor = _factor(geometry, shared, tile, work.events - 1, thread)
        last = work.events - 1 if const_expr(schedule.plan.ahead) else Int32(0)
        shared.output_full.wait_full(*place_of(schedule.plan, tile, last))
        tmem.fence_after()
    elif const_expr(schedule.plan.ctas == 1):
        if tiles > 0:
            shared.q_edge.wait_full(Int32(tile))
    kept = Float32(0.0)
    if const_expr(earlier is not None):
        if earlier.merges != 0:
            if work.events == 0:
                shared.factors_full.wait_full(tile * geometry.factors, Int32(0))
            if work.first_row + thread < place.q.length:
                kept = shared.kept[tile * geometry.rows + thread]
    for first in cutlass.range_constexpr(0, geometry.d_v, HELD_COLUMNS):
        values = [Float32(0.0)] * HELD_COLUMNS
        if work.events > 0:
            values = scaled(tmem.load(output + first, HELD_COLUMNS), factor)
        if const_expr(earlier is not None):
            if kept != 0.0:
                row = earlier.out[place.q.start + work.first_row + thread, place.head, None]
                values = _with_earlier(values, row, factor, kept, first)
        store_row(values, target, first)


@cute.jit
def _with_earlier(values: list, row: cute.Tensor, factor: Float32, kept: Float32, first: cutlass.Constexpr) -> list:
    """Add the columns of an earlier result, from `first` on."""
    dtype = row.element_type
    source = cute.make_tensor(aligned(row.iterator + first, 16), cute.make_layout(len(values)))
    held = cute.make_rmem_tensor(len(values), dtype)
    cute.autovec_copy(source, held)
    widened = held.load().to(Float32)
    return [with_earlier(value, widened[index], factor, kept) for index, value in enumerate(values)]
