"""Pack calls of `tsmla selftest`: a case's inputs, the call that a variant serves, and what it must give."""

from __future__ import annotations

import math

import torch

from ..identity.variant import PackVariant
from ..operators.checks import TORCH_DTYPE_OF
from ..operators.pack import mla_kv_pack_quantize_fp8
from .cases import PackCase
from .kept import kept
from .memory import Memory, bits, surrounded
from .reference import Judged, compared

_GAP = 16
"""Elements between the rows of strided outputs."""


def run(variant: PackVariant, case: PackCase, memory: Memory, pdl: bool) -> dict[str, torch.Tensor]:
    """Call the operator so that `variant` serves; results lie in memory of `memory`."""
    k_nope, k_pe, v = _inputs(case, variant)
    out_dtype = TORCH_DTYPE_OF[variant.out_dtype]

    def out(width: int) -> torch.Tensor:
        return memory.allocate((case.tokens, case.heads, width), out_dtype, gap=_GAP if case.strided else 0)

    k_out, v_out = mla_kv_pack_quantize_fp8(
        k_nope, k_pe, v, *case.scales, out(variant.d_nope + variant.d_rope), out(variant.d_v), out_dtype, pdl
    )
    return {"k": k_out, "v": v_out}


def check(variant: PackVariant, case: PackCase, results: dict[str, torch.Tensor]) -> Judged:
    """Compare the results of `run` with torch: equal bytes, or any NaN for a NaN."""
    return compared(results, _expected(case, variant))


@kept("pack")
def _inputs(case: PackCase, variant: PackVariant) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make k_nope, k_pe and v.

    They hold all 16-bit patterns, or else normal numbers over 28 powers of two: FP8 subnormals, ordinary numbers, and
    such that are beyond FP8's range.
    """
    dtype, d_nope, d_rope, d_v = TORCH_DTYPE_OF[variant.dtype], variant.d_nope, variant.d_rope, variant.d_v

    def made(heads: int, width: int) -> torch.Tensor:
        tensor = surrounded((case.tokens, heads, width), dtype)
        if case.patterns:
            numbers = torch.arange(math.prod(tensor.shape), device="cuda") % 2**16 - 2**15
            bits(tensor).copy_(numbers.to(torch.int16).view(tensor.shape))
        else:
            exponents = torch.randint(-14, 14, tensor.shape, device="cuda")
            tensor.copy_(torch.ldexp(torch.randn(tensor.shape, device="cuda"), exponents).to(dtype))
        return tensor

    if case.strided:
        k_nope, v = made(case.heads, d_nope + d_v).split([d_nope, d_v], -1)
        return k_nope, made(1, 512 + d_rope)[..., 512:], v
    return made(case.heads, d_nope), made(1, d_rope)[:, 0], made(case.heads, d_v)


@kept("pack")
def _expected(case: PackCase, variant: PackVariant) -> dict[str, torch.Tensor]:
    k_nope, k_pe, v = _inputs(case, variant)
    shared = k_pe.reshape(case.tokens, 1, variant.d_rope).expand(-1, case.heads, -1)
    out_dtype = TORCH_DTYPE_OF[variant.out_dtype]
    limit = torch.finfo(out_dtype).max
    sources = {"k": torch.cat([k_nope, shared], -1), "v": v}
    return {
        name: (source.float() * scale).clamp(-limit, limit).to(out_dtype)
        for (name, source), scale in zip(sources.items(), case.scales, strict=True)
    }
