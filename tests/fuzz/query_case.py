"""Calls of mla_quantize_q: what determines one, and how they are drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import Dtype, QuantizeQVariant

from .cache_case import VALUES
from .drawing import schedules
from .guarded import LAYOUTS
from .manner import Manner, manners
from .places import Schedule
from .plain import Plain


@dataclasses.dataclass(frozen=True, repr=False)
class QueryCase(Plain):
    """A query that is quantised, tokens of all requests one behind the other where `packed`. layouts: of each tensor of
    the query, whole or in two pieces, in LAYOUTS. outs: of the three results, in LAYOUTS, or "new"."""

    batch: int = 1
    q_len: int = 1
    heads: int = 1
    packed: bool = False
    layouts: tuple[str, ...] = ("contiguous",)
    outs: tuple[str, str, str] = ("new", "new", "new")
    rounded: bool = True
    values: str = "any bits"
    pdl: bool = False
    seed: int = 0
    schedule: Schedule = Schedule()
    manner: Manner = Manner()

    @property
    def outer(self) -> tuple[int, ...]:
        """Sizes of all but the last dimension."""
        return (self.batch * self.q_len, self.heads) if self.packed else (self.batch, self.q_len, self.heads)

    def variant(self, arch: str) -> QuantizeQVariant:
        """The kernel that is under test on this architecture."""
        return QuantizeQVariant(Arch(arch), Dtype.BF16, ROWS["snapmla"])


@st.composite
def query_cases(draw: Any, variant: QuantizeQVariant, hostile: bool = True) -> QueryCase:
    """Any call that the contract allows; hostile or not, it reads no lengths."""
    layout, out = st.sampled_from(LAYOUTS), st.sampled_from(("new", *LAYOUTS))
    return QueryCase(
        draw(st.integers(0, 4)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from((0, 1, 2, 5, 8))),
        draw(st.booleans()),
        tuple(draw(st.lists(layout, min_size=1, max_size=2))),
        (draw(out), draw(out), draw(out)),
        draw(st.booleans()),
        draw(st.sampled_from(VALUES)),
        draw(st.booleans()),
        draw(st.integers(0, 2**31 - 1)),
        draw(schedules()),
        draw(manners()),
    )
