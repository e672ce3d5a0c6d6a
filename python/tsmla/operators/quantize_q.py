"""mla_quantize_q: quantises query rows to e4m3, with a scale for each row, in one pass over memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import QUANTIZE_Q
from ..identity.row_format import ROWS
from ..identity.support import LATENT_DIM, ROPE_DIM
from ..identity.variant import QuantizeQVariant
from ..loading import resolve
from . import examine, traced, written
from .written import Served

_OPERATOR = QUANTIZE_Q.name
_kind = examine.kind_of(QUANTIZE_Q)
_ROW = ROWS["snapmla"]
_MAX_ROWS = 2**30
"""Most tokens x heads: the kernel counts rows in 32 bits; addresses are 64-bit."""


@written.from_table(QUANTIZE_Q)
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
    are stored, rope included (SnapMLA's formula; docs/reference/cache-formats.md).

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

        return registered.calls["quantize_q"](*written.parameters())
    q_pe = None
    if type(query) is tuple:
        query, q_pe = examine.pieces(_OPERATOR, "query", query, 2)
    tensors, options = written.tensors(), written.options()
    try:
        packed = query.ndim == 3  # type: ignore[union-attr]
        seen = tuple(x if x is None else x.unsqueeze(0) for x in tensors) if packed else tensors
        outer = query.shape[:-1]  # type: ignore[union-attr]
        rows = math.prod(outer)
        first: Any = seen[0]
        kind = _kind(seen, first.shape, options, rows <= _MAX_ROWS)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options))
        if nope_out is None:
            nope_out = served.nope.new_empty((*outer, LATENT_DIM))
        if rope_out is None:
            rope_out = served.rope.new_empty((*outer, ROPE_DIM))
        if scale_out is None:
            scale_out = served.scale.new_empty(outer)
        if not rows:  # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(tensors, options)
        elif packed:
            served.kernel(*written.packed_arguments(served))
        else:
            served.kernel(*written.arguments(served))
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options)  # raises if an argument is wrong, and says which
        raise
    return nope_out, rope_out, scale_out


def _examined(tensors: tuple, options: tuple) -> Served:
    """Check everything about a call, and return what serves it: an empty tensor for each result, too, from which it is
    made."""
    call = written.given(QUANTIZE_Q, tensors, options)
    query, q_pe = call.query, call.q_pe
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
    return written.served(
        QUANTIZE_Q,
        variant,
        call,
        {},
        nope=query.new_empty(0, dtype=torch.float8_e4m3fn),
        rope=query.new_empty(0),
        scale=query.new_empty(0, dtype=torch.float32),
    )


traced.offer(QUANTIZE_Q, mla_quantize_q)
