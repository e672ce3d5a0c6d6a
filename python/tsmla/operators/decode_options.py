"""The arguments of a decode call that are neither tensors nor factors, and the checks of their values."""

from __future__ import annotations

import torch

from ..errors import ArgumentError, UnsupportedError
from ..identity.call import DECODE
from ..identity.support import LATENT_DIM, ROPE_DIM
from . import checks
from .checks import LARGEST_INT
from .written import Given

_OPERATOR = DECODE.name
MAX_MIN_SPLIT = 256


def is_packed(query: torch.Tensor, cum_seq_lens_q: torch.Tensor | None, max_q_len: int | None) -> bool:
    """Whether query tokens of all requests lie one behind the other; checks the arguments that say so."""
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise ArgumentError(
                f"{_OPERATOR}: max_q_len is given but cum_seq_lens_q is not; without it, every request has query's "
                "q_len tokens"
            )
        if isinstance(query, torch.Tensor) and not query.is_nested and query.ndim == 3:
            raise ArgumentError(
                f"{_OPERATOR}: query has shape {list(query.shape)}; it must be [batch, q_len, heads, columns], or "
                "cum_seq_lens_q must be given"
            )
        return False
    if max_q_len is None:
        raise ArgumentError(
            f"{_OPERATOR}: cum_seq_lens_q is given but max_q_len is not; it must be at least the most query tokens of "
            "a request"
        )
    return True


def check_dims(call: Given) -> None:
    """Check the sizes of the two pieces of a row, from which those of query and cache follow."""
    latent, rope = call.kv_lora_rank, call.qk_rope_head_dim
    known = checks.equals_one_of(_OPERATOR, "kv_lora_rank", latent, LATENT_DIM)
    if not checks.equals_one_of(_OPERATOR, "qk_rope_head_dim", rope, ROPE_DIM, 0) or not known:
        raise UnsupportedError(
            f"{_OPERATOR}: kv_lora_rank and qk_rope_head_dim are {checks.spelled(latent)} and {checks.spelled(rope)}; "
            f"kernels exist for {LATENT_DIM} and {ROPE_DIM}, or {LATENT_DIM} and 0"
        )


def check_options(call: Given) -> None:
    """Check the other options whose values no table bounds."""
    checks.integer(_OPERATOR, "window_left", call.window_left, -1, LARGEST_INT)
    cp_world, *_ = context_parallel(call.cp_world, call.cp_rank, call.cp_interleave_size)
    checks.integer(_OPERATOR, "min_split_kv", call.min_split_kv, 1, MAX_MIN_SPLIT)
    if cp_world > 1 and call.causal_seqs is None:
        raise ArgumentError(
            f"{_OPERATOR}: cp_world is {cp_world} but causal_seqs is not given; it must hold each request's keys over "
            "all ranks"
        )
    if cp_world > 1 and call.sinks is not None:
        raise ArgumentError(
            f"{_OPERATOR}: sinks are given and cp_world is {cp_world}; every rank would count them: call without, "
            "merge the ranks' results, and multiply these by 1 / (1 + exp(sink - lse)), where lse is the merged "
            "natural logarithm"
        )
    checks.lse_base(_OPERATOR, call.lse_base)


def context_parallel(world: int, rank: int, interleave_size: int) -> tuple[int, int, int]:
    """Check the ranges of cp_world, cp_rank and cp_interleave_size, and return them as Python ints."""
    world = checks.integer(_OPERATOR, "cp_world", world, 1, LARGEST_INT)
    rank = checks.integer(_OPERATOR, "cp_rank", rank, 0, world - 1)
    most = LARGEST_INT // world
    return world, rank, checks.integer(_OPERATOR, "cp_interleave_size", interleave_size, 1, most)
