"""tokenspeed_mla's functions, 0.1.3 to 2.0.4, computed by tsmla's operators: same names, arguments, layouts, LSE bases.

Its environment variables TOKENSPEED_MLA_PREFILL_BACKEND (cutedsl, binary) and TOKENSPEED_MLA_FMHA_BINARY_SO are read as
they are everywhere in tsmla, when a prefill kernel is first needed. docs/start/compat.md has what differs.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from ..identity.variant import Dtype, PrefillVariant
from ..operators import checks, prepare
from ..operators.decode import tsmla_decode
from ..operators.pack import mla_kv_pack_quantize_fp8
from ..operators.prefill import tsmla_prefill
from ..operators.workspace import multiprocessors
from . import translate

__all__ = [
    "get_num_sm",
    "has_binary_prefill",
    "mla_kv_pack_quantize_fp8",
    "tokenspeed_mla_decode",
    "tokenspeed_mla_prefill",
    "warmup_compile_prefill",
]

_DECODE, _PREFILL, _WARMUP = "tokenspeed_mla_decode", "tokenspeed_mla_prefill", "warmup_compile_prefill"
_MAX_MIN_SPLIT = 256
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def tokenspeed_mla_decode(
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tsmla_decode` with tokenspeed_mla 2.0.4's arguments; shapes, dtypes and errors are in its docstring.

    A True or False in the place of window_left, the fourteenth, is 0.1.3's enable_pdl.

    Args:
        query: [batch, q_len, heads, 576], or [.., 512] where qk_rope_head_dim is 0; copied where its strides are no
            multiples of 16 bytes.
        workspace_buffer: as callers size it for tokenspeed_mla (SMs * heads * 8 * 513 * 4 bytes for q_len up to 8).
        is_var_seq: True or False; lengths are always read from `seq_lens`.
        window_left: with causal_mask=False and several query tokens it is refused: there, tokenspeed_mla moves a
            window's start with the token and not its end.
        min_split_kv: 1 to 256; changes nothing, as keys are dealt evenly to the whole GPU.
        local_visible_lens: [batch, q_len] int32: takes the place of the causal bound, as in tokenspeed_mla; refused
            together with window_left, causal_seqs and cp_world > 1, as there.

    Returns:
        out [batch, q_len, heads, 512], or (out, lse) with lse [batch, q_len, heads] float32, **base 2**. A query row
        that sees no key gives output 0 and LSE -inf.
    """
    if isinstance(window_left, bool):
        if checks.flag(_DECODE, "enable_pdl", enable_pdl):
            raise ArgumentError(f"{_DECODE}: window_left is {window_left}; it must be an integer (enable_pdl is given)")
        enable_pdl, window_left = window_left, -1
    checks.flag(_DECODE, "is_var_seq", is_var_seq)
    checks.integer(_DECODE, "min_split_kv", min_split_kv, 1, _MAX_MIN_SPLIT)
    window_left = checks.integer(_DECODE, "window_left", window_left, -1, translate.LARGEST_INT)
    query = translate.readable(_DECODE, "query", query)
    if window_left >= 0 and query.ndim == 4 and query.shape[1] > 1:
        if not checks.flag(_DECODE, "causal_mask", causal_mask):
            raise UnsupportedError(
                f"{_DECODE}: window_left is {window_left} with causal_mask=False and {query.shape[1]} query tokens; "
                "windows of several query tokens exist with causal_mask=True"
            )
    if local_visible_lens is not None:
        if (
            window_left >= 0
            or causal_seqs is not None
            or checks.integer(_DECODE, "cp_world", cp_world, 1, translate.LARGEST_INT) > 1
        ):
            raise ArgumentError(
                f"{_DECODE}: local_visible_lens is given, which excludes window_left, causal_seqs and cp_world > 1 "
                "(tsmla_decode takes them together, and the least of their bounds holds)"
            )
        checks.flag(_DECODE, "causal_mask", causal_mask)
        causal_mask = False
    return tsmla_decode(
        query=query,
        kv_cache=kv_cache,
        workspace_buffer=workspace_buffer,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        block_tables=block_tables,
        seq_lens=seq_lens,
        max_seq_len=max_seq_len,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        out=out,
        causal_mask=causal_mask,
        window_left=window_left,
        enable_pdl=enable_pdl,
        return_lse=return_lse,
        causal_seqs=causal_seqs,
        cp_world=cp_world,
        cp_rank=cp_rank,
        cp_interleave_size=cp_interleave_size,
        local_visible_lens=local_visible_lens,
    )


def tokenspeed_mla_prefill(
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tsmla_prefill` with tokenspeed_mla 2.0.4's arguments; shapes and errors are in its docstring.

    Args:
        query, key, value: [tokens, heads, dim]; strided views, of `value` too, are read correctly.
        seq_lens, max_seq_len, max_seq_len_q: not read; the kernel finds the lengths itself.
        cum_seq_lens, cum_seq_lens_q: [batch_size + 1]; other integers than int32, and those on the CPU, are copied.
        out: [tokens, heads, d_v] bf16 to write into.

    Returns:
        out, **bf16** for every input dtype, or (out, lse) with lse [tokens, heads] float32, **natural log**. A query
        row that sees no key gives output 0 and LSE -inf.
    """
    return tsmla_prefill(
        query=query,
        key=key,
        value=value,
        seq_lens=None,
        cum_seq_lens=_int32(query, cum_seq_lens),
        max_seq_len=1,
        batch_size=batch_size,
        softmax_scale=softmax_scale,
        is_causal=is_causal,
        return_lse=return_lse,
        cum_seq_lens_q=_int32(query, cum_seq_lens_q),
        enable_pdl=enable_pdl,
        out=out,
        out_dtype=torch.bfloat16,
    )


def _int32(query: torch.Tensor, lengths: Any) -> Any:
    """Return cumulative lengths as int32 on the query's device. Anything but a tensor of integers is returned as
    it is."""
    if isinstance(lengths, torch.Tensor) and isinstance(query, torch.Tensor) and lengths.dtype in _INTEGERS:
        if lengths.dtype is not torch.int32 or (query.is_cuda and not lengths.is_cuda):
            checks.stored(_PREFILL, "cum_seq_lens", lengths)
            return lengths.to(query.device, torch.int32)
    return lengths


def warmup_compile_prefill(
    q_dtype: torch.dtype = torch.float8_e4m3fn, d_qk: int = 192, d_v: int = 128, enable_pdl: bool = False
) -> None:
    """Load the prefill kernels with LSE, causal and full, of one dtype and head dims, and launch each once. Compiles
    those that no library holds. `tsmla.warmup` does it for kernels of any operator."""
    checks.torch_dtype(_WARMUP, "q_dtype", q_dtype, checks.TORCH_DTYPES)
    d_qk, d_v = checks.each(checks.integer, _WARMUP, 1, 2**16, d_qk=d_qk, d_v=d_v)
    checks.flag(_WARMUP, "enable_pdl", enable_pdl)
    arch, dtype = checks.arch_of(torch.device("cuda")), checks.TORCH_DTYPES[q_dtype]
    variants = [PrefillVariant(arch, dtype, Dtype.BF16, d_qk, d_v, causal, True) for causal in (True, False)]
    prepare.warmup(variants)


def get_num_sm(device: torch.device) -> int:
    """The number of SMs of a CUDA device."""
    return multiprocessors(device)


def has_binary_prefill(path: str | None = None) -> bool:
    """Whether prefill runs from a precompiled library: the one at `path`, else the one that a call would use.
    `tsmla.binary_status` says why not."""
    from .. import has_binary_prefill as in_this_package

    return in_this_package(path)
