"""What attention must tell the combine (`parts/partials.py` has the layout), from the plan's integers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tsmla.identity.arch import Deal
from tsmla.identity.plan import RECORD_BYTES, Line, MixedLine, RowTiling, mixed_segments, seen_lengths, segments

WORDS = RECORD_BYTES // 4


def records(
    deal: Deal,
    tiling: RowTiling,
    line: Line,
    rows: int,
    lengths: Sequence[int],
    tiles: Sequence[Sequence[int]],
    parts: int,
) -> list[list[int]]:
    """The words of every record of a call. rows: q_len x heads; the rest as `segments` takes it."""
    slots = defaultdict(list)
    for part in range(parts):
        for segment in segments(deal, tiling, line, lengths, tiles, part):
            if segment.slot >= 0:
                slots[segment.request, segment.row_tile].append(segment.slot)
    units, groups = len(lengths) * tiling.rounds, parts // tiling.group
    written = [[0] * WORDS for _ in range(min(units, groups) * tiling.group)]
    start = 0
    for unit in range(units):
        request, turn = divmod(unit, tiling.rounds)
        number = unit if units <= groups else start // line.chunk
        for column in range(tiling.group):
            row_tile = turn * tiling.group + column
            if found := slots.get((request, row_tile)):
                first_row = row_tile * deal.row_tile
                count = min(rows - first_row, deal.row_tile)
                place = written[number * tiling.group + column]
                assert not any(place), "two units for one record"
                place[:6] = len(found), request * rows + first_row, count, found[0], found[1], tiling.group
        start += line.unit or deal.overhead + lengths[request]
    return written


def mixed_records(
    deal: Deal,
    mixed: MixedLine,
    most_row_tiles: int,
    spans: Sequence[range],
    lengths: Sequence[int],
    tiles: Sequence[Sequence[int]],
    parts: int,
) -> list[list[int]]:
    """The same where requests have rows `spans` of all rows, and at most `most_row_tiles` row tiles."""
    slots = defaultdict(list)
    for part in range(parts):
        for segment in mixed_segments(deal, mixed, lengths, tiles, part):
            if segment.slot >= 0:
                slots[segment.request, segment.row_tile].append((segment.first, segment.slot))
    units, line = sum(mixed.rounds), mixed.line
    written = [[0] * WORDS for _ in range(parts if most_row_tiles > 1 else min(units, parts))]
    start = unit = 0
    seen = seen_lengths([len(own) for own in tiles], lengths)
    for request, rounds in enumerate(mixed.rounds):
        for turn in range(rounds):
            number = unit if most_row_tiles == 1 and units <= parts else start // line.chunk
            for column in range(mixed.group):
                row_tile = turn * mixed.group + column
                if found := [slot for _, slot in sorted(slots.get((request, row_tile), []))]:
                    first_row = spans[request].start + row_tile * deal.row_tile
                    place = written[number * mixed.group + column]
                    assert not any(place), "two units for one record"
                    count = min(spans[request].stop - first_row, deal.row_tile)
                    place[:6] = len(found), first_row, count, found[0], found[1], mixed.group
            start += line.unit or deal.overhead + seen[request]
            unit += 1
    return written
