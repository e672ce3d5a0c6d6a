"""Edges as data: who fills and who empties what roles hand each other, and all that barriers need to know of it.

A schedule has two tables: its roles (`Role`), and the edges between them (`EdgeSpec`, in an `EdgeTable`). These decide
where barriers lie, how many arrivals complete them, how they are initialised, what tests check, and the pictures in
docs/contribute/kernels.md; `pipeline.py` has what roles do with an edge. Plain Python: a table can be read with neither
the compiler nor a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

BARRIER = 8
"""Bytes of an mbarrier."""
NOBODY = ()
"""Parties of an edge that needs no "empty": whoever fills a stage again waits for something that its readers do later.
"""


@dataclasses.dataclass(frozen=True)
class Role:
    """Warps of a CTA that run the function `name`, with this many registers a thread. ctas: how many of the CTAs that
    work together have the role."""

    name: str
    warps: tuple[int, ...]
    registers: int
    ctas: int = 1


@dataclasses.dataclass(frozen=True)
class Warps:
    """Warps of a role that arrive, each when it is done. Where a stage concerns only one of `shares` equal shares of
    them, those arrive; `which` says what share it is."""

    role: Role
    shares: int = 1
    which: str = ""

    def __post_init__(self) -> None:
        assert (self.shares > 1) == bool(self.which), f"say which share of {self.role.name} it is: {self}"
        assert len(self.role.warps) * self.role.ctas % self.shares == 0, self

    @property
    def arrivals(self) -> int:
        return len(self.role.warps) * self.role.ctas // self.shares


@dataclasses.dataclass(frozen=True)
class Copies:
    """Bulk copies that a role issues. Announcing their bytes is one arrival, by one lane; the stage is full when they
    have landed. Where a stage's bytes are announced in several steps, `which` says what each is for."""

    role: Role
    announcements: int = 1
    which: str = ""

    def __post_init__(self) -> None:
        assert self.announcements == 1 or self.which, f"say what is announced in {self.announcements} steps: {self}"

    @property
    def arrivals(self) -> int:
        return self.announcements


@dataclasses.dataclass(frozen=True)
class LaneCopies:
    """Copies of 16 bytes that all lanes of a role's warps start. Each lane arrives when its own have landed. shares,
    which: as `Warps` has them."""

    role: Role
    shares: int = 1
    which: str = ""

    @property
    def arrivals(self) -> int:
        return 32 * Warps(self.role, self.shares, self.which).arrivals


@dataclasses.dataclass(frozen=True)
class TensorCore:
    """tcgen05 MMAs that a role issues: one arrival, when they are complete."""

    role: Role

    @property
    def arrivals(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class Either:
    """One party or the other, depending on the stage; both arrive equally often."""

    one: Warps | Copies
    other: Warps | Copies

    def __post_init__(self) -> None:
        assert self.one.arrivals == self.other.arrivals, self

    @property
    def arrivals(self) -> int:
        return self.one.arrivals


Party = Warps | Copies | LaneCopies | TensorCore | Either


def roles_of(parties: tuple[Party, ...]) -> tuple[Role, ...]:
    """Roles of these parties, each once."""
    found: list[Role] = []
    for party in parties:
        of_one = roles_of((party.one, party.other)) if isinstance(party, Either) else (party.role,)
        found += [role for role in of_one if role not in found]
    return tuple(found)


@dataclasses.dataclass(frozen=True)
class EdgeSpec:
    """One edge: `stages` places of `bytes` bytes, which some parties fill and others empty, in turn.

    A stage is full when all of `filled_by` have arrived (and the announced bytes have landed), empty when all of
    `emptied_by` have. `read_by`: roles that wait until a stage is full and do not say when they have left it. An edge
    that NOBODY empties has no "empty" barriers. Stages of an edge that is filled `once` are never emptied: nobody says
    so or waits for it, though the barriers are initialised. `through`: roles that wait until a stage is empty and then
    fill one of another edge, whose reader fills this one."""

    name: str
    filled_by: tuple[Party, ...]
    emptied_by: tuple[Party, ...]
    stages: int
    bytes: int
    read_by: tuple[Role, ...] = ()
    once: bool = False
    through: tuple[Role, ...] = ()

    def __post_init__(self) -> None:
        assert self.stages > 0 and self.bytes > 0, self
        assert self.filled_by, f"nobody fills {self.name}"
        assert self.readers, f"nobody reads {self.name}"
        assert self.emptied_by or not self.once, f"say who would empty {self.name}"

    @property
    def fills(self) -> int:
        """Arrivals that make a stage full."""
        return sum(party.arrivals for party in self.filled_by)

    @property
    def leaves(self) -> int:
        """Arrivals that make a stage empty; 0 where nobody says so."""
        return sum(party.arrivals for party in self.emptied_by)

    @property
    def barriers(self) -> int:
        """Barriers of the edge: one a stage for "full"; behind them, if anybody empties stages, one a stage for
        "empty"."""
        return self.stages * (2 if self.emptied_by else 1)

    @property
    def writers(self) -> tuple[Role, ...]:
        return roles_of(self.filled_by)

    @property
    def readers(self) -> tuple[Role, ...]:
        """Roles that empty a stage or only read it."""
        emptying = roles_of(self.emptied_by)
        return (*emptying, *(role for role in self.read_by if role not in emptying))

    @property
    def ctas(self) -> int:
        """CTAs that the edge runs between."""
        return max(role.ctas for role in (*self.writers, *self.readers))


@dataclasses.dataclass(frozen=True)
class EdgeTable:
    """A kernel's edges. Their barriers lie one behind the other in the table's order, in the first `room` bytes of
    shared memory (of each CTA, where several work together)."""

    edges: tuple[EdgeSpec, ...]
    room: int

    def __post_init__(self) -> None:
        names = [edge.name for edge in self.edges]
        assert len(set(names)) == len(names), f"two edges of one name: {names}"
        assert self.bytes <= self.room, f"barriers take {self.bytes} bytes and have {self.room}"

    def __iter__(self) -> Iterator[EdgeSpec]:
        return iter(self.edges)

    def __getitem__(self, name: str) -> EdgeSpec:
        return next(edge for edge in self.edges if edge.name == name)

    def __contains__(self, name: object) -> bool:
        return any(edge.name == name for edge in self.edges)

    def first_barrier(self, name: str) -> int:
        """Number of an edge's first barrier."""
        names = [edge.name for edge in self.edges]
        return sum(edge.barriers for edge in self.edges[: names.index(name)])

    @property
    def bytes(self) -> int:
        return BARRIER * sum(edge.barriers for edge in self.edges)
