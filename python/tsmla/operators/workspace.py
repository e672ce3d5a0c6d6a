"""How much scratch memory a decode needs on a GPU."""

from __future__ import annotations

import torch

from ..errors import ArgumentError, TsmlaError, UnsupportedError
from ..identity.arch import Arch
from ..identity.call import DECODE
from ..identity.plan import plan_decode
from . import checks
from .checks import LARGEST_INT

_MOST_ROWS_A_HEAD = 8
"""Rows of partial results that an SM keeps for each head at most, of requests of up to so many query tokens."""
_MOST_ROWS = 128
"""Rows of partial results that an SM keeps at most, whatever the number of heads, of requests of one query token: two
row tiles, of 64 rows or of 128 rows that two SMs share. The first one of a GPU has none, which leaves room for
records."""
_DEVICES = "a CUDA device, such as 0, 'cuda' or 'cuda:1'"


def decode_workspace_size(
    batch_size: int,
    q_len: int,
    heads: int,
    max_seq_len: int | None = None,
    device: torch.device | str | int | None = None,
    *,
    varies: bool = False,
) -> int:
    """Return the bytes of workspace that `tsmla_decode` needs for calls of this shape on a CUDA device (by default the
    current one).

    q_len: max_q_len where requests have different numbers of query tokens (cum_seq_lens_q); `varies` must then be True.
    max_seq_len: without it, the size is enough for any.

    The size is never more than SMs * heads * max(8, q_len) * 513 * 4, which is enough for every batch size. Raises
    UnsupportedError for GPUs that tsmla has no kernels for, and where torch sees no GPU.
    """
    operator = "decode_workspace_size"
    place = _cuda_device(operator, device)
    for name, value in (("batch_size", batch_size), ("q_len", q_len), ("heads", heads)):
        checks.integer(operator, name, value, 0, LARGEST_INT)
    varies = checks.flag(operator, "varies", varies)
    if max_seq_len is not None:
        max_seq_len = checks.integer(operator, "max_seq_len", max_seq_len, 1, LARGEST_INT)
    if not (batch_size and q_len and heads):
        return 0
    arch, processors = _gpu_of(operator, place)
    return plan_decode(arch, processors, batch_size, q_len, heads, max_seq_len, varies).workspace_bytes


def scratch(query: torch.Tensor, batch: int, q_len: int, heads: int, longest: int) -> torch.Tensor:
    """Allocate a workspace for one decode, on the query's device."""
    size = 0
    if batch and q_len and heads:
        longest = min(max(longest, 1), LARGEST_INT)
        arch, processors = checks.arch_of(query.device), multiprocessors(query.device)
        size = plan_decode(arch, processors, batch, q_len, heads, longest).workspace_bytes
    return query.new_empty(size, dtype=torch.int8)


def enough(device: torch.device, heads: int) -> int:
    """Return bytes that are enough for any number of requests of one query token each. heads may be a symbol, which is
    not compared."""
    return multiprocessors(device) * torch.sym_min(heads * _MOST_ROWS_A_HEAD, _MOST_ROWS) * 513 * 4


def sized(workspace: torch.Tensor, needed: int) -> torch.Tensor:
    """Return the part of the workspace that a call needs, which is less than 2 GiB, or refuse one that is too small."""
    size = workspace.nbytes
    if size < needed:
        raise ArgumentError(
            f"{DECODE.name}: workspace_buffer has {size} bytes; this call needs {needed} (tsmla.decode_workspace_size "
            "says so; SMs * heads * max(8, q_len) * 513 * 4 is always enough)"
        )
    return workspace[:needed]


def _cuda_device(operator: str, device: torch.device | str | int | None) -> torch.device:
    """Return the CUDA device that an argument names; the current one for None."""
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


def _gpu_of(operator: str, device: torch.device) -> tuple[Arch, int]:
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
