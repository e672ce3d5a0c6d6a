"""Links exported CuTe DSL objects with the test double in place of NVIDIA's runtime library; results are kept by
content, until nobody has taken them for `core.build.UNUSED_DAYS`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..core.build import drop_unused, mark_used

DOUBLE = Path(__file__).with_name("double.c")
FLAGS = ("-shared", "-nostdlib", "-fno-builtin", "-std=c17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wl,-z,now")


class LinkError(RuntimeError):
    """An object could not be linked for emulation; the text holds what the linker said."""


def cache_directory() -> Path:
    """Return where linked libraries and compiled variants are kept; it need not exist. TSMLA_CACHE_DIR moves it."""
    return Path(os.environ.get("TSMLA_CACHE_DIR") or "~/.cache/tsmla").expanduser() / "emulator"


def link(exported: Path) -> Path:
    """Return a loadable library of an object (.o) or LLVM IR (.ll) that `export_to_c` wrote; it is linked once per
    content.

    The library defines the whole CUDA side itself with hidden symbols, so that a runtime library loaded by somebody
    else in the process cannot take its place, and needs nothing but libtvm_ffi.so.
    """
    exported = Path(exported)
    try:
        content = exported.read_bytes()
    except OSError as error:
        raise LinkError(f"{exported} cannot be read: {error}") from error
    key = hashlib.sha256(DOUBLE.read_bytes() + "\0".join(FLAGS).encode() + content).hexdigest()
    library = cache_directory() / "libraries" / f"{key[:32]}.so"
    for directory in exported.parents:
        if directory.parent == cache_directory():  # a compiled variant, which nobody takes without its library
            mark_used(directory)
    if library.exists():
        mark_used(library)
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / "linked.so"
        quiet = ["-Wno-override-module"] if exported.suffix == ".ll" else []
        _zig(scratch, *FLAGS, *quiet, DOUBLE, exported.resolve(), f"-L{_tvm_ffi() / 'lib'}", "-ltvm_ffi", "-o", made)
        os.replace(made, library)
    drop_unused([*library.parent.glob("*.so"), *cache_directory().glob("[0-9a-f]" * 32)])
    return library


def _tvm_ffi() -> Path:
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or not spec.submodule_search_locations:
        raise LinkError("tvm_ffi is not installed: pip install apache-tvm-ffi")
    return Path(next(iter(spec.submodule_search_locations)))


def _zig(directory: str, *arguments: str | Path) -> None:
    caches = {name: str(Path(directory) / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    command = [sys.executable, "-m", "ziglang", "cc", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True)
    if done.returncode:
        raise LinkError(f"zig cc {' '.join(command[4:])} failed:\n{done.stderr.strip()[-4000:]}")
