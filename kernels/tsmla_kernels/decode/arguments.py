"""The signature that decode kernels of all architectures share."""

from __future__ import annotations

from cutlass import Float32, Int8, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tsmla.variant import DecodeVariant

from ..parts.precision import numeric

ALIGNMENT = 16
"""Bytes; what tensor maps and 128-bit accesses need of every base address, and of the cache's page stride."""


def decode_arguments(variant: DecodeVariant) -> tuple:
    """Fake arguments in calling order, the stream from the TVM-FFI environment:

    query [B, q_len, H, 576] and out [B, q_len, H, 512] without gaps, kv_cache [pages, page, 576] with any page stride
    and rows of 576, block_tables [B, max_pages]; seq_lens [B], causal_seqs [B], visible [B, q_len] (or [0, 0] when
    nothing but lengths and positions hides keys) with any strides; lse [B, q_len, H] without gaps or None, workspace
    [bytes]; softmax_scale, output_scale; causal, window_left, cp_world, cp_rank, cp_interleave, parts.

    Strides of an extent of 1 mean nothing (exporters give it any stride), so kernels take strides from shapes wherever
    there are no gaps.
    """
    batch, q_len, heads, pages, page, max_pages, size, *hiding = (cute.sym_int() for _ in range(9))
    dtype, out_dtype, row = numeric(variant.dtype), numeric(variant.out_dtype), variant.row

    def tensor(element, *shape, align=ALIGNMENT):
        outer = tuple(cute.sym_int64() for _ in shape[:-1])
        return make_fake_tensor(element, shape, stride=(*outer, 1), assumed_align=align)

    def counts(*shape):
        return make_fake_tensor(Int32, shape, stride=tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    lse = tensor(Float32, batch, q_len, heads, align=4) if variant.lse else None
    return (
        tensor(dtype, batch, q_len, heads, row.columns),
        tensor(numeric(row.dtype), pages, page, row.columns),
        tensor(Int32, batch, max_pages, align=4),
        counts(batch),
        counts(batch),
        counts(*hiding),
        tensor(out_dtype, batch, q_len, heads, row.value_columns),
        lse,
        tensor(Int8, size),
        *(Float32(1.0) for _ in ("softmax_scale", "output_scale")),
        *(Int32(0) for _ in ("causal", "window_left", "cp_world", "cp_rank", "cp_interleave", "parts")),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
