"""The benchmarks' one command line: every command can be asked what it does, and the others are refused."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import __main__ as command_line
from benchmarks import runner


@pytest.mark.parametrize("name", command_line.COMMANDS)
def test_every_command_says_what_it_does(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main([name, "--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: python -m benchmarks {name} " in said
    module = importlib.import_module(f"benchmarks.{command_line.COMMANDS[name]}")
    assert module.__doc__.partition("\n")[0] in said and callable(module.run)


def test_commands_are_listed(capsys):
    assert command_line.main([]) == command_line.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in command_line.COMMANDS)


def test_an_unknown_command_is_named_beside_those_that_exist(capsys):
    assert command_line.main(["decodes"]) == 2
    assert capsys.readouterr().err.startswith("there is no command 'decodes'\n")


def test_a_record_has_the_command_line_as_one_may_type_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/__main__.py", "decode", "--against", "a b"])
    assert runner.command() == "python -m benchmarks decode --against 'a b'"
