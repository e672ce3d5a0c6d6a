"""tsmla_decode: absorbed MLA attention of a few query tokens per request over a paged latent cache."""

from __future__ import annotations

import math

import torch

from . import checks
from .checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from .decode_checks import (
    LARGEST_INT,
    MAX_MIN_SPLIT,
    OPERATOR,
    check_dims,
    check_rest,
    examined,
    integer,
    known,
    multiprocessors,
    scale,
)
from .errors import ArgumentError
from .plan import plan_decode
from .support import LATENT_DIM, ROPE_DIM


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

    Nothing is allocated but the results, and nothing waits for the GPU; after `warmup` it can be captured in a CUDA
    graph, whose replays may have other lengths and page tables in the same tensors.

    Args:
        query: [batch, q_len, heads, 576], e4m3, bf16 or fp16, contiguous: latent part first, then rope. Its tokens are
            the last q_len positions of each request. Any number of heads, any q_len.
        kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576] of query's dtype; page_size 16, 32, 64 or 128;
            any page stride that is a multiple of 16 bytes, rows within a page without gaps.
        workspace_buffer: [bytes] int8 or uint8, at least `decode_workspace_size`; callers that size it by
            SMs * heads * max(8, q_len) * 513 * 4 always have enough. Uninitialised, and nothing in it outlives a call.
        kv_lora_rank, qk_rope_head_dim: 512 and 64.
        block_tables: [batch, width] int32, pages of each request in order; entries beyond a request's keys are not
            read, so rows may be wider than needed.
        seq_lens: [batch] int32 or int64, keys of each request in this cache, its query tokens' own included.
        max_seq_len: at least the longest of `seq_lens`, or of what a captured graph will see: how many CTAs can be
            occupied follows from it, never what is computed.
        softmax_scale: factor of the scores, times the dequantisation scales of query and cache.
        output_scale: factor of the output, before it is rounded; not of the LSE.
        out: [batch, q_len, heads, 512] to write into, contiguous: bf16 for e4m3 queries, else query's dtype.
        is_var_seq: not read; lengths are always read from `seq_lens`.
        causal_mask: query token t sees the positions up to its own; otherwise all tokens see what the last one sees.
        window_left: also hide positions more than this many before a token's own; -1 for none.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.
        causal_seqs: [batch] int32 or int64, keys of each request over all ranks: the position that the last query token
            may see, plus one. `seq_lens` when None; needed when cp_world > 1.
        cp_world, cp_rank, cp_interleave_size: decode context parallelism. Key c of this cache has the position
            (c // i) * i * cp_world + cp_rank * i + c % i, with i = cp_interleave_size.
        min_split_kv: 1 to 256; accepted for callers of the same interface. Keys are always dealt evenly to the whole
            GPU, so that there is no least number of splits to ask for.
        local_visible_lens: [batch, q_len] int32, keys of this cache that each query token may see at most.
        lse_base: 2, or math.e for the natural logarithm (one more small launch).

    Returns:
        out, or (out, lse) with lse [batch, q_len, heads] float32, **base 2**: log2 of the sum of exponentials of the
        scaled scores. A query row that sees no key gives output 0 and LSE -inf. Results over context-parallel ranks
        merge to the unsharded one with weights 2 ** lse.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or head dimensions.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if causal_seqs is None:
        causal_seqs = seq_lens
    tensors = (query, kv_cache, workspace_buffer, block_tables, seq_lens, causal_seqs, local_visible_lens, out)
    flags = (bool(return_lse), bool(enable_pdl))
    served = known(*tensors, flags) or examined(*tensors, flags)
    if not (
        type(max_seq_len) is type(window_left) is type(cp_world) is type(cp_rank) is type(cp_interleave_size) is int
        and kv_lora_rank == LATENT_DIM
        and qk_rope_head_dim == ROPE_DIM
        and 0 < max_seq_len <= LARGEST_INT
        and -1 <= window_left <= LARGEST_INT
        and (cp_world == 1 or causal_seqs is not seq_lens)
        and 0 <= cp_rank < cp_world
        and 0 < cp_interleave_size * cp_world <= LARGEST_INT
        and type(min_split_kv) is int
        and 1 <= min_split_kv <= MAX_MIN_SPLIT
        and (lse_base == 2.0 or lse_base == math.e)
        and type(softmax_scale) is type(output_scale) is float
        and SMALLEST_FLOAT32 <= softmax_scale <= LARGEST_FLOAT32
        and -LARGEST_FLOAT32 <= output_scale <= LARGEST_FLOAT32
    ):
        check_dims(kv_lora_rank, qk_rope_head_dim)
        max_seq_len = integer("max_seq_len", max_seq_len, 1, LARGEST_INT)
        window_left = integer("window_left", window_left, -1, LARGEST_INT)
        cp_world = integer("cp_world", cp_world, 1, LARGEST_INT)
        cp_rank = integer("cp_rank", cp_rank, 0, cp_world - 1)
        cp_interleave_size = integer("cp_interleave_size", cp_interleave_size, 1, LARGEST_INT // cp_world)
        integer("min_split_kv", min_split_kv, 1, MAX_MIN_SPLIT)
        check_rest(cp_world, causal_seqs is not seq_lens, lse_base)
        softmax_scale = scale("softmax_scale", softmax_scale, positive=True)
        output_scale = scale("output_scale", output_scale, positive=False)

    batch, q_len, heads, _ = query.shape
    if out is None:
        token = heads * LATENT_DIM
        out = checks.empty(
            (batch, q_len, heads, LATENT_DIM), (q_len * token, token, LATENT_DIM, 1), served.out_dtype, query.device
        )
    lse = None
    if return_lse:
        lse = checks.empty((batch, q_len, heads), (q_len * heads, heads, 1), torch.float32, query.device)
    if batch and q_len and heads:
        plan = plan_decode(served.arch, served.sm_count, batch, q_len, heads, max_seq_len)
        workspace = _sized(workspace_buffer, plan.workspace_bytes)
        lengths = seq_lens if seq_lens.dtype is torch.int32 else _low_words(seq_lens)
        bounds = lengths
        if causal_seqs is not seq_lens:
            bounds = causal_seqs if causal_seqs.dtype is torch.int32 else _low_words(causal_seqs)
        visible = served.nothing if local_visible_lens is None else local_visible_lens
        served.kernel(
            query, kv_cache if kv_cache.ndim == 3 else kv_cache.squeeze(1), block_tables, lengths, bounds, visible,
            out, lse, workspace, softmax_scale, output_scale, 1 if causal_mask else 0, window_left,
            cp_world, cp_rank, cp_interleave_size, plan.parts,
        )  # fmt: skip
        if lse is not None and lse_base != 2.0:
            lse.mul_(math.log(2.0))
    return out if lse is None else (out, lse)


def decode_workspace_size(
    batch_size: int,
    q_len: int,
    heads: int,
    max_seq_len: int | None = None,
    device: torch.device | str | int | None = None,
) -> int:
    """Bytes of workspace that `tsmla_decode` needs for a call of this shape on a CUDA device (the current one).

    Without `max_seq_len`, enough for any. Never more than SMs * heads * max(8, q_len) * 513 * 4, which is enough for
    every batch size. Raises UnsupportedError for GPUs that tsmla has no kernels for.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    for name, value in (("batch_size", batch_size), ("q_len", q_len), ("heads", heads)):
        integer(name, value, 0, LARGEST_INT, "decode_workspace_size")
    if max_seq_len is not None:
        max_seq_len = integer("max_seq_len", max_seq_len, 1, LARGEST_INT, "decode_workspace_size")
    if not (batch_size and q_len and heads):
        return 0
    return plan_decode(
        checks.arch_of(place), multiprocessors(place), batch_size, q_len, heads, max_seq_len
    ).workspace_bytes


def _sized(workspace: torch.Tensor, needed: int) -> torch.Tensor:
    """The workspace as the kernel takes it: int8, less than 2 GiB."""
    size = workspace.numel()
    if size < needed:
        raise ArgumentError(
            f"{OPERATOR}: workspace_buffer has {size} bytes; this call needs {needed} (tsmla.decode_workspace_size "
            "says so; SMs * heads * max(8, q_len) * 513 * 4 is always enough)"
        )
    if size > LARGEST_INT:
        workspace = workspace[:needed]
    return workspace if workspace.dtype is torch.int8 else workspace.view(torch.int8)


def _low_words(lengths: torch.Tensor) -> torch.Tensor:
    """int64 lengths as int32, in place: the low half of each, which comes first."""
    return lengths.as_strided(lengths.shape, (1,)).view(torch.int32)[::2]
