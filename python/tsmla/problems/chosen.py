"""Decodes of chosen keys of `tsmla selftest`: a case's inputs, the call that a variant serves, what it must give."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..identity.row_format import RowFormat, multiplied_row
from ..identity.support import LATENT_DIM
from ..identity.variant import DecodeVariant, Dtype
from ..operators.checks import TORCH_DTYPE_OF
from ..operators.decode import tsmla_decode
from ..operators.workspace import decode_workspace_size
from .cases import ChosenCase
from .decode import FEW_ROWS, LSE, ROW, SCALE, WEIGHT_SCALE, as_given, products_of, query_as_given
from .kept import kept
from .lists import named_slots, random_lists, union_of
from .memory import Memory, surrounded
from .reference import Attended, Judged, Tolerance, attend, judge, sinks_of, with_sinks
from .rows import Stored, numbers_in, random_numbers, stored_as
from .sums import weight_dtype


class _Problem(NamedTuple):
    """The inputs of a case, and what they stand for.

    query: [tokens, heads, 576 or 512], and `given`, the query as the operator takes it.
    rows: the keys that each token's list names, in the list's order, as often as they stand there.
    cache: as the operator takes it, in one tensor or two; rows that no list names are NaN.
    lengths: of the lists, as the operator takes them; None: lists count whole.
    """

    query: torch.Tensor
    given: torch.Tensor | tuple[torch.Tensor, ...]
    rows: list[torch.Tensor]
    cache: Stored | tuple[torch.Tensor, ...]
    indices: torch.Tensor
    lengths: torch.Tensor | None


def run(variant: DecodeVariant, case: ChosenCase, memory: Memory, pdl: bool) -> dict[str, torch.Tensor]:
    """Call the operator so that `variant` serves; results and workspace lie in memory of `memory`."""
    given = _problem(case, variant.dtype, variant.row)
    outer = (case.tokens,) if case.packed else (case.batch, case.q_len)
    size = decode_workspace_size(case.tokens, 1, case.heads, max(1, case.top_k))
    workspace = memory.allocate((size,), torch.int8, scratch=True)
    results = {
        "out": memory.allocate((*outer, case.heads, LATENT_DIM), TORCH_DTYPE_OF[variant.out_dtype]),
        "lse": memory.allocate((*outer, case.heads), torch.float32),
    }
    tsmla_decode(
        given.given, given.cache, workspace, LATENT_DIM, variant.row.columns - LATENT_DIM, None, None, None, SCALE,
        case.output_scale, enable_pdl=pdl, out=results["out"], lse=results["lse"],
        sinks=sinks_of(case.heads) if case.sinks else None, lse_includes_sink=case.lse_includes_sink,
        batch_invariant=case.batch_invariant, indices=given.indices, topk_length=given.lengths,
    )  # fmt: skip
    return results


def check(variant: DecodeVariant, case: ChosenCase, results: dict[str, torch.Tensor]) -> Judged:
    """Compare the results of `run` with float64."""
    weights = weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype])
    exact, plain = _expected(case, variant.dtype, variant.row, weights)
    out, lse = results["out"].view(-1, case.heads, LATENT_DIM), results["lse"].view(-1, case.heads)
    tolerance = Tolerance(torch.finfo(out.dtype).eps, 1.5, LSE)
    return judge(Attended(out, lse), exact, plain, tolerance, factor=case.output_scale)


@kept("gathered")
def _problem(case: ChosenCase, dtype: Dtype, row: RowFormat) -> _Problem:
    """Make the inputs of a case. row: of the cache."""
    torch_dtype, width = torch.bfloat16 if row.scales else TORCH_DTYPE_OF[dtype], row.columns

    def random(row: RowFormat, *shape: int) -> torch.Tensor:
        numbers = random_numbers(*shape, magnitude=case.magnitude, one_sign=case.one_sign)
        return numbers_in(row, stored_as(row, numbers))

    indices = random_lists(
        case.tokens, case.top_k, (case.pages, case.page),
        outside=case.outside, front=case.front, distinct=case.distinct,
    )  # fmt: skip
    named = named_slots(indices, case.pages * case.page, case.lengths or None)
    # Pages lie a row apart, as slices of a larger cache would; that row is never a key's.
    cache = surrounded((case.pages, case.page + 1, width), torch_dtype)[:, : case.page]
    used = union_of(named)
    cache[used // case.page, used % case.page] = random(row, len(used), ROW)
    query = surrounded((case.tokens, case.heads, width), torch_dtype)
    query_row = multiplied_row(row, dtype)
    query[:] = 0 if case.one_sign else random(query_row, case.tokens, case.heads, ROW)
    outer = (case.tokens,) if case.packed else (case.batch, case.q_len)
    joined = query.view(*outer, case.heads, width)
    return _Problem(
        query,
        query_as_given(query_row, joined, case.pieces),
        [cache[own // case.page, own % case.page] for own in named],
        as_given(row, cache, case.apart),
        indices.to(torch.int32).view(*outer, case.top_k).to("cuda"),
        torch.tensor(case.lengths, dtype=torch.int32, device="cuda").view(outer) if case.lengths else None,
    )


@kept("gathered")
def _expected(
    case: ChosenCase, dtype: Dtype, row: RowFormat, weights: torch.dtype
) -> tuple[Attended, Attended]:  # fmt: skip
    """Return what a case must give, [tokens, heads, ..], in float64 and in plain torch, which rounds weights to
    `weights` where inputs have 8 bits; LSE base 2."""
    given = _problem(case, dtype, row)
    few = case.heads <= FEW_ROWS and not case.batch_invariant
    both = []
    for compute in (torch.float64, TORCH_DTYPE_OF[dtype]):
        parts = []
        for query, keys in zip(given.query, given.rows, strict=True):
            seen = torch.ones(case.heads, len(keys), dtype=torch.bool, device="cuda")
            products = products_of(row, query, keys, few)
            parts.append(
                attend(query, keys, keys[:, :LATENT_DIM], seen, SCALE, compute, WEIGHT_SCALE, products, weights)
            )
        outs, lses = zip(*parts, strict=True)
        one = Attended(torch.stack(outs), torch.stack(lses))
        one = with_sinks(one, sinks_of(case.heads), case.lse_includes_sink) if case.sinks else one
        both.append(Attended(one.out * case.output_scale, one.lse / math.log(2)))
    return both[0], both[1]
