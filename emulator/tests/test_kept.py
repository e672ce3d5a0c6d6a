"""What is kept of PTX texts is what reading them anew gives."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from small_kernels import text_of
from tsmla_emulator.run import kept, machine
from tsmla_emulator.run.core.binding import program_of
from tsmla_emulator.run.ptx.parser import PtxError

TEXT = text_of("mov.b32 %r1, 7;\nL: add.s32 %r1, %r1, 1;\nbra L;", 1, "sm_90a", 32)


@pytest.fixture(autouse=True)
def readings(monkeypatch, tmp_path):
    """The texts that were read, with nothing kept before."""
    texts = []
    read = machine.parse
    monkeypatch.setenv("TSMLA_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "parse", lambda text: texts.append(text) or read(text))
    return texts


def test_a_text_is_read_once_and_its_instructions_when_asked_for(readings):
    kept.module_of(TEXT)
    again, read = kept.module_of(TEXT), machine.parse(TEXT)
    assert readings == [TEXT] * 2
    for name, entry in read.entries.items():
        mine, program = again.entries[name], program_of(again, again.entries[name])
        assert program == dataclasses.replace(program_of(read, entry), entry=mine)
        assert readings == [TEXT] * 2
        assert {field: getattr(mine, field) for field in vars(entry)} == vars(entry)
        assert copy.deepcopy(mine) == entry and dataclasses.replace(mine, name="x").name == "x"
    assert readings == [TEXT] * 3


def test_another_text_and_a_damaged_file_are_read(readings, tmp_path):
    kept.module_of(TEXT)
    assert kept.module_of(TEXT.replace("1, 7;", "1, 8;")).text != TEXT and len(readings) == 2
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    assert kept.module_of(TEXT).programs.keys() and len(readings) == 3


def test_a_text_that_cannot_be_read_is_refused_again():
    for _ in range(2):
        with pytest.raises(PtxError):
            kept.module_of(TEXT.replace("bra L", "bra M"))


def test_an_instruction_that_is_not_known_is_for_whoever_runs_it():
    for _ in range(2):
        module = kept.module_of(TEXT.replace("add.s32", "addx.s32"))
        with pytest.raises(PtxError, match="addx"):
            program_of(module, next(iter(module.entries.values())))
