"""The order in which a call looks for its kernel, what stops it, and what the final error says."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from example_variants import PACK, PREFILL
from tsmla.errors import (
    CacheMiss,
    CompileError,
    KernelUnavailable,
    LibraryError,
    ManifestError,
    SettingError,
    UnsupportedError,
)
from tsmla.identity.arch import Arch
from tsmla.loading import jit, loader, manifest, resolve, toolchain


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The JIT's two steps, made to fail; the list says which were tried."""
    tried: list[str] = []

    def cached(variant):
        tried.append("cached")
        raise CacheMiss("nothing kept")

    def compiled(variant):
        tried.append("jit")
        raise CompileError("no compiler")

    monkeypatch.setattr(jit, "load_cached", cached)
    monkeypatch.setattr(jit, "compile_now", compiled)
    return tried


def test_a_shipped_library_serves(shipped: Path, steps: list[str]) -> None:
    assert resolve.resolve(PACK).step == "shipped"
    assert steps == []
    assert "k_nope" in loader.signature_of(resolve.kernel(PACK))
    assert resolve.kernel(PACK) is resolve.kernel(PACK)
    assert resolve.served() == {PACK: "shipped"}


def test_order_without_a_shipped_library(monkeypatch, nothing_shipped: Path, steps: list[str]) -> None:
    with pytest.raises(KernelUnavailable):
        resolve.kernel(PACK)
    assert steps == ["cached", "jit"]
    monkeypatch.setattr(jit, "compile_now", lambda variant: (print, "jit"))
    assert resolve.resolve(PACK) == resolve.Resolved(print, "jit")
    resolve.forget()
    monkeypatch.setattr(jit, "compile_now", lambda variant: (print, "cached"))  # another process was first
    assert resolve.resolve(PACK) == resolve.Resolved(print, "cached")
    resolve.forget()
    monkeypatch.setattr(jit, "load_cached", lambda variant: repr)
    assert resolve.resolve(PACK) == resolve.Resolved(repr, "cached")


def test_the_final_error_lists_each_step_and_why(nothing_shipped: Path, steps: list[str]) -> None:
    with pytest.raises(KernelUnavailable) as raised:
        resolve.kernel(PREFILL)
    lines = str(raised.value).splitlines()
    assert PREFILL.symbol() in lines[0] and "H100, H200" in lines[0]
    assert lines[1:] == [
        "  override: TSMLA_FMHA_BINARY_SO is not set",
        f"  shipped: {nothing_shipped}/manifest.json does not exist: this directory holds no finished build (binary "
        "wheels have one, and `python -m build_aot` makes one)",
        "  cached: nothing kept",
        "  jit: no compiler",
        "`tsmla probe --arch sm_90a`, or binary_status('sm_90a'), says what can be done here",
    ]


def test_a_failed_search_is_repeated(monkeypatch, nothing_shipped: Path, steps: list[str]) -> None:
    with pytest.raises(KernelUnavailable):
        resolve.kernel(PACK)
    monkeypatch.setattr(jit, "load_cached", lambda variant: repr)
    assert resolve.kernel(PACK) is repr


def test_backend_binary_never_compiles(monkeypatch, nothing_shipped: Path, steps: list[str]) -> None:
    monkeypatch.setenv("TSMLA_BACKEND", "binary")
    with pytest.raises(KernelUnavailable, match="jit: not used, the backend is binary"):
        resolve.kernel(PACK)
    assert steps == []


def test_backend_jit_uses_no_library(monkeypatch, shipped: Path, steps: list[str]) -> None:
    monkeypatch.setenv("TSMLA_BACKEND", "jit")
    with pytest.raises(KernelUnavailable, match="shipped: not used, the backend is jit"):
        resolve.kernel(PACK)
    assert steps == ["cached", "jit"]


def test_a_bad_setting_is_an_error_even_when_another_step_could_serve(monkeypatch, shipped, steps) -> None:
    monkeypatch.setenv("TSMLA_VERIFY", "maybe")
    monkeypatch.setattr(jit, "load_cached", lambda variant: repr)
    with pytest.raises(SettingError, match="TSMLA_VERIFY is 'maybe'"):
        resolve.kernel(PACK)


def test_a_variant_that_cannot_exist(steps: list[str]) -> None:
    with pytest.raises(UnsupportedError, match="prefill head dims"):
        resolve.kernel(dataclasses.replace(PREFILL, d_qk=64))
    assert steps == []


def test_the_named_library_serves_prefill(monkeypatch, make_library, nothing_shipped, steps) -> None:
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(make_library("named.so")))
    assert resolve.resolve(PREFILL).step == "override"
    with pytest.raises(KernelUnavailable, match="override: TSMLA_FMHA_BINARY_SO names prefill libraries only"):
        resolve.kernel(PACK)


def test_a_bad_named_library_raises_and_nothing_else_is_tried(monkeypatch, tmp_path, shipped, steps) -> None:
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(tmp_path / "absent.so"))
    with pytest.raises(LibraryError, match="TSMLA_FMHA_BINARY_SO: .*absent.so cannot be read"):
        resolve.kernel(PREFILL)
    assert steps == []


def test_a_named_library_with_a_bad_manifest(monkeypatch, make_library, steps) -> None:
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(make_library("cut.so", text="{")))
    with pytest.raises(ManifestError, match="TSMLA_FMHA_BINARY_SO: the manifest inside .*truncated"):
        resolve.kernel(PREFILL)
    assert steps == []


def test_a_named_library_for_another_gpu(monkeypatch, make_library, steps) -> None:
    other = dataclasses.replace(PREFILL, arch=Arch.SM100A)
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(make_library("named.so", listed=(other,))))
    with pytest.raises(LibraryError, match=r"is for sm_100a \(B200, GB200\); sm_90a \(H100, H200\) is asked for"):
        resolve.kernel(PREFILL)
    assert steps == []


def test_a_named_library_without_the_variant(monkeypatch, make_library, steps) -> None:
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(make_library("named.so")))
    with pytest.raises(LibraryError, match=f"it holds:\n  {PREFILL}"):
        resolve.kernel(dataclasses.replace(PREFILL, causal=False))
    assert steps == []


def test_backend_jit_beats_a_named_library_and_says_so(monkeypatch, make_library, steps, caplog) -> None:
    monkeypatch.setenv("TSMLA_FMHA_BINARY_SO", str(make_library("named.so")))
    monkeypatch.setenv("TSMLA_BACKEND", "jit")
    with pytest.raises(KernelUnavailable, match="override: TSMLA_FMHA_BINARY_SO is not used"):
        resolve.kernel(PREFILL)
    assert "named.so is not used: the backend is jit" in caplog.text


def test_a_library_of_other_kernel_sources_does_not_serve(monkeypatch, shipped, steps, caplog) -> None:
    monkeypatch.setattr(toolchain, "source_digest", lambda: "0" * 64)
    with pytest.raises(KernelUnavailable, match="shipped: .* was built from other kernel sources"):
        resolve.kernel(PACK)
    assert "was built from other kernel sources" in caplog.text


@pytest.mark.parametrize("verify", ["", "0", "1"])
def test_a_changed_library_does_not_serve(monkeypatch, broken, steps, verify: str) -> None:
    monkeypatch.setenv("TSMLA_VERIFY", verify)
    with pytest.raises(KernelUnavailable, match="shipped: .* hashes to"):
        resolve.kernel(PACK)


def test_a_library_that_disagrees_with_its_directory(monkeypatch, shipped, tmp_path, steps) -> None:
    copy = shutil.copytree(shipped, tmp_path / "objs")
    record = manifest.read_directory(copy).libraries[0]
    other = record._replace(manifest=record.manifest._replace(source_digest="0" * 64))
    manifest.write_directory(copy, manifest.DirectoryManifest(manifest.SCHEMA, (other,)))
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: copy)
    with pytest.raises(KernelUnavailable, match="says other things about itself"):
        resolve.kernel(PACK)


def test_threads_that_ask_for_one_kernel_compile_it_once(monkeypatch, nothing_shipped, steps) -> None:
    inside, count = threading.Barrier(8), []

    def compiled(variant):
        count.append(variant)
        return print, "jit"

    def ask(_):
        inside.wait(timeout=30)
        return resolve.kernel(PACK)

    monkeypatch.setattr(jit, "compile_now", compiled)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, range(8))) == {print}
    assert count == [PACK]


def test_what_is_kept_between_calls_is_bounded(monkeypatch):
    monkeypatch.setattr(resolve, "_MOST_CALLS", 3)
    for kind in range(10):
        resolve.keep((kind,), repr)
        assert resolve.calls[kind,] is repr and len(resolve.calls) <= 3
    resolve.forget()
    assert not resolve.calls


def test_a_variant_made_of_words_gets_the_final_error(nothing_shipped: Path, steps: list[str]) -> None:
    with pytest.raises(KernelUnavailable, match="for sm_90a .H100, H200"):
        resolve.kernel(dataclasses.replace(PREFILL, arch=str(PREFILL.arch)))
