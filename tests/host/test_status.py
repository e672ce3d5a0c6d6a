"""binary_status and has_binary_*: a reason for every no, on machines with and without a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import tsmla
from example_variants import PACK, PREFILL
from tsmla.errors import ArgumentError
from tsmla.identity.arch import Arch
from tsmla.identity.variant import FAMILIES
from tsmla.loading import gpu, resolve, status, toolchain


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


@pytest.mark.parametrize("name", ["binary_status", "has_binary_prefill", "has_binary_decode"])
def test_an_unknown_arch_is_refused_in_the_name_of_what_was_called(shipped: Path, name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: arch is 90; accepted"):
        getattr(tsmla, name)(arch=90)


def test_the_report_reads_well_and_is_json(shipped: Path) -> None:
    report = tsmla.binary_status("sm_90a")
    assert "pack: 1 kernels in " in str(report) and "decode: no: " in str(report)
    assert json.loads(json.dumps(report.to_dict()))["families"]["pack"]["available"] is True


def test_a_variant_of_a_shipped_library(shipped: Path) -> None:
    found = tsmla.variant_status(PACK)
    assert found == status.VariantStatus(PACK, "shipped", str(next(shipped.glob("*.so"))))
    assert str(found) == f"{PACK}: shipped, {found.path}"
    assert json.loads(json.dumps(found.to_dict()))["available"] is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"d_nope": 144}, "does not hold it"),
        ({"d_nope": 100}, "pack needs d_nope to be a multiple of 16"),
        ({"arch": Arch.SM100A}, "has no pack library for sm_100a"),
    ],
)
def test_a_variant_that_would_be_compiled(shipped: Path, change: dict, reason: str) -> None:
    found = tsmla.variant_status(dataclasses.replace(PACK, **change))
    assert not found.available and found.path is None and reason in found.reason


def test_a_variant_of_the_named_library(monkeypatch, make_library, shipped: Path) -> None:
    library = make_library("prefill.so")
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(library))
    assert tsmla.variant_status(PREFILL) == status.VariantStatus(PREFILL, "override", str(library))
    assert "does not hold it" in tsmla.variant_status(dataclasses.replace(PREFILL, lse=False)).reason
    assert tsmla.variant_status(PACK).step == "shipped"


def test_the_status_of_a_variant_is_what_resolving_finds(monkeypatch, make_library, shipped: Path) -> None:
    for backend in ("auto", "binary"):
        monkeypatch.setenv("TSMLA_BACKEND", backend)
        assert tsmla.variant_status(PACK).step == resolve.resolve(PACK).step
        resolve.forget()
    monkeypatch.setenv("TSMLA_BACKEND", "jit")
    assert tsmla.variant_status(PACK).reason == "the backend is jit"
    monkeypatch.setenv("TSMLA_BACKEND", "maybe")
    assert "accepted: auto, binary, jit" in tsmla.variant_status(PACK).reason


def test_a_variant_of_other_sources_would_be_compiled(monkeypatch, shipped: Path) -> None:
    monkeypatch.setattr(toolchain, "source_digest", lambda: "0" * 64)
    assert "was built from other kernel sources" in tsmla.variant_status(PACK).reason


@pytest.mark.parametrize("junk", [None, "pack", 1, PACK.to_dict(), PACK.symbol()], ids=range(5))
def test_what_is_no_variant(junk) -> None:
    with pytest.raises(ArgumentError, match="^variant_status: .* is no variant"):
        tsmla.variant_status(junk)


@pytest.mark.parametrize("path", [3, "a\0b.so", b"library.so", None, "~nosuchuser/library.so"])
def test_paths_of_no_library(path, shipped: Path) -> None:
    assert tsmla.has_binary_prefill(path, arch="sm_90a") is False
    assert status.binary_status("sm_90a", path).families["prefill"].reason


def test_served_says_which_step_served_each_kernel(shipped: Path) -> None:
    assert tsmla.served() == {}
    resolve.kernel(PACK)
    assert tsmla.served() == {PACK: "shipped"}
