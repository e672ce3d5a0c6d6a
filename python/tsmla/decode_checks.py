"""What tsmla_decode asks of its arguments, with explanations, and what it keeps for other calls of the same kind."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import checks, resolve
from .errors import ArgumentError, TsmlaError, UnsupportedError
from .plan import plan_decode
from .support import DECODE_OUT_DTYPES, LATENT_DIM, ROPE_DIM, why_unsupported
from .variant import Arch, DecodeVariant

OPERATOR = "tsmla_decode"
LARGEST_INT = 2**31 - 1
_MAX_MIN_SPLIT = 256
_ALIGNMENT = 16
"""Bytes: tensor maps and 128-bit accesses need base addresses, and the cache's page stride, in multiples of this."""
_ROW = LATENT_DIM + ROPE_DIM
_PAGES = (16, 32, 64, 128)
_WORKSPACE_DTYPES = (torch.int8, torch.uint8)
_LENGTH_DTYPES = (torch.int32, torch.int64)
_DEVICES = "a CUDA device, such as 0, 'cuda' or 'cuda:1'"


class Served(NamedTuple):
    """What calls of one kind need besides their arguments.

    parts: of the plan; 0 when there is nothing to launch. nothing: the kernel's word for no visible lengths. new_out,
    new_lse: make the results.
    """

    kernel: Callable[..., None]
    parts: int
    workspace_bytes: int
    nothing: torch.Tensor
    new_out: Callable[[], torch.Tensor]
    new_lse: Callable[[], torch.Tensor]


class Tensors(NamedTuple):
    """Those of a call; causal_seqs is seq_lens when it is not given."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    workspace: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    causal_seqs: torch.Tensor
    visible: torch.Tensor | None
    out: torch.Tensor | None


class Options(NamedTuple):
    """A call's other arguments, but for factors. longest: max_seq_len rounded up to a power of two, as plans round it:
    contexts grow with every step, and kinds of calls should not."""

    lse: bool
    pdl: bool
    kv_lora_rank: int
    qk_rope_head_dim: int
    longest: int
    window_left: int
    cp_world: int
    cp_rank: int
    cp_interleave_size: int
    min_split_kv: int
    lse_base: float


def examined(given: Tensors, options: tuple, kind: tuple | None = None) -> Served:
    """What serves a call (options: fields of `Options`), with every check and its error.

    kind: the key under which `resolve` keeps it for calls that need no examination; None keeps nothing, and so does a
    call that launches nothing. The key tells everything that is looked at here, except what a kernel refuses by itself
    before it launches (the checks that the compiler generates from its signature): arguments that are no tensors, of
    another dtype, device, number of dimensions or alignment, of sizes that do not belong together, without memory, or
    with gaps in the last dimension. Of integers it does not tell whether torch negates them when they are read: no
    public function makes such.
    """
    chosen = Options(*options)
    variant = _variant(given.query, chosen)
    out_dtype = checks.TORCH_DTYPE_OF[variant.out_dtype]
    _check(given, out_dtype)
    _check_options(chosen, given.causal_seqs is not given.seq_lens)
    query = given.query
    batch, q_len, heads, _ = query.shape
    parts = workspace_bytes = 0
    if batch and q_len and heads:
        plan = plan_decode(variant.arch, multiprocessors(query.device), batch, q_len, heads, chosen.longest)
        parts, workspace_bytes = plan.parts, plan.workspace_bytes

    def made(*layout: tuple[int, ...], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        return functools.partial(torch.empty_strided, *layout, dtype=dtype, device=query.device)

    token = heads * LATENT_DIM
    served = Served(
        resolve.kernel(variant),
        parts,
        workspace_bytes,
        query.new_empty((0, 0), dtype=torch.int32),
        made((batch, q_len, heads, LATENT_DIM), (q_len * token, token, LATENT_DIM, 1), dtype=out_dtype),
        made((batch, q_len, heads), (q_len * heads, heads, 1), dtype=torch.float32),
    )
    if kind is not None and parts:
        resolve.keep(kind, served)
    return served


def sized(workspace: torch.Tensor, needed: int) -> torch.Tensor:
    """The workspace as the kernel takes it: less than 2 GiB."""
    size = workspace.nbytes
    if size < needed:
        raise ArgumentError(
            f"{OPERATOR}: workspace_buffer has {size} bytes; this call needs {needed} (tsmla.decode_workspace_size "
            "says so; SMs * heads * max(8, q_len) * 513 * 4 is always enough)"
        )
    return workspace[:needed]


def _variant(query: torch.Tensor, options: Options) -> DecodeVariant:
    """The variant a call needs; raises when the GPU or the dtype has none."""
    arch = checks.arch_of(checks.cuda(OPERATOR, "query", query))
    checks.ndim(OPERATOR, "query", query, ("batch", "q_len", "heads", str(_ROW)))
    checks.dtype_in(OPERATOR, "query", query, [checks.TORCH_DTYPE_OF[dtype] for dtype in DECODE_OUT_DTYPES])
    dtype = checks.dtype_of(query.dtype)
    variant = DecodeVariant(arch, dtype, DECODE_OUT_DTYPES[dtype], options.lse, options.pdl)
    if reason := why_unsupported(variant):
        raise UnsupportedError(f"{OPERATOR}: {reason}")
    return variant


def _check(given: Tensors, out_dtype: torch.dtype) -> None:
    """Everything about the tensors that the kernel relies on and that `_variant` has not looked at."""
    query, kv_cache, workspace, block_tables, seq_lens, causal_seqs, visible, out = given
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
    if out is not None:
        checks.same_device(OPERATOR, "out", out, "query", device)
        checks.dtype_in(OPERATOR, "out", out, (out_dtype,))
        checks.shape(OPERATOR, "out", out, (batch, q_len, heads, LATENT_DIM))
        checks.contiguous(OPERATOR, "out", out)
        checks.aligned(OPERATOR, "out", out, _ALIGNMENT)


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


def _check_options(options: Options, has_causal_seqs: bool) -> None:
    """Everything about them that needs no tensor."""
    dims = (options.kv_lora_rank, options.qk_rope_head_dim)
    for name, size in zip(("kv_lora_rank", "qk_rope_head_dim"), dims, strict=True):
        checks.number(OPERATOR, name, size)
    if dims != (LATENT_DIM, ROPE_DIM):
        raise UnsupportedError(
            f"{OPERATOR}: kv_lora_rank and qk_rope_head_dim are {dims[0]} and {dims[1]}; kernels exist "
            f"for {LATENT_DIM} and {ROPE_DIM}"
        )
    cp_world = options.cp_world
    integers(options.window_left, cp_world, options.cp_rank, options.cp_interleave_size, options.min_split_kv)
    if cp_world > 1 and not has_causal_seqs:
        raise ArgumentError(
            f"{OPERATOR}: cp_world is {cp_world} but causal_seqs is not given; it must hold each request's keys over "
            "all ranks"
        )
    if checks.number(OPERATOR, "lse_base", options.lse_base) not in (2.0, math.e):
        raise ArgumentError(f"{OPERATOR}: lse_base is {checks.spelled(options.lse_base)}; accepted: 2 and math.e")


def integers(
    window_left: int, cp_world: int, cp_rank: int, cp_interleave_size: int, min_split_kv: int
) -> tuple[int, int, int, int, int]:
    """The same, of Python's own type and in their ranges."""
    window_left = checks.integer(OPERATOR, "window_left", window_left, -1, LARGEST_INT)
    cp_world = checks.integer(OPERATOR, "cp_world", cp_world, 1, LARGEST_INT)
    cp_rank = checks.integer(OPERATOR, "cp_rank", cp_rank, 0, cp_world - 1)
    cp_interleave_size = checks.integer(OPERATOR, "cp_interleave_size", cp_interleave_size, 1, LARGEST_INT // cp_world)
    min_split_kv = checks.integer(OPERATOR, "min_split_kv", min_split_kv, 1, _MAX_MIN_SPLIT)
    return window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv


def cuda_device(operator: str, device: torch.device | str | int | None) -> torch.device:
    """The CUDA device that an argument names; the current one for None."""
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            place = torch.device("cuda", device)
        else:
            place = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{operator}: device is {checks.spelled(device)}; it must be {_DEVICES}") from None
    if place.type != "cuda" or (isinstance(device, int) and place.index != device):  # torch keeps 8 bits of an index
        shown = checks.spelled(str(device) if isinstance(device, torch.device) else device)
        raise ArgumentError(f"{operator}: device is {shown}; it must be {_DEVICES}")
    return place


def gpu_of(operator: str, device: torch.device) -> tuple[Arch, int]:
    """Architecture and number of SMs of a CUDA device."""
    try:
        return checks.arch_of(device), multiprocessors(device)
    except TsmlaError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:  # torch's ways to say no driver, no GPU, no such GPU
        raise UnsupportedError(
            f"{operator}: torch cannot use {device} here ({str(error).partition(chr(10))[0]}), and the size depends on "
            "its SMs; ask where the decode will run, or reserve SMs * heads * max(8, q_len) * 513 * 4 bytes"
        ) from error


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
