"""Adopts kernels that somebody else compiles in this process: makes files for emulation of what `cute.compile`
returns."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from .link import link

SYMBOL = "adopted"
"""The name that adopted functions are exported under. Each is alone in its library."""
OPTIONS = "--enable-tvm-ffi --keep-ptx"
LINES = "--generate-line-info"
"""The compiler option that gives findings the lines of the sources."""


@functools.lru_cache(maxsize=16)
def export(compiled: Any) -> tuple[Path, str]:
    """Return the library linked for emulation, and the PTX text. Raises ValueError when it was compiled without
    `OPTIONS`."""
    if not getattr(compiled, "__ptx__", None):
        raise ValueError(f"{compiled!r} has no PTX: give cute.compile the options {OPTIONS!r}")
    with tempfile.TemporaryDirectory() as scratch:
        obj = Path(scratch) / f"{SYMBOL}.o"
        try:
            compiled.export_to_c(str(obj), function_name=SYMBOL, export_only_tvm_ffi_symbols=True)
        except TypeError as error:
            raise ValueError(f"{compiled!r} is no TVM-FFI function: give cute.compile {OPTIONS!r}") from error
        return link(obj), compiled.__ptx__.rstrip("\0")


@contextlib.contextmanager
def adopting(arch: str, processors: int, adopt: Callable[[Any], Any]) -> Iterator[None]:
    """Make `cute.compile`, while active, compile for `arch` without its GPU, and return what `adopt` makes of the
    result.

    CUTLASS's HardwareInfo, which asks the driver, answers for a GPU with that many processors, all free. Kernels that
    ask, before they are compiled, what the compiler compiles for are told `arch`.
    """
    from cutlass import cute
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.utils import HardwareInfo

    answers: dict[str, Any] = {
        "__init__": lambda self, device_id=0: None,
        "get_device_multiprocessor_count": lambda self: processors,
        "get_max_active_clusters": lambda self, cluster_size, *_, **__: processors // cluster_size,
    }

    real = cute.compile

    def compile_adopted(function: Any, *arguments: Any, options: str = "", **keywords: Any) -> Any:
        with tempfile.TemporaryDirectory() as dumps:
            every = f"{options} {OPTIONS} {LINES} --gpu-arch {arch} --dump-dir={dumps}"
            return adopt(real(function, *arguments, options=every, **keywords))

    with (
        mock.patch.object(CuTeDSL._get_dsl().envar, "arch", arch),
        mock.patch.object(cute, "compile", compile_adopted),
        mock.patch.multiple(HardwareInfo, **answers),
    ):
        yield
