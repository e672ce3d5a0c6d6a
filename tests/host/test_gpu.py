"""What is asked of the CUDA driver, against a driver that is a few lines of C."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from examples import compile_c
from tsmla import gpu
from tsmla.variant import Arch

_DRIVER = """
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = 40 + index; return index < COUNT ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (device < 40) return 101;
  *value = attribute == 75 ? (device == 40 ? FIRST : SECOND) : attribute == 76 ? 0 : -1;
  return 0;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make the driver answer like this; majors of the compute capability (minor 0) of two GPUs."""

    def install(*, version: int = 12090, init: int = 0, count: int = 2, first: int = 9, second: int = 10) -> None:
        values = {"VERSION": version, "INIT": init, "COUNT": count, "FIRST": first, "SECOND": second}
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
