"""Decode calls of `tsmla selftest`: a case's inputs, the call that a variant serves, and what it must give."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from ..identity.row_format import RowFormat, multiplied_row
from ..identity.support import LATENT_DIM, ROPE_DIM
from ..identity.variant import DecodeVariant, Dtype
from ..operators.checks import TORCH_DTYPE_OF
from ..operators.decode import tsmla_decode
from ..operators.workspace import decode_workspace_size
from .cases import DecodeCase
from .kept import kept
from .memory import Memory, is_poison, surrounded
from .pages import page_tables, put_keys
from .reference import Attended, Judged, Tolerance, attend, judge, sinks_of, with_sinks
from .rows import Stored, numbers_in, random_numbers, stored, stored_as
from .sums import narrow_products, weight_dtype

ROW = LATENT_DIM + ROPE_DIM
SCALE = ROW**-0.5
_SPARE_PAGES, _SPARE_COLUMNS = 3, 3
_SLACK = 2
"""Rows of a pack behind the last request: NaN in the query, to stay untouched in results."""
WEIGHT_SCALE = 256.0
"""Weights of at most 1 are rounded times this, with inputs of 8 bits, so that the small ones are not lost."""
LSE = (2e-5, 3e-6)
FEW_ROWS = 16
"""Most query rows (query tokens x heads) of a request that Hopper's kernel for few rows takes."""


class _Problem(NamedTuple):
    """The inputs of a case, and what they stand for.

    query: [tokens, heads, 576 or 512] of all requests, and a pack's rows behind them.
    given: the query as the operator takes it.
    rows: each request's keys of this rank, in order.
    cache: the keys in pages, as the operator takes them.
    lengths: how many keys each request has on this rank, of which `longest` is the largest.
    bounds: keys of each request over all ranks.
    visible: [tokens], each token's own limit.
    ends_q: where a pack's requests start and end.

    Where rows have scales, `query` and `rows` are the numbers that `given` and `cache` stand for; where they lie apart,
    `given` and `cache` are three tensors each.
    """

    query: torch.Tensor
    given: torch.Tensor | tuple[torch.Tensor, ...]
    rows: list[torch.Tensor]
    cache: Stored | tuple[torch.Tensor, ...]
    tables: torch.Tensor
    lengths: torch.Tensor
    longest: int
    bounds: torch.Tensor
    visible: torch.Tensor | None
    ends_q: torch.Tensor | None


def run(variant: DecodeVariant, case: DecodeCase, memory: Memory, pdl: bool) -> dict[str, torch.Tensor]:
    """Call the operator so that `variant` serves; results and workspace lie in memory of `memory`."""
    given = _problem(case, variant.dtype, variant.row)
    longest, q_len = given.longest, max(case.own_q_lens)
    size = decode_workspace_size(len(case.lengths), q_len, case.heads, longest, varies=bool(case.q_lens))
    outer = given.query.shape[:1] if case.q_lens else (len(case.lengths), case.q_len)
    workspace = memory.allocate((size,), torch.int8, scratch=True)
    results = {"out": memory.allocate((*outer, case.heads, LATENT_DIM), TORCH_DTYPE_OF[variant.out_dtype])}
    if variant.lse:
        results["lse"] = memory.allocate((*outer, case.heads), torch.float32)
    tsmla_decode(
        given.given,
        given.cache,
        workspace,
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        given.tables,
        given.lengths,
        longest,
        SCALE,
        case.output_scale,
        causal_mask=case.causal,
        window_left=case.window,
        enable_pdl=pdl,
        out=results["out"],
        lse=results.get("lse"),
        causal_seqs=given.bounds if case.ranks > 1 else None,
        cp_world=case.ranks,
        cp_rank=case.ranks - 1,
        cp_interleave_size=case.interleave,
        local_visible_lens=None if given.visible is None else given.visible.view(-1, case.q_len),
        sinks=sinks_of(case.heads) if case.sinks else None,
        lse_includes_sink=case.lse_includes_sink,
        cum_seq_lens_q=given.ends_q,
        max_q_len=q_len if case.q_lens else None,
        batch_invariant=case.batch_invariant,
    )
    return results


def check(variant: DecodeVariant, case: DecodeCase, results: dict[str, torch.Tensor]) -> Judged:
    """Compare the results of `run` with float64."""
    weights = weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype])
    exact, plain = _expected(case, variant.dtype, variant.row, weights)
    tokens = sum(case.own_q_lens)
    out = results["out"].view(-1, case.heads, LATENT_DIM)
    lse = results["lse"].view(-1, case.heads) if variant.lse else exact.lse
    tolerance = Tolerance(torch.finfo(out.dtype).eps, 1.5, LSE)
    judged = judge(
        Attended(out[:tokens], lse[:tokens]),
        exact,
        plain,
        tolerance,
        factor=case.output_scale,
        has_lse=variant.lse,
    )
    for name, result in (("out", out), ("lse", lse)):
        if not is_poison(result[tokens:]).all():
            judged.problems.append(f"{name} has rows that belong to no request and were written")
    return judged


@kept("decode", "gathered")
def _problem(case: DecodeCase, dtype: Dtype, row: RowFormat) -> _Problem:
    """Make the inputs of a case. row: of the cache."""
    torch_dtype = torch.bfloat16 if row.scales else TORCH_DTYPE_OF[dtype]
    query_row, width = multiplied_row(row, dtype), row.columns

    def random(row: RowFormat, *shape: int) -> torch.Tensor:
        numbers = random_numbers(*shape, magnitude=case.magnitude, one_sign=case.one_sign)
        return numbers_in(row, stored_as(row, numbers))

    rows = [random(row, int(_own(case, length).sum()), ROW) for length in case.lengths]
    counts = [own.shape[0] for own in rows]
    tables, pages = page_tables(counts, case.page, spare_pages=_SPARE_PAGES, spare_columns=_SPARE_COLUMNS)
    # Pages lie a row apart, as slices of a larger cache would; that row is never a key's.
    cache = surrounded((pages, case.page + 1, width), torch_dtype)[:, : case.page]
    put_keys(cache, tables, rows)
    tokens = sum(case.own_q_lens)
    query = surrounded((tokens + (_SLACK if case.q_lens else 0), case.heads, width), torch_dtype)
    query[:tokens] = 0 if case.one_sign else random(query_row, tokens, case.heads, ROW)
    joined = query if case.q_lens else query.view(len(rows), case.q_len, case.heads, width)
    visible = None
    if case.visible:
        visible = torch.randint(0, max(case.lengths), (tokens,), dtype=torch.int32).to("cuda")
    return _Problem(
        query,
        query_as_given(query_row, joined, case.pieces),
        rows,
        as_given(row, cache, case.apart),
        tables.to("cuda"),
        _lengths(counts),
        max(counts),
        _lengths(case.lengths),
        visible,
        _lengths(itertools.accumulate(case.q_lens, initial=0)) if case.q_lens else None,
    )


def as_given(row: RowFormat, cache: torch.Tensor, apart: bool = False) -> Stored | tuple[torch.Tensor, ...]:
    """Return rows as the operator takes them; plain rows are returned as they are. apart: in two tensors, where rows of
    one dtype have a rope piece, with gaps of other sizes between rows."""
    if row.scales is not None:
        return stored_as(row, cache)
    if not (apart and row.has("rope")):
        return cache
    pieces = cache[..., :LATENT_DIM], cache[..., LATENT_DIM:]
    return tuple(
        surrounded((*piece.shape[:2], piece.shape[2] + gap), piece.dtype)[..., : piece.shape[2]].copy_(piece)
        for piece, gap in zip(pieces, (32, 16), strict=True)
    )


def query_as_given(row: RowFormat, query: torch.Tensor, pieces: bool) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return query rows as the operator takes them, so that none of its other kernels serves. row: of the query.
    pieces: in two tensors, if rows have two, the latent one as engines compute it."""
    if row.apart:
        latent, rope, scales = stored_as(row, query)
        return _heads_first(latent) if pieces else latent, rope, scales
    if pieces and row.has("rope"):
        return _heads_first(query[..., :LATENT_DIM]), query[..., LATENT_DIM:]
    return query


def products_of(row: RowFormat, query: torch.Tensor, keys: torch.Tensor, few: bool) -> torch.Tensor | None:
    """Return the `narrow_products` of rows of numbers.

    row: of the cache.
    few: whether a call has so few query rows that Hopper's kernel for such takes it, if the cache's rows have scales:
        it multiplies 16-bit numbers.
    """
    if not row.apart:
        return narrow_products(query, keys)
    return None if few else narrow_products(stored(query), stored(keys))


def _heads_first(piece: torch.Tensor) -> torch.Tensor:
    """Copy [.., heads, width] into memory of [heads, .., width], as engines compute it, and view it as before."""
    *outer, heads, width = piece.shape
    memory = surrounded((heads, *outer, width), piece.dtype)
    memory.copy_(piece.movedim(-2, 0))
    return memory.movedim(0, -2)


def _spans(case: DecodeCase) -> list[slice]:
    """Return the query tokens of each request, as slices."""
    ends = itertools.accumulate(case.own_q_lens, initial=0)
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def _lengths(values) -> torch.Tensor:
    return torch.tensor([*values], dtype=torch.int32).to("cuda")


def _own(case: DecodeCase, length: int) -> torch.Tensor:
    """Return which of `length` positions are keys of this rank, the last one."""
    return torch.arange(length) // case.interleave % case.ranks == case.ranks - 1


@kept("decode", "gathered")
def _expected(
    case: DecodeCase, dtype: Dtype, row: RowFormat, weights: torch.dtype
) -> tuple[Attended, Attended]:  # fmt: skip
    """Return what a case must give, [tokens, heads, ..], in float64 and in plain torch, which rounds weights to
    `weights` where inputs have 8 bits; LSE base 2."""
    given = _problem(case, dtype, row)
    few = max(case.own_q_lens) * case.heads <= FEW_ROWS and not (case.batch_invariant or case.q_lens)
    both = []
    for compute in (torch.float64, TORCH_DTYPE_OF[dtype]):
        parts = []
        for request, (span, keys) in enumerate(zip(_spans(case), given.rows, strict=True)):
            seen = _seen(case, request, given).repeat_interleave(case.heads, 0)
            query = given.query[span].flatten(0, 1)
            products = products_of(row, query, keys, few)
            one = attend(query, keys, keys[:, :LATENT_DIM], seen, SCALE, compute, WEIGHT_SCALE, products, weights)
            one = Attended(*(result.unflatten(0, (-1, case.heads)) for result in one))
            parts.append(with_sinks(one, sinks_of(case.heads), case.lse_includes_sink) if case.sinks else one)
        outs, lses = zip(*parts, strict=True)
        both.append(Attended(torch.cat(outs) * case.output_scale, torch.cat(lses) / math.log(2)))
    return both[0], both[1]


def _seen(case: DecodeCase, request: int, given: _Problem) -> torch.Tensor:
    """Return [query tokens, keys]: which of this rank's keys each of a request's tokens sees, by the keys'
    positions."""
    length, q_len, span = case.lengths[request], case.own_q_lens[request], _spans(case)[request]
    position = torch.arange(length)[_own(case, length)].to("cuda")
    token = torch.arange(q_len, device="cuda")[:, None]
    bound = length - (q_len - 1 - token if case.causal else torch.zeros_like(token))
    seen = position < bound
    if case.window >= 0:
        seen &= position >= bound - 1 - case.window
    if given.visible is not None:
        seen &= torch.arange(position.shape[0], device="cuda") < given.visible[span][:, None]
    return seen
