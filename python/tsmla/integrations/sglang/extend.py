"""New tokens of requests, and their context in chunks, with keys and values of every head."""

from __future__ import annotations

from typing import Any

import torch

from tsmla.operators.prefill import tsmla_prefill


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, starts: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the output [tokens, heads, value] and, where the model merges results, the natural LSE [tokens, heads].

    SGLang says whether keys are those of the new tokens, or of a chunk of their context, which all of them see.

    starts: [requests + 1] int32, where each request's new tokens start.
    """
    if forward_batch.mha_one_shot:
        raise NotImplementedError("tsmla prefills new tokens and chunks of their context, not both at once")
    in_context = bool(forward_batch.attn_attend_prefix_cache)
    starts_kv = forward_batch.prefix_chunk_cu_seq_lens[forward_batch.prefix_chunk_idx] if in_context else starts
    return tsmla_prefill(
        q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
        k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
        v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        None,
        starts_kv,
        0,
        starts.numel() - 1,
        layer.scaling,
        not in_context,
        in_context or bool(forward_batch.mha_return_lse),
        cum_seq_lens_q=starts,
    )
