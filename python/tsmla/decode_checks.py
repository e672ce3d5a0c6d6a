"""What tsmla_decode asks of its arguments: quickly for calls of a kind seen before, with explanations for the rest."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import checks, resolve
from .checks import LARGEST_FLOAT32, SMALLEST_FLOAT32
from .errors import ArgumentError, UnsupportedError
from .support import DECODE_OUT_DTYPES, LATENT_DIM, ROPE_DIM, why_unsupported
from .variant import Arch, DecodeVariant

OPERATOR = "tsmla_decode"
LARGEST_INT = 2**31 - 1
MAX_MIN_SPLIT = 256
_ALIGNMENT = 16
"""Bytes: tensor maps and 128-bit accesses need base addresses, and the cache's page stride, in multiples of this."""
_ROW = LATENT_DIM + ROPE_DIM
_PAGES = (16, 32, 64, 128)
_WORKSPACE_DTYPES = (torch.int8, torch.uint8)
_LENGTH_DTYPES = (torch.int32, torch.int64)


class Served(NamedTuple):
    """What a kind of call needs besides its arguments; `nothing` is the kernel's word for no visible lengths."""

    kernel: Callable[..., None]
    out_dtype: torch.dtype
    arch: Arch
    sm_count: int
    nothing: torch.Tensor


Flags = tuple[bool, bool]
"""LSE, PDL."""


def known(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    causal_seqs: torch.Tensor,
    visible: torch.Tensor | None,
    out: torch.Tensor | None,
    flags: Flags,
) -> Served | None:
    """What serves a call of a kind seen before whose tensors are plainly as `_check` wants them.

    None for every other call: wrong ones, and right ones that are unusual (4-D caches of one page, int64 lengths of
    an odd kind, no pages).
    """
    try:
        device, dtype = query.device, query.dtype
        batch, q_len, heads, width = query.shape
        pages, *alone, page_size, cache_width = kv_cache.shape
        page_stride, *_, row_stride, cache_stride = kv_cache.stride()
        addresses = query.data_ptr() | kv_cache.data_ptr() | workspace.data_ptr()
        rows, table_width = block_tables.shape
        _, table_stride = block_tables.stride()
        if not (
            width == cache_width == row_stride == _ROW
            and cache_stride == table_stride == 1
            and query.is_contiguous()
            and (addresses | page_stride * kv_cache.itemsize) % _ALIGNMENT == 0
            and alone in ([], [1])
            and page_size in _PAGES
            and pages > 0
            and table_width > 0
            and rows == batch
            and block_tables.dtype is torch.int32
            and kv_cache.dtype is dtype
            and workspace.dtype in _WORKSPACE_DTYPES
            and workspace.ndim == 1
            and workspace.is_contiguous()
            and kv_cache.device == device
            and workspace.device == device
            and block_tables.device == device
        ):
            return None
        for lengths in (seq_lens,) if causal_seqs is seq_lens else (seq_lens, causal_seqs):
            if not (
                lengths.shape == (batch,)
                and lengths.dtype in _LENGTH_DTYPES
                and lengths.is_contiguous()
                and lengths.device == device
            ):
                return None
        if visible is not None and not (
            visible.shape == (batch, q_len) and visible.dtype is torch.int32 and visible.device == device
        ):
            return None
        served = resolve.calls.get((OPERATOR, device, dtype, flags))
        if (
            out is not None
            and served is not None
            and not (
                out.shape == (batch, q_len, heads, LATENT_DIM)
                and out.dtype is served.out_dtype
                and out.is_contiguous()
                and out.data_ptr() % _ALIGNMENT == 0
                and out.device == device
            )
        ):
            return None
        return served
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def examined(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    causal_seqs: torch.Tensor,
    visible: torch.Tensor | None,
    out: torch.Tensor | None,
    flags: Flags,
) -> Served:
    """What serves a call, with every check and its error; `known` knows calls of this kind afterwards."""
    variant = _variant(query, flags)
    _check(query, kv_cache, workspace, block_tables, seq_lens, causal_seqs, visible)
    if out is not None:
        checks.same_device(OPERATOR, "out", out, "query", query.device)
        checks.dtype_in(OPERATOR, "out", out, (checks.TORCH_DTYPE_OF[variant.out_dtype],))
        checks.shape(OPERATOR, "out", out, (*query.shape[:3], LATENT_DIM))
        checks.contiguous(OPERATOR, "out", out)
        checks.aligned(OPERATOR, "out", out, _ALIGNMENT)
    served = Served(
        resolve.kernel(variant),
        checks.TORCH_DTYPE_OF[variant.out_dtype],
        variant.arch,
        multiprocessors(query.device),
        query.new_empty((0, 0), dtype=torch.int32),
    )
    resolve.calls[OPERATOR, query.device, query.dtype, flags] = served
    return served


def _variant(query: torch.Tensor, flags: Flags) -> DecodeVariant:
    """The variant a call needs; raises when the GPU or the dtype has none."""
    arch = checks.arch_of(checks.cuda(OPERATOR, "query", query))
    checks.ndim(OPERATOR, "query", query, ("batch", "q_len", "heads", str(_ROW)))
    checks.dtype_in(OPERATOR, "query", query, [checks.TORCH_DTYPE_OF[dtype] for dtype in DECODE_OUT_DTYPES])
    dtype = checks.dtype_of(query.dtype)
    variant = DecodeVariant(arch, dtype, DECODE_OUT_DTYPES[dtype], *flags)
    if reason := why_unsupported(variant):
        raise UnsupportedError(f"{OPERATOR}: {reason}")
    return variant


def _check(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    causal_seqs: torch.Tensor,
    visible: torch.Tensor | None,
) -> None:
    """Everything about the tensors that the kernel relies on and that `_variant` has not looked at."""
    device = query.device
    batch, q_len, heads, _ = query.shape
    others = {"kv_cache": kv_cache, "workspace_buffer": workspace, "block_tables": block_tables, "seq_lens": seq_lens}
    others |= {"causal_seqs": causal_seqs} | ({} if visible is None else {"local_visible_lens": visible})
    for name, tensor in others.items():
        checks.same_device(OPERATOR, name, tensor, "query", device)
    checks.shape(OPERATOR, "query", query, (batch, q_len, heads, _ROW))
    checks.contiguous(OPERATOR, "query", query)
    checks.aligned(OPERATOR, "query", query, _ALIGNMENT)
    _check_cache(kv_cache, query.dtype)
    checks.dtype_in(OPERATOR, "workspace_buffer", workspace, _WORKSPACE_DTYPES)
    checks.ndim(OPERATOR, "workspace_buffer", workspace, ("bytes",))
    checks.contiguous(OPERATOR, "workspace_buffer", workspace)
    checks.aligned(OPERATOR, "workspace_buffer", workspace, _ALIGNMENT)
    checks.ndim(OPERATOR, "block_tables", block_tables, ("batch", "width"))
    checks.dtype_in(OPERATOR, "block_tables", block_tables, (torch.int32,))
    if block_tables.shape[0] != batch or (batch and not block_tables.shape[1]):
        raise ArgumentError(
            f"{OPERATOR}: block_tables has shape {list(block_tables.shape)}; it must have a row for each of query's "
            f"{batch} requests and at least one column"
        )
    checks.last_dim_contiguous(OPERATOR, "block_tables", block_tables)
    for name, lengths in (("seq_lens", seq_lens), ("causal_seqs", causal_seqs)):
        checks.dtype_in(OPERATOR, name, lengths, _LENGTH_DTYPES)
        checks.shape(OPERATOR, name, lengths, (batch,))
        checks.contiguous(OPERATOR, name, lengths)
    if visible is not None:
        checks.dtype_in(OPERATOR, "local_visible_lens", visible, (torch.int32,))
        checks.shape(OPERATOR, "local_visible_lens", visible, (batch, q_len))


def _check_cache(kv_cache: torch.Tensor, dtype: torch.dtype) -> None:
    checks.dtype_in(OPERATOR, "kv_cache", kv_cache, (dtype,))
    given = tuple(kv_cache.shape)
    if len(given) not in (3, 4) or given[-1] != _ROW or (len(given) == 4 and given[1] != 1) or given[0] == 0:
        raise ArgumentError(
            f"{OPERATOR}: kv_cache has shape {list(given)}; it must be [pages, page_size, {_ROW}] or "
            f"[pages, 1, page_size, {_ROW}], with at least one page"
        )
    if given[-2] not in _PAGES:
        raise ArgumentError(f"{OPERATOR}: kv_cache has pages of {given[-2]} keys; accepted: {_PAGES}")
    if kv_cache.stride()[-2:] != (_ROW, 1):
        raise ArgumentError(
            f"{OPERATOR}: kv_cache has strides {tuple(kv_cache.stride())}; the rows of a page must follow each other "
            f"without gaps (last strides {_ROW}, 1); the stride between pages is free"
        )
    checks.aligned(OPERATOR, "kv_cache", kv_cache, _ALIGNMENT)


def check_dims(kv_lora_rank: int, qk_rope_head_dim: int) -> None:
    if (kv_lora_rank, qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM):
        raise UnsupportedError(
            f"{OPERATOR}: kv_lora_rank and qk_rope_head_dim are {kv_lora_rank} and {qk_rope_head_dim}; kernels exist "
            f"for {LATENT_DIM} and {ROPE_DIM}"
        )


def check_rest(cp_world: int, has_causal_seqs: bool, lse_base: float) -> None:
    if cp_world > 1 and not has_causal_seqs:
        raise ArgumentError(
            f"{OPERATOR}: cp_world is {cp_world} but causal_seqs is not given; it must hold each request's keys over "
            "all ranks"
        )
    if lse_base not in (2.0, math.e):
        raise ArgumentError(f"{OPERATOR}: lse_base is {lse_base!r}; accepted: 2 and math.e")


def integer(name: str, value: int, lowest: int, highest: int, operator: str = OPERATOR) -> int:
    if not isinstance(value, numbers.Integral):
        raise ArgumentError(
            f"{operator}: {name} is a {type(value).__name__}; it must be a Python integer "
            "(reading a tensor here would wait for the GPU)"
        )
    if not lowest <= value <= highest:
        raise ArgumentError(f"{operator}: {name} is {value}; it must be from {lowest} to {highest}")
    return int(value)


def scale(name: str, value: float, *, positive: bool) -> float:
    value = checks.number(OPERATOR, name, value)
    lowest = SMALLEST_FLOAT32 if positive else -LARGEST_FLOAT32
    if not lowest <= value <= LARGEST_FLOAT32:
        wanted = "positive, finite and a normal float32" if positive else "finite in float32"
        raise ArgumentError(f"{OPERATOR}: {name} is {value}; it must be {wanted}")
    return value


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
