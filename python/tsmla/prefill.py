"""tsmla_prefill: ragged attention forward over already expanded (not absorbed) MLA heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from . import checks, resolve
from .checks import LARGEST_FLOAT32, LARGEST_SCORES_FACTOR, SMALLEST_FLOAT32
from .errors import ArgumentError, TsmlaError, UnsupportedError
from .support import prefill_out_dtype, why_unsupported
from .variant import PrefillVariant

_OPERATOR = "tsmla_prefill"
_ALIGNMENT = 16
"""Bytes: tensor maps need the base and the outer strides of q, k, v and out in multiples of this."""
_grad_enabled = torch.is_grad_enabled
_MOST_SEQUENCES = 2**31 - 2
"""So that batch_size + 1 has 32 bits."""


def tsmla_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """output_scale * softmax(softmax_scale * q (k_scale * k)^T) (v_scale * v) for each sequence of a ragged pack.

    Args:
        query: [tokens_q, heads_q, d_qk], bf16, fp16, e4m3 or e5m2. Strided views are read correctly (last dimension
            contiguous, base and outer strides multiples of 16 bytes), here and for key, value and out.
        key: [tokens_kv, heads_kv, d_qk], query's dtype; heads_q is a multiple of heads_kv (query head h reads
            key head h // (heads_q // heads_kv)).
        value: [tokens_kv, heads_kv, d_v]. (d_qk, d_v) is (192, 128) or (128, 128).
        seq_lens: not read; accepted because callers of the same interface pass it.
        cum_seq_lens: [batch_size + 1] int32 on the device, starting at 0: sequence b owns key rows
            cum_seq_lens[b] .. cum_seq_lens[b + 1] - 1. Trailing entries may repeat the total (padded batches). Whatever
            it holds, nothing outside of the tensors is touched: entries below 0 count as 0, those beyond tokens_kv as
            tokens_kv, and a sequence that would end before it starts has no keys.
        max_seq_len, max_seq_len_q: not read; the kernel finds the lengths itself.
        batch_size: the number of sequences.
        softmax_scale: factor of the scores; the peers' callers pass d_qk ** -0.5 times their own factors.
        is_causal: bottom-right: query i of a sequence sees keys 0 .. i + len_kv - len_q.
        return_lse: also return the log-sum-exp.
        cum_seq_lens_q: [batch_size + 1] int32, as cum_seq_lens for the query; cum_seq_lens when None. Here, an entry
            smaller than one before it counts as that one, so that sequences share no rows.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.
        out: [tokens_q, heads_q, d_v] of `out_dtype` to write into.
        k_scale: what stored keys are to be multiplied by. The scores' factor is softmax_scale * k_scale, which must be
            from 2^-126 to 1024. A query stored in other units has its scale in softmax_scale. Scaled scores beyond 2^23
            are more than float32 tells apart: what then becomes of a row is not defined.
        v_scale, output_scale: the output is multiplied by v_scale * output_scale, before it is rounded. Any finite
            product does, zero and negative ones too.
        out_dtype: None means `out`'s dtype when it is given, else query's for bf16 and fp16, and bf16 for 8-bit
            queries. Combinations without a kernel are refused with what exists.

    Scales are Python numbers, passed to the kernel at run time: no value of them needs another kernel.

    Returns:
        out, or (out, lse) with lse [tokens_q, heads_q] float32, **natural log** of the sum of exponentials of the
        scores times softmax_scale * k_scale; v_scale and output_scale do not enter it. A query row that sees no key
        gives output 0 and LSE -inf. Rows of `out` that belong to no sequence are left untouched.

        NaN and inf in a key or value reach the queries that see it, and perhaps earlier ones of the same sequence in
        the same tile of up to 256. A row of `key` or `value` that no query sees touches no result.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or head dimensions.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if cum_seq_lens_q is None:
        cum_seq_lens_q = cum_seq_lens
    if not (
        type(is_causal) is type(return_lse) is type(enable_pdl) is bool
        and type(softmax_scale) is type(k_scale) is type(v_scale) is type(output_scale) is float
        and type(batch_size) is int
    ):
        is_causal = checks.flag(_OPERATOR, "is_causal", is_causal)
        return_lse = checks.flag(_OPERATOR, "return_lse", return_lse)
        enable_pdl = checks.flag(_OPERATOR, "enable_pdl", enable_pdl)
        softmax_scale = checks.number(_OPERATOR, "softmax_scale", softmax_scale)
        k_scale = checks.number(_OPERATOR, "k_scale", k_scale)
        v_scale = checks.number(_OPERATOR, "v_scale", v_scale)
        output_scale = checks.number(_OPERATOR, "output_scale", output_scale)
        batch_size = checks.integer(_OPERATOR, "batch_size", batch_size, 0, _MOST_SEQUENCES)
    scores_factor, output_factor = softmax_scale * k_scale, v_scale * output_scale
    if not (
        SMALLEST_FLOAT32 <= scores_factor <= LARGEST_SCORES_FACTOR
        and -LARGEST_FLOAT32 <= output_factor <= LARGEST_FLOAT32
    ):
        _refuse_factors(softmax_scale, k_scale, v_scale, output_scale)
    try:
        tokens_q, heads_q, d_qk = query.shape
        _, heads_kv, d_v = value.shape
        launches = tokens_q and heads_q and batch_size > 0
        kind = (  # whatever `_examined` looks at and no kernel refuses by itself
            _OPERATOR, query.get_device(), query.dtype, heads_q, heads_kv, d_qk, d_v, is_causal, return_lse, enable_pdl,
            out_dtype, cum_seq_lens.dtype, cum_seq_lens_q.dtype, cum_seq_lens.numel() == batch_size + 1,
            out if out is None else (
                out.dtype, type(out), out.is_contiguous() or not checks.overlapping(out), out.is_neg()
            ),
            type(query), type(query) is type(key) is type(value) is type(cum_seq_lens) is type(cum_seq_lens_q)
            or (type(key), type(value), type(cum_seq_lens), type(cum_seq_lens_q)),
            query.is_neg() or key.is_neg() or value.is_neg(),
            _grad_enabled() and (
                query.requires_grad or key.requires_grad or value.requires_grad
                or out is not None and out.requires_grad
            ),
        )  # fmt: skip
        served = launches and resolve.calls.get(kind)
        if not served:
            served = _examined(
                query, key, value, cum_seq_lens, cum_seq_lens_q, batch_size, out, out_dtype,
                (is_causal, return_lse, enable_pdl), kind,
            )  # fmt: skip
        kernel, written = served
        if out is None:
            strides = (heads_q * d_v, d_v, 1)
            out = torch.empty_strided((tokens_q, heads_q, d_v), strides, dtype=written, device=query.device)
        lse = None
        if return_lse:
            lse = torch.empty_strided((tokens_q, heads_q), (heads_q, 1), dtype=torch.float32, device=query.device)
        if launches:
            kernel(query, key, value, out, lse, cum_seq_lens_q, cum_seq_lens, scores_factor, output_factor)
    except TsmlaError:
        raise
    except Exception:
        _examined(  # raises if an argument is wrong, and says which
            query, key, value, cum_seq_lens, cum_seq_lens_q, batch_size, out, out_dtype,
            (is_causal, return_lse, enable_pdl),
        )  # fmt: skip
        raise
    return out if lse is None else (out, lse)


def _examined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    batch_size: int,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    flags: tuple[bool, bool, bool],
    kind: tuple | None = None,
) -> tuple[Callable[..., None], torch.dtype]:
    """The kernel of a call and the dtype that it writes, with every check and its error.

    flags: causal, LSE, PDL. kind: the key under which `resolve` keeps the result for calls that need no examination;
    None keeps nothing. The key tells everything that is looked at here, except what a kernel refuses by itself before
    it launches (the checks that the compiler generates from its signature): arguments that are no tensors, of another
    dtype, device, number of dimensions or alignment, of sizes that do not belong together, without memory, or with
    gaps in the last dimension. Of integers it does not tell whether torch negates them when they are read: no public
    function makes such.
    """
    variant = _variant(query, value, out, out_dtype, *flags)
    _check(query, key, value, cum_seq_lens, cum_seq_lens_q, batch_size, out)
    served = resolve.kernel(variant), checks.TORCH_DTYPE_OF[variant.out_dtype]
    if kind is not None:
        resolve.keep(kind, served)
    return served


def _variant(
    query: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    causal: bool,
    lse: bool,
    pdl: bool,
) -> PrefillVariant:
    """The variant a call needs; raises when the GPU, the dtypes or the head dimensions have none."""
    arch = checks.arch_of(checks.cuda(_OPERATOR, "query", query))
    checks.ndim(_OPERATOR, "query", query, ("tokens", "heads", "d_qk"))
    checks.same_device(_OPERATOR, "value", value, "query", query.device)
    checks.ndim(_OPERATOR, "value", value, ("tokens", "heads", "d_v"))
    checks.dtype_in(_OPERATOR, "query", query, checks.TORCH_DTYPES)
    dtype = checks.dtype_of(query.dtype)
    if out_dtype is not None:
        checks.torch_dtype(_OPERATOR, "out_dtype", out_dtype, checks.TORCH_DTYPES)
    if out is not None:
        checks.same_device(_OPERATOR, "out", out, "query", query.device)
        accepted = checks.TORCH_DTYPES if out_dtype is None else (out_dtype,)
        checks.dtype_in(_OPERATOR, "out", out, accepted)
        out_dtype = out.dtype
    written = prefill_out_dtype(dtype) if out_dtype is None else checks.TORCH_DTYPES[out_dtype]
    variant = PrefillVariant(arch, dtype, written, query.shape[2], value.shape[2], causal, lse, pdl)
    if reason := why_unsupported(variant):
        raise UnsupportedError(f"{_OPERATOR}: {reason}")
    return variant


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    batch_size: int,
    out: torch.Tensor | None,
) -> None:
    """Everything about the tensors that the kernel relies on and that `_variant` has not looked at."""
    device = query.device
    tokens_q, heads_q, d_qk = query.shape
    tokens_kv, heads_kv, d_v = value.shape
    checks.integer(_OPERATOR, "batch_size", batch_size, 0, _MOST_SEQUENCES)
    packs = [("query", query), ("key", key), ("value", value)]
    for name, pack in packs:
        checks.same_device(_OPERATOR, name, pack, "query", device)
        checks.dtype_in(_OPERATOR, name, pack, (query.dtype,))
    checks.shape(_OPERATOR, "key", key, (tokens_kv, heads_kv, d_qk))
    if out is not None:
        packs.append(("out", out))
        checks.shape(_OPERATOR, "out", out, (tokens_q, heads_q, d_v))
        checks.no_overlap(_OPERATOR, "out", out)
    for name, pack in packs:
        checks.last_dim_contiguous(_OPERATOR, name, pack)
        checks.aligned(_OPERATOR, name, pack, _ALIGNMENT)
    if heads_kv == 0 or heads_q % heads_kv:
        raise ArgumentError(
            f"{_OPERATOR}: query has {heads_q} heads and key {heads_kv}; query's must be a multiple of key's"
        )
    for name, ends in (("cum_seq_lens", cum_seq_lens), ("cum_seq_lens_q", cum_seq_lens_q)):
        checks.same_device(_OPERATOR, name, ends, "query", device)
        checks.dtype_in(_OPERATOR, name, ends, (torch.int32,))
        checks.shape(_OPERATOR, name, ends, (batch_size + 1,))
        checks.contiguous(_OPERATOR, name, ends)


def _refuse_factors(softmax_scale: float, k_scale: float, v_scale: float, output_scale: float) -> NoReturn:
    if not checks.is_scores_factor(softmax_scale * k_scale):
        given = f"softmax_scale is {softmax_scale} and k_scale {k_scale}; their product"
        checks.refuse_scores_factor(_OPERATOR, given)
    raise ArgumentError(
        f"{_OPERATOR}: v_scale is {v_scale} and output_scale {output_scale}; their product must be finite in "
        f"float32 (up to {LARGEST_FLOAT32:.3g})"
    )
