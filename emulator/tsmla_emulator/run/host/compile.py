"""A tsmla variant as an exported object and the PTX of the same compile, kept by source digest.

Compiles run in processes of their own, each for many variants: the compiler reads its dump settings once, and importing
it takes seconds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tsmla.identity.variant import Variant, variant_from_dict
from tsmla.loading import jit, toolchain

from . import call_sites
from .call_sites import CallSites
from .link import cache_directory, link

_DONE = "done\n"


class CompileError(RuntimeError):
    """A variant did not compile; the text holds the end of what the compiler said."""


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Files of one compiled variant: the library linked for emulation and the PTX text.

    machine_code: a file with another GPU image, whose machine code is run in the place of the library's.
    """

    library: Path
    ptx: Path
    symbol: str
    machine_code: Path | None = None


def compile_for_emulation(variant: Variant, compiler: Compiler | None = None) -> Compiled:
    """The variant's files, compiled now (2 to 10 s) unless the same compilers made them of the same sources before.

    Another copy of the sources compiles anew: the PTX names files, and messages quote them. Raises CompileError.

    compiler: the process to do it; None starts one when there is something to do.
    """
    if reason := toolchain.why_not_compiled(variant.arch):
        raise CompileError(reason)
    key = json.dumps(jit.cache_key(), sort_keys=True) + _sources()
    key += "".join(Path(file).read_text("utf-8") for file in (__file__, call_sites.__file__))
    directory = cache_directory() / hashlib.sha256(key.encode()).hexdigest()[:32] / variant.symbol()
    obj, ptx = directory / "kernel.o", directory / "kernel.ptx"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.with_name(f"{directory.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first process compiles, the others find what it made
        if not ptx.exists():
            with contextlib.ExitStack() as stack:
                compiler = compiler or stack.enter_context(Compiler())
                compiler.compile(variant, obj, ptx)
    return Compiled(link(obj), ptx, variant.symbol())


def _sources() -> str:
    """Where the kernels' sources lie."""
    found = importlib.util.find_spec("tsmla_kernels")
    assert found and found.origin
    return found.origin


def compile_all(variants: Iterable[Variant]) -> Iterator[tuple[Variant, float]]:
    """Compile variants on every CPU that this process may use; yields each when it is done, with the seconds that it
    took. Raises CompileError."""
    cpus = len(os.sched_getaffinity(0))
    idle: queue.SimpleQueue[Compiler] = queue.SimpleQueue()

    def compile_one(variant: Variant) -> float:
        compiler = idle.get()
        started = time.perf_counter()
        try:
            compile_for_emulation(variant, compiler)
            return time.perf_counter() - started
        finally:
            idle.put(compiler)

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(cpus) as pool:
        for _ in range(cpus):
            idle.put(stack.enter_context(Compiler()))
        running = {pool.submit(compile_one, variant): variant for variant in variants}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class Compiler:
    """A process that compiles variants one after another; starts when it is first needed, ends with its context."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._process = None

    def compile(self, variant: Variant, obj: Path, ptx: Path) -> None:
        """Make both files; `ptx` last: its presence says that both are there. Raises CompileError."""
        process = self._process = self._process or self._start()
        assert process.stdin and process.stdout
        with tempfile.TemporaryDirectory(dir=obj.parent.parent) as scratch:
            made, text = Path(scratch) / obj.name, Path(scratch) / ptx.name
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps([variant.to_dict(), str(made), str(text)]), file=process.stdin, flush=True)
            if (answer := process.stdout.readline()) != _DONE:
                ended = "" if answer else f"the compiler ended with status {process.wait()}:\n{self._said()}"
                raise CompileError(f"compiling {variant.symbol()} failed: {ended or json.loads(answer)}")
            obj.parent.mkdir(exist_ok=True)
            os.replace(made, obj)
            os.replace(text, ptx)

    def _start(self) -> subprocess.Popen[str]:
        dumps = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._errors = self._stack.enter_context(tempfile.TemporaryFile("w+"))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
        environment |= {
            "CUTE_DSL_KEEP": "ptx",
            "CUTE_DSL_LINEINFO": "1",
            "CUTE_DSL_DUMP_DIR": dumps,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        process = subprocess.Popen([sys.executable, "-m", __name__], env=environment, text=True, **pipes)
        self._stack.callback(process.wait)
        self._stack.callback(_close, process)
        return process

    def _said(self) -> str:
        """The end of what the compiler wrote to its error stream."""
        self._errors.seek(0)
        return self._errors.read().strip()[-4000:]


def _close(process: subprocess.Popen[str]) -> None:
    """End of its input ends the process."""
    assert process.stdin and process.stdout
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()


def _main() -> None:
    """The compiling process: a task per line of its input, answered by `_DONE` or a JSON text of what went wrong."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no answer
    for line in sys.stdin:
        description, obj, ptx = json.loads(line)
        try:
            _compile(variant_from_dict(description), obj, ptx)
            answers.write(_DONE)
        except Exception:
            answers.write(json.dumps(traceback.format_exc()[-4000:]) + "\n")
        answers.flush()


def _compile(variant: Variant, obj: str, ptx: str) -> None:
    from tsmla_kernels.registry import compile_variant

    sites = CallSites(Path(_sources()).parent)
    with sites.noted():
        compiled = compile_variant(variant)
    compiled.export_to_c(obj, function_name=variant.symbol(), export_only_tvm_ffi_symbols=True)
    text = compiled.__ptx__.rstrip("\n\0") + "\n"
    Path(ptx).write_text(text + sites.comments(text), "utf-8")


if __name__ == "__main__":
    _main()
