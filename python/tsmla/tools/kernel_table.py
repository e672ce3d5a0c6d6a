"""The table of kernels that `tsmla list` prints: a line for those that differ only in architecture, mask and LSE.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..identity.arch import Arch
from ..identity.row_format import ROWS
from ..identity.variant import FAMILIES, DecodeVariant, KeyMaskVariant, PackVariant, PrefillVariant, Variant

HEADER = ("operator", "dtypes", "dims or cache rows", "mask", "LSE", "architecture", "kernels")


def rows(variants: Iterable[Variant]) -> list[tuple[str, ...]]:
    """Return HEADER and the lines below it. Architectures share a line only where they have the same kernels."""
    kinds: dict[tuple[str, str, str], dict[Arch, set[tuple[str, str]]]] = {}
    for variant in variants:
        kind = (variant.family, _dtypes(variant), _shape(variant))
        kinds.setdefault(kind, {}).setdefault(variant.arch, set()).add(_choices(variant))
    lines = []
    for kind in sorted(kinds, key=lambda kind: ([*FAMILIES].index(kind[0]), kind)):
        by_arch = kinds[kind]
        for held in dict.fromkeys(frozenset(choices) for choices in by_arch.values()):
            archs = [arch for arch in Arch if by_arch.get(arch) == held]
            masks, lses = {mask for mask, _ in held}, {lse for _, lse in held}
            choices = ", ".join(sorted(masks)), ", ".join(sorted(lses))
            lines.append((*kind, *choices, ", ".join(archs), str(len(held) * len(archs))))
    return [HEADER, *lines]


def _dtypes(variant: Variant) -> str:
    if isinstance(variant, KeyMaskVariant):
        return "int32 to bits"
    out = getattr(variant, "out_dtype", None)
    return f"{variant.dtype} to {out}" if out else str(variant.dtype)


def _shape(variant: Variant) -> str:
    if isinstance(variant, PrefillVariant):
        return f"qk {variant.d_qk}, v {variant.d_v}{', key mask' if variant.masked else ''}"
    if isinstance(variant, PackVariant):
        return f"nope {variant.d_nope}, rope {variant.d_rope}, v {variant.d_v}"
    if isinstance(variant, KeyMaskVariant):
        return "-"
    name = next((name for name, row in ROWS.items() if row == variant.row), str(variant.row))
    return f"{name}, chosen keys" if isinstance(variant, DecodeVariant) and variant.gathers else name


def _choices(variant: Variant) -> tuple[str, str]:
    """Mask and LSE of a kernel; the operators that have no such choice have one value."""
    if isinstance(variant, PrefillVariant) and variant.masked:
        return "causal or full", "yes"
    mask = _one_of(getattr(variant, "causal", None), "causal", "full")
    lse = _one_of(getattr(variant, "lse", None), "yes", "no")
    return mask, lse


def _one_of(on: bool | None, yes: str, no: str) -> str:
    return "-" if on is None else yes if on else no
