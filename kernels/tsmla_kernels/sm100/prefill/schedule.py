"""Who does what in the Blackwell prefill: roles, edges between them, register budgets, named barriers."""

from __future__ import annotations

import dataclasses

from tsmla.identity.arch import Arch
from tsmla.identity.dtype import Dtype
from tsmla.identity.variant import PrefillVariant

from ...limits import WARPGROUP, registers_at_launch
from ...parts.edges import NOBODY, Copies, EdgeSpec, EdgeTable, Role, TensorCore, Warps
from ...parts.precision import Probabilities
from .geometry import PrefillGeometry
from .plan import TilePlan

CORRECT_BARRIER = 1
"""Named barrier of the four correcting warps."""


@dataclasses.dataclass(frozen=True)
class PrefillSchedule:
    """Who does what in the Blackwell prefill: the first warpgroups are the softmax of one query tile each, a thread per
    row; the next one corrects and writes the output, a thread per row of any tile; in the last, one warp issues MMAs
    (in a pair of CTAs, the leader's), one loads."""

    geometry: PrefillGeometry
    dtype: Dtype
    softmax_registers: int
    correct_registers: int
    issue_registers: int
    emulated: int
    """Couples of exponentials, out of every 16, that are computed on the FMA pipes instead of the exponential unit."""
    maximum_on_load: bool
    """Whether tcgen05.ld gives the maximum of what it loads."""

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillSchedule:
        ultra = variant.arch is Arch.SM103A
        emulated = 0
        if variant.arch is Arch.SM100A:
            emulated = 4 if variant.dtype.bits == 8 else 2
        # Found by the audit: with 48 registers the MMA thread of 8-bit tiles without LSE spills 14 words. CUDA 13's
        # compiler, which Rubin needs, spills in others without a mask, too. A pair's kernels spill with 232 registers
        # for the softmax, whatever the others have, and one of them with 200.
        roomy = variant.dtype.bits == 8 and not variant.lse
        roomy = roomy or (variant.arch is Arch.SM107A and not (variant.causal or variant.masked))
        softmax, correct, issue = (184, 80, 64) if roomy else (192, 80, 48)
        geometry = PrefillGeometry.of(variant)
        if geometry.plan.query_tiles == 1:
            softmax, correct, issue = 208, 152, 144
        schedule = cls(geometry, variant.dtype, softmax, correct, issue, emulated, ultra)
        schedule.check()
        return schedule

    @property
    def plan(self) -> TilePlan:
        return self.geometry.plan

    @property
    def correct_warpgroup(self) -> int:
        return self.plan.query_tiles

    @property
    def threads(self) -> int:
        return (self.correct_warpgroup + 2) * WARPGROUP

    @property
    def mma_warp(self) -> int:
        return 4 * (self.correct_warpgroup + 1)

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def probabilities(self) -> Probabilities:
        """How probabilities enter the value product. With 8 bits a row keeps its reference for as long as e4m3 holds
        its probabilities, which is up to 448, or 2^8.8: a rescale waits for the values before, and the next ones wait
        for it."""
        usual = Probabilities.of(self.dtype)
        return dataclasses.replace(usual, slack=2.75) if self.plan.crossed else usual

    @property
    def in_order(self) -> bool:
        """Whether exponentials stay behind the wait for their turn, and in the order of their columns: ptxas has no
        reason to keep them so, and brings forward what is computed on the FMA pipes (kernels/log/blackwell-prefill.md).
        """
        return self.plan.crossed and self.emulated > 0

    @property
    def softmax(self) -> Role:
        return Role("softmax", tuple(range(4 * self.correct_warpgroup)), self.softmax_registers, self.plan.ctas)

    @property
    def correct(self) -> Role:
        warps = tuple(range(4 * self.correct_warpgroup, self.mma_warp))
        return Role("correct", warps, self.correct_registers, self.plan.ctas)

    @property
    def multiply(self) -> Role:
        return Role("multiply", (self.mma_warp,), self.issue_registers)

    @property
    def load(self) -> Role:
        return Role("load", (self.load_warp,), self.issue_registers, self.plan.ctas)

    @property
    def roles(self) -> tuple[Role, ...]:
        return (self.softmax, self.correct, self.multiply, self.load)

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Blackwell prefill. Slots of K and V go round a `ring`; the other edges have a stage for each
        query tile, or for each of its score places. In a pair of CTAs, bytes and arrivals are those of both, but for
        factors: copies, the softmax and the correction of both tell the leader, whose MMAs tell both. Both CTAs take
        part in all KV tiles, so that `correct` never waits for queries that nobody multiplies.

        What NOBODY empties is free because of what comes before: scores of a KV tile are written behind the value
        product of the tile before, whose probabilities lay in the same place; probabilities and factors when these
        scores have been read. Probabilities are there in two steps: three quarters early, together with the output that
        the correction has rescaled, and the rest late.

        Where probabilities are crossed, all are there early. Their place is free when the other query tile has read the
        scores there, which were computed behind the values before; where it has none, when those are in the output.
        Factors have two places in turn: what lets scores be written, and the last probabilities, is behind the values
        for which the correction has read the factor there. `turns` keeps the two query tiles' exponentials apart.

        Where a query tile has two score places, scores are written behind the values of the KV tile before the last,
        whose probabilities lay there, and factors have four places: the correction has then read those of the third KV
        tile before."""
        geometry, plan, ctas, tiles = self.geometry, self.plan, self.plan.ctas, self.geometry.query_tiles
        places = tiles * plan.score_places
        copies, products = (Copies(self.load),), (TensorCore(self.multiply),)
        of_tile = Warps(self.softmax, tiles * ctas, "the query tile's warpgroup")
        of_tiles_together = of_tile if ctas == 1 else Warps(self.softmax)
        scores, output = 4 * ctas * geometry.rows * geometry.tile_kv, 4 * ctas * geometry.rows * geometry.d_v
        all_probabilities = ctas * geometry.rows * geometry.tile_kv * geometry.element_bytes
        late = 0 if plan.crossed else all_probabilities // 4
        early = all_probabilities - late
        multiply, correct, softmax = (self.multiply,), (self.correct,), (self.softmax,)
        if plan.crossed:
            own = EdgeSpec("scores_read", (of_tile,), NOBODY, tiles, scores, read_by=(self.multiply, self.softmax))
            of_warp = Warps(self.softmax, 4 * tiles, "one of the query tile's")
            turns = [EdgeSpec("turns", (of_warp,), NOBODY, 4 * tiles, scores // 4, read_by=softmax)]
        else:
            own = EdgeSpec("probabilities_late", (of_tiles_together,), NOBODY, places, late, read_by=multiply)
            turns = []
        reads_early = multiply + (correct if plan.crossed else () if plan.ahead else softmax)
        edges = (
            EdgeSpec(
                "q", copies, products, tiles, ctas * geometry.q_bytes, read_by=correct if ctas == 1 else (), once=True
            ),
            EdgeSpec("ring", copies, products, geometry.ring_slots, ctas * geometry.slot_bytes),
            EdgeSpec("scores_full", products, NOBODY, places, scores, read_by=softmax),
            EdgeSpec(
                "probabilities_early", (of_tiles_together, Warps(self.correct)), NOBODY, places, early,
                read_by=reads_early,
            ),
            own,
            EdgeSpec("factors_full", (of_tile,), NOBODY, tiles * geometry.factors, 4 * geometry.rows, read_by=correct),
            EdgeSpec("output_full", products, NOBODY, places, output, read_by=correct + softmax * plan.crossed),
            *turns,
        )  # fmt: skip
        return EdgeTable(edges, geometry.visits_offset)

    def check(self) -> None:
        budgets = (self.softmax_registers, self.correct_registers, self.issue_registers)
        assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in budgets), self
        softmax = self.plan.query_tiles * self.softmax_registers
        total = WARPGROUP * (softmax + self.correct_registers + self.issue_registers)
        assert total <= self.threads * registers_at_launch(self.threads), f"{total} registers: {self}"
        assert 0 <= self.emulated <= 16, self
