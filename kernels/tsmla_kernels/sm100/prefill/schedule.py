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

CORRECT_BARRIER = 1
"""Named barrier of the four correcting warps."""


@dataclasses.dataclass(frozen=True)
class PrefillSchedule:
    """Who does what in the Blackwell prefill: warpgroups 0 and 1 are the softmax of one query tile each, a thread per
    row; warpgroup 2 corrects and writes the output, a thread per row of either tile; in warpgroup 3, one warp issues
    MMAs, one loads."""

    geometry: PrefillGeometry
    dtype: Dtype
    softmax_registers: int
    correct_registers: int
    issue_registers: int
    emulated_pairs: int
    """Pairs of exponentials, out of every 16, that are computed on the FMA pipes instead of the exponential unit."""
    maximum_on_load: bool
    """Whether tcgen05.ld gives the maximum of what it loads."""
    crossed: bool
    """Whether probabilities of a query tile lie over the scores of the other one, so that the next scores are computed
    under the softmax. Else they lie over their own scores, and the next ones come behind their value product."""

    @classmethod
    def of(cls, variant: PrefillVariant) -> PrefillSchedule:
        ultra = variant.arch is Arch.SM103A
        emulated = 0
        if variant.arch is Arch.SM100A:
            emulated = 4 if variant.dtype.bits == 8 else 2
        # Found by the audit: with 48 registers the MMA thread of 16-bit tiles without a mask spills its descriptors,
        # and that of 8-bit ones without LSE 14 words; with 184 the softmax of masked 16-bit ones spills. CUDA 13's
        # compiler, which Rubin needs, spills in 8-bit ones without a mask, too.
        wide = variant.dtype.bits == 16 and variant.d_qk == 192
        roomy = (wide or variant.arch is Arch.SM107A) and not variant.causal
        roomy = roomy or (variant.dtype.bits == 8 and not variant.lse)
        softmax, issue = (184, 64) if roomy else (192, 48)
        crossed = variant.dtype.bits == 8
        schedule = cls(PrefillGeometry.of(variant), variant.dtype, softmax, 80, issue, emulated, ultra, crossed)
        schedule.check()
        return schedule

    threads = 4 * WARPGROUP
    correct_warpgroup = 2
    mma_warp = 12
    load_warp = 13

    @property
    def probabilities(self) -> Probabilities:
        """How probabilities enter the value product. With 8 bits a row keeps its reference for as long as e4m3 holds
        its probabilities, which is up to 448, or 2^8.8: a rescale waits for the values before, and the next ones wait
        for it."""
        usual = Probabilities.of(self.dtype)
        return dataclasses.replace(usual, slack=2.75) if self.crossed else usual

    @property
    def in_order(self) -> bool:
        """Whether exponentials stay behind the wait for their turn, and in the order of their columns: ptxas has no
        reason to keep them so, and brings forward what is computed on the FMA pipes (kernels/log/blackwell-prefill.md).
        """
        return self.crossed and self.emulated_pairs > 0

    @property
    def softmax(self) -> Role:
        return Role("softmax", tuple(range(4 * self.correct_warpgroup)), self.softmax_registers)

    @property
    def correct(self) -> Role:
        return Role("correct", tuple(range(4 * self.correct_warpgroup, self.mma_warp)), self.correct_registers)

    @property
    def multiply(self) -> Role:
        return Role("multiply", (self.mma_warp,), self.issue_registers)

    @property
    def load(self) -> Role:
        return Role("load", (self.load_warp,), self.issue_registers)

    @property
    def roles(self) -> tuple[Role, ...]:
        return (self.softmax, self.correct, self.multiply, self.load)

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Blackwell prefill. Slots of K and V go round a `ring`; the other edges have a stage for each
        query tile.

        What NOBODY empties is free because of what comes before: scores of a KV tile are written behind the value
        product of the tile before, whose probabilities lay in the same place; probabilities and factors when these
        scores have been read. Probabilities are there in two steps: three quarters early, together with the output that
        the correction has rescaled, and the rest late.

        Where probabilities are crossed, all are there early. Their place is free when the other query tile has read the
        scores there, which were computed behind the values before; where it has none, when those are in the output.
        Factors have two places in turn: what lets scores be written, and the last probabilities, is behind the values
        for which the correction has read the factor there. `turns` keeps the two query tiles' exponentials apart."""
        geometry, tiles = self.geometry, self.geometry.query_tiles
        copies, products = (Copies(self.load),), (TensorCore(self.multiply),)
        of_tile = Warps(self.softmax, tiles, "the query tile's warpgroup")
        scores, output = 4 * geometry.rows * geometry.tile_kv, 4 * geometry.rows * geometry.d_v
        late = 0 if self.crossed else geometry.rows * geometry.tile_kv * geometry.element_bytes // 4
        early = geometry.rows * geometry.tile_kv * geometry.element_bytes - late
        multiply, correct, softmax = (self.multiply,), (self.correct,), (self.softmax,)
        if self.crossed:
            own = EdgeSpec("scores_read", (of_tile,), NOBODY, tiles, scores, read_by=(self.multiply, self.softmax))
            of_warp = Warps(self.softmax, 4 * tiles, "one of the query tile's")
            turns = [EdgeSpec("turns", (of_warp,), NOBODY, 4 * tiles, scores // 4, read_by=softmax)]
        else:
            own = EdgeSpec("probabilities_late", (of_tile,), NOBODY, tiles, late, read_by=multiply)
            turns = []
        edges = (
            EdgeSpec("q", copies, products, tiles, geometry.q_bytes, read_by=correct, once=True),
            EdgeSpec("ring", copies, products, geometry.ring_slots, geometry.slot_bytes),
            EdgeSpec("scores_full", products, NOBODY, tiles, scores, read_by=softmax),
            EdgeSpec(
                "probabilities_early", (of_tile, Warps(self.correct)), NOBODY, tiles, early,
                read_by=multiply + (correct if self.crossed else softmax),
            ),
            own,
            EdgeSpec("factors_full", (of_tile,), NOBODY, tiles * geometry.factors, 4 * geometry.rows, read_by=correct),
            EdgeSpec("output_full", products, NOBODY, tiles, output, read_by=correct + softmax * self.crossed),
            *turns,
        )  # fmt: skip
        return EdgeTable(edges, geometry.tmem_base_offset)

    def check(self) -> None:
        budgets = (self.softmax_registers, self.correct_registers, self.issue_registers)
        assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in budgets), self
        total = WARPGROUP * (2 * self.softmax_registers + self.correct_registers + self.issue_registers)
        assert total <= self.threads * registers_at_launch(self.threads), f"{total} registers: {self}"
        assert 0 <= self.emulated_pairs <= 16, self
