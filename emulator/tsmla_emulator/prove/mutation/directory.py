"""A hunt for mutants in a directory, which can be carried to a machine with many cores and no compilers.

hunt.json           symbols, and when and of which commit they were compiled
core-....so         the interpreter, for machines that cannot build it
compiled/SYMBOL.*   PTX and library of each variant
records/            calls of them; not needed any more when all is found
found/KERNEL.jsonl  what runs have shown, as it came
found/KERNEL.json   what became of each mutant, once that is known
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ...run.core import build
from ...run.record import same
from ..page import made
from .hunt import Kept, Pace, TimeIsUp, hunt
from .mutate import Findings, Result, Subject
from .reasons import Reasons
from .sites import Site
from .table import kernels, recorded

_FORK = multiprocessing.get_context("fork")
_LATE = 3
"""Exit status of a process whose time was up."""


class Hunt:
    """A hunt in a directory that `prepare` has filled. Raises OSError and ValueError where it is none."""

    def __init__(self, directory: Path):
        from .. import check

        stated = json.loads((directory / "hunt.json").read_text("utf-8"))
        self.directory = directory
        self.symbols: list[str] = stated["symbols"]
        self.made: str = stated["made"]
        self._kernels = {symbol: kernels(check.find(symbol)) for symbol in self.symbols}

    @classmethod
    def prepare(cls, directory: Path, symbols: Sequence[str]) -> Hunt:
        """Compile variants, unless it was done before. Raises ValueError and CompileError."""
        from ...run.host.compile import compile_all, compile_for_emulation
        from .. import check

        variants = [check.find(symbol) for symbol in symbols]
        for variant, _ in compile_all(variants):
            found = compile_for_emulation(variant)
            files = _compiled(directory, variant.symbol())
            files[0].parent.mkdir(parents=True, exist_ok=True)
            for source, target in zip((found.ptx, found.library), files, strict=True):
                shutil.copyfile(source, target)
        shutil.copy(build.portable(), directory)
        (directory / "hunt.json").write_text(json.dumps({"symbols": [*symbols], "made": made()}), "utf-8")
        return cls(directory)

    def left(self) -> list[str]:
        """Return the kernels of which not everything is known."""
        return [name for symbol in self.symbols for name in self._left(symbol)]

    def findings(self) -> dict[str, Findings]:
        """Return the findings of all kernels. Raises OSError when some are left."""
        names = [name for symbol in self.symbols for name in self._kernels[symbol]]
        return {name: _read(json.loads(self._path(name, "json").read_text("utf-8"))) for name in names}

    def go_on(
        self,
        processes: int,
        seconds: float | None = None,
        reasons: Reasons = Reasons(),  # noqa: B008 -- frozen
        progress: Callable[[str], None] = print,
    ) -> bool:
        """Try out what is left, all kernels side by side. Returns False when the time was too short: what was found is
        kept.

        seconds: with 0, nothing is run, and the answer says whether something is left.
        reasons: for survivors.

        Raises RuntimeError when a kernel cannot be tried; the others are.
        """
        if seconds is not None and seconds <= 0:
            return not self.left()
        if importlib.util.find_spec("ziglang") is None:
            os.environ["TSMLA_EMULATOR_CORE"] = str(next(self.directory.glob("core-*.so")).resolve())
        pace = Pace.of(processes, seconds)
        waiting = [symbol for symbol in self.symbols if self._left(symbol)]
        running: dict[Any, tuple[Any, Sequence[str]]] = {}
        failed = []

        def start(what: str, then: Sequence[str], task: Callable[..., None], *given: Any) -> None:
            process = _FORK.Process(target=_ends, args=(task, *given), name=what)
            process.start()
            running[process.sentinel] = process, then

        for symbol in waiting:
            threads = max(1, processes // len(waiting))
            start(f"calls of {symbol}", self._left(symbol), self._record, symbol, threads)
        while running:
            for sentinel in connection.wait([*running]):
                process, then = running.pop(sentinel)
                process.join()
                if process.exitcode not in (0, _LATE):
                    failed.append(process.name)
                for kernel in () if process.exitcode else then:
                    start(kernel, (), self._try_out, kernel, pace, reasons, progress)
        if failed:
            raise RuntimeError(f"failed: {'; '.join(failed)}")
        return not self.left()

    def _record(self, symbol: str, threads: int) -> None:
        import torch

        from ...run.host.compile import Compiled

        torch.set_num_threads(threads)
        ptx, library = _compiled(self.directory, symbol)
        directory = self.directory / "records"
        of = directory / symbol / "of"
        if not of.exists() or of.read_text("utf-8") != _digest(ptx):
            shutil.rmtree(directory / symbol, ignore_errors=True)
        recorded(symbol, directory, lambda variant: Compiled(library.resolve(), ptx.resolve(), symbol))
        of.write_text(_digest(ptx), "utf-8")

    def _try_out(self, kernel: str, pace: Pace, reasons: Reasons, progress: Callable[[str], None]) -> None:
        symbol = kernel.partition(", ")[0]
        calls = recorded(symbol, self.directory / "records")[kernel]
        with pace.gate:
            subject = Subject.of_files(kernel, *calls)
        of = self._of(symbol)
        kept = Kept(self._path(kernel, "jsonl"), f"{of} {same([*calls[1], *calls[2]])}")
        found = hunt(subject, pace, progress, lambda site: reasons.of(kernel, site) is not None, kept)
        path = self._path(kernel, "new")
        path.write_text(json.dumps({"of": of, **dataclasses.asdict(found)}), "utf-8")
        path.replace(self._path(kernel, "json"))

    def _left(self, symbol: str) -> list[str]:
        def is_found(name: str) -> bool:
            path = self._path(name, "json")
            return path.exists() and json.loads(path.read_text("utf-8"))["of"] == self._of(symbol)

        return [name for name in self._kernels[symbol] if not is_found(name)]

    def _of(self, symbol: str) -> str:
        """Return a text that names what results are of: the kernel's text and the interpreter's sources."""
        return f"{_digest(_compiled(self.directory, symbol)[0])} {build.portable_name()}"

    def _path(self, name: str, suffix: str) -> Path:
        return self.directory / "found" / f"{re.sub('[^a-z0-9_]+', '-', name)}.{suffix}"


def _ends(task: Callable[..., None], *given: Any) -> None:
    """Run a task in a process of its own; its exit status says how it went."""
    try:
        task(*given)
    except TimeIsUp:
        sys.exit(_LATE)


def _compiled(directory: Path, symbol: str) -> tuple[Path, Path]:
    return directory / "compiled" / f"{symbol}.ptx", directory / "compiled" / f"{symbol}.so"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:24]


def _read(found: dict[str, Any]) -> Findings:
    results = [Result(**{**result, "site": Site(**result["site"])}) for result in found["results"]]
    return Findings(results, found["lenient"])
