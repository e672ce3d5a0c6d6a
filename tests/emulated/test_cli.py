"""`tsmla verify --emulated` and `tsmla demo` on a machine without a GPU, with the emulator installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tsmla
import tsmla_emulator
from tsmla.identity.arch import Arch
from tsmla.loading import gpu
from tsmla.tools import cli, demo, emulated

EMULATED = "sm_90a"
SYMBOLS = [variant.symbol() for variant in emulated.examples(Arch(EMULATED))]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)


def test_verify_runs_the_named_kernels(capsys):
    assert cli.main(["verify", "--emulated", *SYMBOLS]) == 0
    printed = capsys.readouterr().out
    assert all(symbol in printed for symbol in SYMBOLS)
    assert "0 bytes differ" in printed and "relative RMSE" in printed


def test_a_wrong_result_is_an_exit_status(capsys, monkeypatch):
    from tsmla_emulator.prove import check

    monkeypatch.setattr(check, "_pack", lambda variant: ("7 bytes differ", "7 bytes differ"))
    monkeypatch.setattr(
        check, "check", lambda variant, *_, **__: check.Verdict(variant, *check._pack(variant), calls=())
    )
    assert cli.main(["verify", "--emulated", SYMBOLS[0]]) == 1
    assert "WRONG: 7 bytes differ" in capsys.readouterr().out


def test_an_unknown_symbol_names_close_ones(capsys):
    assert cli.main(["verify", "--emulated", SYMBOLS[0] + "x"]) == 2
    assert SYMBOLS[0] in capsys.readouterr().err


def test_the_demo_as_a_user_runs_it():
    command = [sys.executable, "-m", "tsmla", "demo", "--emulated", EMULATED]
    with_emulator = {**os.environ, "PYTHONPATH": str(Path(tsmla_emulator.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=with_emulator)
    assert done.returncode == 0, done.stdout + done.stderr
    progress, _, table = done.stdout.partition("Errors against float64")
    assert "core is ready" in progress and all(symbol in progress for symbol in SYMBOLS)
    assert {line.split()[0] for line in table.splitlines() if line.startswith(("tsmla_", "mla_"))} == set(demo.CALLS)
    assert table.endswith("all results are good\n") and "WRONG" not in table


@pytest.mark.archs(EMULATED)
@pytest.mark.parametrize("name", demo.CALLS)
def test_the_demo_notices_a_result_that_is_wrong(gpu, monkeypatch, capsys, name):
    """With the first tensor that the operator writes zero; `gpu` is the GPU that the demo finds."""
    monkeypatch.setattr(demo, "CALLS", {name: demo.CALLS[name]})
    assert cli.main(["demo"]) == 0
    assert "all results are good" in capsys.readouterr().out
    module = sys.modules[getattr(tsmla, name).__module__]
    operator = getattr(module, name)

    def wrong(*given, **named):
        results = operator(*given, **named)
        written = {"mla_write_cache": 3, "mla_read_cache": 1}
        (given[written[name]] if name in written else results[0]).zero_()
        return results

    monkeypatch.setattr(module, name, wrong)
    assert cli.main(["demo"]) == 1
    printed = capsys.readouterr().out
    assert "ms  WRONG" in printed and "some results are WRONG" in printed
