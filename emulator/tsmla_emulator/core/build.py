"""Builds the interpreter's shared library once per source digest and keeps it in the user's cache.

TSMLA_EMULATOR_CACHE names another directory. Compiles with the clang of the `ziglang` package. A machine without it
takes what `portable` made elsewhere, which TSMLA_EMULATOR_CORE names.
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
    "-O3", "-std=c++17", "-fPIC", "-fno-sanitize=all", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
)  # fmt: skip
PORTABLE = ("-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64_v3")
"""For any x86-64 of the last ten years, and glibc from 2.28 on."""


def library() -> Path:
    """Path of the shared library, built if it is not there yet. Raises RuntimeError when TSMLA_EMULATOR_CORE names one
    of other sources."""
    if named := os.environ.get("TSMLA_EMULATOR_CORE"):
        if Path(named).name != (expected := portable_name()):
            raise RuntimeError(f"TSMLA_EMULATOR_CORE is {named}; of these sources is {expected}")
        return Path(named)
    if platform.machine() == "x86_64" and "avx2" in _processor().split():
        return portable()  # as fast as what is made for this processor alone
    return _built(_cache_directory(), ("-mcpu=native",), _processor())


def portable() -> Path:
    """Path of a shared library that other machines can run, too."""
    return _built(_cache_directory(), PORTABLE, "")


def portable_name() -> str:
    """Its file's name, which stands for the sources."""
    return f"core-{_digest(PORTABLE, '')}.so"


def _generated() -> dict[str, str]:
    return {"complex_ops.inc": enum_text(), "simple_ops.inc": switch_text()}


def _digest(target: tuple[str, ...], processor: str) -> str:
    digest = hashlib.sha256(repr((_FLAGS, target, _generated(), processor)).encode())
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _built(directory: Path, target: tuple[str, ...], processor: str) -> Path:
    made = directory / f"core-{_digest(target, processor)}.so"
    if not made.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _build(directory, made, target, processor)
    return made


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


def _build(directory: Path, library: Path, target: tuple[str, ...], processor: str) -> None:
    """Objects are kept by the digest of all that they read, so that a change recompiles one file."""
    generated = _generated()
    include = directory / "generated"
    include.mkdir(exist_ok=True)
    for name, text in generated.items():
        if not (include / name).exists() or (include / name).read_text() != text:
            (include / name).write_text(text)
    headers = hashlib.sha256(repr((_FLAGS, target, generated, processor)).encode())
    for path in sorted(_HERE.glob("*.h")):
        headers.update(path.read_bytes())

    def compile_one(source: Path) -> Path:
        digest = headers.copy()
        digest.update(source.read_bytes())
        made = directory / f"{source.stem}-{digest.hexdigest()[:16]}.o"
        if not made.exists():
            _run([*_compiler(), *target, *_FLAGS, "-I", str(_HERE), "-I", str(include), "-c", str(source)], made)
        return made

    with ThreadPoolExecutor(max_workers=2) as pool:
        made = list(pool.map(compile_one, sorted(_HERE.glob("*.cpp"))))
    _run([*_compiler(), *target, "-shared", "-pthread", *map(str, made)], library)


def _compiler() -> list[str]:
    return [sys.executable, "-m", "ziglang", "c++"]


def _run(command: list[str], made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        part = Path(scratch) / made.name
        done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"cannot build the emulator's core: {' '.join(command)}\n{done.stderr}")
        os.replace(part, made)
