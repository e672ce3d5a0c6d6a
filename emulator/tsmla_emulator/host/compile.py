"""A tsmla variant as an exported object and the PTX of the same compile, kept by source digest.

Compiles run in a process of their own: the compiler reads its dump settings once, and importing it takes a second.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tsmla import jit
from tsmla.variant import Variant, variant_from_dict

from .link import cache_directory, link


class CompileError(RuntimeError):
    """A variant did not compile; the text holds the end of what the compiler said."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Files of one compiled variant: the library linked for emulation and the PTX text."""

    library: Path
    ptx: Path
    symbol: str


def compile_for_emulation(variant: Variant) -> Compiled:
    """The variant's files, compiled now (2 to 10 s) unless the same sources and compilers made them before."""
    key = json.dumps(jit.cache_key(), sort_keys=True) + Path(__file__).read_text("utf-8")
    directory = cache_directory() / hashlib.sha256(key.encode()).hexdigest()[:32] / variant.symbol()
    obj, ptx = directory / "kernel.o", directory / "kernel.ptx"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process compiles, the others find what it made
        if not ptx.exists():
            _compile(variant, obj, ptx)
    return Compiled(link(obj), ptx, variant.symbol())


def compile_all(variants: Iterable[Variant]) -> Iterator[Variant]:
    """Compile variants on every CPU that this process may use; yields each when it is done. Raises CompileError."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {pool.submit(compile_for_emulation, variant): variant for variant in variants}
        for future in concurrent.futures.as_completed(running):
            future.result()
            yield running[future]


def _compile(variant: Variant, obj: Path, ptx: Path) -> None:
    with tempfile.TemporaryDirectory(dir=obj.parent.parent) as scratch:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
        environment |= {
            "CUTE_DSL_KEEP": "ptx",
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_DUMP_DIR": scratch,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        made, text = Path(scratch) / obj.name, Path(scratch) / ptx.name
        command = [sys.executable, "-m", __name__, json.dumps(variant.to_dict()), str(made), str(text)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(
                f"compiling {variant.symbol()} ended with status {done.returncode}:\n{done.stderr.strip()[-4000:]}"
            )
        obj.parent.mkdir(exist_ok=True)
        os.replace(made, obj)
        os.replace(text, ptx)  # last: its presence says that both are there


def _main(description: str, obj: str, ptx: str) -> None:
    """Body of the compiling process."""
    from tsmla_kernels.registry import compile_variant

    variant = variant_from_dict(json.loads(description))
    compiled = compile_variant(variant)
    compiled.export_to_c(obj, function_name=variant.symbol(), export_only_tvm_ffi_symbols=True)
    Path(ptx).write_text(compiled.__ptx__, "utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
