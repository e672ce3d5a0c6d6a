"""`warmup`: does ahead of time what a first call would, so that nothing compiles or loads in a CUDA graph capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..identity.call import OPERATORS, Argument, Number, extent, fixed_sizes
from ..identity.plan import RECORD_BYTES
from ..identity.variant import FAMILIES, Variant
from ..loading import gpu, resolve


def warmup(variants: Iterable[Variant]) -> dict[Variant, str]:
    """Resolve each variant and say which step served it ("override", "shipped", "cached" or "jit").

    The driver loads a kernel's machine code at its first launch, so variants for the current GPU's architecture are
    also launched once on one token, on the current stream, and waited for. Others are resolved only. Call it once per
    device, before capture. Raises what `resolve.kernel` raises.
    """
    steps, launched = {}, False
    arch, _ = gpu.current_arch()
    for variant in variants:
        if not isinstance(variant, tuple(FAMILIES.values())):
            accepted = ", ".join(kind.__name__ for kind in FAMILIES.values())
            raise TypeError(f"warmup: {variant!r} is not a variant; accepted: {accepted}")
        found = resolve.resolve(variant)
        steps[variant] = found.step
        if variant.arch == arch:
            found.function(*_one_token(variant))
            launched = True
    if launched:
        import torch

        torch.cuda.synchronize()
    return steps


def _one_token(variant: Variant) -> tuple[Any, ...]:
    """Arguments of the smallest call that launches: every size is 1 where it can be, every element 0."""
    import torch

    from .checks import dtype_in_table

    operator, fixed = OPERATORS[variant.family], fixed_sizes(variant)
    columns = fixed.get("d_qk", 1)
    sizes = {
        "batch_size": 1,
        "requests": 1,
        "page_size": 64,
        "bytes": RECORD_BYTES,
        "list_words": 3,
        **operator.known,
        **fixed,
    }
    sizes |= {"d_query": columns, "d_key": columns, "row_width": getattr(variant, "row_width", 1)}

    def made(argument: Argument | Number) -> Any:
        if isinstance(argument, Number):
            return argument.neutral
        if not argument.taken_by(variant):
            return None
        shape = [extent(size, sizes) or 1 for size in argument.shape]
        return torch.zeros(shape, dtype=dtype_in_table(variant, argument.dtype), device="cuda")

    return tuple(made(argument) for argument in operator.arguments)
