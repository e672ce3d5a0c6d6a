"""docs/reference/cache-formats.md: its bytes are those of the rows, its errors those that a CPU computes now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tsmla.identity.row_format import ROWS
from tsmla.identity.support import CACHE_DTYPES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "cache-formats.md").read_text("utf-8")


def test_every_format_has_its_bytes():
    widths = dict(re.findall(r"^\| (`[^|]+) \| ([\d +]+) \|", PAGE, re.MULTILINE))
    told = {name: eval(bytes) for names, bytes in widths.items() for name in re.findall(r"`(\w+)`", names)}
    apart = {name: 4 * row.scales_per_row if row.apart else 0 for name, row in ROWS.items()}
    assert told == {name: row.bytes + apart[name] for name, row in ROWS.items()}
    assert set(ROWS) == set(CACHE_DTYPES)


def test_errors_are_what_they_are():
    """Computed anew; other CPUs may round a little otherwise."""
    from docs.cache_formats import FORMATS, errors

    table = PAGE[PAGE.index("## Errors\n") : PAGE.index("## Errors of the kernels")]
    found = {False: errors(False), True: errors(True)}
    for name in FORMATS:
        (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", table, re.MULTILINE)
        told = [float(cell) for cell in row.split("|")]
        computed = [*found[False][name], *found[True][name]]
        assert told == pytest.approx(computed, rel=0.1), name
