"""What the CUDA driver says about this machine, without torch and without creating a CUDA context."""

from __future__ import annotations

import ctypes
import functools
import sys

from ..identity.arch import SHIPPED_ARCHS, Arch

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""CUdevice_attribute values of cuda.h."""


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def driver_cuda_major() -> int | None:
    """Newest CUDA major version that the installed driver runs; None without a driver."""
    driver, version = _driver(), ctypes.c_int()
    if driver is None or driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000


def capabilities() -> tuple[list[tuple[int, int]], str]:
    """Compute capability (major, minor) of every GPU that the driver sees, or none and a sentence saying why.

    Asking initialises the driver in this process; a process that forks CUDA workers afterwards should not ask.
    """
    driver, count = _driver(), ctypes.c_int()
    if driver is None:
        return [], "no CUDA device: libcuda.so.1 is not installed"
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status or count.value == 0:
        cause = f"the CUDA driver answers error {status}" if status else "the CUDA driver sees none"
        return [], f"no CUDA device: {cause}"
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        status = (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        )
        if status:
            return [], f"GPU {index} does not answer: CUDA driver error {status}"
        found.append((major.value, minor.value))
    return found, ""


def current_arch() -> tuple[Arch | None, str]:
    """The architecture of this process's GPU, or None, with a sentence saying what was found.

    The GPU is torch's current one when torch is using CUDA already, else the first visible one. Asks the driver, as
    `capabilities` does: a process that forks CUDA workers afterwards should name the architecture instead.
    """
    found, reason = capabilities()
    if not found:
        return None, reason
    torch = sys.modules.get("torch")
    index = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0
    major, minor = found[index]
    arch = Arch.from_capability(major, minor)
    if arch is None:
        known = ", ".join(f"{a} ({a.gpus})" for a in SHIPPED_ARCHS)
        return None, f"GPU {index} has compute capability {major}.{minor}; tsmla has kernels for {known}"
    return arch, f"GPU {index} runs {arch} ({arch.gpus})"
