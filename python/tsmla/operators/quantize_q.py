"""mla_quantize_q: quantises query rows to e4m3, with a scale for each row, in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import QUANTIZE_Q
from ..identity.row_format import ROWS
from ..identity.support import LATENT_DIM, ROPE_DIM
from ..identity.variant import QuantizeQVariant
from ..loading import resolve
from . import checks, examine, traced

_OPERATOR = QUANTIZE_Q.name
_kind = examine.kind_of(QUANTIZE_Q)
_ROW = ROWS["snapmla"]
_MAX_ROWS = 2**30
"""Most tokens x heads: the kernel counts rows in 32 bits; addresses are 64-bit."""


def mla_quantize_q(
    query: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    power_of_two_scales: bool = True,
    nope_out: torch.Tensor | None = None,
    rope_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a query for a cache of "snapmla" rows: for each token and head, 512 e4m3, 64 bf16 and one scale of both.

    A row has the bits that `mla_write_cache` writes for a key of format "snapmla". In terms of PyTorch, with c and r
    its first 512 and its last 64 elements as float32:

    - s = max(amax(c), 1e-26) / 448, but 1 where amax(c) is 0; with power_of_two_scales, the smallest power of two that
      is not below that;
    - the row is e4m3(c / s), bf16(r / s) and s.

    e4m3(x) is x.clamp(-448, 448).to(torch.float8_e4m3fn), and amax(x) the largest magnitude of those that are not NaN,
    0 where all are. The score of a query and a key is the product of their scales times the product of the rows as they
    are stored, rope included (SnapMLA's formula; docs/cache-formats.md).

    Nothing is allocated but the results, and nothing waits for the GPU: calls can be captured in a CUDA graph.

    Args:
        query: [batch, q_len, heads, 576] or [tokens, heads, 576] bf16: latent part first, then rope. Or a tuple of its
            two pieces, (q_nope [..., 512], q_pe [..., 64]). Here and for results, last dimensions are contiguous, and
            outer strides are free multiples of 16 bytes, of each tensor its own, as addresses are.
        power_of_two_scales: round scales up to powers of two. Dividing the rope part is then exact, unless it leaves
            the range of bf16.
        nope_out: [batch, q_len, heads, 512] or [tokens, heads, 512] e4m3 to write into.
        rope_out: [..., 64] bf16 to write into.
        scale_out: [batch, q_len, heads] or [tokens, heads] float32 to write into, any strides.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.

    Returns:
        (nope_out, rope_out, scale_out), contiguous where they were not given.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        return registered.calls["quantize_q"](query, power_of_two_scales, nope_out, rope_out, scale_out, enable_pdl)
    q_pe = None
    if type(query) is tuple:
        query, q_pe = examine.pieces(_OPERATOR, "query", query, 2)
    given: tuple[Any, ...] = query, q_pe, nope_out, rope_out, scale_out
    options = power_of_two_scales, enable_pdl
    try:
        packed = given[0].ndim == 3
        tensors: tuple[Any, ...] = tuple(x if x is None else x.unsqueeze(0) for x in given) if packed else given
        *outer, _ = shape = tensors[0].shape
        rows = outer[0] * outer[1] * outer[2]
        kind = _kind(tensors, shape, options, rows <= _MAX_ROWS)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(given, options))
        source, rope, *results = tensors
        results = [made.new_empty((*outer, *made.shape)) if x is None else x
                   for x, made in zip(results, served.made, strict=True)]  # fmt: skip
        if rows:
            served.kernel(source, served.whole if rope is None else rope, *results, served.power_of_two, served.pdl)
        else:  # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(given, options)
    except TsmlaError:
        raise
    except Exception:
        _examined(given, options)  # raises if an argument is wrong, and says which
        raise
    made = (x.squeeze(0) for x in results) if packed else results
    return tuple(new if x is None else x for x, new in zip(given[2:], made, strict=True))  # type: ignore[return-value]


class _Served(NamedTuple):
    """What serves calls of one kind, apart from their tensors.

    whole: what the kernel gets where the query is in one piece.
    made: an empty tensor for each result, from which it is made.
    """

    kernel: Callable[..., None]
    whole: torch.Tensor
    made: tuple[torch.Tensor, ...]
    power_of_two: int
    pdl: int


def _examined(tensors: tuple, options: tuple[bool, bool]) -> _Served:
    """Check everything about a call, and return what serves it."""
    power_of_two, pdl = checks.each(checks.flag, _OPERATOR, power_of_two_scales=options[0], enable_pdl=options[1])
    query, q_pe, *_ = tensors
    called, columns = ({}, {}) if q_pe is None else ({"query": "query[0]"}, {"query_columns": LATENT_DIM})
    packed = isinstance(query, torch.Tensor) and query.ndim == 3
    if isinstance(query, torch.Tensor) and not query.is_nested and query.ndim not in (3, 4):
        name, width = called.get("query", "query"), columns.get("query_columns", LATENT_DIM + ROPE_DIM)
        raise ArgumentError(
            f"{_OPERATOR}: {name} has shape {list(query.shape)}; it must be [batch, q_len, heads, {width}] or [tokens, "
            f"heads, {width}]"
        )
    examination = examine.Examination(QUANTIZE_Q, tensors, called, columns, packed)
    variant = QuantizeQVariant(examination.arch, examination.dtype, _ROW)
    examination.check(variant)
    sizes = examination.sizes
    tokens = sizes["tokens"] if packed else sizes["batch"] * sizes["q_len"]
    if tokens * sizes["heads"] > _MAX_ROWS:
        raise ArgumentError(
            f"{_OPERATOR}: {called.get('query', 'query')} has {tokens} tokens x {sizes['heads']} heads; at most "
            f"{_MAX_ROWS} rows fit one call"
        )
    made = (
        query.new_empty(LATENT_DIM, dtype=torch.float8_e4m3fn),
        query.new_empty(ROPE_DIM),
        query.new_empty((), dtype=torch.float32),
    )
    return _Served(resolve.kernel(variant), query.new_empty((0, 0, 0, ROPE_DIM)), made, int(power_of_two), int(pdl))


traced.offer(QUANTIZE_Q, mla_quantize_q)
