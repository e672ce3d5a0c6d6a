"""Calls of tsmla_key_mask: what determines one, and how they are drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.variant import KeyMaskVariant

from .drawing import INT32, schedules
from .manner import Manner, manners
from .places import Schedule
from .plain import Plain


@dataclasses.dataclass(frozen=True, repr=False)
class MaskCase(Plain):
    """Lists that become a mask. outside: of 16 random indices, so many name no key. distinct: keys are among so many
    first ones; among all with 0. strays: (token, column, value) of indices, any int32. lengths: topk_length of each
    token, int64 ones where `wide_lengths`. list_gap, word_gap: elements between rows. out: whether it is given."""

    tokens: int = 1
    top_k: int = 1
    keys: int = 1
    outside: int = 0
    distinct: int = 0
    strays: tuple[tuple[int, int, int], ...] = ()
    lengths: tuple[int, ...] | None = None
    wide_lengths: bool = False
    list_gap: int = 0
    word_gap: int = 0
    offset: int = 0
    out: bool = True
    pdl: bool = False
    seed: int = 0
    schedule: Schedule = Schedule()
    manner: Manner = Manner()

    @property
    def words(self) -> int:
        return -(-self.keys // 32)

    def counted(self, token: int) -> int:
        """How many of the token's indices count."""
        return self.top_k if self.lengths is None else min(max(self.lengths[token], 0), self.top_k)

    def variant(self, arch: str) -> KeyMaskVariant:
        """The kernel that is under test on this architecture."""
        return KeyMaskVariant(Arch(arch))


@st.composite
def mask_cases(draw: Any, variant: KeyMaskVariant, hostile: bool = True) -> MaskCase:
    """Any call that the contract allows. hostile: lengths may be any integers."""
    tokens = draw(st.sampled_from((0, 1, 2, 5)))
    top_k = draw(st.one_of(st.sampled_from((0, 1, 255, 256, 257, 2048, 2049)), st.integers(0, 700)))
    keys = draw(st.one_of(st.sampled_from((0, 1, 31, 32, 33, 8192, 131072, 131073, 270000)), st.integers(1, 9000)))
    lengths, wide = None, draw(st.booleans())
    if draw(st.booleans()):
        ends = (-(2**63), 2**63 - 1) if wide else INT32
        length = st.one_of(st.sampled_from((0, 1, top_k, top_k + 1)), st.integers(0, top_k))
        length = st.one_of(length, st.sampled_from((*ends, -1)), st.integers(*ends)) if hostile else length
        lengths = tuple(draw(st.lists(length, min_size=tokens, max_size=tokens)))
    index = st.one_of(st.sampled_from((*INT32, -1, keys, keys + 1, max(keys - 1, 0))), st.integers(*INT32))
    stray = st.tuples(st.integers(0, max(tokens - 1, 0)), st.integers(0, max(top_k - 1, 0)), index)
    return MaskCase(
        tokens,
        top_k,
        keys,
        outside=draw(st.sampled_from((0, 1, 5, 15, 16))),
        distinct=draw(st.sampled_from((0, 0, 1, 40))),
        strays=tuple(draw(st.lists(stray, max_size=4))) if tokens * top_k else (),
        lengths=lengths,
        wide_lengths=wide,
        list_gap=draw(st.sampled_from((0, 0, 1, 3))),
        word_gap=draw(st.sampled_from((0, 0, 1, 3))),
        offset=draw(st.sampled_from((0, 0, 1, 3))),
        out=draw(st.booleans()),
        pdl=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31 - 1)),
        schedule=draw(schedules()),
        manner=draw(manners()),
    )
