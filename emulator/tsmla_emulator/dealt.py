"""What a decode deals to its workers, in Python's integers: the kernels' own source, run as a warp of one lane.

Python executes the files of `tsmla_kernels` in `SOURCES` with a stand-in for the compiler's language: Int32 is
int, a @cute.jit function is the function, and lanes that exchange numbers have what the only one has. So nothing is
compiled, and a call's deal takes milliseconds. What a warp of 32 lanes finds is for tests of compiled kernels."""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import tsmla_kernels
from tsmla.identity.arch import Deal
from tsmla.identity.plan import RECORD_BYTES

SOURCES = (
    "parts.division", "parts.warp", "parts.seqlen", "parts.keys.visible", "decode.line", "decode.segments",
    "decode.partials",
)  # fmt: skip
"""Modules of `tsmla_kernels`, each before those that import it."""

_UNWRITTEN = -1
"""Word of a record that no worker has written."""


class Sight(NamedTuple):
    """What decides which keys a query token sees, by its names in the table of a decode call."""

    causal: int = 1
    window_left: int = -1
    cp_world: int = 1
    cp_rank: int = 0
    cp_interleave: int = 1


CAUSAL = Sight()
"""The sight of a call that has all keys of its requests, and no window."""


class Dealt(NamedTuple):
    """A call's cut line (`line.Line`), each worker's segments (`segments.Segment`) in the order in which it
    takes them, and the int32 words of each record in the workspace."""

    line: Any
    segments: list[list[Any]]
    records: list[list[int]]


class _Tensor(list[Any]):
    """A tensor, as far as the deal asks."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


def deal_out(
    deal: Deal,
    seq_lens: Sequence[int],
    q_lens: int | Sequence[int],
    heads: int,
    workers: int,
    slots: int,
    sight: Sight = CAUSAL,
    *,
    causal_seqs: Sequence[int] | None = None,
    cum_seq_lens_q: Sequence[int] = (),
    tokens: int = 0,
) -> Dealt:
    """Deal a call whose requests have `q_lens` query tokens; or at most so many out of a pack of `tokens`, which
    `cum_seq_lens_q` divides."""
    if not isinstance(q_lens, int):
        cum_seq_lens_q, tokens = [*itertools.accumulate(q_lens, initial=0)], sum(q_lens)
        q_lens = max(1, *q_lens)
    parts = _parts()
    dealing, partials = parts.segments, parts.partials
    given = SimpleNamespace(
        seq_lens=_Tensor(seq_lens),
        causal_seqs=_Tensor(causal_seqs or seq_lens),
        visible=_Tensor(),
        cum_seq_lens_q=_Tensor(cum_seq_lens_q),
        q_len=q_lens,
        **sight._asdict(),
    )
    view = parts.visible.visibility(given, tokens or len(seq_lens) * q_lens, parts.visible.LARGEST)
    terms = parts.line.terms_of(deal, view, heads, workers, slots)
    line = parts.line.cut_line(deal, view, terms)
    number = workers if terms.mixes else min(terms.units, terms.groups) * terms.group.value
    records = _Tensor([_UNWRITTEN] * (RECORD_BYTES // 4) for _ in range(number))
    segments = []

    def act(work: Any, unit: Any, segment: Any, own: list[Any]) -> list[Any]:
        partials.record_unit(deal, work, records, unit, segment)
        if segment.valid:
            own.append(segment)
        return own

    for worker in range(workers):
        work = parts.line.work_of(line, worker)
        partials.begin_records(work, records)
        first = dealing.first_unit(deal, work)
        work, begun = dealing.begin_in_step(deal, work)
        behind, _ = dealing.stretch_behind(deal, work, begun)
        own: list[Any] = []
        for stretch, unit in [(work, begun), (behind, first)][: 1 if behind is work else 2]:
            dealing.for_each_unit(deal, stretch, unit, act, own)
        segments.append(own)
    return Dealt(line, segments, list(records))


@functools.cache
def _parts() -> SimpleNamespace:
    """Return the namespaces of the executed files, by their names."""
    language, loaded = _language(), SimpleNamespace()

    def importer(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level:
            return getattr(loaded, name.rpartition(".")[2], SimpleNamespace(aligned=None, PartialRows=None))
        return language if name.split(".")[0] == "cutlass" else __import__(name, globals, locals, fromlist, level)

    here = Path(tsmla_kernels.__file__).parent
    for name in SOURCES:
        names: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": importer}, "__name__": name}
        file = here / f"{name.replace('.', '/')}.py"
        exec(compile(file.read_text("utf-8"), str(file), "exec"), names)
        if name == "decode.line":
            # A lane looks at as many requests as ever, and is the whole warp; it keeps all numbers of its work.
            names["WARP_REQUESTS"] = names["LANE_REQUESTS"]
            names["LaneWork"] = _LaneWork
            names["Work"].own = property(lambda work: work)
        if name == "decode.partials":
            names["_write"] = _write
        setattr(loaded, name.rpartition(".")[2], SimpleNamespace(**names))
    return loaded


def _write(records: list[list[int]], number: int, record: Any) -> None:
    records[number] = [*record] + [0] * (RECORD_BYTES // 4 - len(record))


class _LaneWork:
    """Makes a `Work` of what a `LaneWork` is made of."""

    def __new__(cls, view: Any, terms: Any, own: Any) -> Any:
        return own


def _language() -> SimpleNamespace:
    """Return what the files use of the package `cutlass`."""

    def constant(value: Any) -> Any:
        return value

    def unsigned(bits: int) -> Any:
        return lambda value: int(value) & (1 << bits) - 1

    arch = SimpleNamespace(
        lane_idx=lambda: 0,
        shuffle_sync=lambda value, lane: value,
        shuffle_sync_up=lambda value, delta, mask_and_clamp: value,
        vote_any_sync=bool,
        vote_ballot_sync=int,
        warp_redux_sync=lambda value, operation: value,
        popc=int.bit_count,
    )
    return SimpleNamespace(
        cute=SimpleNamespace(jit=constant, arch=arch),
        const_expr=constant,
        range_constexpr=range,
        min=min,
        max=max,
        Boolean=bool,
        Int32=int,
        Int64=int,
        Uint32=unsigned(32),
        Uint64=unsigned(64),
        Float32=float,
    )
