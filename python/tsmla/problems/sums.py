"""Sums of products as tensor cores make them, in float64: what a score is on a GPU, and what it loses there.

An instruction adds `depth` products to the sum so far. All terms are aligned to the largest exponent among them and
cut off, toward 0, `fraction` bits below it; the sum of what is left is exact, and is cut off to `kept` bits behind its
own leading one. So the loss of a score follows from its operands: what each term has below its step's unit. With
these numbers sums have the words that an H200 gave; Blackwell's are those of a public model (emulator/README.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..identity.arch import Arch

_KEYS_AT_A_TIME = 1024
_NO_EXPONENT = -4000
"""The exponent of 0: never the largest."""
_LEAST_EXPONENT, _LEAST_OF_FLOATS = -133, -126
"""Exponents below count as these: that to which terms are aligned, that of a sum."""


Factors = torch.Tensor | tuple[torch.Tensor, ...]


class Sums(NamedTuple):
    """How many products are added at once, and bits of fraction: of terms beside the largest, and of the result."""

    depth: int
    fraction: int
    kept: int

    @property
    def narrow(self) -> bool:
        """Whether results have fewer bits than a float32."""
        return self.kept < 23


def sums_of(arch: Arch, dtype: torch.dtype) -> Sums:
    """Return how tensor cores of `arch` add products of numbers of this dtype."""
    if arch is Arch.SM90A and dtype.itemsize == 1:
        return Sums(32, 13, 13)
    return Sums(32 // dtype.itemsize, 25, 23)


def weight_dtype(arch: Arch, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels of `arch` round weights to, with inputs of `dtype`.

    8-bit values are multiplied by weights of e4m3, but as float16 where sums of 8-bit products are narrow.
    """
    if dtype.itemsize > 1:
        return dtype
    return torch.float16 if sums_of(arch, dtype).narrow else torch.float8_e4m3fn


def narrow_products(q: Factors, k: Factors) -> torch.Tensor | None:
    """Return `products` on the GPU that holds the rows, where its sums are narrow; else None: float64's are as good."""
    latent = q[0] if isinstance(q, tuple) else q
    arch = _arch_of(latent)
    return products(q, k, arch) if arch is not None and sums_of(arch, latent.dtype).narrow else None


def _arch_of(tensor: torch.Tensor) -> Arch | None:
    """Return whose sums a tensor's GPU makes; None in emulation, which adds floats unless it is asked for more."""
    if type(tensor) is not torch.Tensor or not tensor.is_cuda:
        return None
    return Arch.SM90A if torch.cuda.get_device_capability(tensor.device) == (9, 0) else Arch.SM100A


def products(q: Factors, k: Factors, arch: Arch) -> torch.Tensor:
    """Return q [rows, d] times the transpose of k [keys, d] in float64, as tensor cores of `arch` add it up.

    Columns are added from the first to the last, as kernels with narrow sums do.

    q, k: of a dtype that is multiplied, or in pieces, and each row's scale behind them.
    """
    if not isinstance(q, tuple) or not isinstance(k, tuple):
        assert isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor)
        return summed(q, k, sums_of(arch, q.dtype))
    *q_pieces, q_scales = q
    *k_pieces, k_scales = k
    total = None
    for q_piece, k_piece in zip(q_pieces, k_pieces, strict=True):
        total = summed(q_piece, k_piece, sums_of(arch, q_piece.dtype), total)
    assert total is not None
    return total * q_scales.double()[:, None] * k_scales.double()


def summed(q: torch.Tensor, k: torch.Tensor, sums: Sums, before: torch.Tensor | None = None) -> torch.Tensor:
    """Return q [rows, d] times the transpose of k [keys, d] in float64, added up as `sums` says, from the first column
    to the last.

    before: [rows, keys], to which products are added.
    """
    q_exponents, k_exponents = (_exponents(x.double(), _least_of(x.dtype)) for x in (q, k))
    q, k = q.double(), k.double()
    parts = []
    for first in range(0, max(1, k.shape[0]), _KEYS_AT_A_TIME):
        own = slice(first, first + _KEYS_AT_A_TIME)
        total = q.new_zeros(q.shape[0], k[own].shape[0]) if before is None else before[:, own]
        for at in range(0, q.shape[1], sums.depth):
            step = slice(at, at + sums.depth)
            most = (q_exponents[:, None, step] + k_exponents[None, own, step]).amax(-1)
            most = most.maximum(_exponents(total, _LEAST_OF_FLOATS)).clamp_min(_LEAST_EXPONENT)
            unit = _power_of_two(most - sums.fraction)
            terms = (q[:, None, step] * k[None, own, step] / unit[..., None]).trunc().sum(-1) + (total / unit).trunc()
            total = terms * unit
            unit = _power_of_two(_exponents(total, _LEAST_OF_FLOATS).clamp_min(_LEAST_OF_FLOATS) - sums.kept)
            total = (total / unit).trunc() * unit
        parts.append(total)
    return torch.cat(parts, 1)


def _least_of(dtype: torch.dtype) -> int:
    """Return the exponent of a dtype's smallest normal number, which subnormal ones have, too."""
    return math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1


def _exponents(x: torch.Tensor, least: int) -> torch.Tensor:
    """Return the exponents of float64 numbers, `least` for smaller ones."""
    exponents = (torch.frexp(x).exponent - 1).clamp_min(least)
    return torch.where(x == 0, _NO_EXPONENT, exponents)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    return (exponents.long() + 1023 << 52).view(torch.float64)
