"""Who does what in the Blackwell decode: roles, edges between them, registers, named barriers."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from ...limits import WARPGROUP, registers_at_launch
from ...parts.edges import NOBODY, Copies, EdgeSpec, EdgeTable, Either, LaneCopies, Party, Role, TensorCore, Warps
from .geometry import CONVERT_WARPS, CTA_ROWS, TENSOR_ADDRESS_OFFSET, THERE_SLOTS, DecodeGeometry


class Registers(NamedTuple):
    """Registers of a thread: one that attends, one that issues MMAs or copies, and one that brings keys by itself."""

    attend: int
    issue: int
    bring: int


ALIKE, CONVERTING, GATHERING = Registers(255, 255, 255), Registers(168, 72, 136), Registers(216, 136, 152)
GATHERING_SCALED, GATHERING_QUERY = Registers(240, 136, 128), Registers(208, 136, 160)
"""Registers where bulk copies bring keys, where warps convert rows, where they gather them, and where gathered rows
have a scale each, or the warps that gather also bring queries: what roles use without spills, and all there are."""
GATHER_WARPS = WARPGROUP // 32
ROW_BARRIER = 1
"""First of two named barriers: rows 0-31 and rows 32-63 of the CTA."""
START_BARRIER = 3
"""Named barrier behind which a CTA's barriers and tensor memory may be used."""


@dataclasses.dataclass(frozen=True)
class DecodeSchedule:
    """Who does what in the Blackwell decode: warps of one CTA. Softmax warps come first: warp w reaches tensor-memory
    lanes 32 (w % 4) .. + 31 only.

    One softmax warpgroup: the exponentials take as long on two, and what warps do beside them is done once per warp.
    All roles have the same registers, so that none are moved between them.

    Where rows are converted, two more warpgroups do it, in place of the warps that load keys and values. They and
    softmax then need more registers than all may have, and the second warpgroup gives some. Where rows are gathered,
    one more warpgroup does it; in a pair, half of it keys and half values. Where tensor memory holds a part of the
    query, that warpgroup brings it, too: its warps reach all lanes."""

    geometry: DecodeGeometry
    softmax_warps: int = 4
    mma_warp: int = 4
    key_warp: int = 5
    value_warp: int = 6
    scale_warp: int = 7
    query_warp: int = 5
    tell_warp: int = 6
    first_bring_warp: int = 8

    def __post_init__(self) -> None:
        attend, issue, bring = self.registers
        more = self.threads // WARPGROUP - 2
        total = WARPGROUP * (attend + issue + more * bring)
        assert total <= self.threads * registers_at_launch(self.threads), f"{total} registers: {self}"
        warps = [warp for role in self.roles for warp in role.warps]
        assert len({*warps}) == len(warps), f"two roles have the same warp: {self}"
        assert max(warps) < self.threads // 32, self

    @property
    def threads(self) -> int:
        return (4 if self.geometry.converts else 3 if self.geometry.gathers else 2) * WARPGROUP

    @property
    def registers(self) -> Registers:
        if self.geometry.converts:
            return CONVERTING
        if self.geometry.gathers:
            if self.geometry.q_held:
                return GATHERING_QUERY
            return GATHERING_SCALED if self.geometry.scale_slots else GATHERING
        return ALIKE

    @property
    def attend(self) -> Role:
        return Role("attend", tuple(range(self.softmax_warps)), self.registers.attend, self.geometry.ctas)

    def _issuer(self, name: str, warp: int) -> Role:
        """A role of one warp that issues copies, or tells others."""
        return Role(name, (warp,), self.registers.issue, self.geometry.ctas)

    @property
    def multiply(self) -> Role:
        """The role that issues MMAs; in a pair, the leader's."""
        return Role("multiply", (self.mma_warp,), self.registers.issue)

    @property
    def load_keys(self) -> Role:
        return self._issuer("load_keys", self.key_warp)

    @property
    def load_values(self) -> Role:
        return self._issuer("load_values", self.value_warp)

    @property
    def load_scales(self) -> Role:
        return self._issuer("load_scales", self.scale_warp)

    @property
    def load_queries(self) -> Role:
        return self._issuer("load_queries", self.query_warp)

    @property
    def tell_rows(self) -> Role:
        return self._issuer("tell_rows", self.tell_warp)

    @property
    def convert_keys(self) -> Role:
        """The role that converts keys and, in a pair, values."""
        return self._bringer("convert_keys", 0, CONVERT_WARPS)

    @property
    def gather_keys(self) -> Role:
        return self._bringer("gather_keys", 0, GATHER_WARPS // self.geometry.ctas)

    @property
    def gather_values(self) -> Role:
        """The other half of the warps that gather, in a pair."""
        return self._bringer("gather_values", GATHER_WARPS // 2, GATHER_WARPS // 2)

    def _bringer(self, name: str, first: int, warps: int) -> Role:
        """A role of warps that bring keys by themselves."""
        own = range(self.first_bring_warp + first, self.first_bring_warp + first + warps)
        return Role(name, tuple(own), self.registers.bring, self.geometry.ctas)

    @property
    def roles(self) -> tuple[Role, ...]:
        if self.geometry.converts:
            tells = (self.tell_rows,) if self.geometry.gathers else ()
            return (self.attend, self.multiply, self.load_queries, *tells, self.convert_keys)
        scales = (self.load_scales,) if self.geometry.scale_slots else ()
        if self.geometry.gathers:
            values = (self.gather_values,) if self.geometry.is_pair else ()
            return (self.attend, self.multiply, self.load_queries, self.tell_rows, *scales, self.gather_keys, *values)
        values = (self.load_values,) if self.geometry.is_pair else ()
        return (self.attend, self.multiply, self.load_keys, *values, *scales)

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Blackwell decode. Copies of both CTAs of a pair complete on the leader's barriers, and the
        leader announces their bytes. Values are there when the other CTA's lanes, too, have written what they copy
        themselves. Solo, keys are also the values. Scales of keys stay within a CTA: each brings those of all keys.
        Converted rows are there when all converting warps of both CTAs have written theirs. Gathered rows land on edges
        of their own, and are there when `tell_rows` of both CTAs has made them visible to products; it also tells,
        within its CTA, which keys are `there`. Half of an output's columns are complete before the last tile's
        probabilities are empty; the next output is, when `attend` has left this one."""
        geometry = self.geometry
        loads = not (geometry.converts or geometry.gathers)
        ctas, products = geometry.ctas, (TensorCore(self.multiply),)
        loader = self.load_keys if loads else self.load_queries
        brings = Warps(self.convert_keys if geometry.converts else self.tell_rows)
        keys: tuple[Party, ...] = (Copies(self.load_keys) if loads else brings,)
        attend, tile_scores = (Warps(self.attend),), ctas * 4 * self.geometry.s_columns * 128
        queries: tuple[Party, ...]
        if geometry.is_pair:
            own, other = (Warps(loader, ctas, which) for which in ("the leader's", "the other CTA's"))
            queries = (Either(Copies(loader), own), other)
        else:
            queries = (Either(Copies(loader), Warps(loader)), *((Warps(self.gather_keys),) if geometry.q_held else ()))
        lands = geometry.gathers and not geometry.converts
        gatherers = (self.gather_keys, self.gather_values) if lands else ()
        key_bytes = geometry.k_wide_bytes if geometry.rope_apart else geometry.k_bytes
        edges = [
            EdgeSpec("q", queries, products, 1, ctas * geometry.q_bytes),
            EdgeSpec("k", keys, products, geometry.k_slots, ctas * key_bytes, through=gatherers[:1]),
        ]
        if geometry.rope_apart:
            edges.append(EdgeSpec("rope", keys, products, 1, geometry.k_tail_bytes, through=gatherers[:1]))
        if geometry.is_pair:
            values = keys
            if loads:
                values = (Copies(self.load_values), Warps(self.load_values, ctas, "the other CTA's"))
            size = ctas * geometry.v_bytes
            edges.append(EdgeSpec("v", values, products, geometry.v_slots, size, through=gatherers[1:]))
        edges += [
            EdgeSpec("s", products, attend, geometry.s_slots, tile_scores),
            EdgeSpec("p", attend, products, geometry.p_slots, ctas * geometry.p_bytes),
            EdgeSpec("half", products, NOBODY, 1, ctas * CTA_ROWS * geometry.row.value_columns * 2, (self.attend,)),
        ]
        whose = "this CTA's" if geometry.is_pair else ""
        if lands:
            k_slots, v_slots, tells = geometry.k_slots, geometry.v_slots, (self.tell_rows,)
            lanes = LaneCopies(self.gather_keys, ctas, whose)
            edges.append(EdgeSpec("landed_keys", (lanes,), NOBODY, k_slots, key_bytes, tells))
            if geometry.rope_apart:
                edges.append(EdgeSpec("landed_rope", (lanes,), NOBODY, 1, geometry.k_tail_bytes, tells))
            if geometry.is_pair:
                lanes = LaneCopies(self.gather_values, ctas, whose)
                edges.append(EdgeSpec("landed_values", (lanes,), NOBODY, v_slots, geometry.v_bytes, tells))
        if geometry.gathers:
            bring, take = (Warps(self.tell_rows, ctas, whose),), (Warps(self.attend, ctas, whose),)
            edges.append(EdgeSpec("there", bring, take, THERE_SLOTS, geometry.there_bytes))
        if geometry.scale_slots:
            bring, take = (Warps(self.load_scales, ctas, whose),), (Warps(self.attend, ctas, whose),)
            edges.append(EdgeSpec("scales", bring, take, geometry.scale_slots, geometry.scale_bytes))
        return EdgeTable(tuple(edges), TENSOR_ADDRESS_OFFSET)
