"""tsmla_sparse_prefill: attention of a prompt's tokens to the keys that each of them has chosen, in the latent space.

It is a call of `tsmla_decode` with `indices`: the same kernels, with a list of keys for each query token.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError
from ..identity.support import LATENT_DIM, ROPE_DIM
from . import checks
from .decode import tsmla_decode
from .max_logits import max_logits
from .workspace import enough, scratch

_OPERATOR = "tsmla_sparse_prefill"


def tsmla_sparse_prefill(
    query: torch.Tensor | tuple[torch.Tensor, ...],
    kv: torch.Tensor | tuple[torch.Tensor, ...],
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    lse_includes_sink: bool = False,
    output_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    lse_base: float = math.e,
    batch_invariant: bool = False,
    enable_pdl: bool = False,
    workspace_buffer: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Absorbed MLA attention of query tokens to the keys that each has chosen: output_scale * softmax(softmax_scale * q
    k^T) v.

    A row of `kv` is a key, and its first 512 columns are also the value. `tsmla_decode` with `indices` computes it, and
    its docstring says more of each argument: what is said there of [tokens, ...] holds here. No value in a device
    tensor leads outside of the tensors passed, and nothing waits for the GPU.

    Args:
        query: [tokens, heads, 576], or [tokens, heads, 512] for keys without a rope part; bf16, fp16, e4m3 or e5m2. Or
            its pieces, (q_nope [tokens, heads, 512], q_pe [tokens, heads, 64]). Any number of heads.
        kv: [keys, width] rows, such as those of a prompt that are in no cache; or a paged cache [pages, page_size,
            width] with pages of any size. Rows are of query's dtype, 576 or 512 wide as query's are, or 656 bytes wide
            ("fp8_ds_mla") for a bf16 query. A tuple (latent [.., 512], rope [.., 64]) where the pieces lie in two
            tensors.
        indices: [tokens, top_k] int32: the keys of each query token, in any order, any top_k. An index is a row of
            `kv`, or page * page_size + row. One that is negative, or not below the number of rows, names no key; one
            that stands twice counts twice. The lists alone say what is seen: a causal prompt's have no later keys.
        softmax_scale: factor of the scores.
        topk_length: [tokens] int32 or int64: only so many of the first indices of each list count. All when None.
        sinks: [heads] float32: for each head a score of one more key whose value is 0.
        lse_includes_sink: whether the LSE counts that key, too.
        output_scale: factor of the output, before it is rounded.
        out: [tokens, heads, 512] to write into: query's dtype, bf16 for 8 bits.
        lse: [tokens, heads] float32 to write the LSE into, with any strides.
        return_lse: also return the LSE.
        return_max_logits: also return the largest softmax_scale * q k^T of each row. No kernel keeps it: torch gathers
            the keys again and multiplies in float32, which should take several times as long as the attention
            (counted, not measured), and up to 512 MiB.
        lse_base: math.e, or 2.
        batch_invariant: a token's results have the same bits whatever other tokens are in the call.
        enable_pdl: launch with programmatic dependent launch.
        workspace_buffer: scratch memory of `decode_workspace_size(tokens, 1, heads, top_k)` bytes. When None, it is
            allocated, from torch's allocator: up to 35 MB on an H200 for many tokens of 64 heads or more, and where
            torch compiles the call, for any tokens of 16 heads or more.

    Returns:
        out, or a tuple: out; lse, if asked for, [tokens, heads] float32, **natural log** (log2 with lse_base=2); the
        largest logits, if asked for, [tokens, heads] float32, without logarithm or sinks. A token without a key gives
        output 0, LSE -inf and a largest logit of -inf.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or row.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    pieces: Any = query if type(query) is tuple else (query,)
    traced = is_dynamo_compiling()
    if not traced:
        _check_query(pieces)
        return_max_logits = checks.flag(_OPERATOR, "return_max_logits", return_max_logits)
    latent = pieces[0]
    if workspace_buffer is None and traced:  # sizes may be symbols, which a plan would compare
        workspace_buffer = latent.new_empty(enough(latent.device, latent.shape[1]), dtype=torch.int8)
    elif workspace_buffer is None:
        has_lists = isinstance(indices, torch.Tensor) and not indices.is_nested and indices.ndim
        top_k = indices.shape[-1] if has_lists else 1
        workspace_buffer = scratch(latent, len(latent), 1, latent.shape[1], top_k)
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": _paged(kv),
        "workspace_buffer": workspace_buffer,
        "kv_lora_rank": LATENT_DIM,
        "qk_rope_head_dim": sum(piece.shape[-1] for piece in pieces[:2]) - LATENT_DIM,
        "block_tables": None,
        "seq_lens": None,
        "max_seq_len": None,
        "softmax_scale": softmax_scale,
        "output_scale": output_scale,
        "out": out,
        "enable_pdl": enable_pdl,
        "return_lse": return_lse,
        "lse_base": lse_base,
        "sinks": sinks,
        "lse_includes_sink": lse_includes_sink,
        "lse": lse,
        "batch_invariant": batch_invariant,
        "indices": indices,
        "topk_length": topk_length,
    }
    results: Any = tsmla_decode(**arguments) if traced else _called(arguments)
    if not return_max_logits:
        return results
    largest = max_logits(query, arguments["kv_cache"], indices, softmax_scale, topk_length)
    return (*results, largest) if return_lse else (results, largest)


def _called(arguments: dict[str, Any]) -> Any:
    """Call `tsmla_decode`, and say in this function's words what it says of wrong arguments."""
    try:
        return tsmla_decode(**arguments)
    except ArgumentError as error:
        raise _in_own_words(error) from None


def _check_query(pieces: tuple[Any, ...]) -> None:
    """Check that a query has the shape of tokens and columns that there are."""
    for number, piece in enumerate(pieces[:2]):
        name = "query" if len(pieces) == 1 else f"query[{number}]"
        checks.cuda(_OPERATOR, name, piece)
        widths = (LATENT_DIM + ROPE_DIM, LATENT_DIM) if len(pieces) == 1 else ((LATENT_DIM, ROPE_DIM)[number],)
        checks.shape(_OPERATOR, name, piece, *(("tokens", "heads", width) for width in widths))


def _paged(kv: Any) -> Any:
    """View rows [keys, width], and a scale of each [keys], as a cache with pages of one key; other tensors are such
    already."""
    if type(kv) is tuple:
        return tuple(_paged_tensor(tensor, 1 if number == 2 else 2) for number, tensor in enumerate(kv))
    return _paged_tensor(kv, 2)


def _paged_tensor(rows: Any, dimensions: int) -> Any:
    """View a tensor of so many `dimensions` as pages of one key."""
    is_rows = isinstance(rows, torch.Tensor) and not rows.is_nested and rows.ndim == dimensions
    return rows.unsqueeze(1) if is_rows else rows


def _in_own_words(error: ArgumentError) -> ArgumentError:
    """Return an error of `tsmla_decode` as this function's."""
    text = re.sub(r"\bkv_cache\b", "kv", str(error).replace("tsmla_decode", _OPERATOR, 1))
    return type(error)(text)
