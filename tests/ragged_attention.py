"""tsmla_prefill on a CPU in float64, and a small model with MLA's expanded heads: what tests of padded batches need."""

from __future__ import annotations

import math
from typing import Any

import torch
from tsmla.identity.support import PREFILL_DIMS


def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cum_seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    batch_size: int,
    softmax_scale: float,
    is_causal: bool,
    seq_lens: None,
    max_seq_len: int,
) -> torch.Tensor:
    """The operator's contract: causal is bottom-right, a row without keys gives 0, rows of no sequence stay NaN."""
    assert (query.shape[2], value.shape[2]) in PREFILL_DIMS and seq_lens is None and max_seq_len > 0
    assert cum_seq_lens.dtype == cum_seq_lens_q.dtype == torch.int32
    ends_q, ends_kv = cum_seq_lens_q.tolist(), cum_seq_lens.tolist()
    assert len(ends_q) == len(ends_kv) == batch_size + 1
    out = torch.full((*query.shape[:2], value.shape[2]), math.nan, dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    for sequence in range(batch_size):
        rows = slice(*ends_q[sequence : sequence + 2])
        keys = slice(*ends_kv[sequence : sequence + 2])
        k, v = (x[keys].double().repeat_interleave(group, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * softmax_scale
        if is_causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
            scores = scores.masked_fill(hidden, -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), v).to(out.dtype)
    return out


def deepseek(heads: int = 4, key_heads: int | None = None, device: str = "cpu", **changes: Any) -> torch.nn.Module:
    """A random DeepSeek-V3 of two layers, one of them with experts, whose attention matters."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **{
            "vocab_size": 199,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": key_heads or heads,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 48,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": None,
            **changes,
        }
    )
    torch.manual_seed(5)
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(4)
    return model.to(device)
