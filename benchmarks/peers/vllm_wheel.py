"""Kernels that vLLM runs on Hopper, from the extensions of an installed vLLM (0.26).

They are FlashAttention-3, for prefill and as an absorbed MLA decode; FlashMLA, dense, in 16 and in 8 bits; and the
operators of vLLM's caches. Their callers in vLLM's own sources show the arguments:
vllm_flash_attn/flash_attn_interface.py, v1/attention/ops and v1/attention/backends/mla.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..bench_decode import LATENT, PAGE, ROPE
from ..bench_decode import Case as DecodeCase
from ..bench_prefill import Case as PrefillCase

Launch = Callable[[], torch.Tensor]
SPLITS = 32
"""Most pieces that vLLM lets FlashAttention-3 cut a request into inside CUDA graphs."""
EIGHT_BITS = torch.float8_e4m3fn


def fa3_prefill(case: PrefillCase) -> Launch | None:
    """Return a launch of FlashAttention-3 with cumulative lengths."""
    if case.query.dtype == torch.float8_e5m2:
        return None
    out = case.output()
    return lambda: _fa3(
        case.query,
        case.key,
        case.value,
        out,
        case.scale,
        causal=case.causal,
        ends_q=case.ends_q,
        most_q=case.queries,
        ends_kv=case.ends_kv,
        most_kv=case.keys,
    )


def fa3_mla(case: DecodeCase) -> Launch | None:
    """Return a launch of FlashAttention-3's decode of latent values, vLLM's FLASH_ATTN_MLA."""
    query = _one_piece(case)
    if query is None or query.dtype == EIGHT_BITS:
        return None
    query = query.reshape(-1, case.heads, LATENT + ROPE)
    ends = case.cum_seq_lens_q
    if ends is None:
        ends = torch.arange(case.requests + 1, device="cuda", dtype=torch.int32) * case.q_len
    cache = case.kv_cache.unsqueeze(-2)
    plan = _operators("_vllm_fa3_C").get_scheduler_metadata(
        case.requests, case.q_len, case.max_seq_len, case.heads, 1, ROPE, LATENT, query.dtype, case.seq_lens, ends,
        None, None, None, None, PAGE, 0, True, -1, -1, False, SPLITS, None, 0,
    )  # fmt: skip
    out = torch.empty(*query.shape[:2], LATENT, dtype=query.dtype, device="cuda")
    return lambda: _fa3(
        query[..., LATENT:],
        cache[..., LATENT:],
        cache[..., :LATENT],
        out,
        case.scale,
        causal=True,
        ends_q=ends,
        most_q=case.q_len,
        latent_query=query[..., :LATENT],
        seq_lens=case.seq_lens,
        most_kv=case.max_seq_len,
        pages=case.block_tables,
        plan=plan,
        splits=SPLITS,
    )


def flash_mla(case: DecodeCase) -> Launch | None:
    """Return a launch of FlashMLA's dense decode of 16-bit caches. Its plan is made by the first launch and kept."""
    query = _one_piece(case)
    if query is None or query.dtype == EIGHT_BITS or case.cum_seq_lens_q is not None:
        return None
    out = torch.empty(case.requests, 1, case.q_len * case.heads, LATENT, dtype=query.dtype, device="cuda")
    plan: list[torch.Tensor | None] = [None, None]

    def launch() -> torch.Tensor:
        result, _, *plan[:] = _operators("_flashmla_C").dense_decode_fwd(
            query, case.kv_cache.unsqueeze(-2), LATENT, case.seq_lens, case.block_tables, case.scale, True, *plan, out
        )
        return result

    return launch


def flash_mla_sparse(case: DecodeCase) -> Launch | None:
    """Return a launch of FlashMLA's decode of chosen keys of "fp8_ds_mla" rows, which are all of them here."""
    query = _one_piece(case)
    if query is None or case.kv_cache.shape[-1] != 656 or case.cum_seq_lens_q is not None or case.keys % 128:
        return None
    position = torch.arange(case.keys, device="cuda", dtype=torch.int32)
    slots = case.block_tables[:, position // PAGE] * PAGE + position % PAGE
    indices = slots[:, None].expand(-1, case.q_len, -1).contiguous()
    return _flash_mla_chosen(query, case.kv_cache, indices, case.scale)


def flash_mla_chosen(query: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, scale: float) -> Launch:
    """Return a launch of FlashMLA's decode of chosen keys: query [tokens, heads, 576], a cache of "fp8_ds_mla" rows,
    indices [tokens, top_k]."""
    launch = _flash_mla_chosen(query[:, None], cache, indices[:, None], scale)
    return lambda: launch().squeeze(1)


def _flash_mla_chosen(query: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, scale: float) -> Launch:
    """Launch what takes 64 or 128 heads: fewer are filled up, as vLLM's FLASHMLA_SPARSE does."""
    own = query.shape[2]
    heads = 64 if own <= 64 else 128
    filled = torch.zeros(*query.shape[:2], heads, query.shape[-1], dtype=query.dtype, device="cuda")
    filled[:, :, :own] = query
    out = torch.empty(*query.shape[:2], heads, LATENT, dtype=query.dtype, device="cuda")
    plan: list[torch.Tensor | None] = [None, None]
    absent = (None, None, None)

    def launch() -> torch.Tensor:
        result, _, *plan[:] = _operators("_flashmla_C").sparse_decode_fwd(
            filled, cache.unsqueeze(-2), indices, None, None, *plan, *absent, LATENT, scale, out
        )
        return result[:, :, :own]

    return launch


def flash_mla_chosen_prefill(
    query: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, scale: float, lengths: torch.Tensor | None = None
) -> Launch:
    """Return a launch of FlashMLA's prefill of chosen keys: query [tokens, heads, 576], rows [keys, 576] bf16, indices
    [tokens, top_k], of which the first `lengths` [tokens] count. Heads are filled up as `_flash_mla_chosen` does."""
    tokens, own, columns = query.shape
    heads = 64 if own <= 64 else 128
    filled = torch.zeros(tokens, heads, columns, dtype=query.dtype, device="cuda")
    filled[:, :own] = query
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device="cuda")

    def launch() -> torch.Tensor:
        _operators("_flashmla_C").sparse_prefill_fwd(
            filled, rows[:, None], indices[:, None], scale, LATENT, None, lengths, out
        )
        return out[:, :own]

    return launch


def fa3_chosen(query: torch.Tensor, cache: torch.Tensor, indices: torch.Tensor, scale: float) -> Launch:
    """Return a launch of FlashAttention-3's decode of latent values whose pages are single keys, vLLM's
    FLASH_ATTN_MLA_SPARSE: query [tokens, heads, 576], a bf16 cache, indices [tokens, top_k]."""
    tokens, heads, _ = query.shape
    top_k = indices.shape[-1]
    ends = torch.arange(tokens + 1, device="cuda", dtype=torch.int32)
    lengths = torch.full((tokens,), top_k, device="cuda", dtype=torch.int32)
    rows = cache.view(-1, 1, 1, LATENT + ROPE)
    plan = _operators("_vllm_fa3_C").get_scheduler_metadata(
        tokens, 1, top_k, heads, 1, ROPE, LATENT, query.dtype, lengths, ends,
        None, None, None, None, 1, 0, False, -1, -1, False, SPLITS, None, 0,
    )  # fmt: skip
    out = torch.empty(tokens, heads, LATENT, dtype=query.dtype, device="cuda")
    return lambda: _fa3(
        query[..., LATENT:], rows[..., LATENT:], rows[..., :LATENT], out, scale, causal=False, ends_q=ends, most_q=1,
        latent_query=query[..., :LATENT], seq_lens=lengths, most_kv=top_k, pages=indices, plan=plan, splits=SPLITS,
    )  # fmt: skip


def flash_mla_fp8(case: DecodeCase) -> Launch | None:
    """Return a launch of vLLM's FlashMLA for e4m3 queries and caches."""
    query = _one_piece(case)
    if query is None or query.dtype != EIGHT_BITS or case.cum_seq_lens_q is not None:
        return None
    operators = _operators("_flashmla_extension_C")
    plan = operators.get_mla_decoding_metadata_dense_fp8(case.seq_lens, case.q_len * case.heads, 1)
    one = torch.ones(1, device="cuda")
    return lambda: operators.fwd_kvcache_mla_fp8(
        query, case.kv_cache.unsqueeze(-2), LATENT, case.seq_lens, case.block_tables, case.scale, True, *plan, one, one
    )[0]


def _one_piece(case: DecodeCase) -> torch.Tensor | None:
    return None if isinstance(case.query, tuple) else case.query


def _fa3(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    ends_q: torch.Tensor,
    most_q: int,
    most_kv: int,
    ends_kv: torch.Tensor | None = None,
    latent_query: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    splits: int = 1,
) -> torch.Tensor:
    """Call `fwd` by position, since its parameters have no names: see flash_attn_interface.py."""
    new_keys = (None, None)
    left_out: Any = (None,) * 8  # indices and padding of batches, rotary embedding, scales
    window, softcap, interleaved, sm_margin = (-1, -1), 0.0, True, 0
    return _operators("_vllm_fa3_C").fwd(
        query, key, value, *new_keys, latent_query, out, ends_q, ends_kv, None, None, seq_lens, most_q, most_kv, pages,
        *left_out, scale, causal, *window, softcap, interleaved, plan, splits, None, sm_margin, None, 1, 0, None,
    )[0]  # fmt: skip


def installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def cache_operators() -> Any:
    """Return `concat_and_cache_mla` and others, by vLLM's own names. Raises what `_operators` raises."""
    _operators("_C_stable_libtorch")
    return torch.ops._C_cache_ops


@functools.cache
def _operators(library: str) -> Any:
    """Load an extension. Raises ModuleNotFoundError without vLLM, FileNotFoundError where it has no such extension."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("vLLM is not installed; its wheel holds the kernels")
    root = Path(found.submodule_search_locations[0])
    path = next(root.rglob(f"{library}.abi3.so"), None)
    if path is None:
        raise FileNotFoundError(f"{library}.abi3.so is nowhere under {root}")
    torch.ops.load_library(path)
    return getattr(torch.ops, library)
