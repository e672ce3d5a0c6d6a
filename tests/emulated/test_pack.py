"""mla_kv_pack_quantize_fp8 in emulation: every byte as PyTorch computes it."""

from __future__ import annotations

import pytest
import torch
from emulated_archs import KERNELS
from tsmla import mla_kv_pack_quantize_fp8

D_NOPE, D_ROPE, D_V = 128, 64, 128
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]

pytestmark = pytest.mark.archs(*KERNELS)


def spread(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values over 28 powers of two: FP8 subnormals, ordinary values, and values beyond the range."""
    exponents = torch.randint(-14, 14, shape, device="cuda")
    return torch.ldexp(torch.randn(shape, device="cuda"), exponents).to(dtype)


def quantized(x: torch.Tensor, scale: float, fp8: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(fp8).max
    return (x.float() * scale).clamp(-limit, limit).to(fp8)


def same_bytes(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def expected(k_nope, k_pe, v, k_scale, v_scale, fp8):
    key = torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], -1)
    return quantized(key, k_scale, fp8), quantized(v, v_scale, fp8)


@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bit_for_bit(gpu, dtype, fp8):
    both, k_pe = spread(19, 7, D_NOPE + D_V, dtype=dtype), spread(19, 1, D_ROPE, dtype=dtype)
    k_nope, v = both[..., :D_NOPE], both[..., D_NOPE:]
    got = mla_kv_pack_quantize_fp8(k_nope, k_pe, v, 0.5, 3.0, fp8_dtype=fp8)
    for result, want in zip(got, expected(k_nope, k_pe, v, 0.5, 3.0, fp8), strict=True):
        assert same_bytes(result, want)


@pytest.mark.parametrize("tokens, heads", [(1, 1), (1, 128), (200, 3)])
def test_sizes_and_pdl(gpu, tokens, heads):
    k_nope, v = (spread(tokens, heads, d, dtype=torch.bfloat16) for d in (D_NOPE, D_V))
    k_pe = spread(tokens, 1, D_ROPE, dtype=torch.bfloat16)
    got = mla_kv_pack_quantize_fp8(k_nope, k_pe, v, enable_pdl=True)
    for result, want in zip(got, expected(k_nope, k_pe, v, 1.0, 1.0, FP8[0]), strict=True):
        assert same_bytes(result, want)


def test_strided_outputs_keep_what_lies_between(gpu):
    k_nope, v = (spread(9, 4, d, dtype=torch.bfloat16) for d in (D_NOPE, D_V))
    k_pe = spread(9, 1, D_ROPE, dtype=torch.bfloat16)
    whole = torch.full((9, 4, 400), 0x33, dtype=torch.uint8, device="cuda").view(FP8[0])
    k_out, v_out = whole[..., 16:208], whole[..., 240:368]
    mla_kv_pack_quantize_fp8(k_nope, k_pe, v, k_out=k_out, v_out=v_out)
    want = torch.full((9, 4, 400), 0x33, dtype=torch.uint8, device="cuda").view(FP8[0])
    want[..., 16:208], want[..., 240:368] = expected(k_nope, k_pe, v, 1.0, 1.0, FP8[0])
    assert same_bytes(whole, want)
