"""The README's list of holes that were closed names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"


def test_every_hole_names_its_controls():
    table = README.read_text("utf-8").partition("| hole | tests")[2].partition("\n\n")[0]
    rows = [row.split("|")[2] for row in table.splitlines()[2:]]
    assert len(rows) == 12
    for row in rows:
        named = [name.rpartition(".") for name in re.findall(r"`(\w[\w.]*)`", row)]
        assert named
        file = ""
        for file, _, test in ((one[0] or file, *one[1:]) for one in named):
            is_file = (TESTS / f"test_core_{test}.py").exists()
            assert is_file or f"def test_{test}(" in (TESTS / f"test_core_{file}.py").read_text("utf-8"), test
