"""Finds the kernel of a variant: override, shipped library, compile cache, compile now, or an error that says what was
tried.

A variant stays what it was resolved to for the life of the process; `forget` makes changed settings count.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import KernelUnavailable, LibraryError, SettingError, TsmlaError, UnsupportedError
from ..identity.arch import SHIPPED_ARCHS, Arch
from ..identity.support import why_unsupported
from ..identity.variant import Variant
from . import jit, loader, manifest, settings, toolchain, trust

logger = logging.getLogger("tsmla")


class Resolved(NamedTuple):
    """A kernel and the step that served it: "override", "shipped", "cached" or "jit"."""

    function: Callable[..., None]
    step: str


calls: dict[tuple, Any] = {}
"""What serves a call -> by the key of its kind: everything that an operator looked at to find it. Keys start with the
operator's name.

A call of a kind seen before neither examines its arguments again nor makes a variant. `keep` adds to it, and `forget`
empties it.
"""
_MOST_CALLS = 4096
_functions: dict[Variant, Callable[..., None]] = {}
_resolved: dict[Variant, Resolved] = {}
_lock = threading.RLock()


def kernel(variant: Variant) -> Callable[..., None]:
    """The kernel of a variant: call it with positional arguments, on torch's current stream.

    Raises UnsupportedError when the variant cannot exist, LibraryError or ManifestError when the library that
    TSMLA_FMHA_BINARY_SO names cannot serve it, and KernelUnavailable when no step can.
    """
    function = _functions.get(variant)
    return function if function is not None else resolve(variant).function


def resolve(variant: Variant) -> Resolved:
    """Find the kernel of a variant, and the step that served it. Raises what `kernel` raises."""
    with _lock:
        found = _resolved.get(variant)
        if found is None:
            found = _resolved[variant] = _search(variant)
            _functions[variant] = found.function
            logger.info("%s: %s", variant.symbol(), found.step)
    return found


def served() -> dict[Variant, str]:
    """Every variant resolved so far in this process, and the step that served it."""
    with _lock:
        return {variant: found.step for variant, found in _resolved.items()}


def keep(kind: tuple, served: Any) -> Any:
    """Keep what serves calls of a kind in `calls`, and return it. Kinds are few in practice; their number is bounded
    all the same."""
    if len(calls) >= _MOST_CALLS:
        calls.clear()
    calls[kind] = served
    return served


def forget() -> None:
    """Drop what was resolved, so that the next call reads settings and libraries again. Loaded code stays mapped."""
    with _lock:
        calls.clear()
        _functions.clear()
        _resolved.clear()
        _read_shipped.cache_clear()
        _source_digest.cache_clear()


def shipped_library(family: str, arch: Arch) -> loader.Library:
    """The loaded library of this installation for a family and architecture.

    Raises ManifestError or LibraryError with the reason when there is none that can serve.
    """
    directory = toolchain.shipped_libraries()
    held = _read_shipped(directory)
    record = next((r for r in held.libraries if (r.manifest.family, r.manifest.arch) == (family, arch)), None)
    if record is None:
        how = "" if arch in SHIPPED_ARCHS else "; those are built on request: docs/deploy/deployment.md, " + arch.gpus
        raise LibraryError(f"{directory} has no {family} library for {arch}; it holds: {held.names}{how}")
    library = loader.open_library(directory / record.file, family=family, arch=arch, record=record)
    _check_sources(library)
    return library


def _search(variant: Variant) -> Resolved:
    if reason := why_unsupported(variant):
        raise UnsupportedError(f"{variant.symbol()}: {reason}")
    backend = settings.backend(variant.family)
    tried: list[str] = []
    override = settings.fmha_binary_so() if variant.family == "prefill" else None
    if override is None:
        why = "is not set" if variant.family == "prefill" else "names prefill libraries only"
        tried.append(f"override: {settings.BINARY.name} {why}")
    elif backend == "jit":
        logger.warning("%s=%s is not used: the backend is jit", settings.BINARY.name, override)
        tried.append(f"override: {settings.BINARY.name} is not used, the backend is jit")
    else:
        library = _override_library(override, variant.family, variant.arch)
        return Resolved(library.function(variant, check_signature=settings.verify()), "override")

    steps: dict[str, Callable[[], tuple[Callable[..., None], str]]] = {
        "shipped": lambda: (_shipped_kernel(variant), "shipped"),
        "cached": lambda: (jit.load_cached(variant), "cached"),
        "jit": lambda: jit.compile_now(variant),
    }
    barred = {"jit": ("shipped",), "binary": ("cached", "jit"), "auto": ()}[backend]
    for name, step in steps.items():
        if name in barred:
            tried.append(f"{name}: not used, the backend is {backend}")
            continue
        try:
            return Resolved(*step())
        except SettingError:
            raise
        except TsmlaError as error:
            tried.append(f"{name}: {error}")
            if name == "shipped" and not trust.missing(toolchain.shipped_libraries() / manifest.MANIFEST_FILE):
                logger.warning("%s: no shipped kernel: %s", variant.symbol(), str(error).partition("\n")[0])
    raise KernelUnavailable(
        f"no kernel {variant.symbol()} for {variant.arch} ({Arch(variant.arch).gpus}); tried\n  "
        + "\n  ".join(text.replace("\n", "\n    ") for text in tried)
        + f"\n`tsmla probe --arch {variant.arch}`, or binary_status('{variant.arch}'), says what can be done here"
    )


def _shipped_kernel(variant: Variant) -> Callable[..., None]:
    library = shipped_library(variant.family, variant.arch)
    return library.function(variant, check_signature=settings.verify())


def _override_library(path: Path, family: str, arch: Arch) -> loader.Library:
    try:
        return loader.open_library(path, family=family, arch=arch)
    except TsmlaError as error:
        raise type(error)(f"{settings.BINARY.name}: {error}") from error


@functools.lru_cache(maxsize=1)
def _read_shipped(directory: Path) -> manifest.DirectoryManifest:
    return manifest.read_directory(directory)


@functools.lru_cache(maxsize=1)
def _source_digest() -> str:
    return toolchain.source_digest()


def _check_sources(library: loader.Library) -> None:
    """Refuse a library that was built from other kernel sources than those installed (an editable install)."""
    try:
        current = _source_digest()
    except ModuleNotFoundError:
        return  # no sources to differ from
    except OSError as error:
        raise LibraryError(
            f"{library.path} cannot be compared with the installed kernel sources, which cannot be read: {error}"
        ) from error
    if library.manifest.source_digest != current:
        raise LibraryError(
            f"{library.path} was built from other kernel sources than those at {toolchain.kernel_sources()}; "
            "install again to rebuild it"
        )
