"""What is asked of the CUDA driver, and what the build makes of it, against a driver that is a few lines of C."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch
from example_variants import compile_c
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.loading import gpu

from build_aot import __main__ as command
from build_aot import matrix

_DRIVER = """
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return index < COUNT ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (device < 40) return 101;
  if (device == 40 + BROKEN) return 999;
  *value = attribute == 75 ? (device == 40 ? FIRST : SECOND) : attribute == 76 ? 0 : -1;
  return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make the driver answer like this; majors of the compute capability (minor 0) of two GPUs."""

    def install(*, version=12090, init=0, count=2, first=9, second=10, broken=-1) -> None:
        values = {"VERSION": version, "INIT": init, "COUNT": count, "FIRST": first, "SECOND": second, "BROKEN": broken}
        (tmp_path / "driver.c").write_text(_DRIVER)
        flags = [f"-D{name}={value}" for name, value in values.items()]
        library = compile_c(tmp_path / "driver.c", tmp_path / "driver.so", "-shared", "-nostdlib", *flags)
        monkeypatch.setattr(gpu, "_driver", lambda: ctypes.CDLL(str(library)))

    return install


def test_architecture_of_the_first_gpu(driver) -> None:
    driver()
    assert gpu.current_arch() == (Arch.SM90A, "GPU 0 runs sm_90a (H100, H200)")


def test_architecture_of_the_gpu_that_torch_is_using(driver, monkeypatch) -> None:
    driver()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert gpu.current_arch() == (Arch.SM100A, "GPU 1 runs sm_100a (B200, GB200)")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"init": 100}, "no CUDA device: the CUDA driver answers error 100"),
        ({"count": 0}, "no CUDA device: the CUDA driver sees none"),
        ({"broken": 1}, "GPU 1 does not answer: CUDA driver error 999"),
        ({"first": 8}, "GPU 0 has compute capability 8.0; tsmla has kernels for sm_90a (H100, H200)"),
    ],
)
def test_reasons(driver, answers: dict[str, int], reason: str) -> None:
    driver(**answers)
    arch, text = gpu.current_arch()
    assert arch is None and text.startswith(reason)


def test_without_a_driver(monkeypatch) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    assert gpu.current_arch() == (None, "no CUDA device: libcuda.so.1 is not installed")
    assert gpu.driver_cuda_major() is None


@pytest.mark.parametrize(("version", "major"), [(12090, 12), (13000, 13), (13020, 13)])
def test_driver_version(driver, version: int, major: int) -> None:
    driver(version=version)
    assert gpu.driver_cuda_major() == major


@pytest.mark.parametrize(
    ("answers", "archs", "present"),
    [
        ({"count": 1}, (Arch.SM90A,), "1 x sm_90a (H100, H200)"),
        ({"second": 9}, (Arch.SM90A,), "2 x sm_90a (H100, H200)"),
        ({"first": 10, "second": 9}, (Arch.SM90A, Arch.SM100A), "1 x sm_100a (B200, GB200), 1 x sm_90a (H100, H200)"),
        ({"first": 8}, (Arch.SM100A,), "1 x compute capability 8.0 (no kernels), 1 x sm_100a (B200, GB200)"),
        ({"first": 8, "second": 8}, SHIPPED_ARCHS, "2 x compute capability 8.0 (no kernels)"),
    ],
)
def test_native_is_the_gpus_present(driver, answers: dict[str, int], archs: tuple[Arch, ...], present: str) -> None:
    driver(**answers)
    found, text = matrix.native()
    assert found == archs
    assert text == f"compiling for {', '.join(archs)} (set TSMLA_ARCHS to choose); GPUs present: {present}"


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (None, "no CUDA device: libcuda.so.1 is not installed"),
        ({"count": 0}, "no CUDA device: the CUDA driver sees none"),
        ({"init": 34}, "no CUDA device: the CUDA driver answers error 34"),
        ({"broken": 0}, "GPU 0 does not answer: CUDA driver error 999"),
    ],
)
def test_native_is_everything_without_a_gpu(driver, monkeypatch, answers: dict[str, int] | None, reason: str) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    if answers is not None:
        driver(**answers)
    everything = f"compiling for {', '.join(SHIPPED_ARCHS)} (set TSMLA_ARCHS to choose); {reason}"
    assert matrix.native() == (SHIPPED_ARCHS, everything)


@pytest.mark.parametrize(
    ("options", "archs", "said"),
    [
        (["--arch", "native"], [Arch.SM90A], "compiling for sm_90a ("),
        (["--arch", "sm_100a", "sm_103a"], [Arch.SM100A, Arch.SM103A], ""),
        ([], SHIPPED_ARCHS, ""),
    ],
)
def test_what_the_build_compiles(driver, monkeypatch, capsys, options: list[str], archs, said: str) -> None:
    driver(count=1)
    built: list = []
    monkeypatch.setattr(command, "build", lambda variants, *rest, host: built.extend(variants))
    monkeypatch.setattr(sys, "argv", ["build_aot", *options])
    assert command.main() == 0
    assert tuple(built) == matrix.shipped(archs)
    out = capsys.readouterr().out
    assert out.startswith(said) and out.count("\n") == bool(said)


def test_native_stands_alone(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["build_aot", "--arch", "native", "sm_90a"])
    assert command.main() == 1
    assert capsys.readouterr().err == "build_aot: native cannot be combined with other architectures\n"
