"""Masked dense prefill: prompts whose tokens choose keys, as ordinary attention with a bit for each key.

A list for each token reads the keys of each token anew; a mask reads a request's keys once for many tokens, but all of
them. So it pays while prompts are not much longer than lists. vLLM 0.33 has a table that says how long, by the names of
its backends. `offer` writes into it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tsmla.identity.key_mask import words_for
from tsmla.identity.support import prefill_out_dtype, why_unsupported
from tsmla.identity.variant import Dtype, KeyMaskVariant, PrefillVariant
from tsmla.integrations.shared.ready import masked_kernels
from tsmla.operators.checks import TORCH_DTYPES
from tsmla.operators.key_mask import tsmla_key_mask

from . import NAME, PREFILL, SPARSE, name_in, options, ready

logger = logging.getLogger("tsmla")

MOST_BYTES = 256 << 20
"""The most memory of a batch's masks, and of the lists that they are made from. More go by lists."""
_TABLE = "_MASKED_MHA_THRESHOLDS"
_LIST_US = 0.375
"""A token's decode of 2,048 chosen keys in bf16 or fp8_ds_mla, for up to 64 heads: the least of the record
chosen-prefill-nvidia-h200-*."""
_HEADS_AT_ONCE = 64
_KEY_US = {(192, 128): 1.0e-6, (256, 256): 1.35e-6}
"""One query, key and head of a masked prefill of 8,192 tokens with random lists, by the head's dims: records
prefill-masked-*-nvidia-h100-*. Dims that are not here were not measured."""
_PROJECTED_US = {(192, 128): 4.4e-4, (256, 256): 7.6e-4}
"""The projection that makes one key of context and one head from the latent row, at 600 TFLOP/s; not measured."""
_SHARES = (0.25, 0.5, 0.75, 0.875)
"""Where the least number of tokens steps up, as shares of the most keys at which a mask pays."""

Ranges = tuple[tuple[int, int], ...]
"""(most keys of a request, fewest query tokens of one), in ascending order."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Makes key masks from what a batch's tokens chose.

    positions: [tokens, top_k] int32, places in the token's own request, -1 for none.
    """

    positions: torch.Tensor

    def mask(self, tokens: slice, starts_q: torch.Tensor, first: torch.Tensor | None, keys: int) -> torch.Tensor:
        """Return the mask, as `tsmla_prefill` takes it, of a launch over some of each request's keys.

        starts_q: [requests + 1] int32, where each request's rows start among `tokens`.
        first: [requests] int32, the place of the first of these keys in its request; 0 when None.
        keys: the most that a request has in this launch.
        """
        lists = self.positions[tokens]
        if first is not None:
            lists = lists - _of_tokens(first, starts_q, len(lists))
        return tsmla_key_mask(lists, keys)


def _of_tokens(of_requests: torch.Tensor, starts_q: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a column with each token's request's entry; one of no request has the last one's."""
    if of_requests.numel() == 1:
        return of_requests
    token = torch.arange(tokens, dtype=torch.int32, device=starts_q.device)
    request = torch.bucketize(token, starts_q[1:], out_int32=True, right=True)
    return of_requests[request.clamp_(max=of_requests.numel() - 1)][:, None]


def offer(config: Any, heads: int, dims: tuple[int, int]) -> bool:
    """Load what masked prefills of a layer need and tell vLLM where they pay; False, with the reason in the log, where
    tokens of prompts longer than a list are decoded instead.

    heads: of this rank. dims: of a query's head and of a value's.
    """
    if reason := why_not(config, dims):
        _log(reason)
        return False
    masked_kernels(*_kernels(config, dims))
    ranges = where_it_pays(heads, dims, config.model_config.hf_text_config.index_topk)
    table = getattr(mla_attention, _TABLE)
    mine = table.setdefault(dims, {}).setdefault(name_in(AttentionBackendEnum, SPARSE), {})
    mine[config.parallel_config.tensor_parallel_size] = ranges
    return True


def why_not(config: Any, dims: tuple[int, int]) -> str | None:
    """Return a sentence that says why prompts are not masked and what would change it; None when they are."""
    if not hasattr(mla_attention, _TABLE):
        return "this vLLM asks no backend for it; vLLM 0.33 does"
    prefill = config.attention_config.mla_prefill_backend
    if prefill is None or prefill.get_path() != PREFILL:
        return f"another backend prefills; name {NAME} as the mla_prefill_backend"
    if config.parallel_config.decode_context_parallel_size > 1:
        return "vLLM asks for no masks under decode context parallelism; it does with a size of 1"
    if envs.VLLM_BATCH_INVARIANT:
        return "whether a prompt is masked depends on the others of its batch; it is without VLLM_BATCH_INVARIANT"
    if dims not in _KEY_US:
        return f"it was measured for heads of (query, value) dims {', '.join(map(str, _KEY_US))}, not {dims}"
    if ready.arch() is None:
        return "this process has no GPU that tsmla has kernels for"
    variant, mask = _kernels(config, dims)
    return why_unsupported(variant) or why_unsupported(mask)


def _kernels(config: Any, dims: tuple[int, int]) -> tuple[PrefillVariant, KeyMaskVariant]:
    arch = ready.arch()
    assert arch is not None
    dtype = Dtype.E4M3 if options.fp8_prefill(config) else TORCH_DTYPES[config.model_config.dtype]
    masked = PrefillVariant(arch, dtype, prefill_out_dtype(dtype), *dims, causal=False, lse=True, masked=True)
    return masked, KeyMaskVariant(arch)


@functools.cache
def _log(reason: str) -> None:
    """Log a reason once: every layer has it."""
    logger.info("tokens of prompts longer than a list of chosen keys are decoded, without a masked prefill: %s", reason)


def where_it_pays(heads: int, dims: tuple[int, int], top_k: int) -> tuple[Ranges, Ranges]:
    """Return where a masked prefill is faster than a list for each token, without context and with it.

    A list costs the same for any number of keys, and for up to 64 heads; a mask costs what its keys and heads do. New
    tokens see half of their prompt on average. With context, keys are projected for this batch's tokens alone, of which
    there must be enough.
    """
    a_list = _LIST_US * top_k / 2048 * math.ceil(heads / _HEADS_AT_ONCE)
    most = a_list / (_KEY_US[dims] * heads)
    projected = _PROJECTED_US[dims] / _KEY_US[dims]
    with_context = tuple((int(most * share), round(projected * share / (1 - share))) for share in _SHARES)
    return ((int(2 * most), 0),), with_context


def fits(prefill: Any, top_k: int) -> bool:
    """Whether a batch's masks, and the lists that they are made from, need no more than `MOST_BYTES`.

    prefill: vLLM's metadata.
    """
    chunks = () if prefill.chunked_context is None else prefill.chunked_context.chunks
    keys = max(prefill.max_query_len, *(chunk.max_seq_len for chunk in chunks), 0)
    return int(prefill.query_lens_cpu.sum()) * (words_for(keys) + top_k) * 4 <= MOST_BYTES
