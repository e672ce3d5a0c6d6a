"""Builds the interpreter's shared library once per source digest and keeps it in the user's cache, until nobody has
taken it for `UNUSED_DAYS`.

TSMLA_EMULATOR_CACHE names another directory. Compiles with the clang of the `ziglang` package. A machine without it
takes what `portable` made elsewhere, which TSMLA_EMULATOR_CORE names.

Neither libc++ nor compiler-rt is linked, which `ziglang` would have to build first: that took 70 s of a core, twice as
long as the interpreter itself takes. The library needs the machine's libstdc++, as torch does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..ptx.encoding import enum_text
from ..ptx.simple_ops import switch_text
from ..sass import lane_ops

Tell = Callable[[int, int], None]
"""What hears of progress: how many files are compiled, of how many."""

_HERE = Path(__file__).parent
_FLAGS = (
    "-O3", "-g0", "-std=c++17", "-fPIC", "-fno-sanitize=all", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
)  # fmt: skip
_LINK_FLAGS = ("-shared", "-nostdlib", "-s", "-z", "undefs")
UNUSED_DAYS = 30
_DIGEST = "[0-9a-f]" * 16
_LONGEST = ("lane_switch.cpp", "sass_switch.cpp")
"""They take longest, and start first."""
PORTABLE = ("-target", "x86_64-linux-gnu.2.28", "-mcpu=x86_64_v3")
"""For any x86-64 of the last ten years, and glibc from 2.28 on."""


def library(tell: Tell = lambda done, count: None) -> Path:
    """Path of the shared library, built if it is not there yet. Raises RuntimeError when TSMLA_EMULATOR_CORE names one
    of other sources."""
    if named := os.environ.get("TSMLA_EMULATOR_CORE"):
        if Path(named).name != (expected := portable_name()):
            raise RuntimeError(f"TSMLA_EMULATOR_CORE is {named}; of these sources is {expected}")
        return Path(named)
    if platform.machine() == "x86_64" and "avx2" in _processor().split():
        return portable(tell)  # as fast as what is made for this processor alone
    inline = ["-mno-outline-atomics"] if platform.machine() == "aarch64" else []  # others are in compiler-rt
    return _built(cache_directory(), ("-mcpu=native", *inline), _processor(), tell)


def portable(tell: Tell = lambda done, count: None) -> Path:
    """Path of a shared library that other machines can run, too."""
    return _built(cache_directory(), PORTABLE, "", tell)


def portable_name() -> str:
    """Its file's name, which stands for the sources."""
    return f"core-{_digest(PORTABLE, '')}.so"


def _generated() -> dict[str, str]:
    return {"complex_ops.inc": enum_text(), "simple_ops.inc": switch_text(), "sass_ops.inc": lane_ops.switch_text()}


def _digest(target: tuple[str, ...], processor: str) -> str:
    digest = hashlib.sha256(repr((_FLAGS, _LINK_FLAGS, target, _generated(), processor)).encode())
    for path in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _built(directory: Path, target: tuple[str, ...], processor: str, tell: Tell) -> Path:
    made = directory / f"core-{_digest(target, processor)}.so"
    if not made.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _build(directory, made, target, processor, tell)
                drop_unused([*directory.glob(f"core-{_DIGEST}.so"), *directory.glob(f"*-{_DIGEST}.o")])
    mark_used(made)
    return made


def cache_directory() -> Path:
    """Return where what was built is kept; it need not exist."""
    named = os.environ.get("TSMLA_EMULATOR_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tsmla-emulator"


def mark_used(path: Path) -> None:
    """Note that something kept was taken now, for `drop_unused`."""
    with contextlib.suppress(OSError):  # a cache that only others may write to
        os.utime(path)


def drop_unused(paths: Iterable[Path]) -> None:
    """Remove those files and directories that nobody made or took for `UNUSED_DAYS`."""
    oldest = time.time() - UNUSED_DAYS * 86400
    for path in paths:
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _build(directory: Path, library: Path, target: tuple[str, ...], processor: str, tell: Tell) -> None:
    """Objects are kept by the digest of all that they read, so that a change recompiles one file."""
    generated = _generated()
    headers = hashlib.sha256(repr((_FLAGS, target, generated, processor)).encode())
    for path in sorted(_HERE.glob("*.h")):
        headers.update(path.read_bytes())
    sources = sorted(_HERE.glob("*.cpp"), key=lambda source: (source.name not in _LONGEST, source.name))
    tell(0, len(sources))
    with tempfile.TemporaryDirectory(dir=directory) as name:
        scratch = Path(name)
        for name, text in generated.items():
            (scratch / name).write_text(text)
        parsed, runtime = scratch / "all.pch", scratch / "libstdc++.so.6"
        compiling = (*target, *_FLAGS, "-I", str(_HERE), "-I", str(scratch))
        _zig(scratch, *compiling, "-x", "c++-header", str(_HERE / "all.h"), made=parsed)

        def compile_one(source: Path) -> Path:
            digest = headers.copy()
            digest.update(source.read_bytes())
            made = directory / f"{source.stem}-{digest.hexdigest()[:16]}.o"
            mark_used(made)
            if not made.exists():
                _zig(scratch, *compiling, "-include-pch", str(parsed), "-c", str(source), made=made)
            return made

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            running = [pool.submit(compile_one, source) for source in sources]
            for done, _ in enumerate(as_completed(running), 1):
                tell(done, len(sources))
            objects = [str(made.result()) for made in running]
        # A library of this name that holds nothing: the core asks for the one that the machine has, as torch does.
        _zig(scratch, *target, *_LINK_FLAGS, f"-Wl,-soname={runtime.name}", "-x", "c", os.devnull, made=runtime)
        _zig(scratch, *target, *_LINK_FLAGS, *objects, "-Wl,--no-as-needed", str(runtime), made=library)


def _zig(scratch: Path, *arguments: str, made: Path) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", *arguments]
    caches = {name: str(scratch / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    part = scratch / f"{made.name}.part"
    done = subprocess.run([*command, "-o", str(part)], env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cannot build the emulator's core: {' '.join(command)}\n{done.stderr}")
    os.replace(part, made)
