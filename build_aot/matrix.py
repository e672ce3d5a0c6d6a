"""The matrix of what ships: the combinations listed here that `why_unsupported` lets through, for every shipped
architecture."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.support import CACHE_DTYPES, PREFILL_DIMS, pack_dims, why_unsupported
from tsmla.identity.variant import (
    FAMILIES,
    DecodeVariant,
    Dtype,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)
from tsmla.loading import gpu
from tsmla.loading.manifest import library_file

from .errors import BuildError
from .link import ZIG_TARGETS

ATTENTION_OUT_DTYPES = (Dtype.BF16, Dtype.FP16)
OFF_ON = (False, True)
NATIVE = "native"
"""The word that stands, in a list of architectures, for those of the GPUs present."""


def shipped(
    archs: Iterable[Arch | str] = SHIPPED_ARCHS, families: Iterable[str] = tuple(FAMILIES)
) -> tuple[Variant, ...]:
    """Return the shipped variants of these operator families, in symbol order.

    For an architecture that does not ship, those that would.
    """
    wanted = set(families)
    candidates = (variant for arch in archs for variant in _candidates(Arch(arch)) if variant.family in wanted)
    return tuple(sorted((v for v in candidates if why_unsupported(v) is None), key=lambda v: v.symbol()))


def _candidates(arch: Arch) -> Iterator[Variant]:
    yield KeyMaskVariant(arch)
    for dtype, out, dims, causal, lse in itertools.product(Dtype, ATTENTION_OUT_DTYPES, PREFILL_DIMS, OFF_ON, OFF_ON):
        yield PrefillVariant(arch, dtype, out, *dims, causal=causal, lse=lse)
    for dtype, out, dims in itertools.product(Dtype, ATTENTION_OUT_DTYPES, PREFILL_DIMS):
        yield PrefillVariant(arch, dtype, out, *dims, causal=False, lse=True, masked=True)
    for dtype, out, lse, gathers in itertools.product(Dtype, ATTENTION_OUT_DTYPES, OFF_ON, OFF_ON):
        for row in {uniform_row(dtype), *ROWS.values()}:
            yield DecodeVariant(arch, dtype, out, lse, row, gathers)
    for dtype, out in itertools.product(Dtype, Dtype):
        for d_nope, d_rope, d_v in pack_dims(arch, out):
            yield PackVariant(arch, dtype, out, d_nope, d_rope, d_v)
    for name, row in ROWS.items():
        for dtype in CACHE_DTYPES[name]:
            yield WriteCacheVariant(arch, dtype, row)
            yield ReadCacheVariant(arch, dtype, row)
            yield QuantizeQVariant(arch, dtype, row)


def libraries(variants: Iterable[Variant], host: str) -> dict[str, tuple[Variant, ...]]:
    """Return library file name -> its variants in symbol order: one library per operator family and architecture."""
    groups: dict[str, list[Variant]] = {}
    for variant in sorted(variants, key=lambda v: v.symbol()):
        groups.setdefault(library_file(variant.family, variant.arch, host), []).append(variant)
    return {name: tuple(group) for name, group in sorted(groups.items())}


def native() -> tuple[tuple[Arch, ...], str]:
    """Return the architectures of the GPUs present, and a sentence that says which and why.

    All that ship are returned where no GPU present can have kernels.
    """
    found, reason = gpu.capabilities()
    archs = tuple(arch for arch in Arch if arch.capability in found) or SHIPPED_ARCHS
    if found:
        reason = "GPUs present: " + ", ".join(f"{n} x {_described(*pair)}" for pair, n in Counter(found).items())
    return archs, f"compiling for {', '.join(archs)} (set TSMLA_ARCHS to choose); {reason}"


def _described(major: int, minor: int) -> str:
    arch = Arch.from_capability(major, minor)
    return f"{arch} ({arch.gpus})" if arch else f"compute capability {major}.{minor} (no kernels)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a part of the matrix, --arch and --family, each a list, and what it is for,
    --host."""
    archs, ships, families = [arch.value for arch in Arch], [arch.value for arch in SHIPPED_ARCHS], list(FAMILIES)
    text = f"one or more of {', '.join(archs)}; default {', '.join(ships)}; {NATIVE}: those of the GPUs present"
    parser.add_argument("--arch", choices=[NATIVE, *archs], nargs="+", default=ships, help=text, metavar="ARCH")
    text = f"one or more of {', '.join(families)}; default all"
    parser.add_argument("--family", choices=families, nargs="+", default=families, help=text, metavar="FAMILY")
    hosts = sorted(ZIG_TARGETS)
    parser.add_argument("--host", choices=hosts, help=f"CPU: {' or '.join(hosts)}; default: this machine's")


def chosen(asked: argparse.Namespace) -> tuple[Variant, ...]:
    """Return the variants that these options choose. Prints what `native` stands for. Raises BuildError."""
    archs = asked.arch
    if NATIVE in archs:
        if len(archs) > 1:
            raise BuildError(f"{NATIVE} cannot be combined with other architectures")
        archs, text = native()
        print(text)
    return shipped(archs, asked.family)
