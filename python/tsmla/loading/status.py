"""Reports which operator families a precompiled library can serve here, and why others cannot be served."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, LibraryError, TsmlaError
from ..identity.arch import Arch
from ..identity.support import why_unsupported
from ..identity.variant import FAMILIES, Variant
from . import gpu, loader, records, resolve, settings


@dataclasses.dataclass(frozen=True)
class FamilyStatus:
    """Whether a library serves one operator family, which one, how many kernels it holds, and why not.

    For a family that is served, also whether its kernels have passed the selftest on hardware.
    """

    available: bool
    path: str | None = None
    kernels: int = 0
    reason: str = ""
    verified: str = ""


@dataclasses.dataclass(frozen=True)
class BinaryStatus:
    """What `binary_status` found; `arch` is None when no GPU was found and none was named."""

    arch: Arch | None
    host: str
    families: dict[str, FamilyStatus]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        reasons = {family.reason for family in self.families.values()}
        if len(reasons) == 1 and not any(family.available for family in self.families.values()):
            sought = f"for {self.arch} on {self.host}" if self.arch else "were looked for"
            return f"no precompiled kernels {sought}: {reasons.pop()}"
        lines = [f"precompiled kernels for {self.arch or 'no GPU'} on {self.host}"]
        for name, family in self.families.items():
            found = f"{family.kernels} kernels in {family.path}" if family.available else f"no: {family.reason}"
            lines.append(f"  {name}: {found}")
        for text in dict.fromkeys(family.verified for family in self.families.values() if family.available):
            names = [name for name, family in self.families.items() if family.available and family.verified == text]
            lines.append(f"  {', '.join(names)}: {text}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class VariantStatus:
    """Whether one kernel is served without compiling: by which step ("override" or "shipped") and library.

    step is None where it is not, and the reason says why.
    """

    variant: Variant
    step: str | None
    path: str | None = None
    reason: str = ""

    @property
    def available(self) -> bool:
        return self.step is not None

    def to_dict(self) -> dict[str, Any]:
        said = {"available": self.available, "step": self.step, "path": self.path, "reason": self.reason}
        return {"symbol": self.variant.symbol(), "variant": self.variant.to_dict(), **said}

    def __str__(self) -> str:
        return f"{self.variant}: {f'{self.step}, {self.path}' if self.available else f'no: {self.reason}'}"


def binary_status(arch: Arch | str | None = None, path: str | Path | None = None) -> BinaryStatus:
    """Return a report over every family, for `arch` or else for this process's GPU.

    `path` stands in for TSMLA_FMHA_BINARY_SO: the prefill library to judge. Libraries are loaded, GPUs are not touched.
    Reasons are reported, not raised; only an unknown `arch` is an ArgumentError.
    """
    return _judge("binary_status", tuple(FAMILIES), arch, path)


def has_binary_prefill(path: str | Path | None = None, arch: Arch | str | None = None) -> bool:
    """Whether prefill runs from a precompiled library: the one at `path`, else the one that a call would use."""
    return _judge("has_binary_prefill", ("prefill",), arch, path).families["prefill"].available


def has_binary_decode(arch: Arch | str | None = None) -> bool:
    """Whether decode runs from a precompiled library. `binary_status` says why not."""
    return _judge("has_binary_decode", ("decode",), arch, None).families["decode"].available


def variant_status(variant: Variant) -> VariantStatus:
    """Whether a call that needs this kernel finds it in a precompiled library, and if not, why.

    A kernel in the compile cache does not count: it was compiled here, and elsewhere would be again. Reasons are
    reported, not raised; only what is no variant is an ArgumentError.
    """
    if not isinstance(variant, Variant):
        raise ArgumentError(
            f"variant_status: {type(variant).__name__} is no variant; accepted: "
            + ", ".join(family.__name__ for family in FAMILIES.values())
        )
    if reason := why_unsupported(variant):
        return VariantStatus(variant, None, reason=reason)
    try:
        step, library = _library(variant.family, variant.arch)
        if all(kernel.variant != variant for kernel in library.manifest.kernels):
            raise LibraryError(f"{library.path} does not hold it (`tsmla list --resources` names what is installed)")
        library.function(variant, check_signature=settings.verify())
    except TsmlaError as error:
        return VariantStatus(variant, None, reason=str(error))
    return VariantStatus(variant, step, str(library.path))


def _judge(asked: str, families: tuple[str, ...], arch: Arch | str | None, path: str | Path | None) -> BinaryStatus:
    """Return the status of some families. asked: the function that errors name."""
    found, reason = (_named(asked, arch), "") if arch is not None else gpu.current_arch()
    if found is None:
        reason = f"{reason}; name an architecture (arch=, --arch) to ask about another machine"
        return BinaryStatus(None, platform.machine(), {name: FamilyStatus(False, reason=reason) for name in families})
    return BinaryStatus(found, platform.machine(), {name: _judge_family(name, found, path) for name in families})


def _named(asked: str, arch: Arch | str) -> Arch:
    if not isinstance(arch, str) or arch not in list(Arch):
        raise ArgumentError(f"{asked}: arch is {arch!r}; accepted: {', '.join(Arch)}")
    return Arch(arch)


def _judge_family(family: str, arch: Arch, path: str | Path | None) -> FamilyStatus:
    try:
        _, library = _library(family, arch, path)
    except TsmlaError as error:
        return FamilyStatus(False, reason=str(error))
    said = library.manifest
    verified = records.verified(arch, said.source_digest)
    return FamilyStatus(True, str(library.path), len(said.kernels), verified=verified)


def _library(family: str, arch: Arch, path: str | Path | None = None) -> tuple[str, loader.Library]:
    """Return the library that serves a family, and the step that finds it. Raises TsmlaError when there is none."""
    if path is None:
        if settings.backend(family) == "jit":
            raise LibraryError("the backend is jit")
        path = settings.fmha_binary_so() if family == "prefill" else None
    if path is not None and family == "prefill":
        return "override", loader.open_library(_path(path), family=family, arch=arch)
    return "shipped", resolve.shipped_library(family, arch)


def _path(given: str | Path) -> Path:
    try:
        path = Path(given).expanduser()
    except TypeError:
        raise ArgumentError(f"path is a {type(given).__name__}; it must be the path of a library") from None
    except RuntimeError:
        raise LibraryError(f"{str(given)!r} is no path of a library: its user has no home directory") from None
    except ValueError as error:  # of a user's name that no system can look up
        raise LibraryError(f"{str(given)!r} is no path of a library: {error}") from None
    if "\0" in str(path):
        raise LibraryError(f"{str(path)!r} is no path of a library: it has a NUL character")
    return path
