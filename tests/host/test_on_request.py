"""sm_107a (Rubin), which does not ship: built where CUDA 13's compiler is installed, loaded if it was, and otherwise
refused with what to do. Here are libraries of CUDA 12, or stand-ins for both."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import platform
import sys
import types
from collections import Counter
from pathlib import Path

import build_wheel
import pytest
import torch
from example_variants import PACK
from tsmla.errors import KernelUnavailable
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.variant import FAMILIES
from tsmla.loading import gpu, image, jit, manifest, resolve, toolchain
from tsmla.operators import checks
from tsmla.tools import cli
from tsmla_emulator.prove import check
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.host import compile as emulator_compile
from tsmla_emulator.run.host.capture import Library
from tsmla_emulator.run.host.launch_config import KernelLimits

from build_aot import __main__ as command
from build_aot import matrix
from build_aot.build import build
from build_aot.errors import BuildError

RUBIN = dataclasses.replace(PACK, arch=Arch.SM107A)
NEEDS_COMPILER = r"code for sm_107a \(Rubin\) needs the compiler of CUDA 13; .*pip install 'nvidia-cutlass-dsl\[cu13\]'"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    """Make CuTe DSL installed for these CUDA versions, on a machine whose driver runs that one."""

    def install(*compilers: int, driver: int | None = None) -> None:
        monkeypatch.setattr(toolchain, "installed_compilers", lambda: set(compilers))
        monkeypatch.setattr(gpu, "driver_cuda_major", lambda: driver)

    return install


@pytest.fixture
def rubin(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU as torch describes it."""
    monkeypatch.setattr(checks, "_arch_by_index", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 7))
    return torch.device("cuda", 0)


@pytest.fixture
def built(make_library, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of RUBIN in the place of the installed ones."""
    library = make_library(manifest.library_file("pack", Arch.SM107A, platform.machine()), listed=(RUBIN,))
    directory = library.parent
    record = manifest.LibraryRecord.of_file(library, image.read_image(library).manifest)
    manifest.write_directory(directory, manifest.DirectoryManifest(manifest.SCHEMA, (record,)))
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: directory)
    return library


def test_what_ships_is_stated_once() -> None:
    assert SHIPPED_ARCHS == ("sm_90a", "sm_100a", "sm_103a")
    assert {variant.arch for variant in matrix.shipped()} == set(SHIPPED_ARCHS)
    assert {variant.arch for variant in check.variants()} == set(SHIPPED_ARCHS)
    assert build_wheel.ENVIRONMENT["binary"]["TSMLA_ARCHS"].split(";") == list(SHIPPED_ARCHS)


def test_on_request_there_is_what_blackwell_has() -> None:
    def counted(arch: Arch) -> Counter[str]:
        return Counter(variant.family for variant in matrix.shipped([arch]))

    assert Arch.from_capability(10, 7) is Arch.SM107A
    assert counted(Arch.SM107A) == counted(Arch.SM103A)
    assert check.find(RUBIN.symbol()) == RUBIN


@pytest.mark.parametrize(
    ("compilers", "driver", "compiles"),
    [((12,), None, False), ((12,), 13, False), ((12, 13), None, True), ((12, 13), 13, True), ((13,), 14, True),
     ((12, 13), 12, False), ((), 13, True)],
)  # fmt: skip
def test_what_the_compiler_takes(cuda, compilers: tuple[int, ...], driver: int | None, compiles: bool) -> None:
    """The package picks its compiler as CuTe DSL does. Where there is none, importing it says so."""
    cuda(*compilers, driver=driver)
    reason = toolchain.why_not_compiled(Arch.SM107A)
    assert (reason is None) == compiles
    assert [toolchain.why_not_compiled(arch) for arch in SHIPPED_ARCHS] == [None] * len(SHIPPED_ARCHS)
    assert reason is None or ("because the driver runs CUDA 12 at most" in reason) == (13 in compilers)


def test_compilers_are_found_by_their_folders(monkeypatch, tmp_path: Path) -> None:
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "nvidia_cutlass_dsl" else None)
    assert toolchain.installed_compilers() == set()
    for major in (12, 13):
        (tmp_path / f"cu{major}" / "lib").mkdir(parents=True)
        assert max(toolchain.installed_compilers()) == major


def test_the_compiler_is_part_of_keys_and_manifests(cuda, monkeypatch) -> None:
    """What CUDA 13's compiler made never stands in for what CUDA 12's would."""
    versions = {"apache-tvm-ffi": "0.1.15"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name, "4.8.1"))
    cuda(12)
    assert toolchain.versions().keys() == set(toolchain.COMPILERS)
    twelve = jit.cache_key()
    cuda(12, 13)
    assert toolchain.versions().keys() == {*toolchain.COMPILERS, "nvidia-cutlass-dsl-libs-cu13"}
    assert jit.cache_key() != twelve


def test_building_without_its_compiler_touches_nothing(cuda, tmp_path: Path, monkeypatch, capsys) -> None:
    cuda(12)
    monkeypatch.setattr(sys, "argv", ["build_aot", "--arch", "sm_90a", "sm_107a", "--out", str(tmp_path / "objs")])
    assert command.main() == 1
    assert "needs the compiler of CUDA 13; CuTe DSL's compiler here is that of CUDA 12" in capsys.readouterr().err
    assert not (tmp_path / "objs").exists()


def test_what_ships_is_not_built_with_cuda_13(cuda, tmp_path: Path) -> None:
    cuda(12, 13)
    with pytest.raises(BuildError, match="libraries for sm_90a are built with that of CUDA 12"):
        build([PACK, RUBIN], tmp_path / "objs", jobs=1)
    assert not (tmp_path / "objs").exists()


def test_a_built_library_serves_its_gpu(cuda, rubin: torch.device, built: Path, capsys) -> None:
    cuda(12, 13)
    assert checks.arch_of(rubin) is Arch.SM107A
    assert resolve.resolve(dataclasses.replace(PACK, arch=checks.arch_of(rubin))).step == "shipped"
    assert cli.main(["probe", "--arch", "sm_107a", "--family", "pack"]) == 0
    assert f"1 kernels in {built}" in capsys.readouterr().out


def test_a_library_needs_the_runtime_of_its_compiler(cuda, rubin: torch.device, built: Path) -> None:
    cuda(12, driver=13)
    with pytest.raises(KernelUnavailable, match="shipped: .* needs libcute_dsl_runtime.so of CUDA 13; .*cu12.*cu13"):
        resolve.kernel(RUBIN)


def test_where_the_compiler_takes_it_kernels_compile_just_in_time(cuda, shipped: Path, compiled: list[str]) -> None:
    cuda(12, 13)
    assert resolve.resolve(RUBIN).step == "jit" and compiled == [RUBIN.symbol()]


def test_with_neither_library_nor_compiler(cuda, shipped: Path, compiled: list[str], capsys) -> None:
    cuda(12)
    with pytest.raises(KernelUnavailable, match=NEEDS_COMPILER) as raised:
        resolve.kernel(RUBIN)
    assert "has no pack library for sm_107a; it holds: tsmla_pack_sm_90a" in str(raised.value)
    assert "; those are built on request: docs/deploy/deployment.md, Rubin" in str(raised.value)
    assert compiled == []
    assert cli.main(["probe", "--arch", "sm_107a"]) == 1
    assert capsys.readouterr().out.count("built on request") == len(FAMILIES)


def test_the_emulator_has_its_gpu_and_refuses_to_compile_without_its_compiler(cuda) -> None:
    cuda(12)
    with emulated("sm_107a"):
        assert torch.cuda.get_device_capability() == (10, 7)
    with pytest.raises(emulator_compile.CompileError, match=NEEDS_COMPILER):
        emulator_compile.compile_for_emulation(RUBIN)


def test_the_attribute_that_its_host_code_sets_changes_no_limit() -> None:
    library = Library.__new__(Library)
    library._limits = {"k": KernelLimits()}
    library._set_kernel_attribute(b"k", 16, 3)
    assert library._limits == {"k": KernelLimits()}
