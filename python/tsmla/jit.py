"""Compile one variant now, through the same registry as the build, and keep the result on disk.

An entry is the exported object file and a small JSON beside it, written last, that holds the object's hash. The key is
what decides the bytes: kernel sources, compiler versions and flavour, host CPU, and the variant (in the symbol).
A damaged entry is a miss; a cache directory that cannot be written to costs a warning and a compile per process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import loader, settings, toolchain
from .errors import CacheMiss, CompileError, RuntimeLibraryError
from .manifest import file_sha256
from .variant import Variant

logger = logging.getLogger("tsmla")

_DAMAGE = (OSError, ValueError, TypeError, KeyError, CacheMiss)
TYPICAL_SECONDS = {"prefill": 6, "decode": 8, "pack": 3}
"""What a compile takes, import of the compiler included, on two cores of a server CPU; shown in a log line only."""


def load_cached(variant: Variant) -> Callable[..., None]:
    """The kernel from the on-disk cache. Raises CacheMiss when there is no sound entry."""
    entry = _entry(variant)
    if not entry.with_suffix(".json").is_file():
        raise CacheMiss(f"{entry.parent} has no {entry.name}")
    try:
        _check_entry(entry)
    except _DAMAGE as error:
        logger.warning("cache entry %s is damaged and not used: %s", entry, error)
        raise CacheMiss(f"{entry} is damaged: {error}") from error
    return _load_object(entry, variant.symbol())


def compile_now(variant: Variant) -> Callable[..., None]:
    """Compile, put into the cache, load. Logs a line before and after at WARNING, so that nobody sees a silent wait.

    Processes that want the same entry take turns: the first compiles, the others load what it wrote.
    Raises CompileError when the compiler is missing or fails.
    """
    entry = _entry(variant)
    with _locked(entry) as writable:
        if writable:
            with contextlib.suppress(*_DAMAGE, CompileError):
                _check_entry(entry)
                return _load_object(entry, variant.symbol())  # another process was first
        with tempfile.TemporaryDirectory(prefix="tsmla-") as scratch:
            compiled = _compile(variant, Path(scratch) / f"{variant.symbol()}.o")
            if writable:
                _store(compiled, entry)
            return _load_object(compiled, variant.symbol())


def cache_key() -> dict[str, Any]:
    """What, besides the variant, decides an object's bytes. Object files hold code for the CPU that compiled them."""
    try:
        flavour, digest = loader.runtime_library().parent.parent.name, toolchain.source_digest()
    except (RuntimeLibraryError, ModuleNotFoundError) as error:
        raise CompileError(f"cannot compile here: {error}") from error
    return {
        "sources": digest,
        "compilers": toolchain.versions(),
        "flavour": flavour,
        "host": platform.machine(),
        "cpu": _cpu_features(),
    }


def _entry(variant: Variant) -> Path:
    """Path of a variant's object file in the cache."""
    key = hashlib.sha256(json.dumps(cache_key(), sort_keys=True).encode()).hexdigest()[:20]
    return settings.cache_dir() / key / f"{variant.symbol()}.o"


def _cpu_features() -> str:
    try:
        found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return hashlib.sha256(found[1].encode()).hexdigest()[:20] if found else "unknown"


def _check_entry(entry: Path) -> None:
    """Raise one of _DAMAGE unless the object is there with the bytes that its record says."""
    expected = json.loads(entry.with_suffix(".json").read_text("utf-8"))["sha256"]
    if (actual := file_sha256(entry)) != expected:
        raise CacheMiss(f"it hashes to {actual}, its record says {expected}")


def _compile(variant: Variant, file: Path) -> Path:
    symbol = variant.symbol()
    about = TYPICAL_SECONDS[variant.family]
    logger.warning("compiling %s, about %d s", symbol, about)
    started = time.perf_counter()
    try:
        from tsmla_kernels.registry import compile_variant

        compile_variant(variant).export_to_c(str(file), function_name=symbol, export_only_tvm_ffi_symbols=True)
    except Exception as error:  # the compiler has no common exception type
        raise CompileError(f"compiling {symbol} failed: {type(error).__name__}: {error}") from error
    logger.warning("compiled %s in %.1f s", symbol, time.perf_counter() - started)
    return file


def _load_object(file: Path, symbol: str) -> Callable[..., None]:
    try:
        from cutlass.cute.runtime import load_module

        return load_module(str(file), enable_tvm_ffi=True)[symbol]
    except Exception as error:  # the compiler has no common exception type
        raise CompileError(f"{file} cannot be loaded: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[bool]:
    """Hold the entry's lock between processes; yields False when the cache directory cannot be written to."""
    with contextlib.ExitStack() as held:
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            stream = held.enter_context(open(entry.with_suffix(".lock"), "w"))
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("waiting for another process that compiles %s", entry.stem)
                fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("cache directory %s cannot be used, the result is kept in memory: %s", entry.parent, error)
            held.close()
            yield False
            return
        yield True


def _store(compiled: Path, entry: Path) -> None:
    record = json.dumps({"sha256": file_sha256(compiled), "key": cache_key()}, indent=1, sort_keys=True)
    try:
        _write(entry, compiled.read_bytes())
        _write(entry.with_suffix(".json"), record.encode())
    except OSError as error:
        logger.warning("%s could not be written, the result is kept in memory: %s", entry, error)


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
