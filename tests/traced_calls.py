"""A function that torch.compile shall trace: prefill, pack and decode, with torch's own work between them."""

from __future__ import annotations

import math
from typing import Any

import torch
import tsmla
from tsmla.identity.arch import Arch


def attention(given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Prefill over keys that are put together here, the same keys and values in FP8, and a decode whose lengths have 64
    bits and whose LSE is natural."""
    k_nope, value = given["kv"].split(128, -1)
    key = torch.cat([k_nope, given["k_pe"].expand(-1, k_nope.shape[1], -1)], -1)
    out, lse = tsmla.tsmla_prefill(
        given["query"] * 2,
        key,
        value,
        None,
        given["ends"],
        64,
        given["batch"],
        0.125,
        return_lse=True,
        sinks=given["sinks"],
    )
    k_fp8, v_fp8 = tsmla.mla_kv_pack_quantize_fp8(k_nope, given["k_pe"], value, k_scale_inv=0.5)
    decoded, decoded_lse = tsmla.tsmla_decode(
        given["absorbed"] + 1,
        given["cache"],
        given["workspace"],
        512,
        64,
        given["tables"],
        given["seq_lens"],
        given["longest"],
        0.1,
        return_lse=True,
        lse_base=math.e,
    )
    return out * 3, lse, k_fp8.view(torch.uint8), v_fp8.view(torch.uint8), decoded, decoded_lse + 1


def arguments(tokens: int, heads: int, batch: int, device: str) -> dict[str, Any]:
    """What `attention` takes: `tokens` in `batch` sequences, of which the last has nearly all; as many requests."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    ends = [min(sequence, tokens) for sequence in range(batch)] + [tokens]
    pages = 3
    return {
        "query": random(tokens, heads, 192),
        "kv": random(tokens, heads, 256),
        "k_pe": random(tokens, 1, 64),
        "ends": torch.tensor(ends, dtype=torch.int32, device=device),
        "batch": batch,
        "sinks": torch.randn(heads, device=device),
        "absorbed": random(batch, 2, heads, 576),
        "cache": random(pages * batch, 64, 576),
        "workspace": torch.empty(Arch.SM100A.sms * heads * 8 * 513 * 4, dtype=torch.int8, device=device),
        "tables": torch.arange(pages * batch, dtype=torch.int32, device=device).view(batch, pages),
        "seq_lens": torch.randint(0, 64 * pages, (batch,), device=device),
        "longest": 64 * pages,
    }
