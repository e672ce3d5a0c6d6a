"""tsmla_decode: absorbed MLA attention of a few query tokens per request over a paged latent cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import DECODE
from ..identity.plan import plan_decode, wide_rows
from ..identity.support import DECODE_OUT_DTYPES, LATENT_DIM, why_unsupported
from ..identity.variant import DecodeVariant
from ..loading import resolve
from . import checks, chosen_keys, decode_rows, examine, traced, written
from .checks import LARGEST_FLOAT32, LARGEST_INT, LARGEST_SCORES_FACTOR, SMALLEST_FLOAT32
from .decode_options import MAX_MIN_SPLIT, check_dims, check_options, context_parallel, is_packed
from .workspace import multiprocessors, sized
from .written import Given, Served

_OPERATOR = DECODE.name
_MEASURED = {"kv_cache": "kv_cache", "rope_cache": "kv_cache[1]"}
"""Caches that must not reach too far where their rows are found one by one, and what callers call them."""
_kind = examine.kind_of(DECODE, _MEASURED)
_LN_2 = math.log(2.0)
_MOST_ROWS = 2**31 - 128
"""Most query rows (tokens x heads) of a request: the end of its last row tile, of up to 128 rows, must fit in int32."""
PAGE_SIZES = (16, 32, 64, 128)
SMALL_PAGE_SIZES = (1, 2, 4, 8)
"""Page sizes of caches whose keys are gathered one by one."""


@written.from_table(DECODE, without=("max_seq_len", "is_var_seq", "indices", "topk_length"))
def tsmla_decode(
    query: torch.Tensor | tuple[torch.Tensor, ...],
    kv_cache: torch.Tensor | tuple[torch.Tensor, ...],
    workspace_buffer: torch.Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    max_seq_len: int | None,
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
    lse: torch.Tensor | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
    indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA attention over a paged latent cache: output_scale * softmax(softmax_scale * q k^T) v.

    A cache row is a key, and its latent part is also the value. Nothing is allocated but the results (and 32-bit copies
    of 64-bit lengths), and nothing waits for the GPU; after `warmup` a call can be captured in a CUDA graph, whose
    replays may have other lengths and page tables in the same tensors. No value in a device tensor leads outside of the
    tensors passed.

    Args:
        query: [batch, q_len, heads, 576], bf16, fp16, e4m3 or e5m2: latent part first, then rope. Its tokens are the
            last q_len positions of each request. Any number of heads, any q_len. Last dimensions contiguous, outer
            strides free multiples of 16 bytes, of each piece its own. Rows have 512 columns in place of 576 where
            qk_rope_head_dim is 0. Other forms:
            - (q_nope [batch, q_len, heads, 512], q_pe [batch, q_len, heads, 64]): the two pieces as they were computed.
              They are not copied and give the same bits.
            - [tokens, heads, 576], or such pieces, with cum_seq_lens_q: the tokens of all requests, one request behind
              the other.
            - (q_nope e4m3, q_pe bf16, query_scales), with a kv_cache of three tensors. A scale is the factor of a whole
              row, rope included: [batch, q_len, heads] float32, or [batch, q_len, 1], any strides. A bf16 query in one
              or two pieces is accepted, too: `mla_quantize_q` turns it into these three first.
        kv_cache: [pages, page_size, 576] or [pages, 1, page_size, 576] of query's dtype; page_size 1, 2, 4, 8, 16, 32,
            64 or 128; any page stride that is a multiple of 16 bytes, rows within a page without gaps. With indices,
            pages of fewer than 16 keys, or the two tensors below, rows are read one by one: row strides are then free
            multiples of 16 bytes, too, and the cache reaches over less than 32 GiB from its first key to its last.
            Other forms:
            - (latent [pages, page_size, 512], rope [pages, page_size, 64]), both of query's dtype: rows whose pieces
              lie in two tensors, as FlashInfer's ckv_cache and kpe_cache do.
            - Rows of 512 where qk_rope_head_dim is 0, bf16, fp16 or e4m3 as the query.
            - DeepSeek's rows of 656 bytes ("fp8_ds_mla"), for a bf16 query: [pages, page_size, 656] or [pages, 1,
              page_size, 656], uint8 or e4m3, strides as before. Scales are in the rows and may be any float32. Results
              are those of the bf16 rows that `mla_read_cache` reads or, on sm_90a with few query rows, of the rows as
              they are stored, without that rounding.
            - SnapMLA's rows, as `mla_write_cache` writes them under the format "snapmla": (cache [pages, page_size,
              512] e4m3 or uint8, rope_cache [pages, page_size, 64] bf16, scale_cache [pages, page_size] float32).
              Strides of pages and rows are free multiples of 16 bytes, those of scale_cache any. Scales are positive,
              powers of two or not; those of a request's keys must lie within 2^100 of each other. A key whose scale is
              0 counts as hidden; a scale that is negative, infinite or NaN makes NaN of the rows that see its key.
        workspace_buffer: [bytes] int8 or uint8, at least `decode_workspace_size`; callers that size it by SMs * heads *
            max(8, q_len) * 513 * 4 always have enough, q_len being max_q_len where that is given. Uninitialised, and
            nothing in it outlives a call. Where its size is what limits how keys are divided, a larger one may divide
            them otherwise, which changes a result's last bits.
        kv_lora_rank, qk_rope_head_dim: 512 and 64; 512 and 0 for models whose keys do not depend on their position.
            Then query and cache have rows of 512, one tensor each, in bf16, fp16 or e4m3.
        block_tables: [batch, width] int32, pages of each request in order. Entries beyond a request's keys are not
            read, so rows may be wider than needed. A page that the cache does not have reads as zeros, or has no keys
            where rows are read one by one; a cache may have no pages. With a width of 0, no request has keys.
        seq_lens: [batch] int32 or int64, keys of each request in this cache, its query tokens' own included. Negative
            ones count as 0. No request has more keys than width * page_size, or than 2^31 - 256: keys from there on are
            left out, and positions of its query tokens still follow from the length. int64 takes one more small launch.
        max_seq_len: at least the longest of `seq_lens`, or of what a captured graph will see. It decides how many CTAs
            can be occupied, never what is computed.
        softmax_scale: factor of the scores, from 2^-126 to 1024. Where query and cache have one dequantisation scale
            each, multiply it by both. Scaled scores beyond 2^23 are more than float32 tells apart: what then becomes of
            a row is not defined. With SnapMLA's rows, weights are right to 4 % up to scores of 2^20, and off by twice
            as much with each power of two beyond.
        output_scale: factor of the output, before it is rounded; not of the LSE.
        out: [batch, q_len, heads, 512] to write into, contiguous: query's dtype, bf16 for 8 bits. [tokens, heads, 512]
            with cum_seq_lens_q. Neither it nor `lse` nor the workspace may share memory with another argument; this is
            not checked.
        is_var_seq: not read; lengths are always read from `seq_lens`.
        causal_mask: query token t sees the positions up to its own; otherwise all tokens see what the last one sees.
        window_left: also hide positions more than this many before a token's own; -1 for none.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.
        causal_seqs: [batch] int32 or int64, keys of each request over all ranks: the position that the last query token
            may see, plus one. `seq_lens` when None; needed when cp_world > 1. Negative ones count as 0.
        cp_world, cp_rank, cp_interleave_size: decode context parallelism. Key c of this cache has the position (c // i)
            * i * cp_world + cp_rank * i + c % i, with i = cp_interleave_size.
        min_split_kv: 1 to 256; accepted for callers of the same interface. It changes nothing: keys are always divided
            evenly over the whole GPU.
        local_visible_lens: [batch, q_len] int32, or [tokens] with cum_seq_lens_q: keys of this cache that each query
            token may see at most; any values.
        lse_base: 2, or math.e for the natural logarithm.
        sinks: [heads] float32, contiguous: for each head a score, scaled already and in natural units, of one more key
            that every query token sees and whose value is 0. -inf changes nothing, +inf gives outputs of 0. Refused
            when cp_world > 1: apply it to the merged result, as out * sigmoid(LSE - sinks), LSE of base e.
        lse_includes_sink: whether the LSE counts that key, too.
        lse: [batch, q_len, heads] float32 to write the LSE into, with any strides; [tokens, heads] with cum_seq_lens_q.
            Written whether or not return_lse asks for it.
        cum_seq_lens_q: [batch + 1] int32 or int64: request b has query tokens cum_seq_lens_q[b] to cum_seq_lens_q[b +
            1] - 1, any number of them or none, which are its last positions. Read on the GPU only. Values below 0 count
            as 0, those beyond the number of tokens as that number, and one below an earlier one as the earlier one.
            Tokens of no request are neither read nor written in `out` and `lse`.
        max_q_len: at least the most query tokens of a request, or of what a captured graph will see; needed with
            cum_seq_lens_q. max_q_len * heads is at most 2^31 - 128. It decides how a call is divided over the GPU. If a
            request has more tokens, its first max_q_len are computed as if they were its last positions, and the others
            as if they belonged to no request.
        batch_invariant: a request's results have the same bits whatever else is in the batch, packed or not, and
            however many SMs there are. Its keys are then not split among SMs, so that few or long requests leave most
            of them idle.
        indices: [batch, q_len, top_k] int32, or [tokens, top_k] for a query [tokens, heads, ..]: the list of keys of
            each query token (sparse attention), in any order, any top_k. An index is a slot of the cache: page *
            page_size + row. One that is negative, or not below pages * page_size, names no key; one that stands twice
            counts twice. With indices:
            - block_tables, seq_lens and max_seq_len are None, and causal_seqs, local_visible_lens, window_left,
              cum_seq_lens_q, max_q_len and cp_world are left out. causal_mask is not looked at: lists alone say what a
              token sees. On a rank of context parallelism, keys of other ranks are -1.
            - kv_cache may have pages of any size.
            - the workspace is `decode_workspace_size(batch * q_len, 1, heads, top_k)`; the formula above is enough.
            - the first two dimensions of query and indices lie in memory as one, or they are copied; those of out and
              lse must. An LSE is allocated even where none is asked for.
        topk_length: [batch], [batch, q_len] or [tokens] int32 or int64, with indices: only so many of the first indices
            of each list count, none where it is negative. All when None.

    Returns:
        out, or (out, lse) with lse [batch, q_len, heads] float32, or [tokens, heads] with cum_seq_lens_q, **base 2**:
        log2 of the sum of exponentials of the scaled scores. A query row that sees no key gives output 0 and LSE -inf.
        Results over context-parallel ranks merge to the unsharded one with weights 2 ** lse.

        Columns of an output row may differ in size. On sm_90a, where a request's keys are split among SMs, a column
        that is much smaller than the largest loses precision:

        - bf16 caches, and rows with scales: full precision from 2^-14 of the largest column on; smaller columns are off
          by up to 2^-22 of that largest. What is largest is taken for columns 0 to 127 and 256 to 383 together, and for
          the others; with SnapMLA's rows for each half; with up to 16 query rows (tokens times heads) of rows with
          scales, or of bf16 rows and `indices`, for each 128 columns.
        - e4m3 caches: full precision from 2^-22 on, in the cache's units; smaller columns are off by up to 2^-31.
        - batch_invariant, which splits nothing: full precision for all columns.

        A key that no query token of its request may see, whatever hides it, touches no result. NaN and inf in a key
        that only some tokens see may reach the others of its request.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or head dimensions.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        return registered.calls["decode"](*written.parameters())
    chosen = indices is not None
    if chosen:
        callers = out, lse
        query, block_tables, seq_lens, max_seq_len, out, lse, tokens_shape = chosen_keys.as_requests(
            query, indices, topk_length, out, lse,
            block_tables, seq_lens, max_seq_len, cum_seq_lens_q, max_q_len, causal_seqs, local_visible_lens,
            window_left, cp_world,
        )  # fmt: skip
        causal_mask = False  # noqa: F841, the kernel gets it
    elif topk_length is not None:
        raise ArgumentError(f"{_OPERATOR}: topk_length is given but indices is not; it is of their lists")
    if not (
        type(max_seq_len) is type(window_left) is type(cp_world) is type(cp_rank) is type(cp_interleave_size) is int
        and type(min_split_kv) is int
        and type(softmax_scale) is type(output_scale) is float
        and 0 < max_seq_len <= LARGEST_INT
        and SMALLEST_FLOAT32 <= softmax_scale <= LARGEST_SCORES_FACTOR
        and -LARGEST_FLOAT32 <= output_scale <= LARGEST_FLOAT32
    ):
        max_seq_len = checks.integer(_OPERATOR, "max_seq_len", max_seq_len, 1, LARGEST_INT)  # type: ignore[arg-type]
        window_left = checks.integer(_OPERATOR, "window_left", window_left, -1, LARGEST_INT)
        cp_world, cp_rank, cp_interleave_size = context_parallel(cp_world, cp_rank, cp_interleave_size)
        min_split_kv = checks.integer(_OPERATOR, "min_split_kv", min_split_kv, 1, MAX_MIN_SPLIT)
        softmax_scale = checks.number(_OPERATOR, "softmax_scale", softmax_scale)
        if not checks.is_scores_factor(softmax_scale):
            checks.refuse_scores_factor(_OPERATOR, f"softmax_scale is {softmax_scale}; it")
        output_scale = checks.scale(_OPERATOR, "output_scale", output_scale)
    q_pe = query_scales = rope_cache = scale_cache = None
    if type(query) is tuple:
        query, q_pe, query_scales = examine.pieces(_OPERATOR, "query", query, 2, 3)
    if type(kv_cache) is tuple:
        kv_cache, rope_cache, scale_cache = examine.pieces(_OPERATOR, "kv_cache", kv_cache, 2, 3)
        if scale_cache is not None:
            if type(qk_rope_head_dim) is int and qk_rope_head_dim == 0:
                decode_rows.refuse_without_rope()
            query, q_pe, query_scales = decode_rows.quantised(query, q_pe, query_scales, enable_pdl)
            kv_cache = decode_rows.typed(kv_cache)
    elif isinstance(kv_cache, torch.Tensor) and kv_cache.dtype is torch.uint8:
        kv_cache = decode_rows.typed_whole(kv_cache)
    longest = 1 << (max_seq_len - 1).bit_length()  # as plans round it: calls of growing contexts stay of one kind
    tensors, options = written.tensors(), written.options(longest, chosen)
    try:
        packed, shape = cum_seq_lens_q is not None, query.shape  # type: ignore[union-attr]
        has_entries = block_tables.nbytes > 0  # type: ignore[union-attr]
        kind = _kind(tensors, shape[1:] if packed else shape, options, has_entries)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options))
        if not served.workspace_bytes <= workspace_buffer.nbytes <= LARGEST_INT:
            workspace_buffer = sized(workspace_buffer, served.workspace_bytes)
        tokens = shape[:1] if packed else ()
        if out is None:
            out = served.new_out(*tokens)
        if served.has_lse and lse is None:
            lse = served.new_lse(*tokens)
        if not served.launches or (packed and not shape[0]):
            # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(tensors, options)
            if kv_cache.shape[0] == 0:  # type: ignore[union-attr]
                query = decode_rows.joined(query, q_pe, query_scales)
                kv_cache = decode_rows.page_of_zeros(kv_cache, rope_cache, scale_cache)
                if not chosen:
                    block_tables = block_tables.new_full(block_tables.shape, -1)  # type: ignore[union-attr]
                    return tsmla_decode(**written.keywords())
                indices, topk_length = chosen_keys.none_counts(block_tables)
                tsmla_decode(**written.keywords(block_tables=None, seq_lens=None, max_seq_len=None))
        elif packed:
            if local_visible_lens is not None:
                local_visible_lens = local_visible_lens.expand(len(seq_lens), -1)  # type: ignore[arg-type]
            served.kernel(*written.packed_arguments(served, local_visible_lens))
        else:
            served.kernel(*written.arguments(served))
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options)  # raises if an argument is wrong, and says which
        raise
    if chosen:
        out, lse = chosen_keys.as_given(tokens_shape, callers, (out, lse))
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def _examined(tensors: tuple, options: tuple) -> Served:
    """Check everything about a call, and return what serves it."""
    call = written.given(DECODE, tensors, options)
    try:
        return _served(call, tensors)
    except ArgumentError as error:
        raise (chosen_keys.in_words_of_lists(error) if call.chosen else error) from None


def _served(call: Given, tensors: tuple) -> Served:
    """Check a call and return what serves it.

    launches: whether there is anything to launch, and a page that the kernel could be given. has_lse: whether the
    kernel writes an LSE. new_out, new_lse: make the results; those of packed tokens are made from the number of tokens.
    """
    query, q_pe, kv_cache, lse = call.query, call.q_pe, call.kv_cache, call.lse
    packed = is_packed(query, call.cum_seq_lens_q, call.max_q_len)
    check_dims(call)
    called, columns = ({}, {}) if q_pe is None else ({"query": "query[0]"}, {"query_columns": LATENT_DIM})
    if call.qk_rope_head_dim == 0:
        columns = {"query_columns": LATENT_DIM}
    if call.rope_cache is not None:
        called["kv_cache"], columns["row_width"] = "kv_cache[0]", LATENT_DIM
    if call.scale_cache is None and call.query_scales is not None:
        decode_rows.refuse_scales()
    if call.chosen:
        called |= {"block_tables": "indices", "seq_lens": "topk_length"}
    examination = examine.Examination(DECODE, tensors, called, columns, packed)
    dtype, device, sizes = examination.dtype, examination.device, examination.sizes
    out_dtype = DECODE_OUT_DTYPES[dtype]
    wants_lse = call.return_lse or lse is not None
    row: Any = decode_rows.row_of(call, dtype)
    variant = DecodeVariant(examination.arch, dtype, out_dtype, wants_lse, row)
    gathering = dataclasses.replace(variant, lse=True, gathers=True)
    small_sizes = SMALL_PAGE_SIZES if why_unsupported(gathering) is None else ()
    in_two = call.rope_cache is not None and call.scale_cache is None
    if call.chosen or in_two or _page_size(kv_cache) in small_sizes:
        variant = gathering
        sizes.setdefault("row_width", variant.row_width)
    if packed:
        q_len = checks.integer(_OPERATOR, "max_q_len", call.max_q_len, 1, LARGEST_INT)
    else:
        q_len, sizes["requests"] = sizes["q_len"], sizes["batch"]
    examination.check(variant)
    batch, heads = sizes["requests"], sizes["heads"]
    if q_len * heads > _MOST_ROWS:
        what = "max_q_len" if packed else "query's q_len"
        raise ArgumentError(
            f"{_OPERATOR}: {what} is {q_len} and query has {heads} heads; a request may have {_MOST_ROWS} rows (query "
            "tokens x heads) at most"
        )
    if not call.chosen and sizes["page_size"] not in (*small_sizes, *PAGE_SIZES):
        accepted = checks.listed((*small_sizes, *PAGE_SIZES))
        raise ArgumentError(f"{_OPERATOR}: kv_cache has pages of {sizes['page_size']} keys; accepted: {accepted}")
    if variant.gathers:
        for variable, name in _MEASURED.items():
            if (cache := getattr(call, variable)) is not None:
                chosen_keys.check_cache(called.get(name, name), cache)
    check_options(call)
    workers = workspace_bytes = 0
    if batch and q_len and heads:
        plan = plan_decode(
            variant.arch, multiprocessors(device), batch, q_len, heads, call.longest, packed, call.batch_invariant,
            wide_rows(variant.row, variant.gathers),
        )  # fmt: skip
        workers, workspace_bytes = plan.workers if sizes["pages"] else 0, plan.workspace_bytes

    new_out, new_lse = (query.new_empty(0, dtype=dtype) for dtype in (checks.TORCH_DTYPE_OF[out_dtype], torch.float32))

    def made(like: torch.Tensor, *shape: int) -> Callable[..., torch.Tensor]:
        if packed:
            return lambda tokens: like.new_empty(tokens, *shape)
        return functools.partial(like.new_empty, batch, q_len, *shape)

    numbers = {
        "lse_factor": 1.0 if call.lse_base == 2.0 else _LN_2, "q_len": q_len, "workers": workers,
        "entry_keys": 1 if call.chosen else sizes["page_size"],
    }  # fmt: skip
    return written.served(
        DECODE, variant, call, numbers, launches=workers > 0, workspace_bytes=workspace_bytes, has_lse=variant.lse,
        new_out=made(new_out, heads, LATENT_DIM), new_lse=made(new_lse, heads),
    )  # fmt: skip


def _page_size(kv_cache: Any) -> int | None:
    """Keys of a page, as far as the cache is what it has to be."""
    whole = isinstance(kv_cache, torch.Tensor) and not kv_cache.is_nested and kv_cache.ndim in (3, 4)
    return kv_cache.shape[-2] if whole else None


traced.offer(
    DECODE,
    tsmla_decode,
    dtypes={checks.TORCH_DTYPE_OF[ours]: checks.TORCH_DTYPE_OF[out] for ours, out in DECODE_OUT_DTYPES.items()},
    not_read={"is_var_seq": True},
)
