"""Absorbed MLA decode for Hopper of rows with scales, for requests of up to 16 query rows: the kernel.

Each worker of the plan is one CTA, as in `sm90/decode`, whose tasks and results it has. Two teams of four warps take
turns with the tiles; products are those of single warps (`mma.sync`), so that rows are multiplied as they were loaded:
a lane widens what it reads, and nothing is written back. (`wgmma` wants 64 rows, or keys in shared memory.)"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from tsmla.plan import Deal

from ...limits import TILE_ALIGNMENT, WARPGROUP
from ...parts.decode_line import Terms
from ...parts.hopper.storage import BARRIER_BYTES
from ...parts.key_source import KeySource
from ...parts.partials import Partials
from ...parts.pipeline import Barriers
from ...parts.query import QueryRows
from ...parts.row_end import Ending, LogSums
from ...parts.row_scales import RowScales
from ...parts.visible import Visibility
from ..decode.deal import deal
from ..decode.results import Results
from ..decode.task import take, take_next
from .attend import attend_few, is_alone
from .geometry import FewRowsGeometry
from .load import load_apart, load_few
from .maps import Maps, maps_of, places_of
from .schedule import DEAL_WARP, LOAD_WARP, FewRowsSchedule
from .storage import shared_of


class FewRowsKernel:
    """The kernel for few query rows of a decode whose rows have scales: one of its forms (`sm90/decode/forms`)."""

    def __init__(self, geometry: FewRowsGeometry, dealing: Deal):
        self.schedule = FewRowsSchedule(geometry)
        self.schedule.check()
        self.dealing = dealing

    @cute.jit
    def launch(
        self, query: QueryRows, cache: cute.Tensor, rope_cache: cute.Tensor | None, scales: RowScales | None,
        told: tuple, parts: Int32, pdl: Int32, stream,
    ):  # fmt: skip
        """Launch attention. rope_cache, scales: given only where a row's pieces lie in separate tensors."""
        maps = None
        if const_expr(self.schedule.geometry.apart):
            maps = maps_of(self.schedule.geometry, cache, rope_cache)
        self.kernel(query, cache, maps, scales, *told).launch(
            grid=(parts, 1, 1),
            block=(self.schedule.threads, 1, 1),
            smem=self.schedule.geometry.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=pdl,
        )

    @cute.kernel
    def kernel(
        self,
        query: QueryRows,
        cache: cute.Tensor,
        maps: Maps | None,
        scales: RowScales | None,
        block_tables: cute.Tensor,
        view: Visibility,
        terms: Terms,
        out: cute.Tensor,
        lse: LogSums | None,
        partials: Partials,
        pages: Int32,
        page_size: Int32,
        softmax_scale: Float32,
        ending: Ending,
    ):
        schedule = self.schedule
        geometry = schedule.geometry
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if const_expr(geometry.apart):
            if warp == LOAD_WARP:
                for found in (maps.latent_tile, maps.rope_tile):
                    cpasync.prefetch_descriptor(found.atom)
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=TILE_ALIGNMENT)
        barriers = Barriers(schedule.edges, base)
        shared = shared_of(schedule, base, barriers)
        if warp == 0:
            with cute.arch.elect_one():
                barriers.init()
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(schedule.load_registers)
            if warp == DEAL_WARP:
                deal(self.dealing, shared.dealt, view, terms, partials, False)
            elif warp == LOAD_WARP:
                source = KeySource(block_tables, page_size, pages)
                if const_expr(geometry.apart):
                    places = places_of(geometry, maps, base + BARRIER_BYTES)
                number = Int32(0)
                task = take(shared.dealt, number)
                while task.more:
                    if const_expr(geometry.apart):
                        load_apart(places, source, shared, geometry, task)
                    else:
                        load_few(cache, source, shared, geometry, task)
                    number, task = take_next(shared.dealt, number)
                # As in `sm90/decode`: earlier, the combine's CTAs would all go where CTAs without work leave.
                cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_increase(schedule.attend_registers)
            results = Results(out, lse, partials, ending)
            team = warp // (WARPGROUP // 32) - 1
            number = Int32(0)
            task = take(shared.dealt, number)
            while task.more:
                if (team == 0) | (not is_alone(task)):
                    attend_few(
                        geometry, team, shared, view, number, task, terms.heads, query, results, softmax_scale,
                        KeySource(block_tables, page_size, pages), scales,
                    )  # fmt: skip
                number, task = take_next(shared.dealt, number)
