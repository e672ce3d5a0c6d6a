"""`tsmla verify --emulated` and `tsmla demo` on a machine without a GPU, with the emulator installed."""

from __future__ import annotations

import re

import pytest
from tsmla import gpu
from tsmla.tools import cli, demo, emulated


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)


def test_verify_runs_the_named_kernels(capsys):
    assert cli.main(["verify", "--emulated", *emulated.EXAMPLES]) == 0
    printed = capsys.readouterr().out
    assert all(symbol in printed for symbol in emulated.EXAMPLES)
    assert "0 bytes differ" in printed and "relative RMSE" in printed


def test_a_wrong_result_is_an_exit_status(capsys, monkeypatch):
    from tsmla_emulator import check

    monkeypatch.setattr(check, "_pack", lambda variant: ("7 bytes differ", "7 bytes differ"))
    monkeypatch.setattr(check, "check", lambda variant: check.Verdict(variant, *check._pack(variant), calls=()))
    assert cli.main(["verify", "--emulated", emulated.EXAMPLES[0]]) == 1
    assert "WRONG: 7 bytes differ" in capsys.readouterr().out


def test_an_unknown_symbol_names_close_ones(capsys):
    assert cli.main(["verify", "--emulated", emulated.EXAMPLES[0] + "x"]) == 2
    assert emulated.EXAMPLES[0] in capsys.readouterr().err


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("format, size", [("bf16", 1152), ("e4m3", 576), ("fp8_ds_mla", 656), ("snapmla", 644)])
def test_the_demo_tells_what_a_cache_takes_and_loses(gpu, format, size):
    text, good = demo._cache(format, 65)
    assert good and f"{format} rows, {size} bytes a key: 65 keys" in text
    latent, rope = (float(x) for x in re.findall(r"(\S+) \((?:latent|rope)\)", text))
    assert (latent == 0) == (format == "bf16") and (rope == 0) == (format != "e4m3")


def test_the_demo_runs_both_operators(capsys, tmp_path, monkeypatch):
    from tsmla import toolchain

    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: tmp_path)  # none here: they have their own tests
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert all(symbol in printed for symbol in emulated.EXAMPLES)
