"""Compile one variant now, through the same registry as the build, and keep the result on disk.

An entry is the exported object file and a small JSON beside it, written last, of its hash, symbol and key. The key is
what decides the bytes: kernel sources, compiler versions and flavour, host CPU, and the variant (in the symbol).
A damaged entry is a miss; a cache directory that cannot be written to costs a warning and a compile per process. So
does one that another user could have put code into (`trust`): what the cache holds is run. A directory of root's that
everyone may read serves every user; users' own directories serve nobody else.
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

from ..errors import CacheMiss, CompileError, RuntimeLibraryError
from ..identity.variant import Variant
from . import loader, settings, toolchain, trust
from .manifest import parse_json

logger = logging.getLogger("tsmla")

_DAMAGE = (OSError, ValueError, TypeError, KeyError, RecursionError, CacheMiss)
_MOST_RECORD_BYTES, _MOST_CODE_BYTES = 1 << 20, 1 << 30
TYPICAL_SECONDS = {
    "prefill": 6,
    "decode": 8,
    "pack": 3,
    "write_cache": 3,
    "read_cache": 3,
    "quantize_q": 3,
    "key_mask": 3,
}
"""Seconds that a compile takes on two cores of a server CPU, import of the compiler included; for a log line only."""


def load_cached(variant: Variant) -> Callable[..., None]:
    """Return the kernel of a variant from the on-disk cache. Raises CacheMiss when there is no sound entry."""
    entry = _entry(variant)
    try:
        if reason := _why_untrusted(entry.parent):
            raise CacheMiss(reason)
        os.lstat(_record(entry))
    except FileNotFoundError:
        raise CacheMiss(f"{entry.parent} has no {entry.name}") from None
    except OSError as error:
        raise CacheMiss(f"{entry.parent} cannot be read: {error}") from error
    try:
        code = _read_entry(entry)
    except _DAMAGE as error:
        logger.warning("cache entry %s is damaged and not used: %s", entry, error)
        raise CacheMiss(f"{entry} is damaged: {error}") from error
    return _load_object(code, variant.symbol())


def compile_now(variant: Variant) -> tuple[Callable[..., None], str]:
    """Compile a variant, put it into the cache and load it; return the kernel and "jit".

    Processes that want the same entry take turns: the first compiles, the others load what it wrote and return
    "cached". A line is logged before and after at WARNING, so that nobody sees a silent wait. Raises CompileError when
    the compiler is missing, cannot make code for the architecture, or fails.
    """
    if reason := toolchain.why_not_compiled(variant.arch):
        raise CompileError(reason)
    entry = _entry(variant)
    with _locked(entry) as writable:
        if writable:
            with contextlib.suppress(*_DAMAGE, CompileError):
                return _load_object(_read_entry(entry), variant.symbol()), "cached"
        code = _compile(variant)
        if writable:
            _store(code, entry)
        return _load_object(code, variant.symbol()), "jit"


def cache_key() -> dict[str, Any]:
    """Return what, besides the variant, decides an object file's bytes. It holds code for the CPU that compiled it."""
    try:
        flavour, digest = loader.runtime_library().parent.parent.name, toolchain.source_digest()
    except (RuntimeLibraryError, ModuleNotFoundError, OSError) as error:
        raise CompileError(f"cannot compile here: {error}") from error
    if reason := toolchain.why_tvm_ffi_not_accepted():
        raise CompileError(f"cannot compile here: {reason}")
    return {
        "sources": digest,
        "compilers": toolchain.versions(),
        "flavour": flavour,
        "host": platform.machine(),
        "cpu": _cpu_features(),
    }


def _entry(variant: Variant) -> Path:
    """Path of a variant's object file in the cache."""
    return settings.cache_dir() / _key_name(cache_key()) / f"{variant.symbol()}.o"


def _key_name(key: dict[str, Any]) -> str:
    """Name of the directory of everything that was compiled under a key."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]


def _cpu_features() -> str:
    try:
        found = re.search(rb"^(?:flags|Features)\s*:\s*(.*)$", Path("/proc/cpuinfo").read_bytes(), re.MULTILINE)
    except OSError:
        found = None
    return hashlib.sha256(found[1]).hexdigest()[:20] if found else "unknown"


def _record(entry: Path) -> Path:
    """The description beside an object file."""
    return entry.with_suffix(".json")


def _why_untrusted(directory: Path) -> str | None:
    """Return why nothing in a directory of the cache is run, and what to do; None when it may be. Raises OSError."""
    reason = trust.why_directory_untrusted(settings.cache_dir(), directory)
    return reason and (
        f"{reason}; code that lies there is not run. Set {settings.CACHE.name} to a directory of this user's or root's "
        "that nobody else can write to"
    )


def _read_entry(entry: Path) -> bytes:
    """The object code in a trusted directory. Raises one of _DAMAGE unless its bytes are those that its record says."""
    record = parse_json(_read_own(_record(entry), _MOST_RECORD_BYTES))
    if record["symbol"] != entry.stem:
        raise CacheMiss(f"it is of {record['symbol']}, its record says")
    if _key_name(record["key"]) != entry.parent.name:
        raise CacheMiss("it was made from other sources or by another compiler, its record says")
    code = _read_own(entry, _MOST_CODE_BYTES)
    if (actual := hashlib.sha256(code).hexdigest()) != record["sha256"]:
        raise CacheMiss(f"it hashes to {actual}, its record says {record['sha256']}")
    return code


def _read_own(file: Path, most: int) -> bytes:
    with trust.open_regular(file, follow_links=False) as stream:
        if reason := trust.why_untrusted(file, os.fstat(stream.fileno())):
            raise CacheMiss(reason)
        return trust.read_bounded(stream, most)


def _compile(variant: Variant) -> bytes:
    """The object code of a variant, made now."""
    symbol = variant.symbol()
    about = TYPICAL_SECONDS[variant.family]
    try:
        scratch = tempfile.TemporaryDirectory(prefix="tsmla-", ignore_cleanup_errors=True)
    except OSError as error:
        raise CompileError(
            f"compiling {symbol} needs a temporary directory: {error}; set TMPDIR to one that can be written to"
        ) from error
    with scratch:
        file = Path(scratch.name) / f"{symbol}.o"
        logger.warning("compiling %s, about %d s", symbol, about)
        started = time.perf_counter()
        try:
            from tsmla_kernels.registry import compile_variant

            compile_variant(variant).export_to_c(str(file), function_name=symbol, export_only_tvm_ffi_symbols=True)
            code = file.read_bytes()
        except Exception as error:  # the compiler has no common exception type
            raise CompileError(f"compiling {symbol} failed: {_described(error)}") from error
    logger.warning("compiled %s in %.1f s", symbol, time.perf_counter() - started)
    return code


def _load_object(code: bytes, symbol: str) -> Callable[..., None]:
    """Return the function in object code.

    CuTe DSL takes a path and reads the file. The path given is of a file in memory that nobody else can name, so that
    the bytes which are run are those which were hashed.
    """
    try:
        from cutlass.cute.runtime import load_module

        with os.fdopen(os.memfd_create(symbol), "wb") as file:
            file.write(code)
            file.flush()
            return load_module(f"/proc/self/fd/{file.fileno()}", enable_tvm_ffi=True)[symbol]
    except Exception as error:  # the compiler has no common exception type
        raise CompileError(f"the object code of {symbol} cannot be loaded: {_described(error)}") from error


def _described(error: Exception) -> str:
    """An error of the compiler, and what to do where it cannot be imported."""
    advice = f": {toolchain.why_no_cutlass()}" if getattr(error, "name", None) == "cutlass" else ""
    return f"{type(error).__name__}: {error}{advice}"


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[bool]:
    """Hold the entry's lock between processes; yields False when the cache directory cannot be written to."""
    with contextlib.ExitStack() as held:
        try:
            # Both times before anything is made or opened inside: until then another user might exchange what is there.
            for directory in (settings.cache_dir(), entry.parent):
                trust.make_directory(directory)
                if reason := _why_untrusted(directory):
                    raise OSError(reason)
            # Neither truncated nor followed if it is a link: nothing that lies under this name is changed.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(entry.with_suffix(".lock"), flags, 0o600)
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("waiting for another process that compiles %s", entry.stem)
                fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("cache directory %s cannot be used, the result is kept in memory: %s", entry.parent, error)
            held.close()
            yield False
            return
        yield True


def _store(code: bytes, entry: Path) -> None:
    made = {"sha256": hashlib.sha256(code).hexdigest(), "symbol": entry.stem, "key": cache_key()}
    try:
        _write(entry, code)
        _write(_record(entry), json.dumps(made, indent=1, sort_keys=True).encode())
    except OSError as error:
        logger.warning("%s could not be written, the result is kept in memory: %s", entry, error)


def _write(path: Path, content: bytes) -> None:
    """Put a file in place, readable by this user only, in one step."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
