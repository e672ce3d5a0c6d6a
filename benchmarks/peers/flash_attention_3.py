"""FlashAttention-3 from its own sources: the module flash_attn_interface, in hopper/ of Dao-AILab/flash-attention.

Every call makes its own results, as that interface has it. For bench_prefill:

    python -m benchmarks prefill --against flash_attention_3=benchmarks.peers.flash_attention_3:prefill
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..bench_prefill import Case

Launch = Callable[[], torch.Tensor]
DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Dtypes that its kernels take; results of 8 bits are bf16."""


def prefill(case: Case) -> Launch | None:
    """Return a launch of its entry for sequences of one length, [batch, length, heads, dim], whose scheduler knows
    that."""
    if case.query.dtype not in DTYPES:
        return None
    query, key, value = (
        pack.unflatten(0, (case.sequences, length))
        for pack, length in ((case.query, case.queries), (case.key, case.keys), (case.value, case.keys))
    )
    options, function = _options(case), _interface().flash_attn_func
    return lambda: function(query, key, value, **options)


def prefill_ragged(case: Case) -> Launch | None:
    """Return a launch of its entry for a pack with cumulative lengths."""
    if case.query.dtype not in DTYPES:
        return None
    options, function = _options(case), _interface().flash_attn_varlen_func
    return lambda: function(
        case.query, case.key, case.value, case.ends_q, case.ends_kv, case.queries, case.keys, **options
    )


def _options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal}
    if case.query.dtype.itemsize == 1:
        one = torch.ones(case.sequences, case.key.shape[1], device=case.query.device)
        options |= {"q_descale": one, "k_descale": one, "v_descale": one}
    return options


def _interface() -> Any:
    """Import the interface. Raises ModuleNotFoundError where it is not installed."""
    return importlib.import_module("flash_attn_interface")
