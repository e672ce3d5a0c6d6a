"""The arguments of a decode call that are neither tensors nor factors, and the checks of their values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentError, UnsupportedError
from ..identity.call import DECODE
from ..identity.support import LATENT_DIM, ROPE_DIM
from . import checks

_OPERATOR = DECODE.name
_LARGEST_INT = 2**31 - 1
_MAX_MIN_SPLIT = 256


class Options(NamedTuple):
    """Every argument of a decode call that is neither a tensor nor a factor.

    longest: max_seq_len rounded up to a power of two, as plans round it: calls of growing contexts stay of one kind.
    """

    return_lse: bool
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
    max_q_len: int | None
    batch_invariant: bool


def is_packed(query: torch.Tensor, cum_seq_lens_q: torch.Tensor | None, max_q_len: int | None) -> bool:
    """Whether query tokens of all requests lie one behind the other; checks the arguments that say so."""
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise ArgumentError(
                f"{_OPERATOR}: max_q_len is given but cum_seq_lens_q is not; without it, every request has query's "
                "q_len tokens"
            )
        if isinstance(query, torch.Tensor) and query.ndim == 3:
            raise ArgumentError(
                f"{_OPERATOR}: query has shape {list(query.shape)}; it must be [batch, q_len, heads, 576], or "
                "cum_seq_lens_q must be given"
            )
        return False
    if max_q_len is None:
        raise ArgumentError(
            f"{_OPERATOR}: cum_seq_lens_q is given but max_q_len is not; it must be at least the most query tokens of "
            "a request"
        )
    return True


def check_options(options: Options, has_causal_seqs: bool, has_sinks: bool) -> None:
    """Check the options that can be checked without a tensor."""
    dims = (options.kv_lora_rank, options.qk_rope_head_dim)
    for name, size in zip(("kv_lora_rank", "qk_rope_head_dim"), dims, strict=True):
        checks.number(_OPERATOR, name, size)
    if dims != (LATENT_DIM, ROPE_DIM):
        raise UnsupportedError(
            f"{_OPERATOR}: kv_lora_rank and qk_rope_head_dim are {dims[0]} and {dims[1]}; kernels exist "
            f"for {LATENT_DIM} and {ROPE_DIM}"
        )
    cp_world = options.cp_world
    integers(options.window_left, cp_world, options.cp_rank, options.cp_interleave_size, options.min_split_kv)
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
    checks.lse_base(_OPERATOR, options.lse_base)


def integers(
    window_left: int, cp_world: int, cp_rank: int, cp_interleave_size: int, min_split_kv: int
) -> tuple[int, int, int, int, int]:
    """Check the ranges of the integer options, and return them as Python ints."""
    window_left = checks.integer(_OPERATOR, "window_left", window_left, -1, _LARGEST_INT)
    cp_world = checks.integer(_OPERATOR, "cp_world", cp_world, 1, _LARGEST_INT)
    cp_rank = checks.integer(_OPERATOR, "cp_rank", cp_rank, 0, cp_world - 1)
    most = _LARGEST_INT // cp_world
    cp_interleave_size = checks.integer(_OPERATOR, "cp_interleave_size", cp_interleave_size, 1, most)
    min_split_kv = checks.integer(_OPERATOR, "min_split_kv", min_split_kv, 1, _MAX_MIN_SPLIT)
    return window_left, cp_world, cp_rank, cp_interleave_size, min_split_kv
