"""FlashMLA's decode, dense and of chosen keys, and its prefill of chosen keys: `get_mla_metadata`,
`flash_mla_with_kvcache` and `flash_mla_sparse_fwd`, by `tsmla_decode` and `tsmla_sparse_prefill`.

They take the parameters of FlashMLA's older and current versions. Compared: deepseek-ai/FlashMLA 02fe0d0 and 9241ae3,
sgl-flash-mla 1.0.0. docs/start/compat.md has what differs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from ..identity.row_format import ROWS
from ..identity.support import LATENT_DIM
from ..operators import checks, workspace
from ..operators.decode import tsmla_decode
from ..operators.sparse_prefill import tsmla_sparse_prefill
from . import translate

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_FACE = "flash_mla_with_kvcache"
_NAMES = {
    "query": "q",
    "kv_cache": "k_cache",
    "block_tables": "block_table",
    "seq_lens": "cache_seqlens",
    "kv_lora_rank": "head_dim_v",
    "causal_mask": "causal",
    "sinks": "attn_sink",
}
_ROW_BYTES = ROWS["fp8_ds_mla"].bytes
"""Width of FlashMLA's rows with scales."""


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Stands in for the object in which FlashMLA keeps its schedule. It holds nothing: tsmla's kernels divide the work
    themselves, on the GPU, in every call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return (metadata, None) to hand to `flash_mla_with_kvcache`, which reads neither. Arguments are ignored."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool = False,
    kv_format: str | None = None,
    descale_q: float | torch.Tensor | None = None,
    descale_k: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MLA decode over a paged cache, dense or of chosen keys: `tsmla_decode` with FlashMLA's arguments and results.

    Args:
        q: [batch, s_q, heads, 576], bf16, fp16, e4m3 or e5m2, or [.., 512] without rope parts, bf16, fp16 or e4m3;
            copied where it is not contiguous.
        k_cache: [pages, page_size, 1, 576 or 512] as q; page_size 1, 2, 4, 8, 16, 32, 64 or 128. With indices also
            rows of 656 bytes, e4m3 or uint8, for a bf16 q, and pages of any size.
        block_table: [batch, width] int32. Not read where indices are given.
        cache_seqlens: [batch] int32 or int64. Not read where indices are given.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: not read; whatever `get_mla_metadata` of any version gave, or None.
        softmax_scale: q.shape[-1] ** -0.5 when None.
        causal: whether query token t sees no further than its own position; aligned to the last key. False with
            indices.
        is_fp8_kvcache: None, or whether k_cache has 8 bits.
        indices: [batch, s_q, top_k] int32: the keys of each query token, as page * page_size + row. Those that the
            cache does not have, -1 among them, name no key.
        topk_length: [batch] int32 or int64, with indices: only so many of the first of each list count.
        attn_sink: [heads] float32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); the LSE is not.
        use_legacy: True or False; one kernel serves both.
        descale_q, descale_k: of 8-bit q and k_cache: numbers, or floating-point tensors of one element. A CUDA tensor
            is waited for, and refused while a CUDA graph is captured.
        enable_batch_invariant: whether a request's bits must not depend on what shares its batch.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length, kv_format: refused if given.

    Returns:
        (out, lse): out [batch, s_q, heads, 512], q's dtype or bf16 for 8 bits; lse [batch, heads, s_q] float32,
        contiguous, **natural log**. A query row that sees no key gives output 0 and LSE **+inf**, as FlashMLA does.

    Raises what `tsmla_decode` raises; the texts have both functions' names of an argument.
    """
    translate.refused(
        _FACE, "keys come from one cache here: attend to each cache in a call of its own, and merge both by their LSEs",
        extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )  # fmt: skip
    translate.refused(_FACE, "the width of k_cache's rows tells their format", kv_format=kv_format)
    checks.flag(_FACE, "use_legacy", use_legacy)
    checks.flag(_FACE, "enable_batch_invariant", enable_batch_invariant)
    checks.cuda(_FACE, "q", q)
    checks.stored(_FACE, "k_cache", k_cache)
    sizes = checks.shape(_FACE, "q", q, ("batch", "s_q", "heads", "columns"))
    batch, s_q, heads = (sizes[name] for name in ("batch", "s_q", "heads"))
    widths = (q.shape[-1],) if indices is None else (q.shape[-1], _ROW_BYTES)
    checks.shape(_FACE, "k_cache", k_cache, *(("pages", "page_size", 1, width) for width in widths))
    scale, descale = _scales(q, k_cache, softmax_scale, is_fp8_kvcache, descale_q, descale_k)
    keys: dict[str, Any]
    if indices is None:
        keys, longest = _paged(k_cache, block_table, cache_seqlens, topk_length)
        keys["causal_mask"] = causal
        room = workspace.scratch(q, batch, s_q, heads, longest)
    else:
        if checks.flag(_FACE, "causal", causal):
            raise ArgumentError(f"{_FACE}: causal is True beside indices; it must be False: the lists say what is seen")
        checks.stored(_FACE, "indices", indices)
        top_k = checks.shape(_FACE, "indices", indices, (batch, s_q, "top_k"))["top_k"]
        keys = {"block_tables": None, "seq_lens": None, "max_seq_len": None}
        keys |= {"indices": indices, "topk_length": topk_length}
        room = workspace.scratch(q, batch * s_q, 1, heads, top_k)
    made = q.new_empty((batch, s_q, heads), dtype=torch.float32)
    try:
        out: Any = tsmla_decode(
            query=translate.readable(_FACE, "q", q),
            kv_cache=k_cache.squeeze(2),
            workspace_buffer=room,
            kv_lora_rank=head_dim_v,
            qk_rope_head_dim=q.shape[-1] - checks.integer(_FACE, "head_dim_v", head_dim_v, 1, translate.LARGEST_INT),
            softmax_scale=scale,
            output_scale=descale,
            lse=made,
            lse_base=math.e,
            sinks=attn_sink,
            batch_invariant=enable_batch_invariant,
            **keys,
        )
    except ArgumentError as error:
        raise translate.in_their_words(_FACE, error, _NAMES) from None
    lse = q.new_empty((batch, heads, s_q), dtype=torch.float32)
    return out, _with_infinity(made.transpose(1, 2), lse)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    return_max_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Attention of query tokens to chosen keys: `tsmla_sparse_prefill` with FlashMLA's arguments and results, but for
    the maximum of the logits, which must be asked for.

    Args:
        q: [s_q, heads, 576 or 512], bf16, fp16, e4m3 or e5m2, any number of heads; copied where it is not contiguous.
        kv: [s_kv, 1, 576 or 512] as q, with strides that are multiples of 16 bytes; or [s_kv, 1, 656], e4m3 or uint8,
            for a bf16 q.
        indices: [s_q, 1, top_k] int32: the rows of kv that each token sees. Those that kv does not have name no key,
            whether -1, s_kv or any other; one that stands twice counts twice.
        sm_scale: factor of the scores.
        d_v: 512.
        attn_sink: [heads] float32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); the LSE is not.
        topk_length: [s_q] int32 or int64: only so many of the first of each list count.
        return_max_logits: compute FlashMLA's second result too, by a second pass over the keys
            (`tsmla_sparse_prefill` says what it takes).

    Returns:
        (out, max_logits, lse): out [s_q, heads, 512], q's dtype or bf16 for 8 bits; lse [s_q, heads] float32, **natural
        log**. A token without a key gives output 0 and LSE **+inf**, as FlashMLA does. max_logits: [s_q, heads]
        float32, the largest scaled score of each row, -inf without keys; None where it was not asked for.

    Raises what `tsmla_sparse_prefill` raises; the texts have both functions' names of an argument.
    """
    face = "flash_mla_sparse_fwd"
    checks.cuda(face, "q", q)
    sizes = checks.shape(face, "q", q, ("s_q", "heads", 576), ("s_q", "heads", 512))
    checks.stored(face, "kv", kv)
    checks.shape(face, "kv", kv, *(("s_kv", 1, width) for width in (q.shape[-1], _ROW_BYTES)))
    checks.stored(face, "indices", indices)
    checks.shape(face, "indices", indices, (sizes["s_q"], 1, "top_k"))
    if checks.integer(face, "d_v", d_v, 1, translate.LARGEST_INT) != LATENT_DIM:
        raise UnsupportedError(f"{face}: d_v is {d_v}; kernels exist for {LATENT_DIM}")
    lse = q.new_empty((sizes["s_q"], sizes["heads"]), dtype=torch.float32)
    try:
        results: Any = tsmla_sparse_prefill(
            translate.readable(face, "q", q), kv, indices.squeeze(1), sm_scale,
            topk_length=topk_length, sinks=attn_sink, lse=lse, return_max_logits=return_max_logits,
        )  # fmt: skip
    except ArgumentError as error:
        names = {"query": "q", "softmax_scale": "sm_scale", "sinks": "attn_sink"}
        raise translate.in_their_words(face, error, names) from None
    out, largest = results if return_max_logits else (results, None)
    return out, largest, _with_infinity(lse, lse)


def _with_infinity(lse: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write an LSE with +inf for rows without keys, FlashMLA's, where the operators have -inf."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf, out=into)


def _paged(k_cache: torch.Tensor, block_table: Any, cache_seqlens: Any, topk_length: Any) -> tuple[dict[str, Any], int]:
    """Return the operator's arguments of a dense call, and the most keys of a request."""
    if block_table is None or cache_seqlens is None:
        missing = "block_table" if block_table is None else "cache_seqlens"
        raise ArgumentError(f"{_FACE}: {missing} is None; it must be given where indices are not")
    checks.stored(_FACE, "block_table", block_table)
    width = checks.shape(_FACE, "block_table", block_table, ("batch", "width"))["width"]
    longest = min(max(1, width * k_cache.shape[1]), translate.LARGEST_INT)
    keys = {"block_tables": block_table, "seq_lens": cache_seqlens, "max_seq_len": longest, "topk_length": topk_length}
    return keys, longest


def _scales(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    softmax_scale: float | None,
    is_fp8_kvcache: bool | None,
    descale_q: float | torch.Tensor | None,
    descale_k: float | torch.Tensor | None,
) -> tuple[float, float]:
    """Return the factors of the scores and of the output."""
    scaled = k_cache.shape[-1] == _ROW_BYTES
    eight_bits = k_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) or (scaled and k_cache.dtype is torch.uint8)
    if is_fp8_kvcache is not None and checks.flag(_FACE, "is_fp8_kvcache", is_fp8_kvcache) != eight_bits:
        raise UnsupportedError(
            f"{_FACE}: is_fp8_kvcache is {bool(is_fp8_kvcache)} and k_cache is {k_cache.dtype}; an 8-bit cache is "
            f"torch.float8_e4m3fn or torch.float8_e5m2, 576 or 512 elements a row, or with indices {_ROW_BYTES} bytes "
            "a row"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.number(_FACE, "softmax_scale", softmax_scale)
    if scaled or not eight_bits:
        has = f"has rows of {_ROW_BYTES} bytes with scales of their own" if scaled else f"is {k_cache.dtype}"
        translate.refused(
            _FACE, f"it belongs to 8-bit caches of 576 or 512 elements a row, and k_cache {has}",
            descale_q=descale_q, descale_k=descale_k,
        )  # fmt: skip
    of_query = 1.0 if descale_q is None else translate.number(_FACE, "descale_q", descale_q)
    of_keys = 1.0 if descale_k is None else translate.number(_FACE, "descale_k", descale_k)
    return scale * of_query * of_keys, of_keys
