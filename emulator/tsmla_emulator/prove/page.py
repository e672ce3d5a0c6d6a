"""Lines of pages that runs write: when and how they were made, and tables."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import Sequence

from ..provenance import commit


def made() -> str:
    """Return when and from which commit, as a page says it."""
    return f"Date {datetime.date.today()}, commit {commit()}."


def command_block(*commands: Sequence[str]) -> list[str]:
    """Return a block of commands, each given as its words, in lines that a shell takes as they stand."""
    lines: list[str] = []
    for first, *words in commands:
        lines.append(first)
        for word in words:
            if len(lines[-1]) + 1 + len(word) <= 116:
                lines[-1] += f" {word}"
            else:
                lines[-1] += " \\"
                lines.append(word)
    return ["```", *lines, "```"]


def wrapped(line: str) -> str:
    """Return a line of a page in lines of at most 120 characters; one of a table as it is."""
    if line.startswith("|"):
        return line
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def table_row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
