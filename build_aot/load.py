"""Open a library on the machine that built it, to ask what it says: needs no GPU, runs no kernel."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from . import link


def load(library: Path) -> Any:
    """The library's TVM-FFI module. One path can be loaded once per process: the system keeps the first file."""
    import tvm_ffi

    ctypes.CDLL(str(link.runtime_directories()[0] / link.NEEDED[0]))
    return tvm_ffi.load_module(str(library))
