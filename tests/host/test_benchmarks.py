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


WRONG = {
    "a peer without a place": (["decode", "--against", "foo"], "foo: expected NAME=MODULE:FUNCTION"),
    "a peer of no module": (["decode", "--against", "a=nowhere:f"], "a=nowhere:f: No module named 'nowhere'; expected"),
    "a directory that is not there": (["phases", "/nowhere"], "/nowhere: there is no such file or directory"),
    "a record that is not there": (["predict-clocks", "--after", "/nowhere"], "/nowhere: there is no such file"),
    "libraries that are not there": (["compare-libraries", "/nowhere", "/"], "/nowhere: there is no such file"),
    "an unknown part": (["predict-peers", "moon"], "'moon' is not known; accepted: hopper, published,"),
    "an unknown topic": (["microbench", "moon"], "'moon' is not known; accepted: pipes, sync,"),
}


@pytest.mark.parametrize("arguments, said", WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_told_what_is_accepted(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["phases", "."], ["cold-start"], ["pack"]], ids=" ".join)
def test_without_a_gpu_a_sentence_says_so(arguments, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="benchmarks measure on a CUDA GPU; torch sees none"):
        command_line.main(arguments)


def test_a_record_has_the_command_line_as_one_may_type_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmarks/__main__.py", "decode", "--against", "a b"])
    assert runner.command() == "python -m benchmarks decode --against 'a b'"
