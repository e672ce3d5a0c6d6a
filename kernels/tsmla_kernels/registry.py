"""variant -> compiled kernel. Ahead of time and just in time both come through here, so they cannot differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tsmla.identity.arch import Arch
from tsmla.identity.support import why_unsupported
from tsmla.identity.variant import (
    DecodeVariant,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)

OPT_LEVEL = 3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What cute.compile needs: the host entry (a @cute.jit callable) and fake arguments in calling order."""

    entry: Callable[..., Any]
    arguments: tuple[Any, ...]


def recipe(variant: Variant) -> Recipe:
    """The entry and fake arguments of a variant. Raises ValueError with the reason when it cannot be built."""
    if reason := why_unsupported(variant):
        raise ValueError(f"{variant.symbol()}: {reason}")
    from .entry import fake_arguments

    if isinstance(variant, PackVariant):
        from .pack.kernel import PackKernel as Kernel
    elif isinstance(variant, WriteCacheVariant):
        from .cache.write import WriteCacheKernel as Kernel
    elif isinstance(variant, ReadCacheVariant):
        from .cache.read import ReadCacheKernel as Kernel
    elif isinstance(variant, QuantizeQVariant):
        from .cache.query import QuantizeQKernel as Kernel
    elif isinstance(variant, KeyMaskVariant):
        from .key_mask.kernel import KeyMaskKernel as Kernel
    elif isinstance(variant, PrefillVariant) and variant.arch is Arch.SM90A:
        from .sm90.prefill.kernel import PrefillKernel as Kernel
    elif isinstance(variant, PrefillVariant):
        from .sm100.prefill.kernel import PrefillKernel as Kernel
    elif isinstance(variant, DecodeVariant) and variant.arch is Arch.SM90A:
        from .sm90.decode.entry import DecodeKernel as Kernel
    elif isinstance(variant, DecodeVariant):
        from .sm100.decode.kernel import DecodeKernel as Kernel
    else:
        raise TypeError(f"not a variant: {variant!r}")
    return Recipe(Kernel(variant), fake_arguments(variant))


def compile_variant(variant: Variant):
    """Compile one variant for its architecture; needs no GPU. Returns the DSL's TVM-FFI function object, to be exported
    (positional arguments, stream taken from the TVM-FFI environment); here it cannot be called."""
    import cutlass.cute as cute

    made = recipe(variant)
    options = f"--enable-tvm-ffi --opt-level {OPT_LEVEL} --gpu-arch {variant.arch}"
    return cute.compile(made.entry, *made.arguments, options=options, no_jit_engine=True)
