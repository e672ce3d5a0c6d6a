"""What attention must tell the combine (`parts/partials.py` has the layout), from the plan's integers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tsmla.plan import RECORD_BYTES, Deal, Line, RowTiling, segments

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
