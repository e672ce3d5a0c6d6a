"""Do ahead of time what a first call would do, so that nothing compiles or loads inside a CUDA graph capture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from . import gpu, resolve
from .plan import RECORD_BYTES
from .support import LATENT_DIM, ROPE_DIM
from .variant import DecodeVariant, PackVariant, PrefillVariant, Variant


def warmup(variants: Iterable[Variant]) -> dict[Variant, str]:
    """Resolve each variant and say which step served it ("override", "shipped", "cached" or "jit").

    The driver loads a kernel's machine code at its first launch, so variants for the current GPU's architecture are
    also launched once on one token, on the current stream, and waited for. Others are resolved only. Call it once per
    device, before capture. Raises what `resolve.kernel` raises.
    """
    steps, launched = {}, False
    arch, _ = gpu.current_arch()
    for variant in variants:
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
    """Arguments of the smallest call that launches: one token, one head."""
    import torch

    from .checks import TORCH_DTYPE_OF


    def zeros(*shape: int, dtype: torch.dtype = TORCH_DTYPE_OF[variant.dtype]) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    out_dtype = TORCH_DTYPE_OF[variant.out_dtype]
    if isinstance(variant, PrefillVariant):
        q, k, v = zeros(1, 1, variant.d_qk), zeros(1, 1, variant.d_qk), zeros(1, 1, variant.d_v)
        lse = zeros(1, 1, dtype=torch.float32) if variant.lse else None
        lengths = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        return q, k, v, zeros(1, 1, variant.d_v, dtype=out_dtype), lse, lengths, lengths, 1.0, 1.0
    if isinstance(variant, DecodeVariant):
        query, cache = zeros(1, 1, 1, LATENT_DIM + ROPE_DIM), zeros(1, 64, LATENT_DIM + ROPE_DIM)
        pages, length = zeros(1, 1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32, device="cuda")
        out = zeros(1, 1, 1, LATENT_DIM, dtype=out_dtype)
        lse = zeros(1, 1, 1, dtype=torch.float32) if variant.lse else None
        workspace, scales, sight, parts = zeros(RECORD_BYTES, dtype=torch.int8), (1.0, 1.0), (1, -1, 1, 0, 1), 1
        return query, cache, pages, length, length, length[:, None], out, lse, workspace, *scales, *sight, parts
    if isinstance(variant, PackVariant):
        k_out = zeros(1, 1, variant.d_nope + variant.d_rope, dtype=out_dtype)
        v_out = zeros(1, 1, variant.d_v, dtype=out_dtype)
        return zeros(1, 1, variant.d_nope), zeros(1, variant.d_rope), zeros(1, 1, variant.d_v), k_out, v_out, 1.0, 1.0
    raise TypeError(f"not a variant: {variant!r}")
