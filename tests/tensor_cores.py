"""What is lost when Hopper's tensor cores add products of 8-bit numbers."""

from __future__ import annotations

import torch

_STEP = 32
"""Products that one instruction adds to an element of its result."""
_FRACTION_BITS = 13
_DRAWS = 4096
"""Scores of which the largest loss is taken: of 100,000 normal e5m2 keys and queries of 192 dims, half lose 4e-5, and
the worst of so many 1e-3."""


def truncate(tensor: torch.Tensor) -> bool:
    """Whether kernels add products of this dtype as `truncated_products` does: 8-bit ones, on Hopper, not emulated."""
    on_gpu = type(tensor) is torch.Tensor and tensor.is_cuda
    return on_gpu and tensor.dtype.itemsize == 1 and torch.cuda.get_device_capability(tensor.device) == (9, 0)


def lse_loss(query: torch.Tensor, key: torch.Tensor, scale: float, squares: torch.Tensor) -> torch.Tensor:
    """How far from the exact one the natural LSE of rows may be that tensor cores computed, whose keys' weights have
    these sums of squares. query [.., d] and key [.., d] are those of the call.

    An LSE loses the mean of what its keys' scores lose, by weight. Of that mean

    - one part is the same for all rows, however many keys they have: what is cut off brings scores nearer to 0, and
      high scores weigh more (2e-5 to 4e-5 for normal keys of 128 and 192 dims);
    - the rest would be one loss times the root of `squares`, if losses were independent.

    How large losses may be is not read off the rows that are judged. These may be a few rows of a single key each, and
    how hardware groups addends is not known well enough to predict the loss of each. The mean and the largest are those
    of `_DRAWS` scores of this call's numbers, times 3: of 17,280 simulated rows of 1 and 60 keys (e4m3 and e5m2, 192
    and 576 dims, 32 products at a time, 16, or 32 from the last dim on), 115 lost more than the largest of 2,048 times
    the root, and the worst 1.84 times that; rows of 20,000 keys lost up to 5.7e-5 on an H100 (e5m2, 128 dims), where
    the mean is 2.4e-5 and the other part 0.7e-5."""
    scores, losses = sampled_losses(query, key)
    mean = ((scores * scale).softmax(1) * losses).sum(1).mean().abs()
    return 3 * scale * (mean + losses.abs().max() * squares.sqrt())


def sampled_losses(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`_DRAWS` products of rows of query and key, [queries, keys], and what tensor cores lose of each. Rows need not
    see each other, and keys of which there are too few come again with their columns in another order. Rows with NaN do
    not count; a single 0 stands for no rows."""
    q, k = (rows.flatten(0, -2).float() for rows in (query, key))
    q, k = (rows[rows.isfinite().all(-1)] for rows in (q, k))
    if not len(q) or not len(k):
        return q.new_zeros(1, 1).double(), q.new_zeros(1, 1).double()
    q = q[:: max(1, len(q) // 64)][:64]
    count = _DRAWS // len(q)
    if len(k) < count:
        order = torch.rand(count - len(k), k.shape[1], generator=torch.Generator().manual_seed(0)).argsort(1)
        again = k[torch.arange(len(order), device=k.device) % len(k)].gather(1, order.to(k.device))
        k = torch.cat([k, again])
    k = k[:: len(k) // count][:count]
    exact = q.double() @ k.double().T
    return exact, truncated_products(q, k) - exact


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
