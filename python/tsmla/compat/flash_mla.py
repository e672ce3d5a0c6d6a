"""FlashMLA's dense decode, computed by `tsmla_decode`: `get_mla_metadata` and `flash_mla_with_kvcache`.

They take the parameters of FlashMLA's older and current versions. Compared: deepseek-ai/FlashMLA 02fe0d0 and 9241ae3,
sgl-flash-mla 1.0.0. docs/start/compat.md has what differs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from ..operators import checks
from ..operators.decode import tsmla_decode
from . import translate

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

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
_SPARSE = "there is dense attention here only; FlashMLA and FlashInfer have sparse kernels"


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
    """Dense MLA decode over a paged cache: `tsmla_decode` with FlashMLA's arguments and results.

    Args:
        q: [batch, s_q, heads, 576], bf16, fp16, e4m3 or e5m2; copied where it is not contiguous.
        k_cache: [pages, page_size, 1, 576] of q's dtype; page_size 16, 32, 64 or 128.
        block_table: [batch, width] int32.
        cache_seqlens: [batch] int32 or int64.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: not read; whatever `get_mla_metadata` of any version gave, or None.
        softmax_scale: q.shape[-1] ** -0.5 when None.
        causal: whether query token t sees no further than its own position; aligned to the last key.
        is_fp8_kvcache: None, or whether k_cache has 8 bits. 656-byte rows are not such a cache.
        attn_sink: [heads] float32: the output is multiplied by exp(lse) / (exp(lse) + exp(attn_sink)); the LSE is not.
        use_legacy: True or False; one kernel serves both.
        descale_q, descale_k: of 8-bit q and k_cache: numbers, or floating-point tensors of one element. A CUDA tensor
            is waited for, and refused while a CUDA graph is captured.
        enable_batch_invariant: whether a request's bits must not depend on what shares its batch.
        indices, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length, kv_format: refused if given.

    Returns:
        (out, lse): out [batch, s_q, heads, 512], q's dtype or bf16 for 8 bits; lse [batch, heads, s_q] float32,
        contiguous, **natural log**. A query row that sees no key gives output 0 and LSE **+inf**, as FlashMLA does.

    Raises what `tsmla_decode` raises; the texts have both functions' names of an argument.
    """
    translate.refused(
        _FACE,
        _SPARSE,
        indices=indices,
        extra_k_cache=extra_k_cache,
        topk_length=topk_length,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )
    translate.refused(_FACE, "dense caches have one format", kv_format=kv_format)
    checks.flag(_FACE, "use_legacy", use_legacy)
    checks.flag(_FACE, "enable_batch_invariant", enable_batch_invariant)
    if block_table is None or cache_seqlens is None:
        missing = "block_table" if block_table is None else "cache_seqlens"
        raise ArgumentError(f"{_FACE}: {missing} is None; it must be given: {_SPARSE}")
    checks.cuda(_FACE, "q", q)
    for name, given in (("k_cache", k_cache), ("block_table", block_table)):
        checks.stored(_FACE, name, given)
    sizes = checks.shape(_FACE, "q", q, ("batch", "s_q", "heads", "columns"))
    checks.shape(_FACE, "k_cache", k_cache, ("pages", "page_size", 1, q.shape[-1]))
    width = checks.shape(_FACE, "block_table", block_table, ("batch", "width"))["width"]
    scale, descale = _scales(q, k_cache, softmax_scale, is_fp8_kvcache, descale_q, descale_k)
    longest = min(max(1, width * k_cache.shape[1]), translate.LARGEST_INT)
    lse = q.new_empty((sizes["batch"], sizes["heads"], sizes["s_q"]), dtype=torch.float32)
    try:
        out: Any = tsmla_decode(
            query=translate.readable(_FACE, "q", q),
            kv_cache=k_cache.squeeze(2),
            workspace_buffer=translate.scratch(q, sizes["batch"], sizes["s_q"], sizes["heads"], longest),
            kv_lora_rank=head_dim_v,
            qk_rope_head_dim=q.shape[-1] - checks.integer(_FACE, "head_dim_v", head_dim_v, 1, translate.LARGEST_INT),
            block_tables=block_table,
            seq_lens=cache_seqlens,
            max_seq_len=longest,
            softmax_scale=scale,
            output_scale=descale,
            causal_mask=causal,
            lse=lse.transpose(1, 2),
            lse_base=math.e,
            sinks=attn_sink,
            batch_invariant=enable_batch_invariant,
        )
    except ArgumentError as error:
        raise translate.in_their_words(_FACE, error, _NAMES) from None
    return out, lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)


def _scales(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    softmax_scale: float | None,
    is_fp8_kvcache: bool | None,
    descale_q: float | torch.Tensor | None,
    descale_k: float | torch.Tensor | None,
) -> tuple[float, float]:
    """Return the factors of the scores and of the output."""
    eight_bits = k_cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    if is_fp8_kvcache is not None and checks.flag(_FACE, "is_fp8_kvcache", is_fp8_kvcache) != eight_bits:
        raise UnsupportedError(
            f"{_FACE}: is_fp8_kvcache is {bool(is_fp8_kvcache)} and k_cache is {k_cache.dtype}; an 8-bit cache is "
            "torch.float8_e4m3fn or torch.float8_e5m2, 576 elements a row"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.number(_FACE, "softmax_scale", softmax_scale)
    if not eight_bits:
        translate.refused(
            _FACE,
            f"it belongs to 8-bit caches, and k_cache is {k_cache.dtype}",
            descale_q=descale_q,
            descale_k=descale_k,
        )
    of_query = 1.0 if descale_q is None else translate.number(_FACE, "descale_q", descale_q)
    of_keys = 1.0 if descale_k is None else translate.number(_FACE, "descale_k", descale_k)
    return scale * of_query * of_keys, of_keys
