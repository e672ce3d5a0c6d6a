"""`python -m tsmla_emulator.prove.controls`: runs controls of installed packages; compares them with `stated.json`."""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import fnmatch
import importlib.metadata
import multiprocessing
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ...provenance import commit
from ..page import command_block
from . import cudnn, flash_attn_4, flashinfer, judging, tokenspeed_mla
from .control import STATED, Control, Package, Seen, Stated
from .running import run

SOURCES = (tokenspeed_mla, flash_attn_4, cudnn, flashinfer)
CUTLASS = "4.8.1"
"""The version of the compiler that findings are stated for: others make other PTX of the same sources."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run controls. Returns 0 when all is as stated, 1 when something differs, 2 when a package is missing or of
    another version."""
    parser = argparse.ArgumentParser(prog="python -m tsmla_emulator.prove.controls", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of controls' names, * and ? allowed; else all")
    parser.add_argument("--list", action="store_true", help="print the names, run none")
    parser.add_argument("--table", type=Path, help="write the results as Markdown")
    parser.add_argument("--machine-code", action="store_true", help="what ptxas made of the kernels: results alone")
    parser.add_argument("--seed", type=int, help="of the inputs; drawn when not given")
    given = parser.parse_args(arguments)
    chosen = [control for source in SOURCES for control in source.controls() if _named(control, given.names)]
    if not chosen:
        parser.error(f"no control's name contains {' or '.join(given.names)}; --list prints the names")
    if given.list:
        print(*(control.title for control in chosen), sep="\n")
        return 0
    if missing := lacking({control.package for control in chosen}):
        print(*missing, sep="\n", file=sys.stderr)
        return 2
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    words = ["python", "-m", "tsmla_emulator.prove.controls", *given.names, "--seed", str(seed)]
    command = [shlex.quote(word) for word in [*words, *(["--machine-code"] if given.machine_code else [])]]
    return _run(chosen, Stated.read(STATED), given.table, seed, command, given.machine_code)


def _named(control: Control, names: Sequence[str]) -> bool:
    return not names or any(fnmatch.fnmatch(control.title, f"*{name}*") for name in names)


def lacking(packages: set[Package]) -> list[str]:
    """Return what to install: a command for each package that is not there in the version that findings are
    stated for."""
    found = []
    for package in (*sorted(packages, key=lambda p: p.name), Package("nvidia-cutlass-dsl", CUTLASS)):
        try:
            version = importlib.metadata.version(package.name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version != package.version:
            wanted = " ".join((f"{package.name}=={package.version}", *package.needs))
            found.append(f"{package.name}: {version}; pip install --no-deps {wanted}")
    return found


def _run(
    controls: Sequence[Control], stated: Stated, table: Path | None, seed: int, command: list[str], machine_code: bool
) -> int:
    results: list[tuple[Control, Seen]] = []
    wrong: list[str] = []
    for number, control in enumerate(controls, 1):
        seen = _apart(control, seed, machine_code)
        results.append((control, seen))
        found = judging.problems(control, seen, stated, machine_code)
        wrong += found
        print(
            f"[{number}/{len(controls)}] {control.title}: {'DIFFERS' if found else 'as stated'}, {seen.seconds:.0f} s",
            *(f"    {problem}" for problem in found),
            sep="\n",
            flush=True,
        )
    page = judging.table(results, stated, _origin(controls, command))
    if table:
        table.write_text(page, "utf-8")
    else:
        print(page)
    return 1 if wrong else 0


def _origin(controls: Sequence[Control], command: Sequence[str]) -> str:
    """Return when, from which commit, with which versions and by which command a page was made."""
    names = {control.package.name for control in controls} | {"nvidia-cutlass-dsl", "apache-tvm-ffi", "torch"}
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in sorted(names))
    return "\n".join([f"{datetime.date.today()}, commit {commit()}, {versions}.", "", *command_block(command)])


def _apart(control: Control, seed: int, machine_code: bool) -> Seen:
    """Run a control in a process of its own: packages and the compiler remember for which GPU they worked."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
        try:
            return pool.submit(run, control, seed, machine_code).result()
        except concurrent.futures.process.BrokenProcessPool:
            return Seen(refused="its process ended")


if __name__ == "__main__":
    sys.exit(main())
