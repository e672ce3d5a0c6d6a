"""tsmla_decode: absorbed MLA attention of a few query tokens per request over a paged latent cache."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import checks, examine, resolve
from .call import DECODE
from .checks import LARGEST_FLOAT32, LARGEST_SCORES_FACTOR, SMALLEST_FLOAT32
from .errors import ArgumentError, TsmlaError, UnsupportedError
from .plan import plan_decode
from .support import DECODE_OUT_DTYPES, LATENT_DIM, ROPE_DIM
from .variant import DecodeVariant
from .workspace import multiprocessors, sized

_OPERATOR = DECODE.name
_kind = examine.kind_of(DECODE)
_LARGEST_INT = 2**31 - 1
_MAX_MIN_SPLIT = 256
_PAGES = (16, 32, 64, 128)
_TENSOR = torch.Tensor


def tsmla_decode(
    query: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
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
    sinks: torch.Tensor | None = None,
    lse_includes_sink: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """output_scale * softmax(softmax_scale * q k^T) v, where a cache row is a key, and its latent part also the value.

    Nothing is allocated but the results (and 32-bit copies of 64-bit lengths), and nothing waits for the GPU; after
    `warmup` it can be captured in a CUDA graph, whose replays may have other lengths and page tables in the same
    tensors. No value in a device tensor leads outside of the tensors passed.

    Args:
        query: [batch, q_len, heads, 576], bf16, fp16, e4m3 or e5m2: latent part first, then rope. Or a pair of its
            parts as they were computed, (q_nope [batch, q_len, heads, 512], q_pe [batch, q_len, heads, 64]), which are
            not copied and give the same bits. Last dimensions contiguous, outer strides free multiples of 16 bytes, of
            each part its own. Its tokens are the last q_len positions of each request. Any number of heads, any q_len.
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
        sinks: [heads] float32, contiguous: for each head a score, scaled already and in natural units, of one more key
            that every query token sees and whose value is 0. -inf changes nothing, +inf gives outputs of 0. Refused
            when cp_world > 1: it belongs into the merged result, as out * sigmoid(LSE - sinks), LSE of base e.
        lse_includes_sink: whether the LSE counts that key, too.

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
    if not (
        type(max_seq_len) is type(window_left) is type(cp_world) is type(cp_rank) is type(cp_interleave_size) is int
        and type(min_split_kv) is int
        and type(softmax_scale) is type(output_scale) is float
        and 0 < max_seq_len <= _LARGEST_INT
        and SMALLEST_FLOAT32 <= softmax_scale <= LARGEST_SCORES_FACTOR
        and -LARGEST_FLOAT32 <= output_scale <= LARGEST_FLOAT32
    ):
        max_seq_len = checks.integer(_OPERATOR, "max_seq_len", max_seq_len, 1, _LARGEST_INT)
        window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv = _integers(
            window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv
        )
        softmax_scale = checks.number(_OPERATOR, "softmax_scale", softmax_scale)
        if not checks.is_scores_factor(softmax_scale):
            checks.refuse_scores_factor(_OPERATOR, f"softmax_scale is {softmax_scale}; it")
        output_scale = checks.scale(_OPERATOR, "output_scale", output_scale)
    q_pe = None
    if type(query) is not _TENSOR and isinstance(query, tuple | list):
        query, q_pe = examine.pieces(_OPERATOR, "query", ("q_nope", "q_pe"), query)
    tensors = (
        query, q_pe, kv_cache, block_tables, seq_lens, causal_seqs, local_visible_lens, sinks, out, workspace_buffer
    )  # fmt: skip
    options = (
        return_lse, enable_pdl, causal_mask, lse_includes_sink, kv_lora_rank, qk_rope_head_dim,
        1 << (max_seq_len - 1).bit_length(), window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv, lse_base,
    )  # fmt: skip
    try:
        kind = _kind(tensors, query.shape, options, block_tables.nbytes > 0)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options))
        kernel, parts, workspace_bytes, rewritten, whole, nothing, no_sinks, new_out, new_lse = served
        flat, narrow, narrow_bounds = rewritten
        if not workspace_bytes <= workspace_buffer.nbytes <= _LARGEST_INT:
            workspace_buffer = sized(workspace_buffer, workspace_bytes)
        if out is None:
            out = new_out()
        lse = new_lse() if return_lse else None
        lengths = bounds = examine.narrowed(seq_lens) if narrow else seq_lens
        if causal_seqs is not None:
            bounds = examine.narrowed(causal_seqs) if narrow_bounds else causal_seqs
        if parts:
            kernel(
                query, whole if q_pe is None else q_pe, kv_cache.squeeze(1) if flat else kv_cache, block_tables,
                lengths, bounds, nothing if local_visible_lens is None else local_visible_lens,
                no_sinks if sinks is None else sinks, out, lse, workspace_buffer, softmax_scale, output_scale,
                1 if causal_mask else 0, window_left, cp_world, cp_rank, cp_interleave_size,
                1 if lse_includes_sink else 0, parts,
            )  # fmt: skip
        else:  # no kernel that would refuse what the kind does not tell
            _examined(tensors, options)
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options)  # raises if an argument is wrong, and says which
        raise
    if lse is None:
        return out
    if lse_base != 2.0:
        lse.mul_(math.log(2.0))
    return out, lse


class _Options(NamedTuple):
    """A call's arguments that are no tensors, but for factors. longest: max_seq_len rounded up to a power of two, as
    plans round it: contexts grow with every step, and kinds of calls should not."""

    lse: bool
    pdl: bool
    causal: bool
    lse_includes_sink: bool
    kv_lora_rank: int
    qk_rope_head_dim: int
    longest: int
    window_left: int
    cp_world: int
    cp_rank: int
    cp_interleave_size: int
    min_split_kv: int
    lse_base: float


class _Served(NamedTuple):
    """What calls of one kind need besides their arguments.

    parts: of the plan; 0 when there is nothing to launch. rewritten: whether the cache's dimension of 1 has to go, and
    whether seq_lens and causal_seqs have 64 bits. whole, nothing, no_sinks: the kernel's words for no second piece of
    the query, no visible lengths and no sinks. new_out, new_lse: make the results.
    """

    kernel: Callable[..., None]
    parts: int
    workspace_bytes: int
    rewritten: tuple[bool, bool, bool]
    whole: torch.Tensor
    nothing: torch.Tensor
    no_sinks: torch.Tensor
    new_out: Callable[[], torch.Tensor]
    new_lse: Callable[[], torch.Tensor]


def _examined(tensors: tuple, chosen: tuple) -> _Served:
    """What serves a call (chosen: fields of `_Options`), with every check and its error."""
    options = _Options(*chosen)
    query, q_pe, kv_cache, block_tables, seq_lens, causal_seqs, _, sinks, *_ = tensors
    first, sizes = ("", {}) if q_pe is None else ("q_nope", {"query_columns": LATENT_DIM})
    examination = examine.Examination(DECODE, tensors, first, sizes)
    dtype, device, sizes = examination.dtype, examination.device, examination.sizes
    out_dtype = DECODE_OUT_DTYPES[dtype]
    lse, pdl, *_ = checks.each(
        checks.flag, _OPERATOR, return_lse=options.lse, enable_pdl=options.pdl, causal_mask=options.causal,
        lse_includes_sink=options.lse_includes_sink,
    )  # fmt: skip
    variant = DecodeVariant(examination.arch, dtype, out_dtype, lse, pdl)
    examination.check(variant)
    batch, q_len, heads = sizes["batch"], sizes["q_len"], sizes["heads"]
    for name, size, least in (("kv_cache", "pages", "one page"), ("block_tables", "width", "one column")):
        if batch and not sizes[size]:
            given = list((kv_cache if name == "kv_cache" else block_tables).shape)
            raise ArgumentError(f"{_OPERATOR}: {name} has shape {given}; it must have at least {least}")
    if sizes["page_size"] not in _PAGES:
        raise ArgumentError(f"{_OPERATOR}: kv_cache has pages of {sizes['page_size']} keys; accepted: {_PAGES}")
    _check_options(options, causal_seqs is not None, sinks is not None)
    parts = workspace_bytes = 0
    if batch and q_len and heads:
        plan = plan_decode(variant.arch, multiprocessors(device), batch, q_len, heads, options.longest)
        parts, workspace_bytes = plan.parts, plan.workspace_bytes

    def made(*layout: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return functools.partial(torch.empty_strided, *layout, dtype=dtype, device=device)

    token = heads * LATENT_DIM
    return _Served(
        resolve.kernel(variant),
        parts,
        workspace_bytes,
        (kv_cache.ndim == 4, examine.is_wide(seq_lens), examine.is_wide(causal_seqs)),
        query.new_empty((0, 0, 0, ROPE_DIM)),
        query.new_empty((0, 0), dtype=torch.int32),
        query.new_empty(0, dtype=torch.float32),
        made(
            (batch, q_len, heads, LATENT_DIM), (q_len * token, token, LATENT_DIM, 1),
            dtype=checks.TORCH_DTYPE_OF[out_dtype],
        ),
        made((batch, q_len, heads), (q_len * heads, heads, 1), dtype=torch.float32),
    )  # fmt: skip


def _check_options(options: _Options, has_causal_seqs: bool, has_sinks: bool) -> None:
    """Everything about them that needs no tensor."""
    dims = (options.kv_lora_rank, options.qk_rope_head_dim)
    for name, size in zip(("kv_lora_rank", "qk_rope_head_dim"), dims, strict=True):
        checks.number(_OPERATOR, name, size)
    if dims != (LATENT_DIM, ROPE_DIM):
        raise UnsupportedError(
            f"{_OPERATOR}: kv_lora_rank and qk_rope_head_dim are {dims[0]} and {dims[1]}; kernels exist "
            f"for {LATENT_DIM} and {ROPE_DIM}"
        )
    cp_world = options.cp_world
    _integers(options.window_left, cp_world, options.cp_rank, options.cp_interleave_size, options.min_split_kv)
    if cp_world > 1 and not has_causal_seqs:
        raise ArgumentError(
            f"{_OPERATOR}: cp_world is {cp_world} but causal_seqs is not given; it must hold each request's keys over "
            "all ranks"
        )
    if cp_world > 1 and has_sinks:
        raise ArgumentError(
            f"{_OPERATOR}: sinks are given and cp_world is {cp_world}; every rank would count them: call without, "
            "merge the ranks' results, and multiply these by 1 / (1 + exp(sink - lse)), where lse is the merged "
            "natural logarithm"
        )
    if checks.number(_OPERATOR, "lse_base", options.lse_base) not in (2.0, math.e):
        raise ArgumentError(f"{_OPERATOR}: lse_base is {checks.spelled(options.lse_base)}; accepted: 2 and math.e")


def _integers(
    window_left: int, cp_world: int, cp_rank: int, cp_interleave_size: int, min_split_kv: int
) -> tuple[int, int, int, int, int]:
    """The same, of Python's own type and in their ranges."""
    window_left = checks.integer(_OPERATOR, "window_left", window_left, -1, _LARGEST_INT)
    cp_world = checks.integer(_OPERATOR, "cp_world", cp_world, 1, _LARGEST_INT)
    cp_rank = checks.integer(_OPERATOR, "cp_rank", cp_rank, 0, cp_world - 1)
    most = _LARGEST_INT // cp_world
    cp_interleave_size = checks.integer(_OPERATOR, "cp_interleave_size", cp_interleave_size, 1, most)
    min_split_kv = checks.integer(_OPERATOR, "min_split_kv", min_split_kv, 1, _MAX_MIN_SPLIT)
    return window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv
