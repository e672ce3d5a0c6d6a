"""What must hold of a decode's deal, whoever made it: each key of each row once, each partial result where the combine
finds it."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tsmla.identity.arch import Deal
from tsmla.identity.plan import RECORD_BYTES
from tsmla_emulator.dealt import Dealt, deal_out

WORDS = RECORD_BYTES // 4


def seen_tiles(deal: Deal, seq_len: int, q_len: int, heads: int) -> list[range]:
    """The KV tiles that some row of each row tile of a request sees, where each query token sees the keys before it."""
    last_rows = [min(first + deal.row_tile, q_len * heads) - 1 for first in range(0, q_len * heads, deal.row_tile)]
    ends = [max(seq_len - (q_len - 1 - row // heads), 0) for row in last_rows]
    return [range(-(-end // deal.tile_kv)) for end in ends]


def check_segments(deal: Deal, segments: list[list[Any]], seen: list[list[range]], spans: list[range], heads: int):
    """Assert that segments of all workers cover what row tiles see, `seen`, once, and name their rows: those of
    requests with query tokens `spans`."""
    found = defaultdict(list)
    for segment in itertools.chain(*segments):
        found[segment.request, segment.row_tile].append(segment)
    assert found.keys() == {(b, r) for b, own in enumerate(seen) for r in range(len(own))}
    for (request, row_tile), own in found.items():
        span, tiles = spans[request], sorted((s.first_tile, s.tiles) for s in own)
        expected = seen[request][row_tile]
        assert all(count for _, count in tiles) or (len(tiles) == 1 and not expected), "an empty segment"
        covered = [tile for first, count in tiles for tile in range(first, first + count)]
        assert covered == list(expected), (request, row_tile)
        first_row = span.start * heads + row_tile * deal.row_tile
        rows = min(deal.row_tile, span.stop * heads - first_row)
        assert {(s.first_row, s.rows, s.end_token) for s in own} == {(first_row, rows, span.stop)}


def check_slots(segments: list[list[Any]], slots: int, records: Sequence[Sequence[int]]):
    """Assert that who has all tiles of a row tile writes the result, that others have slots of their own, and that a
    row tile's slots are in one of the `records`, in the order of its keys."""
    by_row = defaultdict(list)
    for segment in itertools.chain(*segments):
        by_row[segment.first_row].append(segment)
    expected = {}
    for row, own in by_row.items():
        own.sort(key=lambda s: s.first_tile)
        assert (own[0].slot < 0) == (len(own) == 1), "a result is written by who has all of it, and by nobody else"
        if len(own) > 1:
            expected[row, own[0].rows] = [s.slot for s in own]
    used = list(itertools.chain(*expected.values()))
    assert len(set(used)) == len(used) and all(0 <= slot < slots for slot in used)
    told = [words for words in records if words[0]]
    places = {
        (row, rows): [head, *(tail + i * step for i in range(count - 1))]
        for count, row, rows, head, tail, step, *_ in told
    }
    assert places == expected and len(told) == len(expected)


def check(deal: Deal, seq_lens: list[int], q_lens: int | list[int], heads: int, workers: int, slots: int) -> Dealt:
    """Deal a causal call and assert all that must hold of it."""
    dealt = deal_out(deal, seq_lens, q_lens, heads, workers, slots)
    each = [q_lens] * len(seq_lens) if isinstance(q_lens, int) else q_lens
    spans = [range(end - q_len, end) for q_len, end in zip(each, itertools.accumulate(each), strict=True)]
    seen = [seen_tiles(deal, n, q_len, heads) for n, q_len in zip(seq_lens, each, strict=True)]
    check_segments(deal, dealt.segments, seen, spans, heads)
    check_slots(dealt.segments, slots, dealt.records)
    return dealt


def work(deal: Deal, dealt: Dealt) -> list[int]:
    """KV tiles of each worker, fixed costs included."""
    return [sum(s.tiles + deal.overhead for s in own) for own in dealt.segments]
