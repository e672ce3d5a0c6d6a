"""tsmla_prefill: attention over ragged packs of sequences, with MLA heads that are already expanded (not absorbed)."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import PREFILL
from ..identity.key_mask import MASK_BITS, room_for_lists, words_for
from ..identity.support import NOPE_DIMS, prefill_out_dtype
from ..identity.variant import PrefillVariant
from ..loading import resolve
from . import checks, examine, traced, written
from .checks import LARGEST_FLOAT32, LARGEST_INT, LARGEST_SCORES_FACTOR, SMALLEST_FLOAT32
from .workspace import multiprocessors
from .written import Given, Served

_OPERATOR = PREFILL.name
_kind = examine.kind_of(PREFILL)
_LOG2_E = math.log2(math.e)
_LOWEST_FLOAT32 = -LARGEST_FLOAT32
_WITH_ROPE = {d_nope: d_qk for d_qk, d_nope in NOPE_DIMS.items() if d_qk > d_nope}
"""Columns of the first piece of a query or key -> columns of both pieces."""
_MOST_SEQUENCES = 2**31 - 2
"""Most sequences: batch_size + 1 must fit in int32."""
_MOST_PIECES = 2**31 - 2**26
"""Most sequences times heads: their query tiles must be numbered in 32 bits. Each adds one tile at most to those that
all rows would fill, which are fewer than 2^26: tiles of 64 rows, of 128 bytes each, in 512 GiB."""


@written.from_table(PREFILL, without=("seq_lens", "max_seq_len", "batch_size", "max_seq_len_q", "merge_into"))
def tsmla_prefill(
    query: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    value: torch.Tensor,
    seq_lens: torch.Tensor | None,
    cum_seq_lens: torch.Tensor,
    max_seq_len: int,
    batch_size: int,
    softmax_scale: float,
    is_causal: bool = True,
    return_lse: bool = False,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_seq_len_q: int | None = None,
    enable_pdl: bool = False,
    out: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    output_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    sinks: torch.Tensor | None = None,
    lse_includes_sink: bool = False,
    lse: torch.Tensor | None = None,
    merge_into: tuple[torch.Tensor, torch.Tensor] | None = None,
    lse_base: float = math.e,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over each sequence of a ragged pack: output_scale * softmax(softmax_scale * q (k_scale * k)^T) (v_scale
    * v).

    Args:
        query: [tokens_q, heads_q, d_qk], bf16, fp16, e4m3 or e5m2. Strided views are read correctly (last dimension
            contiguous, base and outer strides multiples of 16 bytes), here and for key, value and out. With d_qk 192 or
            256 also a tuple of its two pieces, (q_nope [tokens_q, heads_q, d_qk - 64], q_pe [tokens_q, heads_q, 64]),
            each with its own strides; nothing is copied.
        key: [tokens_kv, heads_kv, d_qk], query's dtype; heads_q is a multiple of heads_kv (query head h reads key head
            h // (heads_q // heads_kv)). With d_qk 192 or 256 also a tuple of its two pieces, (k_nope [tokens_kv,
            heads_kv, d_qk - 64], k_pe [tokens_kv, 64] or [tokens_kv, 1, 64]): all heads share k_pe. Results have the
            same bits as those of joined pieces. Query and key may differ in whether they are joined.
        value: [tokens_kv, heads_kv, d_v]. (d_qk, d_v) is (192, 128), (128, 128) or, in bf16 and e4m3, (256, 256).
        seq_lens: not read; accepted because callers of the same interface pass it.
        cum_seq_lens: [batch_size + 1] int32 on the device, starting at 0: sequence b owns key rows cum_seq_lens[b] ..
            cum_seq_lens[b + 1] - 1. Trailing entries may repeat the total (padded batches). Whatever it holds, nothing
            outside of the tensors is touched: entries below 0 count as 0, those beyond tokens_kv as tokens_kv, and a
            sequence that would end before it starts has no keys.
        max_seq_len: the most keys of a sequence. Only key_mask is compared with it (not where torch compiles the call);
            the kernel finds the lengths itself.
        max_seq_len_q: not read.
        batch_size: the number of sequences; times heads_q at most 2^31 - 2^26.
        softmax_scale: factor of the scores, such as d_qk ** -0.5 times a model's own factors.
        is_causal: bottom-right: query i of a sequence sees keys 0 .. i + len_kv - len_q.
        return_lse: also return the log-sum-exp (LSE).
        cum_seq_lens_q: [batch_size + 1] int32, as cum_seq_lens for the query; cum_seq_lens when None. Here, an entry
            smaller than one before it counts as that one, so that sequences share no rows.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.
        out: [tokens_q, heads_q, d_v] of `out_dtype` to write into. Neither it nor `lse` may share memory with another
            argument; this is not checked.
        k_scale: what stored keys are to be multiplied by. The scores' factor is softmax_scale * k_scale, which must be
            from 2^-126 to 1024. A query stored in other units has its scale in softmax_scale. Scaled scores beyond 2^23
            are more than float32 tells apart: what then becomes of a row is not defined.
        v_scale, output_scale: the output is multiplied by v_scale * output_scale, before it is rounded. Their product
            may be any finite number, zero and negative ones too.
        out_dtype: None means `out`'s dtype when it is given, else query's for bf16 and fp16, and bf16 for 8-bit
            queries. Combinations without a kernel are refused with what exists.
        sinks: [heads_q] float32, contiguous: for each head a score, scaled already, of one more key that every query
            sees and whose value is 0: exp(sink) joins the sum that the output is divided by. -inf changes nothing, and
            +inf gives outputs of 0.
        lse_includes_sink: whether the LSE counts that key, too. Results over parts of the keys can be merged only
            without it.
        lse: [tokens_q, heads_q] float32 to write the LSE into, with any strides: `lse=buffer.T` fills a buffer of
            [heads_q, tokens_q], as some engines want it. Written whether or not return_lse asks for it.
        merge_into: (out, lse), the result of an earlier call with the same queries over other keys: `out` as for out=,
            `lse` as for lse=, with the natural LSE of these keys. Both then hold the result over all keys, and are what
            is returned.
            - A row whose earlier LSE is -inf keeps nothing of `out`, whatever that holds.
            - A query that sees none of this call's keys keeps its row as it is, unless there are sinks.
            - The earlier output is used as it is, so all calls need the same v_scale * output_scale. It is weighted,
              added in float32 and rounded once more, in an order that is always the same.
            - Sinks count once, after merging, for every row: only the last call may have them.
        lse_base: math.e, or 2 for an LSE of base 2, which merge_into does not take.
        key_mask: [tokens_q, words] int32, last dimension contiguous: which keys each query sees, for all heads. Bit b
            of word w of a query is key 32 * w + b of its own sequence; the query sees it if the bit is set and, with
            is_causal, if the key is not behind its own position. There must be words for max_seq_len keys. Keys without
            a word are not seen, and bits behind a sequence's last key are ignored, whatever they hold. Keys of which no
            query of a tile of up to 256 sees any are neither loaded nor multiplied.

    Pass arguments by keyword. (None is keyword-only: each such one that is left out would add 25 ns to a call.) Scales
    are Python numbers, passed to the kernel at run time: no value of them needs another kernel.

    Returns:
        out, or (out, lse) with lse [tokens_q, heads_q] float32, **natural log** (log2 with lse_base=2) of the sum of
            exponentials of the scores times softmax_scale * k_scale; v_scale and output_scale do not enter it. A query
            row that sees no key gives output 0 and LSE -inf. Rows of `out` and `lse` that belong to no sequence are
            left untouched.

        NaN and inf in a key or value reach the queries that see it, and perhaps earlier ones of the same sequence in
        the same tile of up to 256. A row of `key` or `value` that no query sees touches no result. With key_mask, NaN
        and inf in a value may also reach queries that do not see it, where another query of the same tile sees it or
        one of its neighbours.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or head dimensions.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        return registered.calls["prefill"](*written.parameters())
    if not (
        type(softmax_scale) is type(k_scale) is type(v_scale) is type(output_scale) is float and type(batch_size) is int
    ):
        softmax_scale, k_scale, v_scale, output_scale = checks.each(
            checks.number,
            _OPERATOR,
            softmax_scale=softmax_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            output_scale=output_scale,
        )
        batch_size = checks.integer(_OPERATOR, "batch_size", batch_size, 0, _MOST_SEQUENCES)
    scores_factor, output_factor = softmax_scale * k_scale, v_scale * output_scale
    if not (
        SMALLEST_FLOAT32 <= scores_factor <= LARGEST_SCORES_FACTOR
        and _LOWEST_FLOAT32 <= output_factor <= LARGEST_FLOAT32
    ):
        _refuse_factors(softmax_scale, k_scale, v_scale, output_scale)
    q_pe = k_pe = None
    merges, visits = False, None
    if type(query) is tuple or type(key) is tuple or merge_into is not None:
        query, q_pe = examine.pieces(_OPERATOR, "query", query, 2)
        key, k_pe = examine.pieces(_OPERATOR, "key", key, 2)
        if merge_into is not None:
            (out, lse), merges = earlier_result(merge_into, out, lse), True
            if lse_base != math.e:
                _refuse_merging(lse_base)
    if key_mask is not None:
        _check_words(key_mask, max_seq_len)
    tensors, options = written.tensors(), written.options(merges)
    try:
        shape = query.shape  # type: ignore[union-attr]
        kind = _kind(tensors, shape, options, cum_seq_lens.numel() == batch_size + 1)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options, batch_size))
        tokens, heads = shape[0], served.heads
        if out is None:
            out = served.new_out.new_empty(tokens, heads, served.d_v)
        if lse is None and (return_lse or key_mask is not None):  # kernels with a mask always write one
            lse = served.new_lse.new_empty(tokens, heads)
        if tokens and 0 < batch_size * heads <= _MOST_PIECES:
            if key_mask is not None:  # by now batch_size is that of cum_seq_lens
                visits = _lists(key_mask, batch_size)  # noqa: F841, written.arguments() reads it
            served.kernel(*written.arguments(served))
        else:  # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(tensors, options, batch_size)
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options, batch_size)  # raises if an argument is wrong, and says which
        raise
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def earlier_result(given: Any, out: torch.Tensor | None, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensors of merge_into, after checking that `out` and `lse` name no others to write into."""
    if not isinstance(given, tuple | list) or len(given) != 2 or given[0] is None or given[1] is None:
        raise ArgumentError(f"{_OPERATOR}: merge_into is {checks.spelled(given)}; it must be (out, lse), two tensors")
    for name, other in (("out", out), ("lse", lse)):
        if other is not None:
            raise ArgumentError(
                f"{_OPERATOR}: {name} is given, and so is merge_into, whose tensors are written into; give one of them"
            )
    return given[0], given[1]


def _refuse_merging(lse_base: float) -> NoReturn:
    checks.lse_base(_OPERATOR, lse_base)
    raise ArgumentError(
        f"{_OPERATOR}: lse_base is {checks.spelled(lse_base)} and merge_into is given, which holds natural logarithms; "
        "leave lse_base out"
    )


def _called(call: Given) -> dict[str, str]:
    """Return what errors call tensors that are pieces of arguments."""
    return {
        **({} if call.q_pe is None else {"query": "query[0]"}),
        **({} if call.k_pe is None else {"key": "key[0]"}),
        **({"out": "merge_into[0]", "lse": "merge_into[1]"} if call.merges else {}),
    }


def _examined(tensors: tuple, options: tuple, batch_size: int) -> Served:
    """Check everything about a call, and return what serves it: query heads, d_v and an empty tensor for each result,
    too."""
    call = written.given(PREFILL, tensors, options)
    checks.lse_base(_OPERATOR, call.lse_base)
    query, q_pe, k_pe, out, out_dtype = call.query, call.q_pe, call.k_pe, call.out, call.out_dtype
    called = _called(call)
    examination = examine.Examination(PREFILL, tensors, called)
    if q_pe is not None:
        checks.shape(_OPERATOR, called["query"], query, *(("tokens_q", "heads_q", columns) for columns in _WITH_ROPE))
    sizes = examination.sizes
    sizes["batch_size"] = checks.integer(_OPERATOR, "batch_size", batch_size, 0, _MOST_SEQUENCES)
    if out_dtype is not None:
        checks.torch_dtype(_OPERATOR, "out_dtype", out_dtype, checks.TORCH_DTYPES)
    if out is not None:
        name = called.get("out", "out")
        checks.same_device(_OPERATOR, name, out, examination.reference, examination.device)
        checks.dtype_in(_OPERATOR, name, out, checks.TORCH_DTYPES)
        if out_dtype not in (None, out.dtype):
            raise ArgumentError(
                f"{_OPERATOR}: out_dtype is {out_dtype} but {name} is {out.dtype}; out_dtype may be left out"
            )
        out_dtype = out.dtype
    ours = prefill_out_dtype(examination.dtype) if out_dtype is None else checks.TORCH_DTYPES[out_dtype]
    d_qk = sizes["d_query"] if q_pe is None else _WITH_ROPE[sizes["d_query"]]
    wants_lse = call.return_lse or call.lse is not None
    masked = call.key_mask is not None
    kind = (False, True, True) if masked else (call.is_causal, wants_lse)
    variant = PrefillVariant(examination.arch, examination.dtype, ours, d_qk, sizes["d_v"], *kind)
    if k_pe is not None and d_qk not in _WITH_ROPE.values():
        columns = " or ".join(map(str, _WITH_ROPE.values()))
        raise ArgumentError(
            f"{_OPERATOR}: key has two pieces, together with a query of {columns} columns; query has {d_qk}"
        )
    sizes["d_key"] = d_qk if k_pe is None else NOPE_DIMS[d_qk]
    examination.check(variant)
    heads, heads_kv = sizes["heads_q"], sizes["heads_kv"]
    if heads_kv == 0 or heads % heads_kv:
        raise ArgumentError(
            f"{_OPERATOR}: query has {heads} heads and key {heads_kv}; query's must be a multiple of key's"
        )
    if batch_size * heads > _MOST_PIECES:
        raise ArgumentError(
            f"{_OPERATOR}: batch_size is {batch_size} and query has {heads} heads; their product must be at most "
            f"{_MOST_PIECES}"
        )
    numbers = {
        "lse_factor": 1.0 if call.lse_base == math.e else _LOG2_E,
        "merges": int(call.merges),
        "processors": multiprocessors(examination.device),
    }
    return written.served(
        PREFILL,
        variant,
        call,
        numbers,
        heads=heads,
        d_v=variant.d_v,
        new_out=query.new_empty(0, dtype=checks.TORCH_DTYPE_OF[ours]),
        new_lse=query.new_empty(0, dtype=torch.float32),
    )


def _check_words(key_mask: Any, max_seq_len: int) -> None:
    """Refuse a mask that has too few words for the longest sequence; all else about it is examined later."""
    if type(max_seq_len) is not int or max_seq_len < 0:
        max_seq_len = checks.integer(_OPERATOR, "max_seq_len", max_seq_len, 0, LARGEST_INT)
    known = isinstance(key_mask, torch.Tensor) and not key_mask.is_nested and key_mask.ndim == 2
    if known and max_seq_len > MASK_BITS * key_mask.shape[1]:
        raise ArgumentError(
            f"{_OPERATOR}: key_mask has shape {list(key_mask.shape)} and max_seq_len is {max_seq_len}; each query must "
            f"have at least {words_for(max_seq_len)} words, one for {MASK_BITS} keys"
        )


def _lists(key_mask: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return room for the lists of KV tiles that query tiles visit."""
    tokens, words = key_mask.shape
    return key_mask.new_empty(room_for_lists(tokens, batch_size, words), dtype=torch.int32)


def _refuse_factors(softmax_scale: float, k_scale: float, v_scale: float, output_scale: float) -> NoReturn:
    if not checks.is_scores_factor(softmax_scale * k_scale):
        given = f"softmax_scale is {softmax_scale} and k_scale {k_scale}; their product"
        checks.refuse_scores_factor(_OPERATOR, given)
    raise ArgumentError(
        f"{_OPERATOR}: v_scale is {v_scale} and output_scale {output_scale}; their product must be finite in "
        f"float32 (up to {LARGEST_FLOAT32:.3g})"
    )


traced.offer(
    PREFILL,
    tsmla_prefill,
    dtype_given="out_dtype",
    dtypes={theirs: checks.TORCH_DTYPE_OF[prefill_out_dtype(ours)] for theirs, ours in checks.TORCH_DTYPES.items()},
    not_read={"seq_lens": None, "max_seq_len": 1, "max_seq_len_q": None},
    earlier=earlier_result,
)
