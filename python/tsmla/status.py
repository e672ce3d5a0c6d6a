"""Which operator families can be served by a precompiled library here, and if one cannot, why."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import Any

from . import gpu, loader, records, resolve, settings
from .errors import ArgumentError, TsmlaError
from .variant import FAMILIES, Arch


@dataclasses.dataclass(frozen=True)
class FamilyStatus:
    """One family: whether a library serves it, which one, how many kernels it holds, and why not; of one that serves,
    whether its kernels have passed the selftest on hardware."""

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
        lines = [f"precompiled kernels for {self.arch or 'no GPU'} on {self.host}"]
        for name, family in self.families.items():
            found = f"{family.kernels} kernels in {family.path}" if family.available else f"no: {family.reason}"
            lines.append(f"  {name}: {found}")
        for text in dict.fromkeys(family.verified for family in self.families.values() if family.available):
            names = [name for name, family in self.families.items() if family.available and family.verified == text]
            lines.append(f"  {', '.join(names)}: {text}")
        return "\n".join(lines)


def binary_status(arch: Arch | str | None = None, path: str | Path | None = None) -> BinaryStatus:
    """A report over every family, for `arch` or else for this process's GPU.

    `path` stands in for TSMLA_FMHA_BINARY_SO: the prefill library to judge. Libraries are loaded, GPUs are not touched.
    Reasons are reported, not raised; only an unknown `arch` is an ArgumentError.
    """
    return _judge(tuple(FAMILIES), arch, path)


def has_binary_prefill(path: str | Path | None = None, arch: Arch | str | None = None) -> bool:
    """Whether prefill runs from a precompiled library: the one at `path`, else the one that a call would use."""
    return _judge(("prefill",), arch, path).families["prefill"].available


def has_binary_decode(arch: Arch | str | None = None) -> bool:
    """Whether decode runs from a precompiled library. `binary_status` says why not."""
    return _judge(("decode",), arch, None).families["decode"].available


def _judge(families: tuple[str, ...], arch: Arch | str | None, path: str | Path | None) -> BinaryStatus:
    found, reason = (_named(arch), "") if arch is not None else gpu.current_arch()
    if found is None:
        reason = f"{reason}; name an arch to ask about another machine"
        return BinaryStatus(None, platform.machine(), {name: FamilyStatus(False, reason=reason) for name in families})
    return BinaryStatus(found, platform.machine(), {name: _judge_family(name, found, path) for name in families})


def _named(arch: Arch | str) -> Arch:
    if arch not in list(Arch):
        raise ArgumentError(f"binary_status: arch is {arch!r}; accepted: {', '.join(Arch)}")
    return Arch(arch)


def _judge_family(family: str, arch: Arch, path: str | Path | None) -> FamilyStatus:
    try:
        if path is None:
            if settings.backend(family) == "jit":
                return FamilyStatus(False, reason="the backend is jit")
            path = settings.fmha_binary_so()
        if path is not None and family == "prefill":
            library = loader.open_library(Path(path), family=family, arch=arch)
        else:
            library = resolve.shipped_library(family, arch)
    except TsmlaError as error:
        return FamilyStatus(False, reason=str(error))
    said = library.manifest
    verified = records.verified(arch, said.source_digest)
    return FamilyStatus(True, str(library.path), len(said.kernels), verified=verified)
