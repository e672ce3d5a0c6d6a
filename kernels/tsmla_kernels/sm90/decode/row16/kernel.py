"""Absorbed MLA decode for Hopper of rows with scales, and of bf16 rows that are gathered, for requests of up to 16
query rows: the kernel.

Each worker of the plan is one CTA, as in `row64`. Two teams of four warps take turns with the tiles; products are those
of single warps (`mma.sync`), so that rows are multiplied as they were loaded: a lane widens what it reads, and nothing
is written back. (`wgmma` wants 64 rows, or keys in shared memory.) A query of 16 rows is in registers, where `row64`
keeps one of 64 in shared memory: more keys can be on their way."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync
from tsmla.identity.arch import Deal

from ....decode.line import Terms
from ....decode.results import Results
from ....limits import TILE_ALIGNMENT, WARPGROUP
from ....parts.dependent_launch import launch
from ....parts.hopper.storage import BARRIER_BYTES
from ....parts.keys.listed import ListedKeys
from ....parts.keys.scales import RowScales
from ....parts.keys.source import KeySource
from ....parts.keys.visible import Visibility
from ....parts.pipeline import Barriers
from ....parts.query import QueryRows
from ..work.deal import deal
from .attend import Attending, attend_few
from .gather import gather_few
from .geometry import FewRowsGeometry
from .load import load_apart, load_few
from .maps import Maps, maps_of, places_of
from .schedule import DEAL_WARP, LOAD_WARP, FewRowsSchedule
from .storage import shared_of


class FewRowsKeys(NamedTuple):
    """A call's keys as the kernel is told of them: the cache; tensor maps where pieces lie apart and are not gathered;
    scales where these lie apart; and where the keys lie."""

    cache: cute.Tensor
    maps: Maps | None
    scales: RowScales | None
    source: KeySource | ListedKeys


class FewRowsKernel:
    """The kernel for few query rows of a decode: one of its forms (`forms`)."""

    def __init__(self, geometry: FewRowsGeometry, dealing: Deal):
        self.geometry = geometry
        self.schedule = FewRowsSchedule(geometry)
        self.schedule.check()
        self.dealing = dealing

    def keys(self, given, source: KeySource | ListedKeys) -> FewRowsKeys:
        """Make the tensor maps, if there are any, on the host. given: what the call's table lists, by name."""
        maps = scales = None
        if self.geometry.apart:
            scales = RowScales(given.scale_cache, given.query_scales)
            if not self.geometry.gathers:
                maps = maps_of(self.geometry, given.kv_cache, given.rope_cache)
        return FewRowsKeys(given.kv_cache, maps, scales, source)

    @cute.jit
    def launch(self, told: tuple, given):
        """Launch attention. told: the kernel's arguments."""
        launch(self.kernel(*told), given, given.workers, self.schedule.threads, self.geometry.shared_bytes)

    @cute.kernel
    def kernel(
        self,
        query: QueryRows,
        keys: FewRowsKeys,
        view: Visibility,
        terms: Terms,
        results: Results,
        softmax_scale: Float32,
    ):
        schedule, geometry = self.schedule, self.geometry
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if const_expr(keys.maps is not None):
            if warp == LOAD_WARP:
                for found in (keys.maps.latent_tile, keys.maps.rope_tile):
                    cpasync.prefetch_descriptor(found.atom)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(schedule, base, barriers)
        if warp == 0:
            barriers.init()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == DEAL_WARP:
                deal(self.dealing, shared.dealt, view, terms, results.partials, False)
            elif const_expr(geometry.gathers):
                gatherers = schedule.load.warps
                for gatherer in cutlass.range_constexpr(len(gatherers)):
                    if warp == gatherers[gatherer]:
                        key_scales = keys.scales.keys if const_expr(geometry.apart) else None
                        gather_few(keys.source, key_scales, shared, geometry, view, terms.heads, gatherer)
                        cute.arch.griddepcontrol_launch_dependents()
            elif warp == LOAD_WARP:
                if const_expr(geometry.apart):
                    load_apart(places_of(geometry, keys.maps, base + BARRIER_BYTES), keys.source, shared)
                else:
                    load_few(keys.cache, keys.source, shared, geometry)
                # As in `row64`: earlier, the combine's CTAs would all go where CTAs without work leave.
                cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            attending = Attending(query, view, terms.heads, results, softmax_scale, keys.source, keys.scales)
            attend_few(geometry, shared, attending)
