"""Who does what in the Hopper decode: roles, edges between them, register budgets, named barriers."""

from __future__ import annotations

import dataclasses

from ....limits import WARPGROUP, registers_at_launch
from ....parts.edges import NOBODY, Copies, EdgeSpec, EdgeTable, Either, LaneCopies, Party, Role, Warps
from ..work.ring import DEALT_AT, TASK_RING, TASK_WORDS
from .geometry import CONVERTERS, LOAD_WARPS, WEIGHT_STAGES, DecodeGeometry

CLEAN_WARP = 1
DEAL_WARP = 2
ROW_BARRIER = 1
"""First of four named barriers: the two warps, one of each attending warpgroup, that hold the same 16 rows."""
CONVERT_BARRIER = 5
"""First of the named barriers of the converting warpgroups."""
WARPS = WARPGROUP // 32
"""Warps of a warpgroup."""


@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Who does what in the Hopper decode; warps of warpgroups 0 to 4:

    | rows | 0: warps 0, 3 | 0: warp 1 | 0: warp 2 | 1, 2 | 3 | 4 |
    |---|---|---|---|---|---|---|
    | 16 bits | load | clean | deal | attend | none | none |
    | 8 bits | load | clean | deal | attend | score | none |
    | 8 bits, a scale for each | load | clean; bring scales | deal | attend | score | none |
    | converted | load | nothing | deal | attend | convert, clean | convert, clean |
    | gathered, converted | gather stored rows; 0 tells, 3 loads query | nothing | deal | attend | convert | convert |
    | gathered, 16 bits | 3: load query | tell which keys are there | deal | attend | gather | none |
    | gathered, 8 bits | gather | tell which keys are there | deal | attend | score | none |
    | gathered, a scale for each | gather | tell what is there; bring scales | deal | attend | score | none |
    | converted, CTAs in pairs | 3: load query, rope pieces | nothing | deal | attend | load, convert, clean | none |
    | gathered, converted, pairs | 3: query, rope, tell | nothing | deal | attend | load, convert | none |"""

    geometry: DecodeGeometry
    load_registers: int
    attend_registers: int
    helper_registers: int
    helpers: int

    @classmethod
    def of(cls, geometry: DecodeGeometry) -> DecodeSchedule:
        if geometry.helpers_gather:
            schedule = cls(geometry, 32, 216, 48, 1)
        elif geometry.turns:
            schedule = cls(geometry, 40, 192, 88, 1)
        elif geometry.ctas > 1:
            schedule = cls(geometry, 32, 192, 96, 1)
        elif geometry.converts:
            schedule = cls(geometry, 32, 192, 32, CONVERTERS)
        else:
            schedule = cls(geometry, 40, 232, 0, 0)
        schedule.check()
        return schedule

    @property
    def threads(self) -> int:
        return (3 + self.helpers) * WARPGROUP

    @property
    def load(self) -> Role:
        if self.geometry.helpers_gather:
            return Role("load_queries", LOAD_WARPS[-1:], self.load_registers)
        if self.geometry.gathers and self.geometry.ctas > 1:
            return Role("gather_rope", LOAD_WARPS[-1:], self.load_registers)
        warps = [warp for loader, warp in enumerate(LOAD_WARPS) if self.geometry.loaded_strips(loader)]
        name = "load"
        if self.geometry.gathers:
            name = "gather_stored" if self.geometry.converts else "gather_rows"
        return Role(name, tuple(warps), self.load_registers)

    @property
    def gather(self) -> Role:
        """Who gathers rows, if anybody does."""
        if not self.geometry.helpers_gather:
            return self.load
        return Role("gather_rows", self._helpers, self.helper_registers)

    @property
    def clean(self) -> Role:
        name = "clean"
        if self.geometry.gathers:
            name = "tell_scaled_rows" if self.geometry.scaled else "tell_rows"
        return Role(name, (CLEAN_WARP,), self.load_registers)

    @property
    def deal(self) -> Role:
        return Role("deal", (DEAL_WARP,), self.load_registers)

    @property
    def attend(self) -> Role:
        name = "attend_turned" if self.geometry.turns else "attend"
        return Role(name, tuple(range(WARPS, 3 * WARPS)), self.attend_registers)

    @property
    def score(self) -> Role:
        """Who scores tiles, where value products are turned."""
        return Role("score_tiles", self._helpers, self.helper_registers)

    @property
    def convert(self) -> Role:
        return Role("convert" if self.geometry.ctas == 1 else "convert_for_both", self._helpers, self.helper_registers)

    @property
    def _helpers(self) -> tuple[int, ...]:
        return tuple(range(3 * WARPS, self.threads // 32))

    @property
    def roles(self) -> tuple[Role, ...]:
        if self.geometry.converts:
            return (self.load, self.deal, self.attend, self.convert)
        others = (self.gather,) if self.geometry.helpers_gather else ()
        if self.geometry.turns:
            others = (self.score,)
        return (self.load, self.clean, self.deal, self.attend, *others)

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Hopper decode. `kv...` are the cache's strips, the rope columns with the last. Copies of a
        border tile, at an end of the visible keys, complete on `landed` instead, all strips on one barrier; `clean`
        wipes what no row may see, and then fills the stages of the strips. `landed` has as many stages as a loading
        warp may be ahead of the other.

        Where rows are converted, there is no `landed`: `convert` makes zeros of what no row may see, and fills
        `ready...`, the converted strips, which lie where those of `kv...` do and are emptied with them. In pairs of
        CTAs, `convert_for_both` loads, too, and fills `kv...` themselves; each of its warps also announces as many
        bytes of the other CTA's, and both CTAs empty a stage.

        Where keys are gathered, lanes' copies complete on `landed...`, one for each strip. `tell_rows` makes what they
        have written visible to products, and fills `kv...`. Where they are converted, too, copies complete on `kv...`,
        and the warp that has the first strip also says that it has told which keys are there.

        `referenced` and `exchanged` have a stage for each two warps, one of either attending warpgroup, that hold the
        same rows. The one that scores a tile tells its references, and then hands over its probabilities. The other has
        read them when it tells those of the next tile. `dealt` are tasks. `scales` are what scores and sums need of the
        scales of a tile's keys.

        Where value products are turned, one warpgroup scores all tiles and hands the probabilities of all rows over, in
        `exchanged`, with what outputs are multiplied by before; at the end of a task, what ends rows, in `ends`."""
        geometry = self.geometry
        scorer_of_rows = (Warps(self.attend, 2 * WARPS, "of a pair, the warp that scores the tile"),)
        each_strip = Copies(self.load, geometry.latent_strips, "each latent strip")
        emptied_by: tuple[Party, ...] = (Warps(self.attend, 2, "the warpgroup whose output it adds to"),)
        if geometry.ctas > 1:
            emptied_by = (*emptied_by, Warps(self.attend, 2, "its counterpart in the other CTA"))
        if geometry.turns:
            emptied_by = (*emptied_by, Warps(self.score))
        told = tuple(Warps(role) for role in self.roles if role != self.deal)
        loaders = len(self.load.warps)
        loader = Warps(self.load, loaders, "the warp that loads the query" if loaders > 1 else "")
        scores = (Warps(self.score if geometry.turns else self.attend),)
        edges = [EdgeSpec("q", (Either(Copies(self.load), loader),), scores, 1, geometry.q_bytes)]
        converters = (self.convert,) if self.ready_names else ()
        through = (self.gather,) if self.landed_names else ()
        lanes = (LaneCopies(self.gather, loaders, "the warp that loads the strip" if loaders > 1 else ""),)
        for strip, (name, size) in enumerate(zip(self.kv_names, geometry.edge_bytes, strict=True)):
            filled_by: tuple[Party, ...] = (Copies(self.load),) if geometry.copied_with(strip) else ()
            if geometry.ctas > 1:
                if geometry.gathers and strip in (0, geometry.latent_strips - 1):  # what is told, and rope pieces
                    filled_by = (Warps(self.load),)
                filled_by = (Warps(self.convert), *filled_by)
            elif geometry.gathers and geometry.converts:
                tells = (Warps(self.load, loaders, "the warp that tells which keys are there"),)
                filled_by = (*lanes, *(tells if strip == 0 else ()))
            elif geometry.gathers:
                filled_by = (Warps(self.clean),)
            elif not geometry.converts:
                filled_by = (Either(Copies(self.load), Warps(self.clean)),)
            edges.append(EdgeSpec(name, filled_by, emptied_by, geometry.stages, size, converters, through=through))
        for name, size in zip(self.ready_names, geometry.ready_bytes, strict=False):
            filled_by = (Warps(self.convert, CONVERTERS, "the warpgroup that converts the strip"),)
            edges.append(EdgeSpec(name, filled_by, NOBODY, geometry.stages, size, read_by=(self.attend,)))
        tile_bytes = sum(geometry.edge_bytes)
        if geometry.gathers and not geometry.converts:
            for name, size in zip(self.landed_names, geometry.edge_bytes, strict=True):
                edges.append(EdgeSpec(name, lanes, NOBODY, geometry.stages, size, read_by=(self.clean,)))
        elif not geometry.converts:
            edges.append(EdgeSpec("landed", (each_strip,), NOBODY, geometry.stages, tile_bytes, read_by=(self.clean,)))
        edges += [
            *self._told(scorer_of_rows),
            EdgeSpec("dealt", (Warps(self.deal),), told, TASK_RING, TASK_WORDS * 4),
        ]
        if geometry.scaled:
            told, size = (Warps(self.clean),), geometry.folded_bytes
            edges.append(EdgeSpec("scales", told, scores, geometry.scale_stages, size))
        return EdgeTable(tuple(edges), DEALT_AT)

    def _told(self, scorer_of_rows: tuple[Warps, ...]) -> tuple[EdgeSpec, ...]:
        """Edges of what is told of a tile's rows. Where value products are turned, one warpgroup scores all tiles, and
        both that attend read the probabilities of all rows in shared memory; `ends` is what ends rows."""
        geometry, size = self.geometry, self.geometry.probabilities_bytes
        if geometry.turns:
            told, by = (Warps(self.score),), (Warps(self.attend),)
            return (
                EdgeSpec("exchanged", told, by, WEIGHT_STAGES, size),
                EdgeSpec("ends", told, by, 2, geometry.tile_q * 4),
            )
        return (
            EdgeSpec("referenced", scorer_of_rows, NOBODY, WARPS, geometry.tile_q * 4 // WARPS, read_by=(self.attend,)),
            EdgeSpec("exchanged", scorer_of_rows, NOBODY, WARPS, size // WARPS, read_by=(self.attend,)),
        )

    @property
    def kv_names(self) -> tuple[str, ...]:
        """Names of the strips' edges."""
        return tuple(f"kv{strip}" for strip in range(self.geometry.latent_strips))

    @property
    def landed_names(self) -> tuple[str, ...]:
        """Names of the edges on which the copies of each strip complete, where keys are gathered."""
        apart = self.geometry.gathers and not self.geometry.converts
        return tuple(f"landed{strip}" for strip in range(self.geometry.latent_strips)) if apart else ()

    @property
    def ready_names(self) -> tuple[str, ...]:
        """Names of the converted strips' edges, where strips are converted in place."""
        in_place = self.geometry.converts and self.geometry.ctas == 1
        return tuple(f"ready{strip}" for strip in range(self.geometry.latent_strips)) if in_place else ()

    def check(self) -> None:
        total = WARPGROUP * (self.load_registers + 2 * self.attend_registers + self.helpers * self.helper_registers)
        assert total <= self.threads * registers_at_launch(self.threads), f"{total} registers: {self}"
        assert self.geometry.accumulator_registers + 16 <= self.attend_registers, self
