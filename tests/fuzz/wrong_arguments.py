"""In what an argument can be wrong: for each operator its arguments, ways to spoil each, and values out of range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from .guarded import Guarded, contiguous

_OTHER_DTYPES = {
    torch.int32: (torch.float32, torch.int16, torch.uint32, torch.int8),
    torch.float32: (torch.float64, torch.bfloat16, torch.int32, torch.float16),
    torch.int64: (torch.float64, torch.uint32, torch.uint64, torch.int16),
}
_NO_DTYPES = (torch.float32, torch.float64, torch.int16, torch.bool)


def _cpu(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor.cpu()


def _dtype(tensor: torch.Tensor, index: int) -> torch.Tensor:
    others = _OTHER_DTYPES.get(tensor.dtype, _NO_DTYPES)
    return Guarded(tuple(tensor.shape), others[index % len(others)]).tensor


def _more_dims(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor[None]


def _fewer_dims(tensor: torch.Tensor, index: int) -> torch.Tensor:
    return tensor[0]


def _gap(tensor: torch.Tensor, index: int) -> torch.Tensor:
    shape = tuple(tensor.shape)
    return Guarded(shape, tensor.dtype, tuple(2 * stride for stride in contiguous(shape))).tensor


def _address(tensor: torch.Tensor, index: int) -> torch.Tensor:
    misses = [size for size in (1, 2, 4, 8) if size % tensor.element_size() == 0]
    return Guarded(tuple(tensor.shape), tensor.dtype, None, None, misses[index % len(misses)]).tensor


def _stride(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Rows that lie a few bytes too far apart; the outermost dimension has more than one."""
    shape = tuple(tensor.shape)
    strides = contiguous(shape)
    return Guarded(shape, tensor.dtype, (strides[0] + 1 + index % 3, *strides[1:])).tensor


def _rows_apart(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Gaps of 16 bytes before each last dimension, for arguments that must have none."""
    shape = tuple(tensor.shape)
    strides = contiguous((*shape[:-1], shape[-1] + 16 // tensor.element_size()))
    return Guarded(shape, tensor.dtype, strides).tensor


def _resized(dim: int, by: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def resized(tensor: torch.Tensor, index: int) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] += by
        return Guarded(tuple(shape), tensor.dtype).tensor

    return resized


SPOIL: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "on the CPU": _cpu,
    "dtype": _dtype,
    "float64": lambda tensor, index: tensor.double(),
    "more dims": _more_dims,
    "fewer dims": _fewer_dims,
    "gap": _gap,
    "address": _address,
    "stride": _stride,
    "rows apart": _rows_apart,
    **{f"dim {dim} {by:+}": _resized(dim, by) for dim in range(4) for by in (-1, 1, 16)},
}
"""What makes a wrong tensor of a right one; the number chooses among variations."""

_ANY = ("on the CPU", "dtype", "more dims", "fewer dims")
_ALIGNED = ("gap", "address", "stride")
_WHOLE = ("gap", "address", "rows apart")
_NUMBERS = (None, "1", torch.ones(()))
_SCALES = (*_NUMBERS, math.nan, math.inf, -math.inf, 1e41)
_FACTORS = (*_SCALES, 0, 0.0, -1.0, 1e-39, 5e-324, 1e20)
_NO_TENSORS = ("tensor", 3, [1, 2])
_BASES = (None, 10, "2", -2.0, 1.0)

PREFILL: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {
    "query": ((*_ANY, *_ALIGNED, "dim 2 -1", "dim 2 +16"), (None, *_NO_TENSORS), ("head dims",)),
    "key": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 0 -1", "dim 1 +1", "dim 2 -1", "dim 2 +16"), (None, *_NO_TENSORS), ()),
    "value": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 +1", "dim 2 -1"), (None, *_NO_TENSORS), ("key", "head dims")),
    "cum_seq_lens": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ()),
    "cum_seq_lens_q": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), _NO_TENSORS, ()),
    "out": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 +16"), _NO_TENSORS, ("writes",)),
    "batch_size": ((), (None, "2", 1, 3, -1), ("cum_seq_lens",)),
    "softmax_scale": ((), _FACTORS, ()),
    "k_scale": ((), _FACTORS, ()),
    "v_scale": ((), _SCALES, ()),
    "output_scale": ((), _SCALES, ()),
    "out_dtype": ((), (torch.float32, torch.float8_e4m3fn, "bf16", torch.int8), ("writes", "out is")),
    "sinks": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), _NO_TENSORS, ()),
    "key_mask": ((*_ANY, "dim 0 +1", "dim 0 -1", "dim 1 -1"), _NO_TENSORS, ()),
    "lse_includes_sink": ((), (None, "yes", 2), ()),
    "lse": ((*_ANY, "dim 0 +1", "dim 1 -1"), _NO_TENSORS, ()),
    "merge_into": ((), (*_NO_TENSORS, (1, 2), (None, None), ()), ()),
    "lse_base": ((), _BASES, ()),
}
"""Argument -> how its tensor can be wrong, values that are wrong, what else an error may speak of."""
_QUERY = (*_ANY, *_ALIGNED, "dim 0 +1", "dim 3 -1", "dim 3 +16")
DECODE: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {
    "query": (_QUERY, (None, *_NO_TENSORS, (1, 2), (), (None, None, None)), ("block_tables", "query[0]")),
    "query[0]": (_QUERY, (None, *_NO_TENSORS), ("block_tables", "query")),
    "query[1]": (_QUERY, (None, *_NO_TENSORS), ("query is a tuple",)),
    "query[2]": ((*_ANY, "dim 0 +1", "dim 1 +1", "dim 2 +16"), (None, *_NO_TENSORS), ("query is a tuple",)),
    "kv_cache": (
        ("on the CPU", "dtype", *_ALIGNED, "rows apart", "dim 1 +1", "dim 2 -1"),
        (None, *_NO_TENSORS, (), (1, 2), (1, 2, 3)), (),
    ),
    "kv_cache[0]": (
        ("on the CPU", "dtype", *_ALIGNED, "more dims", "fewer dims", "dim 0 +1", "dim 1 +1", "dim 2 -1"),
        (None, *_NO_TENSORS), ("kv_cache[1]", "kv_cache"),
    ),
    "kv_cache[1]": (
        (*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 -1"), (None, *_NO_TENSORS), ("kv_cache is a tuple",),
    ),
    "kv_cache[2]": ((*_ANY, "dim 0 +1", "dim 1 -1"), (None, *_NO_TENSORS), ("kv_cache is a tuple",)),
    "workspace_buffer": (("on the CPU", "dtype", "more dims", "fewer dims", "gap", "address", "dim 0 -1"),
                         (None, *_NO_TENSORS), ()),
    "block_tables": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ()),
    "seq_lens": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ()),
    "causal_seqs": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), _NO_TENSORS, ()),
    "local_visible_lens": ((*_ANY, "dim 0 +1", "dim 1 -1", "dim 1 +1"), _NO_TENSORS, ()),
    "out": ((*_ANY, *_WHOLE, "dim 0 +1", "dim 2 -1", "dim 3 +16"), _NO_TENSORS, ()),
    "kv_lora_rank": ((), (511, 0, -512, None, "512"), ()),
    "qk_rope_head_dim": ((), (63, 32, None), ()),
    "max_seq_len": ((), (*_NUMBERS, 0, -1, 2**31, 3.0), ()),
    "softmax_scale": ((), _FACTORS, ()),
    "output_scale": ((), _SCALES, ()),
    "window_left": ((), (*_NUMBERS, -2, 2**31, 1.5), ()),
    "cp_world": ((), (*_NUMBERS, 0, -1, 2**31, 1.5), ("cp_rank", "cp_interleave_size")),
    "cp_rank": ((), (*_NUMBERS, -1, 2, 2**31, 0.5), ()),
    "cp_interleave_size": ((), (*_NUMBERS, 0, -1, 2**31, 1.5), ()),
    "min_split_kv": ((), (*_NUMBERS, 0, 257, 1.5), ()),
    "lse": ((*_ANY, "dim 0 +1", "dim 1 -1", "dim 2 +16"), _NO_TENSORS, ()),
    "lse_base": ((), _BASES, ()),
    "cum_seq_lens_q": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ("max_q_len", "query")),
    "max_q_len": ((), (None, "1", torch.ones(()), 0, -1, 2**31, 1.5), ("cum_seq_lens_q",)),
    "sinks": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), _NO_TENSORS, ("cp_world",)),
    "batch_invariant": ((), (None, "yes", 2), ()),
    "lse_includes_sink": ((), (None, "yes", 2), ()),
}  # fmt: skip
PACK: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {
    "k_nope": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 -1"), (None, *_NO_TENSORS), ("d_nope", "k_pe", "v ")),
    "k_pe": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 0 -1", "dim 1 +1"), (None, *_NO_TENSORS), ("d_rope",)),
    "v": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 -1"), (None, *_NO_TENSORS), ("d_v",)),
    "k_out": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 +16"), _NO_TENSORS, ()),
    "v_out": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 +16"), _NO_TENSORS, ()),
    "k_scale_inv": ((), _SCALES, ()),
    "v_scale_inv": ((), _SCALES, ()),
    "fp8_dtype": ((), (None, torch.bfloat16, torch.uint8, "e4m3"), ()),
}
_KEYS: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {
    "kv_c": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 1 +16"), (None, *_NO_TENSORS), ("k_pe",)),
    "k_pe": (("on the CPU", "dtype", "fewer dims", *_ALIGNED, "dim 0 +1", "dim 1 -1"), (None, *_NO_TENSORS), ()),
    "cache": (("on the CPU", *_ANY[2:], *_ALIGNED, "dim 2 -1", "dim 2 +16"), (None, *_NO_TENSORS), ("rope_cache",)),
    "rope_cache": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 -1"), (None, *_NO_TENSORS), ()),
    "scale_cache": ((*_ANY, "dim 0 +1", "dim 1 -1"), (None, *_NO_TENSORS), ()),
    "format": ((), (None, 3, "fp8", "BF16", ["bf16"]), ()),
    "scale": ((), (*_SCALES, 0, -1.0, 1e-39), ()),
    "enable_pdl": ((), (None, "yes", 2), ()),
}
WRITE_CACHE = {
    **_KEYS,
    "slot_mapping": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ()),
    "power_of_two_scales": ((), ("yes", 2, 1.5), ()),
    "positions": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ()),
    "cos_sin_cache": (
        ("on the CPU", "float64", *_ANY[2:], *_ALIGNED, "dim 1 -1", "dim 1 +16"),
        (None, *_NO_TENSORS),
        (),
    ),
    "rope_interleaved": ((), (None, "yes", 2), ()),
}
READ_CACHE = {
    **_KEYS,
    "indices": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ()),
    "block_tables": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ("cum_seq_lens", "seq_starts")),
    "cum_seq_lens": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ("seq_starts",)),
    "seq_starts": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), _NO_TENSORS, ()),
}
KEY_MASK: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {
    "indices": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), (None, *_NO_TENSORS), ("topk_length", "out")),
    "keys": ((), (None, -1, 2**31, "70", 7.5, 64, 97), ("out",)),
    "topk_length": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1"), _NO_TENSORS, ()),
    "out": ((*_ANY, "gap", "dim 0 +1", "dim 0 -1", "dim 1 +1", "dim 1 -1"), _NO_TENSORS, ()),
    "enable_pdl": ((), (None, "yes", 2), ()),
}
QUANTIZE_Q: dict[str, tuple[tuple[str, ...], tuple[Any, ...], tuple[str, ...]]] = {
    "query": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 +1"), (None, *_NO_TENSORS, (1, 2)), ("_out",)),
    "nope_out": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 +1"), _NO_TENSORS, ()),
    "rope_out": ((*_ANY, *_ALIGNED, "dim 0 +1", "dim 1 -1", "dim 2 +1"), _NO_TENSORS, ()),
    "scale_out": ((*_ANY, "dim 0 +1", "dim 1 -1"), _NO_TENSORS, ()),
    "power_of_two_scales": ((), (None, "yes", 2), ()),
    "enable_pdl": ((), (None, "yes", 2), ()),
}
