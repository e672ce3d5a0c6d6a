"""What is lost when Hopper's tensor cores add products of 8-bit numbers."""

from __future__ import annotations

import torch

_STEP = 32
"""Products that one instruction adds to an element of its result."""
_FRACTION_BITS = 13


def truncate(tensor: torch.Tensor) -> bool:
    """Whether kernels add products of this dtype as `truncated_products` does: 8-bit ones, on Hopper, not emulated."""
    on_gpu = type(tensor) is torch.Tensor and tensor.is_cuda
    return on_gpu and tensor.dtype.itemsize == 1 and torch.cuda.get_device_capability(tensor.device) == (9, 0)


def lse_loss(query: torch.Tensor, plain_lse: torch.Tensor, exact_lse: torch.Tensor) -> float:
    """How far the LSE of `truncated_products` is from the exact one, at most over the rows that have keys; 0 where
    kernels on these inputs add exactly."""
    with_keys = exact_lse.isfinite()
    if not truncate(query) or not with_keys.any():
        return 0.0
    return float((plain_lse - exact_lse)[with_keys].abs().max())


def truncated_products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [rows, d] times the transpose of k [keys, d], in float64, as those tensor cores add: 32 products at a time to
    what was added before, each cut off at 13 bits behind the leading one of the largest (DeepSeek-V3, arXiv 2412.19437,
    section 3.3.2: aligned to the largest exponent, 14 bits kept, the rest truncated)."""
    q, k = q.double(), k.double()
    total = q.new_zeros(len(q), len(k), 1)
    for at in range(0, q.shape[1], _STEP):
        addends = torch.cat([total, q[:, None, at : at + _STEP] * k[None, :, at : at + _STEP]], -1)
        _, exponent = torch.frexp(addends.abs().amax(-1, keepdim=True))
        quantum = torch.ldexp(torch.ones_like(total), exponent - 1 - _FRACTION_BITS)
        total = ((addends / quantum).trunc() * quantum).sum(-1, keepdim=True)
    return total[..., 0]
