"""The Hopper decode of up to 64 query rows a CTA: the kernel.

Each worker of the plan is one CTA, which walks its segments (`decode/segments.py`): 64 query rows against a range of
KV tiles. Two warpgroups attend, two warps load by TMA, one deals, one wipes what lies beyond the visible keys; what
else rows of a format need, helping warpgroups do (`keys/`)."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from tsmla.identity.arch import Deal

from ....decode.line import Terms
from ....decode.results import Results
from ....limits import TILE_ALIGNMENT, WARPGROUP
from ....parts.dependent_launch import launch
from ....parts.keys.visible import Visibility
from ....parts.pipeline import Barriers
from ....parts.precision import numeric
from ....parts.query import Query
from ..work.deal import deal
from .begin import Attending
from .exchanging.attend import attend
from .geometry import LOAD_WARPS, PAIR, DecodeGeometry
from .keys.stream import Keys
from .keys.streams import stream_of
from .schedule import CLEAN_WARP, DEAL_WARP, DecodeSchedule
from .storage import shared_of
from .turned.attend import attend_turned
from .turned.score import score_tiles


class Products(NamedTuple):
    """The products of a tile: of queries and keys; of their rope pieces, where these have a dtype of their own; and of
    probabilities and values."""

    qk: cute.TiledMma
    rope: cute.TiledMma | None
    pv: cute.TiledMma


class Row64Kernel:
    """The kernel of one form of a Hopper decode (`forms`) whose CTAs have up to 64 query rows."""

    def __init__(self, geometry: DecodeGeometry, dealing: Deal):
        self.geometry = geometry
        self.schedule = DecodeSchedule.of(geometry)
        self.stream = stream_of(geometry)
        self.dealing = dealing

    @cute.jit
    def launch(self, varying: cutlass.Constexpr[bool], told: tuple, given):
        """Launch attention, for requests that vary in query tokens or for all others. told: the kernel's arguments."""
        geometry = self.geometry
        cluster = geometry.ctas if geometry.ctas > 1 else None
        kernel = self.kernel(varying, *told)
        launch(kernel, given, given.workers, self.schedule.threads, geometry.shared_bytes, cluster)

    @cute.kernel
    def kernel(
        self,
        varying: cutlass.Constexpr[bool],
        query: Query,
        keys: Keys,
        view: Visibility,
        terms: Terms,
        results: Results,
        softmax_scale: Float32,
        products: Products,
    ):
        geometry, schedule, heads = self.geometry, self.schedule, terms.heads
        paired = const_expr(geometry.ctas == PAIR)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARPS[0]:
            for copied in (*query.maps, *(copies.tile for copies in keys.copies)):
                cpasync.prefetch_descriptor(copied.atom)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(schedule, base, barriers)
        if warp == 0:
            barriers.init()
        if const_expr(paired):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        attending = Attending(products, view, heads, results, softmax_scale, keys.scales)

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == DEAL_WARP:
                deal(self.dealing, shared.dealt, view, terms, results.partials, varying, not paired)
            elif warp == CLEAN_WARP:
                self.stream.clean(keys, shared, view, heads)
            elif const_expr(not paired) or warp == LOAD_WARPS[-1]:
                places = self.stream.places(keys, shared)
                for loader in cutlass.range_constexpr(len(LOAD_WARPS)):
                    if warp == LOAD_WARPS[loader]:
                        self.stream.load(loader, places, query, keys, shared, (view, heads, varying))
                if const_expr(not geometry.helpers_gather):
                    # The combine's CTAs may come now. Earlier, all would go where CTAs without work leave: to few SMs.
                    cute.arch.griddepcontrol_launch_dependents()
        elif warp >= 3 * WARPGROUP // 32:
            if const_expr(schedule.helpers > 0):
                cute.arch.setmaxregister_decrease(schedule.helper_registers)
                if const_expr(geometry.turns):
                    score_tiles(geometry, shared, attending)
                else:
                    self.stream.help(keys, shared, view, heads)
                if const_expr(geometry.helpers_gather):
                    cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            if const_expr(geometry.turns):
                attend_turned(geometry, shared, attending)
            else:
                attend(geometry, shared, attending)
        if const_expr(paired):  # the other CTA may still tell this one that it has left a stage
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def products(self) -> Products:
        """Make, on the host, the products: scores = Q K^T with both in shared memory, one more for rope pieces where
        they have a dtype of their own; output += P V with P in registers, or, turned, output^T += V^T P^T with V^T in
        registers."""
        geometry = self.geometry
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        v_major, columns = (k_major, geometry.tile_q) if geometry.turns else (mn_major, geometry.value_columns)
        one = (1, 1, 1)
        qk, *rope = (
            hopper.make_trivial_tiled_mma(dtype, dtype, k_major, k_major, Float32, one, (64, geometry.tile_kv))
            for dtype in (numeric(geometry.strip_dtypes[strip]) for strip in (0, *geometry.behind_latent))
        )
        operands = map(numeric, geometry.probabilities.operands)
        pv = hopper.make_trivial_tiled_mma(
            *operands, k_major, v_major, Float32, one, (64, columns), warpgroup.OperandSource.RMEM
        )
        return Products(qk, rope[0] if geometry.scaled else None, pv)
