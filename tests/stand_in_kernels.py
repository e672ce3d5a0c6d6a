"""What stands for kernels on a CPU: functions with their parameters that compute in float64 what the contract says.

They are slow and see every argument, so that a plug-in's mistake in any of them shows in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tsmla.checks import TORCH_DTYPE_OF
from tsmla.variant import DecodeVariant, PackVariant, PrefillVariant, Variant


class Kernels:
    """Stands for `resolve.kernel`; `asked` lists the variants that were asked for."""

    def __init__(self) -> None:
        self.asked: list[Variant] = []

    def __call__(self, variant: Variant) -> Callable[..., None]:
        self.asked.append(variant)
        if isinstance(variant, DecodeVariant):
            return decode
        if isinstance(variant, PrefillVariant):
            return lambda *given: prefill(variant.causal, *given)
        assert isinstance(variant, PackVariant)
        return lambda *given: pack(TORCH_DTYPE_OF[variant.out_dtype], *given)


def rows(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, -inf for what is hidden: (mean of values, natural LSE), or (0, -inf)."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return weights @ values, lse


def decode(
    query, cache, tables, lengths, bounds, visible, sinks, out, lse, workspace, scale, out_scale, causal, window_left,
    world, rank, interleave, lse_includes_sink, parts,
) -> None:  # fmt: skip
    page, q_len = cache.shape[1], query.shape[1]
    assert not visible.numel() and not sinks.numel() and parts > 0
    workspace.fill_(-1)
    for b, length in enumerate(lengths.tolist()):
        pages = tables[b, : -(-length // page)].long()
        keys = cache[pages].reshape(-1, 576)[:length].double()
        index = torch.arange(length)
        position = index // interleave * interleave * world + rank * interleave + index % interleave
        for t in range(q_len):
            own = int(bounds[b]) - q_len + t
            seen = position <= (own if causal else int(bounds[b]) - 1)
            if window_left >= 0:
                seen &= position >= own - window_left
            scores = (scale * query[b, t].double() @ keys.T).masked_fill(~seen, -math.inf)
            result, natural = rows(scores, keys[:, :512])
            out[b, t] = (out_scale * result).to(out.dtype)
            if lse is not None:
                lse[b, t] = natural / math.log(2)


def prefill(causal, q, k, v, out, lse, starts_q, starts_kv, sinks, scale, out_scale, lse_includes_sink) -> None:
    assert not sinks.numel()
    for b in range(len(starts_q) - 1):
        mine, theirs = (slice(int(s[b]), int(s[b + 1])) for s in (starts_q, starts_kv))
        n, m = mine.stop - mine.start, theirs.stop - theirs.start
        scores = scale * torch.einsum("qhd,khd->hqk", q[mine].double(), k[theirs].double())
        if causal:
            scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
        result, natural = rows(scores, v[theirs].double().transpose(0, 1))
        out[mine] = (out_scale * result).transpose(0, 1).to(out.dtype)
        if lse is not None:
            lse[mine] = natural.T.float()


def pack(dtype, k_nope, k_pe, v, k_out, v_out, k_scale_inv, v_scale_inv) -> None:
    largest = torch.finfo(dtype).max
    shared = k_pe[:, None].expand(*k_nope.shape[:2], k_pe.shape[-1])
    for out, x, factor in ((k_out, torch.cat((k_nope, shared), -1), k_scale_inv), (v_out, v, v_scale_inv)):
        out.copy_((x.float() * factor).clamp(-largest, largest).to(dtype))
