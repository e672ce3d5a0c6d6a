"""binary_status and has_binary_*: a reason for every no, on machines with and without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tsmla
from tsmla import gpu, status
from tsmla.errors import ArgumentError
from tsmla.variant import FAMILIES, Arch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)


def test_without_a_gpu_and_without_an_arch(no_gpu: None, shipped: Path) -> None:
    assert tsmla.has_binary_prefill() is False
    assert tsmla.has_binary_decode() is False
    report = tsmla.binary_status()
    assert report.arch is None
    for family in report.families.values():
        assert family.reason.startswith("no CUDA device: libcuda.so.1 is not installed") and "arch" in family.reason


def test_without_a_gpu_for_a_named_arch(no_gpu: None, shipped: Path) -> None:
    report = tsmla.binary_status("sm_90a")
    assert set(report.families) == set(FAMILIES)
    assert report.families["pack"].available
    assert report.families["pack"].kernels == 1
    assert report.families["pack"].path == str(next(shipped.glob("tsmla_pack_*.so")))
    assert not report.families["prefill"].available
    assert "has no prefill library for sm_90a; it holds: tsmla_pack_sm_90a" in report.families["prefill"].reason
    assert "has no decode library for sm_90a" in report.families["decode"].reason


def test_the_gpu_of_this_process_is_asked_about(monkeypatch: pytest.MonkeyPatch, shipped: Path) -> None:
    monkeypatch.setattr(gpu, "current_arch", lambda: (Arch.SM90A, "GPU 0"))
    assert tsmla.binary_status().families["pack"].available
    monkeypatch.setattr(gpu, "current_arch", lambda: (Arch.SM100A, "GPU 0"))
    assert not tsmla.binary_status().families["pack"].available


def test_a_library_by_path(make_library, nothing_shipped: Path) -> None:
    library = make_library("prefill.so")
    assert tsmla.has_binary_prefill(library, arch=Arch.SM90A)
    assert tsmla.has_binary_prefill(str(library), arch="sm_90a")
    assert not tsmla.has_binary_prefill(library, arch="sm_100a")
    assert "is for sm_90a" in status.binary_status("sm_100a", library).families["prefill"].reason
    assert not tsmla.has_binary_prefill(library.with_name("absent.so"), arch="sm_90a")


def test_the_named_library_is_the_one_judged(monkeypatch, make_library, shipped: Path) -> None:
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(make_library("prefill.so")))
    report = tsmla.binary_status("sm_90a")
    assert report.families["prefill"].path.endswith("/prefill.so")
    assert report.families["pack"].path.startswith(str(shipped))


def test_backend_jit_means_no_library(monkeypatch: pytest.MonkeyPatch, shipped: Path) -> None:
    monkeypatch.setenv("TSMLA_BACKEND", "jit")
    assert tsmla.binary_status("sm_90a").families["pack"].reason == "the backend is jit"


def test_an_unknown_arch(shipped: Path) -> None:
    with pytest.raises(ArgumentError, match="arch is 'sm_80'; accepted: sm_90a, sm_100a, sm_103a"):
        tsmla.binary_status("sm_80")


def test_the_report_reads_well_and_is_json(shipped: Path) -> None:
    report = tsmla.binary_status("sm_90a")
    assert "pack: 1 kernels in " in str(report) and "decode: no: " in str(report)
    assert json.loads(json.dumps(report.to_dict()))["families"]["pack"]["available"] is True
