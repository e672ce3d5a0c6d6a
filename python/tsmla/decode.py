"""tsmla_decode: absorbed MLA attention of a few query tokens per request over a paged latent cache."""

from __future__ import annotations

import math

import torch

from . import checks, resolve
from .checks import LARGEST_FLOAT32, LARGEST_SCORES_FACTOR, SMALLEST_FLOAT32
from .decode_checks import LARGEST_INT, OPERATOR, Tensors, cuda_device, examined, gpu_of, integers, sized
from .errors import TsmlaError
from .plan import plan_decode

_grad_enabled = torch.is_grad_enabled


def tsmla_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    softmax_scale: float,
    output_scale: float = 1.0,
    out: torch.Tensor | None = None,
    is_var_seq: bool = True,
    causal_mask: bool = True,
    window_left: int = -1,
    enable_pdl: bool = False,
    return_lse: bool = False,
    causal_seqs: torch.Tensor | None = None,
    cp_world: int = 1,
    cp_rank: int = 0,
    cp_interleave_size: int = 1,
    *,
    min_split_kv: int = 1,
    local_visible_lens: torch.Tensor | None = None,
    lse_base: float = 2.0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """output_scale * softmax(softmax_scale * q k^T) v, where a cache row is a key, and its latent part also the value.

    Nothing is allocated but the results (and 32-bit copies of 64-bit lengths), and nothing waits for the GPU; after
    `warmup` it can be captured in a CUDA graph, whose replays may have other lengths and page tables in the same
    tensors. No value in a device tensor leads outside of the tensors passed.

    Args:
        query: [batch, q_len, heads, 576], bf16, fp16, e4m3 or e5m2, contiguous: latent part first, then rope. Its
            tokens are the last q_len positions of each request. Any number of heads, any q_len.
        kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576] of query's dtype; page_size 16, 32, 64 or 128;
            any page stride that is a multiple of 16 bytes, rows within a page without gaps.
        workspace_buffer: [bytes] int8 or uint8, at least `decode_workspace_size`; callers that size it by
            SMs * heads * max(8, q_len) * 513 * 4 always have enough. Uninitialised, and nothing in it outlives a call.
        kv_lora_rank, qk_rope_head_dim: 512 and 64.
        block_tables: [batch, width] int32, pages of each request in order; entries beyond a request's keys are not
            read, so rows may be wider than needed. A page that the cache does not have reads as zeros.
        seq_lens: [batch] int32 or int64, keys of each request in this cache, its query tokens' own included. Negative
            ones count as 0, those beyond width * page_size as that. int64 takes one more small launch.
        max_seq_len: at least the longest of `seq_lens`, or of what a captured graph will see: how many CTAs can be
            occupied follows from it, never what is computed.
        softmax_scale: factor of the scores, times the dequantisation scales of query and cache: from 2^-126 to 1024.
            Scaled scores beyond 2^23 are more than float32 tells apart: what then becomes of a row is not defined.
        output_scale: factor of the output, before it is rounded; not of the LSE.
        out: [batch, q_len, heads, 512] to write into, contiguous: query's dtype, bf16 for 8 bits.
        is_var_seq: not read; lengths are always read from `seq_lens`.
        causal_mask: query token t sees the positions up to its own; otherwise all tokens see what the last one sees.
        window_left: also hide positions more than this many before a token's own; -1 for none.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.
        causal_seqs: [batch] int32 or int64, keys of each request over all ranks: the position that the last query token
            may see, plus one. `seq_lens` when None; needed when cp_world > 1. Negative ones count as 0.
        cp_world, cp_rank, cp_interleave_size: decode context parallelism. Key c of this cache has the position
            (c // i) * i * cp_world + cp_rank * i + c % i, with i = cp_interleave_size.
        min_split_kv: 1 to 256; accepted for callers of the same interface. Keys are always dealt evenly to the whole
            GPU, so that there is no least number of splits to ask for.
        local_visible_lens: [batch, q_len] int32, keys of this cache that each query token may see at most; any values.
        lse_base: 2, or math.e for the natural logarithm (one more small launch).

    Returns:
        out, or (out, lse) with lse [batch, q_len, heads] float32, **base 2**: log2 of the sum of exponentials of the
        scaled scores. A query row that sees no key gives output 0 and LSE -inf. Results over context-parallel ranks
        merge to the unsharded one with weights 2 ** lse.

        A key that no query token of its request may see, whatever hides it, touches no result. NaN and inf in a key
        that only some tokens see may reach the others of its request.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or head dimensions.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if causal_seqs is None:
        causal_seqs = seq_lens
    if not (
        type(max_seq_len) is type(window_left) is type(cp_world) is type(cp_rank) is type(cp_interleave_size) is int
        and type(min_split_kv) is int
        and type(return_lse) is type(enable_pdl) is type(causal_mask) is bool
        and type(softmax_scale) is type(output_scale) is float
        and 0 < max_seq_len <= LARGEST_INT
        and SMALLEST_FLOAT32 <= softmax_scale <= LARGEST_SCORES_FACTOR
        and -LARGEST_FLOAT32 <= output_scale <= LARGEST_FLOAT32
    ):
        max_seq_len = checks.integer(OPERATOR, "max_seq_len", max_seq_len, 1, LARGEST_INT)
        window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv = integers(
            window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv
        )
        return_lse = checks.flag(OPERATOR, "return_lse", return_lse)
        enable_pdl = checks.flag(OPERATOR, "enable_pdl", enable_pdl)
        causal_mask = checks.flag(OPERATOR, "causal_mask", causal_mask)
        softmax_scale = checks.number(OPERATOR, "softmax_scale", softmax_scale)
        if not checks.is_scores_factor(softmax_scale):
            checks.refuse_scores_factor(OPERATOR, f"softmax_scale is {softmax_scale}; it")
        output_scale = checks.scale(OPERATOR, "output_scale", output_scale)
    options = (
        return_lse, enable_pdl, kv_lora_rank, qk_rope_head_dim, 1 << (max_seq_len - 1).bit_length(), window_left,
        cp_world, cp_rank, cp_interleave_size, min_split_kv, lse_base,
    )  # fmt: skip
    try:
        cache_shape, lengths_dtype = kv_cache.shape, seq_lens.dtype
        kind = (  # whatever `examined` looks at and no kernel refuses by itself
            OPERATOR, query.get_device(), query.dtype, query.shape, query.is_contiguous(),
            type(query), type(query) is type(kv_cache) is type(workspace_buffer) is type(block_tables) is type(seq_lens)
            or (type(kv_cache), type(workspace_buffer), type(block_tables), type(seq_lens)),
            query.is_neg() or kv_cache.is_neg(),
            cache_shape, kv_cache.is_contiguous() or kv_cache.stride(), block_tables.dtype, block_tables.nbytes > 0,
            lengths_dtype, seq_lens.is_contiguous(),
            None if causal_seqs is seq_lens else (
                causal_seqs.dtype, type(causal_seqs), causal_seqs.is_contiguous()
            ),
            None if local_visible_lens is None else (
                local_visible_lens.dtype, type(local_visible_lens), local_visible_lens.shape
            ),
            out if out is None else (type(out), out.is_contiguous() and not out.is_neg()),
            _grad_enabled() and (
                query.requires_grad or kv_cache.requires_grad or out is not None and out.requires_grad
            ),
            options,
        )  # fmt: skip
        kernel, parts, workspace_bytes, nothing, new_out, new_lse = resolve.calls.get(kind) or examined(
            Tensors(query, kv_cache, workspace_buffer, block_tables, seq_lens, causal_seqs, local_visible_lens, out),
            options,
            kind,
        )
        if not workspace_bytes <= workspace_buffer.nbytes <= LARGEST_INT:
            workspace_buffer = sized(workspace_buffer, workspace_bytes)
        if out is None:
            out = new_out()
        lse = new_lse() if return_lse else None
        lengths = seq_lens if lengths_dtype is torch.int32 else _narrowed(seq_lens)
        bounds = lengths
        if causal_seqs is not seq_lens:
            bounds = causal_seqs if causal_seqs.dtype is torch.int32 else _narrowed(causal_seqs)
        if parts:
            kernel(
                query, kv_cache if len(cache_shape) == 3 else kv_cache.squeeze(1), block_tables, lengths, bounds,
                nothing if local_visible_lens is None else local_visible_lens, out, lse, workspace_buffer,
                softmax_scale, output_scale, 1 if causal_mask else 0, window_left, cp_world, cp_rank,
                cp_interleave_size, parts,
            )  # fmt: skip
    except TsmlaError:
        raise
    except Exception:
        examined(  # raises if an argument is wrong, and says which
            Tensors(query, kv_cache, workspace_buffer, block_tables, seq_lens, causal_seqs, local_visible_lens, out),
            options,
        )
        raise
    if lse is None:
        return out
    if lse_base != 2.0:
        lse.mul_(math.log(2.0))
    return out, lse


def decode_workspace_size(
    batch_size: int,
    q_len: int,
    heads: int,
    max_seq_len: int | None = None,
    device: torch.device | str | int | None = None,
) -> int:
    """Bytes of workspace that `tsmla_decode` needs for a call of this shape on a CUDA device (the current one).

    Without `max_seq_len`, enough for any. Never more than SMs * heads * max(8, q_len) * 513 * 4, which is enough for
    every batch size. Raises UnsupportedError for GPUs that tsmla has no kernels for, and where torch sees no GPU.
    """
    operator = "decode_workspace_size"
    place = cuda_device(operator, device)
    for name, value in (("batch_size", batch_size), ("q_len", q_len), ("heads", heads)):
        checks.integer(operator, name, value, 0, LARGEST_INT)
    if max_seq_len is not None:
        max_seq_len = checks.integer(operator, "max_seq_len", max_seq_len, 1, LARGEST_INT)
    if not (batch_size and q_len and heads):
        return 0
    arch, processors = gpu_of(operator, place)
    return plan_decode(arch, processors, batch_size, q_len, heads, max_seq_len).workspace_bytes


def _narrowed(lengths: torch.Tensor) -> torch.Tensor:
    """int64 lengths as int32, those that it cannot hold as the nearest that it can: the low half of each, which comes
    first."""
    lengths = lengths.clamp(0, LARGEST_INT)
    return lengths.view(torch.int32)[::2]
