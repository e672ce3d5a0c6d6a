"""Decodes over pages that `check` makes of a variant, and what they must give."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla.identity.plan import FEW_ROWS_DEALS
from tsmla.identity.row_format import RowFormat, multiplied_row
from tsmla.identity.support import LATENT_DIM, ROPE_DIM
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems.cases import DecodeCase
from tsmla.problems.pages import page_tables, put_keys
from tsmla.problems.prefill import rmse_of_rounding, weight_dtype
from tsmla.problems.rows import numbers_in, stored_as

from .reference import SINKS, attention, judged, summed_as_hardware, with_sinks

DECODE_SMS = 4
DECODE_LENGTHS = (1800, 70, 0, 170)
"""SMs and keys of requests of a small decode. They make

- the longest request split among CTAs, and rings of tiles wrap;
- a CTA with several requests, one of them without keys;
- last tiles that end in their first half and in their second.
"""
DECODE_HIDDEN, DECODE_HIDDEN_MORE, DECODE_HIDDEN_OF_PACK = 20, 52, 116
"""How many keys of the longest request a window hides from its first query token (from its second, one more): usually;
with visible lengths; and with visible lengths in a pack, where that ends in the other half of a tile of 128 keys, which
has a pipeline stage of its own."""
DECODE_NO_PAGE = 20
"""Which entry of a request's page table, where it has so many, names a page that the cache does not have: its keys are
zeros, or are not there where keys are gathered."""
DECODE_ROWS = 10
"""Query rows (tokens x heads) of a small decode, where no kernel needs more."""
HOPPER_FEW_ROWS = 16
"""Most query rows for which caches with scales in rows have a kernel of their own on Hopper."""
HOPPER_PAIR_ROWS = 256
"""Query rows of a small decode for which Hopper runs CTAs in pairs, where rows are converted: two tokens of 128
heads."""
HOPPER_TURNED_ROWS = 58
"""Query rows of a decode with visible lengths where Hopper turns value products: each row of a tile has instructions of
its own, which then all run, and the tile's last rows are nobody's. They are of two heads, so that rows differ in what
they see."""
DECODE_STRIPS = 4
"""Strips that a query row's latent columns are divided into: in some rows, all strips but one are faint."""
DECODE_FAINT = 128
"""How many first keys of each request are a twentieth as large as the others: row maxima grow until outputs are
rescaled."""
DECODE_BOUNDS, DECODE_BOUNDS_WINDOWS, DECODE_BOUNDS_ROWS = (*range(101, 231, 3), 1056), (69, 150, 250, 700), 64
"""Keys of requests, `window_left` of calls, and query tokens (of one head) of the longest requests, of decodes in which
rows begin and end everywhere:

- The first and the last key that a row sees lie in every column of a tile of 64 keys, in a CTA's first tiles and in
  later ones.
- The last request's keys end with a tile, and with a page in the middle of a tile, behind which the page table has no
  entry. It has query tokens where requests differ in these, too. Windows leave it two tiles, four, five and twelve:
  Hopper's kernel of few rows looks up pages of six tiles before its first.
"""
DECODE_DIFFERING = (70, 1800)
"""Keys of requests of a pack of which the first has two row tiles and the other one: groups have one CTA (or pair), the
first takes two rounds, the other is split, and on Hopper the combine has fewer row tiles than there are CTAs."""
DECODE_HIDING = (70, 0, 170, 330, 130, 200, 4192)
"""Keys of requests of a decode with visible lengths. They end as those of DECODE_BOUNDS, also many tiles behind the
first of a CTA. The first query token of the longest request sees no key: its visible length ends where its window
begins. Where requests have one token, the last sees keys in both pairs of CTAs that it is split among, of which one
begins with it."""

_THREE_RANKS = DecodeCase(
    "three ranks", (1000, 2, 400), q_len=3, page=32, window=300, ranks=3, interleave=5, visible=True
)
DECODE_DIVIDED = (
    *(dataclasses.replace(_THREE_RANKS, heads=heads) for heads in (8, 24)),
    DecodeCase("one request", (9000,), q_len=3, heads=24, ranks=2, interleave=16),
)
"""Decodes in which ranks divide the keys, beside those of `tsmla selftest`: each kernel with all that hides keys, and
that of pairs with fewer requests than pairs."""


def given_query(variant: DecodeVariant, numbers: torch.Tensor) -> Any:
    """Return queries [..., 576] of a decode as the operator takes them."""
    return stored_as(query_row(variant), numbers)


def given_cache(variant: DecodeVariant, numbers: torch.Tensor, negative: bool = False) -> Any:
    """Return keys [..., 576] of a decode as the operator takes them.

    Where each key has a scale, not all scales are powers of two, and three of four keys that are NaN have -0 for
    theirs. negative: where keys have several, the second of some is less than 0.
    """
    rows: Any = stored_as(variant.row, numbers)
    if not variant.row.apart:
        if negative and variant.row.scales is not None:
            rows.view(torch.uint8)[..., LATENT_DIM + 7] |= torch.where(numbers[..., 0] > 2, 0x80, 0).to(torch.uint8)
        return rows
    latent, rope, scales = rows
    scales = torch.where(numbers[..., 0] > 0, 1.25 * scales, scales)
    some = torch.arange(numbers.shape[-2], device=numbers.device) % 4 < 3
    return latent, rope, torch.where(scales.isnan() & some, -0.0, scales)


def keys_given(variant: DecodeVariant, rows: Any) -> torch.Tensor:
    """Return the numbers [..., 576] of keys that `given_cache` stored."""
    if not variant.row.apart:
        return numbers_in(variant.row, rows)
    latent, rope, scales = rows
    return torch.cat((latent.float(), rope.float()), -1) * scales[..., None]


def query_row(variant: DecodeVariant) -> RowFormat:
    """Return the row format of a query."""
    return multiplied_row(variant.row, variant.dtype)


def decode_rows(arch: Arch, row: RowFormat | None = None, gathers: bool = False) -> tuple[int, ...]:
    """Return the query rows of the small decodes that together reach every kernel of a variant.

    row: the cache's row format; by default one without scales.
    gathers: whether keys are gathered.
    """
    few = FEW_ROWS_DEALS.get(arch)
    if few is not None:
        return DECODE_ROWS, few.row_tile + 2
    scales = None if row is None else row.scales
    chosen = gathers and row is not None and row.piece("latent").dtype is Dtype.BF16
    if scales is None and not chosen:
        return (DECODE_ROWS,)
    pairs = (HOPPER_PAIR_ROWS,) if scales is not None and scales.in_row else ()
    return (DECODE_ROWS, *pairs, HOPPER_FEW_ROWS + 2)


def small_page(variant: DecodeVariant, page: int) -> int:
    """Return how many keys a page has that would have `page`: a sixteenth where keys are gathered."""
    return page // 16 if variant.gathers else page


def turns_values(variant: DecodeVariant) -> bool:
    """Return whether a decode's value products are turned: columns of the output times query rows."""
    return variant.arch is Arch.SM90A and query_row(variant).piece("latent").dtype.bits == 8


@dataclasses.dataclass(frozen=True)
class Way:
    """How a decode is called.

    varies: requests differ in query tokens, which lie in a pack.
    hides: with visible lengths, random ones.
    other: what calls need not have: heads are the query's outermost dimension in memory, so that its rows follow each
        other nowhere, pages have 64 keys, some scales in rows are negative, and heads have sinks, which the LSE counts.
    tells: with visible lengths that hide nothing: each key is asked for.
    window: `window_left`; by default one that hides some keys of the longest request.
    heads: by default so many that equal requests have two query tokens.
    """

    varies: bool = False
    hides: bool = False
    other: bool = False
    tells: bool = False
    window: int | None = None
    heads: int | None = None


def decode(
    variant: DecodeVariant, rows: int, key_counts: tuple[int, ...], way: Way, sums: bool = False
) -> tuple[str, str | None]:
    """Call a decode of `rows` query rows a request, and compare it with float64.

    Keys that no row may see are NaN. Entries of the page table behind a request's pages name a page of NaN, and so
    would the entry that DECODE_NO_PAGE takes away. Pages have 32 keys; those of equal requests of many rows have 64,
    for which pairs of Blackwell CTAs have larger copies. Where keys are gathered, see `small_page`.

    sums: 8-bit numbers are summed as tensor cores do, if the kernel multiplies such.
    """
    page = 64 if way.other or rows > DECODE_ROWS and not (way.varies or way.hides or way.heads) else 32
    page = small_page(variant, page)
    heads = way.heads or rows // 2
    q_len = rows // heads
    q_lens = [(q_len, 1, q_len, 0)[i % 4] if way.varies else q_len for i in range(len(key_counts))]
    hidden = DECODE_HIDDEN
    if way.hides:
        hidden = DECODE_HIDDEN_OF_PACK if way.varies else DECODE_HIDDEN_MORE
    window = max(key_counts) - q_len - hidden if way.window is None else way.window
    limits: list[Any] = [None] * len(q_lens)
    if way.hides:
        limits = _visible(q_lens, key_counts, hidden)
    elif way.tells:
        limits = [
            torch.full((q_len,), count, dtype=torch.int32) for q_len, count in zip(q_lens, key_counts, strict=True)
        ]
    keys = _keys(variant, page, q_lens, key_counts, limits, window, way.other)
    query = _query(variant, sum(q_lens), heads, way.hides and rows <= HOPPER_FEW_ROWS)
    given_rows = given_query(variant, query if way.varies else query.unflatten(0, (-1, q_len)))
    sinks = torch.linspace(*SINKS, heads, device="cuda")
    more: dict[str, Any] = {}
    if way.hides or way.tells:
        more["local_visible_lens"] = (torch.cat(limits) if way.varies else torch.stack(limits)).to("cuda")
    if way.varies:
        ends = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32, device="cuda")
        more |= {"cum_seq_lens_q": ends, "max_q_len": q_len}
    if way.other:
        more |= {"sinks": sinks, "lse_includes_sink": variant.lse}
        if variant.row.apart:
            latent, rope, factors = given_rows
            given_rows = (*(x.movedim(-2, 0).contiguous().movedim(0, -2) for x in (latent, rope)), factors)
        else:
            given_rows = given_rows.movedim(-2, 0).contiguous().movedim(0, -2)
    scale = (LATENT_DIM + ROPE_DIM) ** -0.5
    size = tsmla.decode_workspace_size(len(q_lens), q_len, heads, max(key_counts), varies=way.varies)
    result: Any = tsmla.tsmla_decode(
        given_rows,
        keys.cache,
        torch.empty(size, dtype=torch.int8, device="cuda"),
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        keys.tables,
        torch.tensor(key_counts, dtype=torch.int32, device="cuda"),
        max(key_counts),
        scale,
        enable_pdl=True,
        return_lse=variant.lse,
        window_left=window,
        **more,
    )
    out, lse = result if variant.lse else (result, None)
    if not way.varies:
        out, lse = out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
    narrow = sums and not (rows <= HOPPER_FEW_ROWS and variant.row.apart and not way.varies)
    parts = []
    for own, given, limit in zip(query.split(q_lens), keys.rows, limits, strict=True):
        made = summed_as_hardware(variant.arch, given_query(variant, own), given) if narrow else None
        seen = keys_given(variant, given)[:, None]
        there = torch.ones(len(own), len(seen), dtype=torch.bool)
        there[:, _no_page(page)] = not variant.gathers
        parts.append(attention(own, seen, seen[..., :LATENT_DIM], scale, True, window, limit, there, made))
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if way.other:
        expected, expected_lse = with_sinks(expected, expected_lse, sinks)
    dtype = TORCH_DTYPE_OF[variant.dtype]
    step = rmse_of_rounding(weight_dtype(variant.arch, dtype), out.dtype)
    measured, error = judged(out, lse, expected, expected_lse / math.log(2), step, dtype)
    how = f"{rows} rows" + ", packed" * way.varies + ", with sinks" * way.other
    return f"{how}: {measured}", error and f"{how}: {error}"


class _Keys(NamedTuple):
    """A decode's cache and page tables, as the operator takes them, and the rows of each request's keys."""

    cache: Any
    tables: torch.Tensor
    rows: list[Any]


def _no_page(page: int) -> slice:
    """Return which keys of a request lie in the page that DECODE_NO_PAGE takes away."""
    return slice(DECODE_NO_PAGE * page, (DECODE_NO_PAGE + 1) * page)


def _visible(q_lens: list[int], key_counts: tuple[int, ...], hidden: int) -> list[Any]:
    """Return random visible lengths of each request's query tokens. The first of the longest request sees `hidden`
    keys, which is where its window begins. One that is alone sees three quarters, and the token before it nothing."""
    limits = [
        torch.randint(0, count + 9, (tokens,), dtype=torch.int32)
        for tokens, count in zip(q_lens, key_counts, strict=True)
    ]
    longest = key_counts.index(max(key_counts))
    if q_lens[longest] == 1:
        limits[longest - 1][0], limits[longest][0] = 0, 3 * key_counts[longest] // 4
    elif q_lens[longest]:
        limits[longest][0] = hidden
    limits[0][0] = limits[0][-1] // 2  # of a CTA's first task, what the last token sees others do not
    return limits


def _keys(
    variant: DecodeVariant,
    page: int,
    q_lens: list[int],
    key_counts: tuple[int, ...],
    limits: list[Any],
    window: int,
    negative: bool,
) -> _Keys:
    """Return random keys of each request, in pages: NaN where no row sees them. negative: see `given_cache`."""
    width = LATENT_DIM + ROPE_DIM
    tables, all_pages = page_tables(key_counts, page, spare_pages=1, unused=None)
    rows = []
    cache = torch.full((all_pages, page, width), math.nan, device="cuda")
    no_page = _no_page(page)
    for request, (tokens, count, limit) in enumerate(zip(q_lens, key_counts, limits, strict=True)):
        taken = -(-count // page)
        keys = torch.randn(taken * page, width, device="cuda")
        keys[:DECODE_FAINT] *= 0.05
        rows.append(given_cache(variant, keys[:count], negative))
        for piece in rows[-1][:2] if variant.row.apart else rows[-1:]:
            piece[no_page] = 0
        keys[: max(0, count - tokens - window)] = math.nan
        keys[count if limit is None else min(count, max(limit.tolist(), default=0)) :] = math.nan
        keys[no_page] = math.nan
        put_keys(cache, tables[request : request + 1], [keys])
        if taken > DECODE_NO_PAGE:
            tables[request, DECODE_NO_PAGE] = -1
    return _Keys(given_cache(variant, cache, negative), tables.to("cuda"), rows)


def _query(variant: DecodeVariant, tokens: int, heads: int, all_alone: bool) -> torch.Tensor:
    """Return the numbers of random queries [tokens, heads, 576]. Where rows are scaled by their largest numbers, some
    rows are small, and some have one strip alone that is not: others' numbers must not scale them.

    all_alone: all rows have such a strip; a ninth row of ten, in one request or another, has each, and the tenth has
        not the same.
    """
    query = 2 * torch.randn(tokens, heads, LATENT_DIM + ROPE_DIM, device="cuda")
    if variant.row.scales is not None:
        number = torch.arange(tokens * heads)
        query.flatten(0, 1)[number // 4 % 2 == 1] *= 2**-12
        alone = torch.where(number % 3 == 1, number // 3 % DECODE_STRIPS, -1)
        if all_alone:
            alone = (number + 1) // 2 % DECODE_STRIPS
        for strip in range(DECODE_STRIPS):
            others = torch.arange(LATENT_DIM) * DECODE_STRIPS // LATENT_DIM != strip
            query.flatten(0, 1)[..., :LATENT_DIM][(alone == strip)[:, None] & others] *= 2**-14
    row = query_row(variant)
    return numbers_in(row, stored_as(row, query))
