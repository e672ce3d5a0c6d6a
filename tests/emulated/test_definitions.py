"""tsmla's solutions of definitions for flashinfer-bench, emulated, beside the references that these have."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

SCALE = 192**-0.5
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def both(module: str, *given):
    solution, reference = (
        importlib.import_module(f"benchmarks.definitions.{folder}.{module}").run for folder in ("solution", "reference")
    )
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]
    return [x.cpu() for x in solution(*on_gpu)], list(reference(*given))


def close(got, want, tolerance: float) -> None:
    (out, lse), (wanted, wanted_lse) = got, want
    assert out.dtype == wanted.dtype and out.shape == wanted.shape
    torch.testing.assert_close(out.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_decode(gpu, dtype):
    query, cache = torch.randn(2, 2, 16, 576).to(dtype), torch.randn(4, 64, 576).to(dtype)
    table, lengths = torch.tensor([[2, 0], [3, 1]]).int(), torch.tensor([100, 1]).int()
    got, want = both("decode", query, cache, table, lengths, SCALE)
    close(got, want, 2e-2 if dtype == BF16 else 6e-2)
    assert want[1][1, 0].isneginf().all()


def test_chosen(gpu):
    query, cache = torch.randn(3, 16, 576).to(BF16), torch.randn(2, 64, 576).to(BF16)
    indices = torch.randint(-1, 128, (3, 40)).int()
    close(*both("chosen", query, cache, indices, SCALE), 2e-2)


def test_prefill(gpu):
    query, key, value = torch.randn(90, 2, 192), torch.randn(140, 2, 192), torch.randn(140, 2, 128)
    ends = torch.tensor([0, 70, 90]).int(), torch.tensor([0, 60, 140]).int()
    got, want = both("prefill", *(x.to(BF16) for x in (query, key, value)), *ends, SCALE)
    close(got, want, 2e-2)
    assert want[1][:10].isneginf().all() and want[1][10:].isfinite().all()


def test_pack(gpu):
    nope, rope, value = (torch.randn(5, n, d).mul(300).to(BF16) for n, d in ((4, 128), (1, 64), (4, 128)))
    nope[0, 0, 0] = math.inf
    got, want = both("pack", nope, rope, value)
    assert all(x.view(torch.uint8).equal(y.view(torch.uint8)) for x, y in zip(got, want, strict=True))
