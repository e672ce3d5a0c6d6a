"""FlashInfer's paged decode, computed by `tsmla_decode`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError
from ...operators import checks
from ...operators.decode import tsmla_decode
from .. import translate

_FACE = "trtllm_batch_decode_with_kv_cache_mla"
_NAMES = {
    "softmax_scale": "bmm1_scale",
    "output_scale": "bmm2_scale",
    "causal_seqs": "causal_seqlens_kv_global",
}
_LIST_NAMES = {**_NAMES, "indices": "block_tables", "topk_length": "sparse_mla_top_k_lens"}
_SCALE_FORMATS = ("auto", "pow2_fp32", "arbitrary_fp32")
_BACKENDS = ("auto", "trtllm-gen", "cute-dsl", "xqa", "cake", "sparse")


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: list[torch.Tensor] | torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tsmla_decode`, causal or of chosen keys, with FlashInfer's arguments and results; shapes and dtypes are in its
    docstring.

    Args:
        query: [batch, q_len, heads, 576], or [tokens, heads, 576] with `cum_seq_lens_q`; 512 columns where
            qk_rope_head_dim is 0. Copied where strides are no multiples of 16 bytes.
        workspace_buffer: need not be zeroed; 128 MiB are enough for q_len up to 8.
        qk_nope_head_dim, multi_ctas_kv_counter_buffer: not read.
        bmm1_scale, bmm2_scale: factors of the scores and of the output: numbers, or floating-point tensors of one
            element. A CUDA tensor is waited for, and refused while a CUDA graph is captured.
        sinks: [heads] float32, or a list of one such tensor. Refused with return_lse: FlashInfer does not say whether
            its LSE counts them, `tsmla_decode` lets one choose.
        enable_pdl: None is False.
        backend, cute_dsl_impl: choose no kernel here; "cute-dsl" makes the LSE natural unless return_lse_base is given.
            "sparse" is for chosen keys only.
        is_var_seq: True or False; lengths are always read from `seq_lens`.
        lse: [batch * q_len, heads] or [batch, q_len, heads] float32 to write the LSE into, with any strides; with
            sparse_mla_top_k, the first two of three dimensions lie in memory as one.
        cum_seq_lens_q: [batch + 1] int32 on the device, which may change between replays of a graph.
        max_q_len: no request has more query tokens; None: not more than there are. Results of tokens of no request are
            not written.
        enable_dcp: decode context parallelism with an interleave of 1: `cp_world`, `cp_rank`, and
            `causal_seqlens_kv_global`, which is `causal_seqs`. Needs return_lse.
        return_lse_base: "base2" or "basee". None: e where only FlashInfer's cute-dsl could answer (backend "cute-dsl",
            enable_dcp, cum_seq_lens_q), else 2.
        sparse_mla_top_k: 0, or the length of lists of keys: block_tables are then the lists, [batch, q_len,
            sparse_mla_top_k], or [tokens, sparse_mla_top_k] with cum_seq_lens_q, of slots page * page_size + row; -1,
            or any other that the cache does not have, is no key. Pages have any size. max_seq_len and max_q_len are not
            read, results of tokens of no request are written, and enable_dcp is refused: lists name a rank's own keys.
        sparse_mla_top_k_lens: [tokens] int32, how many of the first of each list count. Without, those are as many as
            the keys before and at the token, by seq_lens [batch] (some more small launches where requests have several
            tokens); seq_lens [batch, q_len] are themselves such numbers; None: all.
        kv_scale_format: "auto"; with chosen keys also "pow2_fp32" and "arbitrary_fp32", which are the same here.
        uses_shared_paged_kv_idx, use_fp16_softmax, skip_softmax_threshold_scale_factor: refused unless they are what
            they are by default.

    Returns:
        out [batch, q_len, heads, 512] (or [tokens, heads, 512]), or (out, lse) with the LSE in `lse`'s shape, by
        default [batch * q_len, heads]. A query row that sees no key gives output 0 and LSE -inf.

    Raises what `tsmla_decode` raises; the texts have both functions' names of an argument.
    """
    top_k = checks.integer(_FACE, "sparse_mla_top_k", sparse_mla_top_k, 0, translate.LARGEST_INT)
    sparse = translate.word(_FACE, "backend", backend, _BACKENDS) == "sparse"
    if not top_k and (sparse or sparse_mla_top_k_lens is not None):
        said = "backend is sparse" if sparse else "sparse_mla_top_k_lens is given"
        raise ArgumentError(f"{_FACE}: {said} and sparse_mla_top_k is 0; it must be the length of lists of keys")
    translate.no_skipping(_FACE, skip_softmax_threshold_scale_factor)
    translate.off(_FACE, "it chooses a kernel of FlashInfer's", use_fp16_softmax=use_fp16_softmax)
    translate.word(_FACE, "cute_dsl_impl", cute_dsl_impl, ("auto", "modular", "monolithic"))
    translate.word(_FACE, "kv_scale_format", kv_scale_format, _SCALE_FORMATS if top_k else _SCALE_FORMATS[:1])
    if not checks.flag(_FACE, "uses_shared_paged_kv_idx", uses_shared_paged_kv_idx):
        raise UnsupportedError(f"{_FACE}: uses_shared_paged_kv_idx is False; keys and values are the same pages here")
    checks.flag(_FACE, "is_var_seq", is_var_seq)
    ragged = cum_seq_lens_q is not None
    if max_q_len is not None and not ragged:
        raise ArgumentError(f"{_FACE}: max_q_len is given without cum_seq_lens_q")
    returned = checks.flag(_FACE, "return_lse", return_lse)
    parallel = _parallel(returned, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global)
    if return_lse_base is None:
        base_e = backend == "cute-dsl" or parallel or ragged
    else:
        base_e = translate.word(_FACE, "return_lse_base", return_lse_base, ("base2", "basee")) == "basee"
    if lse is not None and not returned:
        raise ArgumentError(f"{_FACE}: lse is given and return_lse is False")
    sink = _one_sink(sinks)
    if sink is not None and returned:
        raise UnsupportedError(
            f"{_FACE}: sinks are given with return_lse; whether the LSE counts them is not FlashInfer's contract "
            "(tsmla_decode has lse_includes_sink)"
        )
    checks.cuda(_FACE, "query", query)
    columns = ("tokens", "heads", "columns") if ragged else ("batch", "q_len", "heads", "columns")
    checks.shape(_FACE, "query", query, columns)
    bounds = causal_seqlens_kv_global if parallel else None
    flat = math.prod(query.shape[:-2]), query.shape[-2]
    if lse is not None:
        translate.check_lse(_FACE, lse, query.device, flat, query.shape[:-1])
    keys: dict[str, Any] = {"block_tables": block_tables, "seq_lens": seq_lens, "max_seq_len": max_seq_len}
    if top_k:
        if parallel:
            raise UnsupportedError(f"{_FACE}: enable_dcp is True with chosen keys; pass lists of the rank's own keys")
        keys = _chosen(query, block_tables, top_k, sparse_mla_top_k_lens, seq_lens, cum_seq_lens_q)
    elif ragged:
        keys |= {
            "cum_seq_lens_q": cum_seq_lens_q,
            "max_q_len": max(query.shape[0], 1) if max_q_len is None else max_q_len,
        }
    result: Any
    try:
        result = tsmla_decode(
            query=translate.readable(_FACE, "query", query),
            kv_cache=kv_cache,
            workspace_buffer=workspace_buffer,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            softmax_scale=translate.number(_FACE, "bmm1_scale", bmm1_scale),
            output_scale=translate.number(_FACE, "bmm2_scale", bmm2_scale),
            out=out,
            enable_pdl=False if enable_pdl is None else enable_pdl,
            return_lse=returned,
            causal_seqs=bounds,
            cp_world=cp_world,
            cp_rank=cp_rank,
            lse_base=math.e if base_e else 2.0,
            sinks=sink,
            lse=None if lse is None else lse.view(query.shape[:-1]),
            **keys,
        )
    except ArgumentError as error:
        raise translate.in_their_words(_FACE, error, _LIST_NAMES if top_k else _NAMES) from None
    if not returned:
        return result
    made, made_lse = result
    return made, made_lse.view(flat) if lse is None else lse


def _chosen(
    query: torch.Tensor, lists: Any, top_k: int, lengths: Any, seq_lens: Any, ends: torch.Tensor | None
) -> dict[str, Any]:
    """Return the operator's arguments that say which keys query tokens see. ends: `cum_seq_lens_q`."""
    tokens = query.shape[:-2]
    checks.stored(_FACE, "block_tables", lists)
    checks.shape(_FACE, "block_tables", lists, (*tokens, top_k))
    for name, given in (("sparse_mla_top_k_lens", lengths), ("seq_lens", seq_lens), ("cum_seq_lens_q", ends)):
        if given is not None:
            checks.same_device(_FACE, name, given, "query", query.device)
            checks.dtype_in(_FACE, name, given, (torch.int32, torch.int64))
    if lengths is not None:
        checks.shape(_FACE, "sparse_mla_top_k_lens", lengths, (math.prod(tokens),))
        lengths = lengths.reshape(tokens)
    elif seq_lens is not None:
        lengths = _keys_before(tokens, seq_lens, ends)
    return {"block_tables": None, "seq_lens": None, "max_seq_len": None, "indices": lists, "topk_length": lengths}


def _keys_before(tokens: torch.Size, seq_lens: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Return how many keys each query token sees of its request's, itself included; a token of no request sees none."""
    if ends is None:
        batch, q_len = tokens
        checks.shape(_FACE, "seq_lens", seq_lens, (batch,), (batch, q_len))
        if seq_lens.ndim == 2 or q_len == 1:
            return seq_lens
        return seq_lens[:, None] - torch.arange(q_len - 1, -1, -1, dtype=seq_lens.dtype, device=seq_lens.device)
    (requests,) = checks.shape(_FACE, "seq_lens", seq_lens, ("requests",)).values()
    checks.shape(_FACE, "cum_seq_lens_q", ends, (requests + 1,))
    token = torch.arange(tokens[0], dtype=ends.dtype, device=ends.device)
    if not requests:
        return torch.zeros_like(token)
    request = torch.searchsorted(ends[1:].contiguous(), token, right=True)
    own = request.clamp(max=requests - 1)
    return torch.where(request < requests, seq_lens[own] - ends[own + 1] + token + 1, 0)


def _parallel(returned: bool, enable_dcp: bool, cp_world: int, cp_rank: int, causal: torch.Tensor | None) -> bool:
    """Whether context parallelism is asked for; its arguments go together."""
    world = checks.integer(_FACE, "cp_world", cp_world, 1, translate.LARGEST_INT)
    rank = checks.integer(_FACE, "cp_rank", cp_rank, 0, world - 1)
    if not checks.flag(_FACE, "enable_dcp", enable_dcp):
        others = {"cp_world": world != 1, "cp_rank": rank != 0, "causal_seqlens_kv_global": causal is not None}
        for name, given in others.items():
            if given:
                raise ArgumentError(f"{_FACE}: {name} is given and enable_dcp is False")
        return False
    if not returned:
        raise ArgumentError(f"{_FACE}: enable_dcp needs return_lse: ranks' results are merged with it")
    if causal is None:
        raise ArgumentError(f"{_FACE}: enable_dcp needs causal_seqlens_kv_global, each request's keys over all ranks")
    return True


def _one_sink(sinks: list[torch.Tensor] | torch.Tensor | None) -> torch.Tensor | None:
    if not isinstance(sinks, (list, tuple)):
        return sinks
    if len(sinks) != 1:
        raise ArgumentError(f"{_FACE}: sinks has {len(sinks)} tensors; it must be one, or a list of one")
    return sinks[0]
