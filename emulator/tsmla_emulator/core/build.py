"""Builds the interpreter's shared library once per source digest and keeps it in the user's cache.

TSMLA_EMULATOR_CACHE names another directory. Compiles with the clang of the `ziglang` package.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..ptx.encoding import enum_text
from ..ptx.simple_ops import switch_text

_HERE = Path(__file__).parent
_FLAGS = (
    "-O3", "-std=c++17", "-mcpu=native", "-fPIC", "-fno-sanitize=all", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
)  # fmt: skip


def library() -> Path:
    """Path of the shared library, built if it is not there yet."""
    generated = {"complex_ops.inc": enum_text(), "simple_ops.inc": switch_text()}
    sources = sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")])
    digest = hashlib.sha256(repr((_FLAGS, generated, _processor())).encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    directory = _cache_directory()
    target = directory / f"core-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _build(directory, target, generated)
    return target


def _cache_directory() -> Path:
    named = os.environ.get("TSMLA_EMULATOR_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsmla-emulator"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _build(directory: Path, target: Path, generated: dict[str, str]) -> None:
    """Objects are kept by the digest of all that they read, so that a change recompiles one file."""
    include = directory / "generated"
    include.mkdir(exist_ok=True)
    for name, text in generated.items():
        if not (include / name).exists() or (include / name).read_text() != text:
            (include / name).write_text(text)
    headers = hashlib.sha256(repr((_FLAGS, generated, _processor())).encode())
    for path in sorted(_HERE.glob("*.h")):
        headers.update(path.read_bytes())

    def compile_one(source: Path) -> Path:
        digest = headers.copy()
        digest.update(source.read_bytes())
        made = directory / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not made.exists():
            _run([*_compiler(), *_FLAGS, "-I", str(_HERE), "-I", str(include), "-c", str(source)], made)
        return made

    with ThreadPoolExecutor(max_workers=2) as pool:
        made = list(pool.map(compile_one, sorted(_HERE.glob("*.cpp"))))
    _run([*_compiler(), "-shared", "-pthread", *map(str, made)], target)


def _compiler() -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++"]


def _run(command: list[str], made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        part = Path(scratch) / made.name
        done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot build the emulator's core: {' '.join(command)}\n{done.stderr}")
        os.replace(part, made)
