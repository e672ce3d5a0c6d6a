"""Whether kernels ship for an engine's GPU. Engines ask before anybody looks whether kernels have been built."""

from __future__ import annotations

from typing import Any

from ...identity.arch import SHIPPED_ARCHS, Arch


def arch_of(capability: Any) -> Arch | None:
    """Return the architecture of a compute capability with `major` and `minor`; None for None, and for GPUs that no
    kernels ship for."""
    found = None if capability is None else Arch.from_capability(capability.major, capability.minor)
    return found if found in SHIPPED_ARCHS else None


def why_no_gpu(capability: Any) -> str | None:
    """Return a sentence that says which GPUs kernels ship for; None for one of them."""
    if arch_of(capability) is not None:
        return None
    known = ", ".join(f"{a.capability[0]}.{a.capability[1]} ({a.gpus})" for a in SHIPPED_ARCHS)
    found = "none" if capability is None else f"{capability.major}.{capability.minor}"
    return f"tsmla has kernels for compute capability {known}; this GPU's is {found}"
