"""What the loader says about a library that is wrong in one way. Every library here is a real file."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from pathlib import Path

import pytest
from example_variants import PACK, PREFILL, compile_c, library_manifest, run_python
from tsmla.errors import LibraryError, ManifestError, RuntimeLibraryError, TsmlaError
from tsmla.identity.arch import Arch
from tsmla.loading import gpu, image, loader, manifest

from build_aot import link

OPEN = """
import sys, pathlib
from tsmla.loading import loader
from tsmla.errors import TsmlaError
try:
    loader.open_library(pathlib.Path(sys.argv[1]))
except TsmlaError as error:
    print(type(error).__name__, error)
"""
PIP = "pip install -U 'nvidia-cutlass-dsl>=4.7.1'"


@pytest.fixture
def pack_library(pack_directory: Path) -> Path:
    return pack_directory / manifest.library_file("pack", Arch.SM90A, platform.machine())


def test_a_built_library_serves_without_a_gpu(pack_library: Path) -> None:
    library = loader.open_library(pack_library, family="pack", arch=Arch.SM90A)
    function = library.function(PACK, check_signature=True)
    assert "k_nope: Tensor([n0, n1, 128], bfloat16)" in loader.signature_of(function)
    assert loader.open_library(pack_library) is library


def test_another_architecture(pack_library: Path) -> None:
    with pytest.raises(LibraryError, match=r"is for sm_90a \(H100, H200\); sm_100a \(B200, GB200\) is asked for"):
        loader.open_library(pack_library, arch=Arch.SM100A)


def test_another_family(pack_library: Path) -> None:
    with pytest.raises(LibraryError, match="is a pack library; a prefill library is asked for"):
        loader.open_library(pack_library, family="prefill")


def test_a_variant_that_is_not_there(pack_library: Path) -> None:
    with pytest.raises(LibraryError, match=f"has no {PREFILL}; it holds:\n  {PACK}"):
        loader.open_library(pack_library).function(PREFILL, check_signature=False)


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_a_tvm_ffi_that_cannot_be_imported(pack_library: Path, tmp_path: Path, kind: str) -> None:
    """OSError is what it raises where the system lacks libstdc++.so.6."""
    (tmp_path / "tvm_ffi.py").write_text(f"raise {kind}('libstdc++.so.6: cannot open shared object file')")
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}){OPEN}", pack_library)
    assert done.stdout.startswith("RuntimeLibraryError tvm_ffi cannot be imported: libstdc++.so.6"), done.stderr


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match="absent.so cannot be read: .*No such file"):
        loader.open_library(tmp_path / "absent.so")


def test_not_an_elf_file(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not machine code " * 10)
    with pytest.raises(LibraryError, match="is not a 64-bit ELF library"):
        loader.open_library(tmp_path / "text.so")


def test_not_named_like_a_library(pack_library: Path, tmp_path: Path) -> None:
    shutil.copy(pack_library, tmp_path / "library")
    with pytest.raises(LibraryError, match="must end in .so"):
        loader.open_library(tmp_path / "library")


def test_every_truncation_is_refused_before_it_is_mapped(pack_library: Path, tmp_path: Path) -> None:
    whole = pack_library.read_bytes()
    for size in (0, 20, 63, 64, 200, 4096, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / f"cut{size}.so"
        cut.write_bytes(whole[:size])
        with pytest.raises(LibraryError, match="truncated|no 64-bit little-endian ELF header"):
            loader.open_library(cut)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (os.mkfifo, "a FIFO"),
        (os.mkdir, "a directory"),
        (lambda path: os.symlink("/dev/zero", path), "a device"),
    ],
    ids=["fifo", "directory", "device"],
)
def test_only_regular_files_are_opened(tmp_path: Path, make, what: str) -> None:
    """In a process of its own, since opening a FIFO may wait for ever."""
    make(tmp_path / "library.so")
    done = run_python(OPEN, tmp_path / "library.so")
    assert f"LibraryError {tmp_path}/library.so cannot be read: " in done.stdout, done.stderr
    assert f"it is {what}, not a regular file" in done.stdout


def test_a_link_to_a_library_is_opened(pack_library: Path, tmp_path: Path) -> None:
    (tmp_path / "link.so").symlink_to(pack_library)
    assert loader.open_library(tmp_path / "link.so").manifest.family == "pack"


def test_a_foreign_library_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    """A copy of TVM-FFI's own library, which ends the process when it is mapped a second time."""
    for original in (link.runtime_directories()[1] / "libtvm_ffi.so", loader.runtime_library()):
        shutil.copy(original, tmp_path / "copy.so")
        done = run_python(OPEN, tmp_path / "copy.so")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"LibraryError {tmp_path}/copy.so is not a tsmla library"), done.stdout


def test_nothing_is_mapped_of_a_library_for_something_else(make_library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_map_runtime", lambda: pytest.fail("the library is about to be mapped"))
    with pytest.raises(LibraryError, match="a pack library is asked for"):
        loader.open_library(make_library("one.so"), family="pack")
    with pytest.raises(LibraryError, match="sm_100a .* is asked for"):
        loader.open_library(make_library("two.so"), arch=Arch.SM100A)
    with pytest.raises(LibraryError, match="is for riscv64 hosts"):
        loader.open_library(make_library("three.so", host="riscv64"))
    with pytest.raises(RuntimeLibraryError, match="needs nvidia-cutlass-dsl 999.0"):
        loader.open_library(make_library("four.so", min_runtime="999.0"))
    with pytest.raises(ManifestError, match="is not valid JSON"):
        loader.open_library(make_library("five.so", text="{"))


def test_a_library_replaced_after_it_was_loaded_is_not_taken_for_the_new_one(pack_directory: Path) -> None:
    record = manifest.read_directory(pack_directory).libraries[0]
    path = pack_directory / record.file
    loader.open_library(path, record=record)
    with pytest.raises(LibraryError, match="has been replaced since this process loaded it"):
        loader.open_library(path, record=record._replace(sha256="0" * 64))


@pytest.mark.parametrize("path", ["nul\0.so", "~no-such-user/library.so"])
def test_a_path_that_no_file_can_have(path: str) -> None:
    with pytest.raises(LibraryError, match="cannot be read"):
        loader.open_library(Path(path))


def test_machine_code_for_another_host(pack_library: Path, tmp_path: Path) -> None:
    code = bytearray(pack_library.read_bytes())
    other = 183 if platform.machine() == "x86_64" else 62
    code[18:20] = other.to_bytes(2, "little")
    (tmp_path / "other.so").write_bytes(image.sealed(bytes(code)))
    with pytest.raises(LibraryError, match=f"is for (aarch64|x86_64) hosts; this one is {platform.machine()}"):
        loader.open_library(tmp_path / "other.so")


def test_a_manifest_for_another_host(make_library) -> None:
    with pytest.raises(LibraryError, match=f"is for riscv64 hosts; this one is {platform.machine()}"):
        loader.open_library(make_library("host.so", host="riscv64"))


def test_not_a_tsmla_library(make_library) -> None:
    with pytest.raises(LibraryError, match="is not a tsmla library.*: it lacks the sections .tsmla.manifest"):
        loader.open_library(make_library("foreign.so", describe=False))


def test_truncated_manifest_inside_a_library(make_library) -> None:
    text = library_manifest(PREFILL).to_json()
    with pytest.raises(ManifestError, match="the manifest inside .*cut.so .*truncated"):
        loader.open_library(make_library("cut.so", text=text[: len(text) // 2]))


def test_unknown_schema_inside_a_library(make_library) -> None:
    text = library_manifest(PREFILL, schema=manifest.SCHEMA + 6).to_json()
    with pytest.raises(ManifestError, match=f"future.so has schema {manifest.SCHEMA + 6}"):
        loader.open_library(make_library("future.so", text=text))


def test_listed_but_not_exported(make_library) -> None:
    library = loader.open_library(make_library("hollow.so", exported=()))
    with pytest.raises(LibraryError, match=f"lists {PREFILL} in its manifest but does not export it"):
        library.function(PREFILL, check_signature=False)


def test_other_parameters_than_the_manifest_says(make_library) -> None:
    library = loader.open_library(make_library("changed.so", says="Expects 2 parameters"))
    with pytest.raises(LibraryError, match="does not take what its manifest says") as raised:
        library.function(PREFILL, check_signature=True)
    assert "Expects 1 parameters" in str(raised.value) and "Expects 2 parameters" in str(raised.value)


def test_a_library_that_needs_a_newer_runtime_than_is_installed(make_library) -> None:
    with pytest.raises(RuntimeLibraryError, match=r"needs nvidia-cutlass-dsl 999\.0.*" + re.escape(PIP)):
        loader.open_library(make_library("newer.so", min_runtime="999.0"))


def test_missing_runtime_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeLibraryError, match="nvidia-cutlass-dsl is not installed.*" + re.escape(PIP)):
        loader.runtime_library()


def test_runtime_package_of_an_older_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    stand_in_package(monkeypatch, tmp_path)
    with pytest.raises(RuntimeLibraryError, match=re.escape(f"looked for {tmp_path}/cu12/lib")):
        loader.runtime_library()


def test_too_old_runtime_library(pack_library: Path, tmp_path: Path) -> None:
    """The real library against a runtime that lacks its symbols, in a process that has not loaded the real one."""
    (tmp_path / "empty.c").write_text("int nothing;")
    old = compile_c(
        tmp_path / "empty.c",
        tmp_path / loader.RUNTIME_FILE,
        "-shared",
        "-nostdlib",
        f"-Wl,-soname,{loader.RUNTIME_FILE}",
    )
    script = """
import sys, pathlib
from tsmla.loading import loader
from tsmla.errors import RuntimeLibraryError
try:
    loader.open_library(pathlib.Path(sys.argv[1]))
except RuntimeLibraryError as error:
    print(error)
"""
    done = run_python(script, pack_library, CUTE_DSL_LIBS=str(old))
    assert done.returncode == 0, done.stderr
    assert f"{old} is too old for {pack_library}" in done.stdout
    assert "undefined symbol" in done.stdout and PIP in done.stdout


def test_cute_dsl_libs_counts_only_when_the_file_exists(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = tmp_path / loader.RUNTIME_FILE
    monkeypatch.setenv("CUTE_DSL_LIBS", f"/nowhere/libother.so:{named}")
    assert loader.runtime_library() != named
    named.touch()
    assert loader.runtime_library() == named


@pytest.mark.parametrize(
    ("driver", "flavours", "taken"),
    [
        (None, ("cu12", "cu13"), "cu12"),
        (12, ("cu12", "cu13"), "cu12"),
        (13, ("cu12", "cu13"), "cu13"),
        (13, ("cu12",), "cu12"),
        (14, ("cu12", "cu13"), "cu13"),
    ],
)
def test_flavour_of_the_runtime_follows_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: int | None, flavours: tuple[str, ...], taken: str
) -> None:
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(gpu, "driver_cuda_major", lambda: driver)
    stand_in_package(monkeypatch, tmp_path)
    for flavour in flavours:
        (tmp_path / flavour / "lib").mkdir(parents=True)
        (tmp_path / flavour / "lib" / loader.RUNTIME_FILE).touch()
    assert loader.runtime_library() == tmp_path / taken / "lib" / loader.RUNTIME_FILE


def test_a_library_of_one_host_is_what_the_build_names(pack_library: Path) -> None:
    assert loader.open_library(pack_library).manifest.host == link.host()


def test_loader_errors_are_tsmla_errors() -> None:
    assert issubclass(LibraryError, TsmlaError) and issubclass(RuntimeLibraryError, LibraryError)


def stand_in_package(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """`root` in the place of the installed nvidia_cutlass_dsl."""

    class Spec:
        submodule_search_locations = [str(root)]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
