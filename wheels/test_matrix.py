"""Does a wheel work under every Python, with the oldest and the newest of what it requires?

    python wheels/test_matrix.py WHEEL [--python PATH...] [--corners]

For each interpreter and each end of the ranges in the wheel's metadata, a fresh environment: the wheel is installed,
`tsmla verify` loads every library and asks every kernel, and one kernel is compiled just in time. Needs a package index
and no GPU; torch, which has no range, is left out. --corners: also oldest with newest.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import archive

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
COMPILE = """
import platform
from importlib.metadata import version
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PackVariant
from tsmla_kernels.registry import compile_variant
compile_variant(PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128))
print(platform.python_version(), *(f"{name} {version(name)}" for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")))
"""


def interpreters() -> dict[str, str]:
    """Return version -> path of the interpreters that are found: where pyenv and uv keep theirs, and on PATH."""
    kept = [*Path.home().glob(".pyenv/versions/*/bin"), *Path.home().glob(".local/share/uv/python/*/bin")]
    path = os.pathsep.join([*map(str, kept), os.environ.get("PATH", "")])
    found = {}
    for version in PYTHONS:
        named = shutil.which(f"python{version}", path=path)
        if named and not subprocess.run([named, "-c", "import venv, ensurepip"], capture_output=True).returncode:
            found[version] = named
    return found


def ends(ranges: dict[str, str], corners: bool) -> dict[str, list[str]]:
    """Return the name of each end of the ranges -> requirements that pip is given for it."""
    oldest = {name: f"{name}=={_lower(name, text)}" for name, text in ranges.items()}
    newest = {name: f"{name}{text}" for name, text in ranges.items()}
    found = {"oldest": list(oldest.values()), "newest": list(newest.values())}
    if corners:
        for chosen in itertools.product((oldest, newest), repeat=len(ranges)):
            made = [choice[name] for choice, name in zip(chosen, ranges, strict=True)]
            if made not in found.values():
                found[" ".join("oldest" if choice is oldest else "newest" for choice in chosen)] = made
    return found


def _lower(name: str, text: str) -> str:
    bound = re.search(r">=([^,]+)", text)
    if bound is None:
        raise ValueError(f"{name}{text} has no lower end")
    return bound[1]


def try_one(interpreter: str, wheel: Path, wanted: list[str]) -> tuple[bool, str]:
    """Return whether everything worked in a fresh environment, and what was installed or the end of what failed."""
    with tempfile.TemporaryDirectory() as scratch:
        python = str(Path(scratch, "venv", "bin", "python"))
        steps = [
            [interpreter, "-m", "venv", str(Path(scratch, "venv"))],
            [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", *wanted],
            [python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel.absolute())],
            [python, "-m", "tsmla", "verify"],
            [python, "-c", COMPILE],
        ]
        ours = ("PYTHON", "VIRTUAL", "TSMLA")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        for step in steps:
            done = subprocess.run(step, cwd=scratch, env=kept, capture_output=True, text=True)
            if done.returncode:
                return False, f"{' '.join(step[1:4])} failed:\n{(done.stdout + done.stderr).strip()[-1500:]}"
        return True, done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="wheels/test_matrix.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=archive.wheel_file)
    parser.add_argument("--python", nargs="+", help="interpreters; default: all that are found", metavar="PATH")
    parser.add_argument("--corners", action="store_true", help="also the oldest of one with the newest of another")
    asked = parser.parse_args()
    found = {path: path for path in asked.python} if asked.python else interpreters()
    if missing := [] if asked.python else [version for version in PYTHONS if version not in found]:
        print(f"not tried, no interpreter found: {', '.join(missing)}", flush=True)
    ranges = {name: text for name, text in archive.requirements(asked.wheel).items() if text}
    failed = not found
    for python, (end, wanted) in itertools.product(found, ends(ranges, asked.corners).items()):
        start = time.perf_counter()
        passed, said = try_one(found[python], asked.wheel, wanted)
        failed |= not passed
        outcome = f"{'passed' if passed else 'FAILED'}, {time.perf_counter() - start:.0f} s"
        print(f"{python} {end}: {outcome}; {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
