"""Blocks of commands of pages that runs write: a shell takes them as they stand, and shipped pages have them so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tsmla_emulator.prove.page import command_block

DOCS = Path(__file__).parents[1] / "docs"
TOGETHER = re.compile(r"python -m \S+ --keep DIRECTORY|--count \d+ --seed \d+|--(?:table|reasons) \S+|\S+")
"""What a line of a command does not end in between."""


def test_commands_are_read_as_they_were_given():
    commands = [["run", *(f"--kernel={'k' * 30}{number}" for number in range(12)), "'two words'"], ["run", "again"]]
    first, *lines, last = command_block(*commands)
    assert first == last == "```" and len(lines) > 4 and max(map(len, lines)) <= 118
    read = [shlex.split(line) for line in "\n".join(lines).replace("\\\n", "").splitlines()]
    assert read == [[*commands[0][:-1], "two words"], commands[1]]


@pytest.mark.parametrize("page", ["mutation-table.md", "machine-mutants.md", "controls.md"])
def test_commands_of_shipped_pages_are_as_runs_write_them(page):
    text = (DOCS / page).read_text("utf-8")
    commands = text.split("```")[1].strip().replace("\\\n", "").splitlines()
    assert "\n".join(command_block(*map(TOGETHER.findall, commands))) in text
    program = commands[0].partition(" tsmla_")[0].partition(" --")[0]
    assert all(command.startswith(program) for command in commands), "a line without an end has no command"
