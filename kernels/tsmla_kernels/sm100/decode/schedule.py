"""Who does what in the Blackwell decode: roles, edges between them, registers, named barriers."""

from __future__ import annotations

import dataclasses

from ...limits import REGISTERS_PER_SM, WARPGROUP
from ...parts.edges import NOBODY, Copies, EdgeSpec, EdgeTable, Either, Party, Role, TensorCore, Warps
from .geometry import CONVERT_WARPS, CTA_ROWS, S_SLOTS, TENSOR_ADDRESS_OFFSET, DecodeGeometry

ATTEND_REGISTERS, ISSUE_REGISTERS, CONVERT_REGISTERS = 168, 72, 136
"""Registers of a thread of each warpgroup where rows are converted: what they use without spills, and all there are."""
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
    softmax then need more registers than all may have, and the second warpgroup gives some."""

    geometry: DecodeGeometry
    softmax_warps: int = 4
    mma_warp: int = 4
    key_warp: int = 5
    value_warp: int = 6
    scale_warp: int = 7
    query_warp: int = 5
    first_convert_warp: int = 8

    def __post_init__(self) -> None:
        a_role_each = (self.attend, self.multiply, self.convert_keys, self.convert_keys)[: self.threads // WARPGROUP]
        assert WARPGROUP * sum(role.registers for role in a_role_each) <= REGISTERS_PER_SM, self
        warps = [warp for role in self.roles for warp in role.warps]
        assert len({*warps}) == len(warps), f"two roles have the same warp: {self}"
        assert max(warps) < self.threads // 32, self

    @property
    def threads(self) -> int:
        return 4 * WARPGROUP if self.geometry.converts else 2 * WARPGROUP

    @property
    def registers(self) -> int:
        """Registers of a thread that issues MMAs or copies."""
        return ISSUE_REGISTERS if self.geometry.converts else 255

    @property
    def attend(self) -> Role:
        registers = ATTEND_REGISTERS if self.geometry.converts else self.registers
        return Role("attend", tuple(range(self.softmax_warps)), registers, self.geometry.ctas)

    @property
    def multiply(self) -> Role:
        """The role that issues MMAs; in a pair, the leader's."""
        return Role("multiply", (self.mma_warp,), self.registers)

    @property
    def load_keys(self) -> Role:
        return Role("load_keys", (self.key_warp,), self.registers, self.geometry.ctas)

    @property
    def load_values(self) -> Role:
        return Role("load_values", (self.value_warp,), self.registers, self.geometry.ctas)

    @property
    def load_scales(self) -> Role:
        return Role("load_scales", (self.scale_warp,), self.registers, self.geometry.ctas)

    @property
    def load_queries(self) -> Role:
        return Role("load_queries", (self.query_warp,), self.registers, self.geometry.ctas)

    @property
    def convert_keys(self) -> Role:
        """The role that converts keys and, in a pair, values."""
        warps = tuple(self.first_convert_warp + warp for warp in range(CONVERT_WARPS))
        return Role("convert_keys", warps, CONVERT_REGISTERS, self.geometry.ctas)

    @property
    def roles(self) -> tuple[Role, ...]:
        if self.geometry.converts:
            return (self.attend, self.multiply, self.load_queries, self.convert_keys)
        values = (self.load_values,) if self.geometry.is_pair else ()
        scales = (self.load_scales,) if self.geometry.scale_slots else ()
        return (self.attend, self.multiply, self.load_keys, *values, *scales)

    @property
    def edges(self) -> EdgeTable:
        """Edges of the Blackwell decode. Copies of both CTAs of a pair complete on the leader's barriers, and the
        leader announces their bytes. Values are there when the other CTA's lanes, too, have written what they copy
        themselves. Solo, keys are also the values. Scales of keys stay within a CTA: each brings those of all keys.
        Converted rows are there when all converting warps of both CTAs have written theirs. Half of an output's columns
        are complete before the last tile's probabilities are empty; the next output is, when `attend` has left this
        one."""
        geometry = self.geometry
        ctas, products = geometry.ctas, (TensorCore(self.multiply),)
        loader = self.load_queries if geometry.converts else self.load_keys
        keys: tuple[Party, ...] = (Warps(self.convert_keys) if geometry.converts else Copies(self.load_keys),)
        attend, tile_scores = (Warps(self.attend),), ctas * 4 * self.geometry.s_columns * 128
        queries: tuple[Party, ...]
        if geometry.is_pair:
            own, other = (Warps(loader, ctas, which) for which in ("the leader's", "the other CTA's"))
            queries = (Either(Copies(loader), own), other)
        else:
            queries = (Either(Copies(loader), Warps(loader)),)
        edges = [
            EdgeSpec("q", queries, products, 1, ctas * geometry.q_bytes),
            EdgeSpec("k", keys, products, geometry.k_slots, ctas * geometry.k_bytes),
        ]
        if geometry.is_pair:
            values = keys
            if not geometry.converts:
                values = (Copies(self.load_values), Warps(self.load_values, ctas, "the other CTA's"))
            edges.append(EdgeSpec("v", values, products, geometry.v_slots, ctas * geometry.v_bytes))
        edges += [
            EdgeSpec("s", products, attend, S_SLOTS, tile_scores),
            EdgeSpec("p", attend, products, geometry.p_slots, ctas * geometry.p_bytes),
            EdgeSpec("half", products, NOBODY, 1, ctas * CTA_ROWS * geometry.row.value_columns * 2, (self.attend,)),
        ]
        if geometry.scale_slots:
            whose = "this CTA's" if geometry.is_pair else ""
            bring, take = (Warps(self.load_scales, ctas, whose),), (Warps(self.attend, ctas, whose),)
            edges.append(EdgeSpec("scales", bring, take, geometry.scale_slots, geometry.scale_bytes))
        return EdgeTable(tuple(edges), TENSOR_ADDRESS_OFFSET)
