"""What ships: every combination listed here that `why_unsupported` lets through, for every architecture."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator

from tsmla.manifest import library_file
from tsmla.support import PREFILL_DIMS, why_unsupported
from tsmla.variant import FAMILIES, Arch, DecodeVariant, Dtype, PackVariant, PrefillVariant, Variant

ATTENTION_OUT_DTYPES = (Dtype.BF16, Dtype.FP16)
PACK_DIMS = ((128, 64, 128),)
"""(d_nope, d_rope, d_v) of the models served; other sizes compile just in time."""
OFF_ON = (False, True)


def shipped(
    archs: Iterable[Arch | str] = tuple(Arch), families: Iterable[str] = tuple(FAMILIES)
) -> tuple[Variant, ...]:
    """The shipped variants of these architectures and operator families, in symbol order."""
    wanted = set(families)
    candidates = (variant for arch in archs for variant in _candidates(Arch(arch)) if variant.family in wanted)
    return tuple(sorted((v for v in candidates if why_unsupported(v) is None), key=lambda v: v.symbol()))


def _candidates(arch: Arch) -> Iterator[Variant]:
    for dtype, out, dims, causal, lse, pdl in itertools.product(
        Dtype, ATTENTION_OUT_DTYPES, PREFILL_DIMS, OFF_ON, OFF_ON, OFF_ON
    ):
        yield PrefillVariant(arch, dtype, out, *dims, causal=causal, lse=lse, pdl=pdl)
    for dtype, out, lse, pdl in itertools.product(Dtype, ATTENTION_OUT_DTYPES, OFF_ON, OFF_ON):
        yield DecodeVariant(arch, dtype, out, lse=lse, pdl=pdl)
    for dtype, out, pack_dims, pdl in itertools.product(Dtype, Dtype, PACK_DIMS, OFF_ON):
        yield PackVariant(arch, dtype, out, *pack_dims, pdl=pdl)


def libraries(variants: Iterable[Variant], host: str) -> dict[str, tuple[Variant, ...]]:
    """Library file name -> its variants in symbol order: one library per operator family and architecture."""
    groups: dict[str, list[Variant]] = {}
    for variant in sorted(variants, key=lambda v: v.symbol()):
        groups.setdefault(library_file(variant.family, variant.arch, host), []).append(variant)
    return {name: tuple(group) for name, group in sorted(groups.items())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose a part of the matrix: --arch and --family, each a list."""
    for option, known in (("--arch", [arch.value for arch in Arch]), ("--family", list(FAMILIES))):
        text = f"one or more of {', '.join(known)}; default all"
        parser.add_argument(option, choices=known, nargs="+", default=known, help=text, metavar=option[2:].upper())
