"""Conversions of what `BatchMLAPagedAttentionWrapper` is given to what `tsmla_decode` takes."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ArgumentError, UnsupportedError
from ...identity.support import DECODE_OUT_DTYPES, LATENT_DIM
from ...operators import checks
from .. import translate


def planned_dtype(
    face: str, q_data_type: torch.dtype, kv_data_type: torch.dtype, output_dtype: torch.dtype | None
) -> torch.dtype:
    """Check the dtypes that a plan names, and return the one that query and cache share."""
    accepted = [checks.TORCH_DTYPE_OF[dtype] for dtype in DECODE_OUT_DTYPES]
    checks.torch_dtype(face, "q_data_type", q_data_type, accepted)
    checks.torch_dtype(face, "kv_data_type", kv_data_type, accepted)
    if kv_data_type != q_data_type:
        raise UnsupportedError(f"{face}: kv_data_type is {kv_data_type}; it must be q_data_type, {q_data_type}")
    written = checks.TORCH_DTYPE_OF[DECODE_OUT_DTYPES[checks.dtype_of(q_data_type)]]
    if output_dtype is not None:
        checks.torch_dtype(face, "output_dtype", output_dtype, [written])
    return q_data_type


def query_pieces(
    face: str, query: Any, q_nope: torch.Tensor | None, q_pe: torch.Tensor | None, rope_dim: int
) -> tuple[torch.Tensor, ...]:
    """Return the query in one piece, ([tokens, heads, 512 + rope_dim],), or in its pieces of 512 and 64 columns."""
    parts = _parts(face, ("query", "q_nope", "q_pe"), query, q_nope, q_pe)
    if len(parts) == 1:
        checks.cuda(face, "query", parts[0])
        checks.shape(face, "query", parts[0], ("tokens", "heads", LATENT_DIM + rope_dim))
        return (translate.readable(face, "query", parts[0]),)
    nope, pe = parts
    device = checks.cuda(face, "q_nope", nope)
    checks.same_device(face, "q_pe", pe, "q_nope", device)
    checks.dtype_in(face, "q_pe", pe, (nope.dtype,))
    sizes = checks.shape(face, "q_nope", nope, ("tokens", "heads", LATENT_DIM))
    checks.shape(face, "q_pe", pe, (sizes["tokens"], sizes["heads"], rope_dim))
    if not rope_dim:
        return (translate.readable(face, "q_nope", nope),)
    return translate.readable(face, "q_nope", nope), translate.readable(face, "q_pe", pe)


def cache_of(
    face: str,
    kv_cache: Any,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    page_size: int,
    rope_dim: int,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor [pages, page_size, 512 + rope_dim] that the given parts are views of; the parts themselves
    where they lie apart."""
    row = LATENT_DIM + rope_dim
    parts = _parts(face, ("kv_cache", "ckv_cache", "kpe_cache"), kv_cache, ckv_cache, kpe_cache)
    if len(parts) == 1:
        checks.cuda(face, "kv_cache", parts[0])
        checks.shape(face, "kv_cache", parts[0], ("pages", page_size, row))
        return parts[0]
    ckv, kpe = parts
    device = checks.cuda(face, "ckv_cache", ckv)
    checks.same_device(face, "kpe_cache", kpe, "ckv_cache", device)
    checks.dtype_in(face, "kpe_cache", kpe, (ckv.dtype,))
    pages = checks.shape(face, "ckv_cache", ckv, ("pages", page_size, LATENT_DIM))["pages"]
    checks.shape(face, "kpe_cache", kpe, (pages, page_size, rope_dim))
    if not rope_dim:
        return ckv
    whole = translate.joined(ckv, kpe) if pages else ckv.new_empty(0, page_size, row)
    return (ckv, kpe) if whole is None else whole


def _parts(face: str, names: tuple[str, str, str], whole: Any, left: Any, right: Any) -> tuple[Any, ...]:
    """Return (whole,) or (left, right), whichever is given."""
    name, left_name, right_name = names
    if whole is None:
        if left is None or right is None:
            raise ArgumentError(f"{face}: needs {name}, or {left_name} and {right_name}")
        return left, right
    if left is not None or right is not None:
        raise ArgumentError(f"{face}: {name} is given, and so is {left_name if left is not None else right_name}")
    if isinstance(whole, torch.Tensor):
        return (whole,)
    if not isinstance(whole, tuple) or len(whole) != 2:
        raise ArgumentError(f"{face}: {name} is a {type(whole).__name__}; it must be a tensor or a pair of tensors")
    return whole


def factors(
    face: str,
    sm_scale: float,
    ckv_scale: float | None,
    kpe_scale: float | None,
    bmm1_scale: float | None,
    bmm2_scale: float | None,
) -> tuple[float, float]:
    """Return the factors of the scores and of the output."""
    if (bmm1_scale is None) != (bmm2_scale is None):
        raise ArgumentError(f"{face}: bmm1_scale and bmm2_scale are given together, or neither")
    if (ckv_scale is None) != (kpe_scale is None):
        raise ArgumentError(f"{face}: ckv_scale and kpe_scale are given together, or neither")
    if bmm1_scale is not None and ckv_scale is not None:
        raise ArgumentError(f"{face}: ckv_scale is given, and so is bmm1_scale")
    if bmm1_scale is not None and bmm2_scale is not None:
        return checks.number(face, "bmm1_scale", bmm1_scale), checks.number(face, "bmm2_scale", bmm2_scale)
    if ckv_scale is None or kpe_scale is None:
        return sm_scale, 1.0
    latent, rope = checks.each(checks.number, face, ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    if latent != rope:
        raise UnsupportedError(f"{face}: kpe_scale is {rope}; one factor serves a whole row, ckv_scale, {latent}")
    return sm_scale * latent, latent


def asked_lse(
    face: str, lse_mode: str, lse: torch.Tensor | None, return_lse: bool, on_e: bool
) -> tuple[bool, bool, bool]:
    """Return three flags: the LSE is computed (also to fill a buffer), it is returned, it has base e.

    lse_mode: what `plan` was told about it.
    """
    returned, on_e = checks.flag(face, "return_lse", return_lse), checks.flag(face, "return_lse_base_on_e", on_e)
    computed = returned or lse is not None
    if on_e and not computed:
        raise ArgumentError(f"{face}: return_lse_base_on_e is given, return_lse is False, and there is no lse")
    if lse_mode != "none" and (not computed or on_e != (lse_mode == "basee")):
        raise ArgumentError(
            f"{face}: return_lse is {returned} and return_lse_base_on_e {on_e}; plan had lse_mode={lse_mode!r}"
        )
    return computed, returned, on_e
