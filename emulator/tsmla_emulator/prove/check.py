"""Runs a tsmla variant through its operator on a small problem in emulation, and compares it with torch.

`tsmla verify --emulated` and `tsmla-emulator run SYMBOL` are these functions with text around them.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import tsmla
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.call import OPERATORS
from tsmla.identity.plan import FEW_ROWS_DEALS
from tsmla.identity.row_format import ROWS, RowFormat, multiplied_row, uniform_row
from tsmla.identity.support import CACHE_DTYPES, LATENT_DIM, NOPE_DIMS, PREFILL_DIMS, ROPE_DIM, pack_dims
from tsmla.identity.variant import (
    DecodeVariant,
    Dtype,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems import cache as cache_problems
from tsmla.problems import kept
from tsmla.problems import key_mask as key_mask_problems
from tsmla.problems import pack as pack_problems
from tsmla.problems import query as query_problems
from tsmla.problems.cases import MaskCase, PackCase, cases_of
from tsmla.problems.lists import named_slots, random_lists, union_of
from tsmla.problems.memory import Memory
from tsmla.problems.pages import page_tables, put_keys
from tsmla.problems.prefill import mask_words, rmse_of_rounding, weight_dtype
from tsmla.problems.rows import numbers_in, stored_as
from tsmla.problems.sums import Factors, products, sums_of

from ..run.emulate import Call, emulated
from ..run.host.compile import Compiled
from ..run.host.tensor import in_plain_tensors
from ..run.machine import Options

SCRATCH = frozenset(x.name for operator in OPERATORS.values() for x in operator.tensors if x.scratch)
"""Names of tensors that are no results: nobody need write all of them."""
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
zeros."""
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
DECODE_BOUNDS, DECODE_BOUNDS_WINDOWS, DECODE_BOUNDS_ROWS = (*range(101, 231, 3), 1056), (69, 150, 700), 64
"""Keys of requests, `window_left` of calls, and query tokens (of one head) of the longest requests, of decodes in which
rows begin and end everywhere:

- The first and the last key that a row sees lie in every column of a tile of 64 keys, in a CTA's first tiles and in
  later ones.
- The last request's keys end with a tile, and with a page in the middle of a tile, behind which the page table has no
  entry. It has query tokens where requests differ in these, too.
"""
DECODE_HIDING = (70, 0, 170, 330, 130, 200, 4192)
"""Keys of requests of a decode with visible lengths. They end as those of DECODE_BOUNDS, also many tiles behind the
first of a CTA. The first query token of the longest request sees no key: its visible length ends where its window
begins."""
PREFILL_SMS = 1
"""SMs of a small prefill: so few that a CTA of Hopper's takes several query tiles, if its kernel can."""
PREFILL_LENGTHS = ((70, 1, 130), (200, 0, 130))
"""Query and KV lengths of the sequences of a small prefill."""
_BOOLS = (False, True)
_THIN = 8
"""Elements from one row of a long pack to the next. Rows overlap, so that hundreds of thousands of them that belong to
no sequence take a few MB."""
CASE_ROWS = 1024
"""Rows of the cases of `tsmla selftest` that `at_bounds` adds, at most."""
SINKS = (-1.0, 12.0)
"""Least and largest sink: below and above the LSE of most rows."""
PREFILL_BOUNDS = ((1,) * 159, tuple(range(1, 160)))
"""Query and KV lengths of a prefill in which keys end in every column of a tile."""
Lengths = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a variant's calls, one for each of its kernels.

    measured: how far results were off, in words.
    error: what was wrong, None when nothing was.
    """

    variant: Variant
    measured: str
    error: str | None
    calls: tuple[Call, ...]


def variants(archs: Iterable[Arch] = SHIPPED_ARCHS) -> list[Variant]:
    """Return every variant that can be built for these architectures, with the head dims that models use."""
    found: list[Variant] = []
    for arch, dtype, out_dtype in itertools.product(archs, Dtype, Dtype):
        found += [PackVariant(arch, dtype, out_dtype, *dims) for dims in pack_dims(arch, out_dtype)]
        rows = {uniform_row(dtype), *ROWS.values()}
        found += [
            DecodeVariant(arch, dtype, out_dtype, lse, row, gathers)
            for lse, row, gathers in itertools.product(_BOOLS, rows, _BOOLS)
        ]
        for dims, causal, lse in itertools.product(PREFILL_DIMS, _BOOLS, _BOOLS):
            found.append(PrefillVariant(arch, dtype, out_dtype, *dims, causal, lse))
        found += [PrefillVariant(arch, dtype, out_dtype, *dims, False, True, masked=True) for dims in PREFILL_DIMS]
    for arch, (name, row) in itertools.product(archs, ROWS.items()):
        for dtype in CACHE_DTYPES[name]:
            found += [kind(arch, dtype, row) for kind in (WriteCacheVariant, ReadCacheVariant, QuantizeQVariant)]
    found += [KeyMaskVariant(arch) for arch in archs]
    return [variant for variant in found if tsmla.why_unsupported(variant) is None]


def find(symbol: str) -> Variant:
    """Return the variant of a symbol. Raises ValueError with the closest symbols that exist, three at most."""
    known = {variant.symbol(): variant for variant in variants(Arch)}
    if symbol not in known:
        close = difflib.get_close_matches(symbol, known, 3, 0.3)
        hint = "close to it:\n  " + "\n  ".join(close) if close else "`tsmla list --resources` names those installed"
        raise ValueError(f"no variant {symbol!r} can be built; {hint}")
    return known[symbol]


def check(
    variant: Variant,
    options: Options = Options(),  # noqa: B008 -- frozen
    seed: int = 0,
    lengths: Lengths = PREFILL_LENGTHS,
    decode_lengths: tuple[int, ...] = DECODE_LENGTHS,
    record_to: Path | None = None,
    compiled: Callable[[Variant], Compiled] | None = None,
    all_ways: bool = False,
    at_bounds: bool = False,
    spreads: bool = False,
) -> Verdict:
    """Call the variant's operator on inputs drawn from `seed`, once for each kernel that it chooses from.

    All calls of one kernel go before those of the next. Raises EmulationError and what the operator raises.

    lengths: query and KV lengths of a prefill's sequences.
    decode_lengths: keys of a decode's requests.
    record_to, compiled: see `emulated`.
    all_ways: call a prefill a second time, in pieces if its dims allow, and merging if it has an LSE; and call each
        kernel of a decode also with requests that differ in query tokens.
    at_bounds: also call a prefill with sinks, once with PREFILL_BOUNDS and as in `all_ways`; a decode, in all of
        these ways, with visible lengths and with DECODE_BOUNDS, and with what calls need not have; other operators with
        all cases of `tsmla selftest` that have few rows.
    spreads: see `emulated`; not for attention, whose host code knows how results lie.
    """
    torch.manual_seed(seed)
    ways: dict[str, Any] = {"processors": emulated_sms(variant), "spreads": spreads}
    with emulated(variant.arch.value, options, record_to=record_to, compiled=compiled, **ways) as gpu:
        judged = make_calls(variant, lengths, decode_lengths, all_ways, at_bounds, options.hardware_sums)
    measured = "; ".join(measured for measured, _ in judged)
    error = "; ".join(error for _, error in judged if error) or None
    entries = {launch.entry for call in gpu.calls for launch in call.launches}
    if isinstance(variant, PrefillVariant):
        expected = prefill_kernels(variant) + variant.masked  # a survey of its mask goes before attention
        if len(entries) != expected:
            raise RuntimeError(f"{variant.symbol()}: {len(entries)} of {expected} kernels were reached")
    for call in gpu.calls:
        if call.name != variant.symbol():
            raise RuntimeError(f"the operator ran {call.name} where {variant.symbol()} was to be checked")
        # Rows of a cache that nobody wrote hold poison, as do 32 keys that a mask shows.
        may_be_poison = isinstance(variant, WriteCacheVariant | ReadCacheVariant | KeyMaskVariant)
        unwritten = {name: count for name, count in call.unwritten.items() if name not in SCRATCH and not may_be_poison}
        if unwritten and not error:
            error = "never written: " + ", ".join(f"{count} elements of {name}" for name, count in unwritten.items())
    return Verdict(variant, measured, error, tuple(gpu.calls))


def emulated_sms(variant: Variant) -> int | None:
    """Return how many SMs a GPU has for the calls of `check`, None for as many as its architecture's."""
    return {DecodeVariant: DECODE_SMS, PrefillVariant: PREFILL_SMS}.get(type(variant))


def make_calls(
    variant: Variant,
    lengths: Lengths = PREFILL_LENGTHS,
    decode_lengths: tuple[int, ...] = DECODE_LENGTHS,
    all_ways: bool = False,
    at_bounds: bool = False,
    hardware_sums: bool = False,
) -> list[tuple[str, str | None]]:
    """Make the calls of `check` on the device that is there; return for each how far off it was and what was wrong.

    hardware_sums: whether the device sums products as tensor cores do.
    """
    sums = hardware_sums and hasattr(variant, "dtype") and sums_of(variant.arch, TORCH_DTYPE_OF[variant.dtype]).narrow
    if isinstance(variant, PackVariant):
        judged = [_pack(variant), *(_cases(pack_problems, variant, True) if at_bounds else [])]
    elif isinstance(variant, WriteCacheVariant | ReadCacheVariant):
        judged = _cases(cache_problems, variant, at_bounds)
    elif isinstance(variant, QuantizeQVariant):
        judged = _cases(query_problems, variant, at_bounds)
    elif isinstance(variant, KeyMaskVariant):
        judged = _cases(key_mask_problems, variant, at_bounds)
    elif isinstance(variant, PrefillVariant):
        judged = []
        for long in _BOOLS[: prefill_kernels(variant)]:
            judged += [_prefill(variant, lengths, merges, long, sums) for merges in _BOOLS[: 1 + all_ways]]
            if at_bounds:
                judged.append(_prefill(variant, PREFILL_BOUNDS, False, long, sums, sinks=True))
                judged += [_prefill(variant, lengths, merges, long, sums, sinks=True) for merges in (True, False)]
    elif variant.gathers:
        judged = [_chosen(variant, rows, decode_lengths, sums) for rows in _rows_of(variant)]
    else:
        judged = []
        ways = _BOOLS[: 1 + all_ways]
        rows_of_each = _rows_of(variant)
        for rows in rows_of_each:
            judged += [_decode(variant, rows, decode_lengths, varies, sums=sums) for varies in ways]
            if at_bounds:
                turned = turns_values(variant) and rows == rows_of_each[-1]
                hiding, heads = (HOPPER_TURNED_ROWS, 2) if turned else (rows, None)
                for varies in ways:
                    judged.append(_decode(variant, hiding, DECODE_HIDING, varies, heads=heads, hides=True, sums=sums))
                judged += [_decode(variant, rows, decode_lengths, varies, sums=sums, other=True) for varies in ways]
                heads = 1
                tokens = max(rows, DECODE_BOUNDS_ROWS if rows == rows_of_each[-1] else HOPPER_FEW_ROWS)
                if rows == HOPPER_PAIR_ROWS:
                    heads, tokens = rows // 2, 1
                for varies, window in itertools.product(ways, DECODE_BOUNDS_WINDOWS):
                    judged.append(_decode(variant, tokens * heads, DECODE_BOUNDS, varies, window, heads, sums=sums))
    return judged


def _pack(variant: PackVariant) -> tuple[str, str | None]:
    tokens, heads, scales = 37, 5, (0.5, 3.0)
    dtype, fp8 = TORCH_DTYPE_OF[variant.dtype], TORCH_DTYPE_OF[variant.out_dtype]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda") * 64

    both, k_pe = random(tokens, heads, variant.d_nope + variant.d_v), random(tokens, 1, variant.d_rope)
    k_nope, v = both.split([variant.d_nope, variant.d_v], -1)
    got = tsmla.mla_kv_pack_quantize_fp8(k_nope, k_pe, v, *scales, fp8_dtype=fp8, enable_pdl=True)
    limit = torch.finfo(fp8).max
    sources = (torch.cat([k_nope, k_pe.expand(-1, heads, -1)], -1), v)
    wrong = 0
    for result, source, scale in zip(got, sources, scales, strict=True):
        expected = (source.float() * scale).clamp(-limit, limit).to(fp8)
        wrong += int((result.view(torch.uint8) != expected.view(torch.uint8)).sum())
    measured = f"{wrong} bytes differ from torch"
    return measured, measured if wrong else None


def _cases(tests: Any, variant: Variant, at_bounds: bool) -> list[tuple[str, str | None]]:
    """Run the short cases of `tsmla selftest`, with `at_bounds` also the others that have few rows.

    tests: the module of the selftest that runs such variants.
    """
    cases = [case for case in cases_of(variant.family, full=at_bounds) if case.short or _rows(case) <= CASE_ROWS]
    try:
        found = [tests.check(variant, case, tests.run(variant, case, Memory(), pdl=True)) for case in cases]
    finally:
        kept.forget()  # what was drawn for these calls lies in memory that only they have
    return [(f"{x.error:.0f} elements differ from torch", "; ".join(x.problems) or None) for x in found]


def _rows(case: Any) -> int:
    """Return how many rows a case of the selftest has; of a key mask, how many times 32 indices."""
    if isinstance(case, PackCase):
        return case.tokens * case.heads
    return case.tokens * max(1, case.top_k // 32) if isinstance(case, MaskCase) else case.tokens


def given_query(variant: DecodeVariant, numbers: torch.Tensor) -> Any:
    """Return queries [..., 576] of a decode as the operator takes them."""
    return stored_as(query_row(variant), numbers)


def given_cache(variant: DecodeVariant, numbers: torch.Tensor) -> Any:
    """Return keys [..., 576] of a decode as the operator takes them.

    Where each key has a scale, not all scales are powers of two, and three of four keys that are NaN have -0 for
    theirs.
    """
    rows = stored_as(variant.row, numbers)
    if not variant.row.apart:
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


def _rows_of(variant: DecodeVariant) -> tuple[int, ...]:
    return decode_rows(variant.arch, variant.row, variant.gathers)


def turns_values(variant: DecodeVariant) -> bool:
    """Return whether a decode's value products are turned: columns of the output times query rows."""
    return variant.arch is Arch.SM90A and query_row(variant).piece("latent").dtype.bits == 8


def _decode(
    variant: DecodeVariant,
    rows: int,
    key_counts: tuple[int, ...],
    varies: bool = False,
    window: int | None = None,
    heads: int | None = None,
    hides: bool = False,
    sums: bool = False,
    other: bool = False,
) -> tuple[str, str | None]:
    """Call a decode, and compare it with float64.

    Keys that no row may see are NaN. Entries of the page table behind a request's pages name a page of NaN, and so
    would the entry that DECODE_NO_PAGE takes away. Pages have 32 keys; those of equal requests of many rows have 64,
    for which pairs of Blackwell CTAs have larger copies.

    hides: with visible lengths, random ones.
    sums: 8-bit numbers are summed as tensor cores do, if the kernel multiplies such.
    other: what calls need not have: heads are the query's outermost dimension in memory, so that its rows follow each
        other nowhere, pages have 64 keys, and heads have sinks, which the LSE counts.
    """
    page = 64 if other or rows > DECODE_ROWS and not (varies or hides or heads) else 32
    heads = heads or rows // 2
    q_len = rows // heads
    q_lens = [q_len] * len(key_counts)
    if varies:
        q_lens = [(q_len, 1, q_len, 0)[i % 4] for i in range(len(key_counts))]
    hidden = (DECODE_HIDDEN_OF_PACK if varies else DECODE_HIDDEN_MORE) if hides else DECODE_HIDDEN
    if window is None:
        window = max(key_counts) - q_len - hidden
    width = LATENT_DIM + ROPE_DIM
    pages = [-(-count // page) for count in key_counts]
    limits: list[Any] = [None] * len(q_lens)
    more: dict[str, Any] = {}
    if hides:
        limits = [
            torch.randint(0, count + 9, (tokens,), dtype=torch.int32)
            for tokens, count in zip(q_lens, key_counts, strict=True)
        ]
        if q_lens[longest := key_counts.index(max(key_counts))]:
            limits[longest][0] = hidden
        limits[0][0] = limits[0][-1] // 2  # of a CTA's first task, what the last token sees others do not
        visible = torch.cat(limits) if varies else torch.stack(limits)
        more["local_visible_lens"] = visible.to("cuda")
    tables, all_pages = page_tables(key_counts, page, spare_pages=1, unused=None)
    seen, rows_of_keys = [], []
    cache = torch.full((all_pages, page, width), math.nan, device="cuda")
    for request, (taken, count) in enumerate(zip(pages, key_counts, strict=True)):
        keys = torch.randn(taken * page, width, device="cuda")
        keys[:DECODE_FAINT] *= 0.05
        rows_of_keys.append(given_cache(variant, keys[:count]))
        for piece in rows_of_keys[-1][:2] if variant.row.apart else rows_of_keys[-1:]:
            piece[DECODE_NO_PAGE * page : (DECODE_NO_PAGE + 1) * page] = 0
        seen.append(keys_given(variant, rows_of_keys[-1])[:, None])
        keys[: max(0, count - q_lens[request] - window)] = math.nan
        keys[min(count, max(limits[request].tolist(), default=0)) if hides else count :] = math.nan
        keys[DECODE_NO_PAGE * page : (DECODE_NO_PAGE + 1) * page] = math.nan
        put_keys(cache, tables[request : request + 1], [keys])
        if taken > DECODE_NO_PAGE:
            tables[request, DECODE_NO_PAGE] = -1
    rows_of_query = 2 * torch.randn(sum(q_lens), heads, width, device="cuda")
    if variant.row.scales is not None:  # rows are scaled by their largest numbers: not by other rows', nor by a strip's
        number = torch.arange(sum(q_lens) * heads)
        rows_of_query.flatten(0, 1)[number // 4 % 2 == 1] *= 2**-12
        for strip in range(DECODE_STRIPS):
            others = torch.arange(LATENT_DIM) * DECODE_STRIPS // LATENT_DIM != strip
            alone = (number % 3 == 1) & (number // 3 % DECODE_STRIPS == strip)
            rows_of_query.flatten(0, 1)[..., :LATENT_DIM][alone[:, None] & others] *= 2**-14
    query = numbers_in(query_row(variant), stored_as(query_row(variant), rows_of_query))
    shaped = query if varies else query.unflatten(0, (-1, q_len))
    lengths = torch.tensor(key_counts, dtype=torch.int32, device="cuda")
    size = tsmla.decode_workspace_size(len(pages), q_len, heads, max(key_counts), varies=varies)
    scale = width**-0.5
    if varies:
        ends = torch.tensor([0, *itertools.accumulate(q_lens)], dtype=torch.int32, device="cuda")
        more |= {"cum_seq_lens_q": ends, "max_q_len": q_len}
    given_rows = given_query(variant, shaped)
    sinks = torch.linspace(*SINKS, heads, device="cuda")
    if other:
        more |= {"sinks": sinks, "lse_includes_sink": variant.lse}
        if not variant.row.apart:
            given_rows = given_rows.movedim(-2, 0).contiguous().movedim(0, -2)
    result: Any = tsmla.tsmla_decode(
        given_rows,
        given_cache(variant, cache),
        torch.empty(size, dtype=torch.int8, device="cuda"),
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        tables.to("cuda"),
        lengths,
        max(key_counts),
        scale,
        enable_pdl=True,
        return_lse=variant.lse,
        window_left=window,
        **more,
    )
    out, lse = result if variant.lse else (result, None)
    if not varies:
        out, lse = out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
    narrow = sums and not (rows <= HOPPER_FEW_ROWS and variant.row.apart and not varies)
    parts = []
    for own, of_one, given, limit in zip(query.split(q_lens), seen, rows_of_keys, limits, strict=True):
        made = _products(variant.arch, given_query(variant, own), given) if narrow else None
        parts.append(_attention(own, of_one, of_one[..., :LATENT_DIM], scale, True, window, limit, made=made))
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if other:
        expected, expected_lse = _with_sinks(expected, expected_lse, sinks)
    step = rmse_of_rounding(weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype]), out.dtype)
    measured, error = _judged(out, lse, expected, expected_lse / math.log(2), step)
    how = f"{rows} rows" + ", packed" * varies + ", with sinks" * other
    return f"{how}: {measured}", error and f"{how}: {error}"


def has_kernel_of_long_sequences(variant: PrefillVariant) -> bool:
    """Return whether sequences of more than LONG_KEYS keys, on average, have a kernel of their own, whose CTAs take one
    query tile each."""
    # Here: the kernels' sizes, which other operators are checked without.
    from tsmla_kernels.sm90.prefill.policy import policy_of

    return variant.arch is Arch.SM90A and policy_of(variant).alone_if_long


def prefill_kernels(variant: PrefillVariant) -> int:
    """Return how many GPU kernels a variant chooses from."""
    return 1 + has_kernel_of_long_sequences(variant)


def _prefill(
    variant: PrefillVariant,
    lengths: Lengths,
    merges: bool,
    long: bool = False,
    sums: bool = False,
    sinks: bool = False,
) -> tuple[str, str | None]:
    """Call a prefill, and compare it with float64. One with a key mask is causal, too, unless it merges.

    long: put so many rows of no sequence, which are NaN, behind the keys that the kernel of long sequences runs.
    sums: 8-bit numbers are summed as tensor cores do.
    sinks: each head has one, which the LSE counts unless the call merges.
    """
    from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS

    lengths_q, lengths_kv = lengths
    heads, heads_kv = 2, 1
    d_nope = NOPE_DIMS[variant.d_qk]
    in_pieces = merges and variant.d_qk > d_nope

    def random(rows: int, count: int, dim: int) -> torch.Tensor:
        return torch.randn(rows, count, dim, device="cuda").to(TORCH_DTYPE_OF[variant.dtype])

    def thin(rows: int, dim: int) -> torch.Tensor:
        more = LONG_KEYS * len(lengths_kv) + 1
        numbers = torch.full((_THIN * (rows + more) + dim,), math.nan, dtype=torch.float32, device="cuda")
        numbers[: _THIN * rows + dim] = torch.randn(_THIN * rows + dim, device="cuda")
        return numbers.to(TORCH_DTYPE_OF[variant.dtype]).as_strided((rows + more, heads_kv, dim), (_THIN, _THIN, 1))

    def ends(lengths: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")

    def given(x: torch.Tensor) -> Any:
        return tuple(x.split([d_nope, variant.d_qk - d_nope], -1)) if in_pieces else x

    q = random(sum(lengths_q), heads, variant.d_qk)
    keys, longest = sum(lengths_kv), max(lengths_kv)
    causal = variant.causal or variant.masked and not merges
    bits = torch.rand(len(q), -(-longest // 32) * 32, device="cuda") < 0.4
    bits[: lengths_q[0], 128:] = False  # a tile without a bit
    bits[-lengths_q[-1] :, :128] = True  # one with all bits
    k, v = (thin(keys, dim) if long else random(keys, heads_kv, dim) for dim in (variant.d_qk, variant.d_v))
    scale = 1 / math.sqrt(variant.d_qk)
    earlier: Any = None
    options: dict[str, Any] = {"key_mask": mask_words(bits)} if variant.masked else {}
    of_heads = torch.linspace(*SINKS, heads, device="cuda")
    if sinks:
        options |= {"sinks": of_heads, "lse_includes_sink": variant.lse and not merges}
    if merges and variant.lse:
        earlier_out = torch.randn(len(q), heads, variant.d_v, device="cuda").to(TORCH_DTYPE_OF[variant.out_dtype])
        earlier_lse = 4 + torch.randn(len(q), heads, device="cuda")
        earlier_out[::7], earlier_lse[::7] = 0.0, -math.inf
        earlier = earlier_out.double(), earlier_lse.double()
        options["merge_into"] = earlier_out, earlier_lse
    result: Any = tsmla.tsmla_prefill(
        given(q),
        given(k),
        v,
        None,
        ends(lengths_kv),
        max(lengths_kv),
        len(lengths_kv),
        scale,
        causal,
        variant.lse,
        ends(lengths_q),
        max(lengths_q),
        True,
        out_dtype=TORCH_DTYPE_OF[variant.out_dtype],
        **options,
    )
    out, lse = result if variant.lse else (result, None)
    parts = [
        _attention(
            q_rows,
            k_rows,
            v_rows,
            scale,
            causal,
            bits=own if variant.masked else None,
            made=_products(variant.arch, q_rows, k_rows[:, 0]) if sums else None,
        )  # fmt: skip
        for q_rows, k_rows, v_rows, own in zip(
            q.split(lengths_q),
            k[:keys].split(lengths_kv),
            v[:keys].split(lengths_kv),
            bits.split(lengths_q),
            strict=True,
        )
    ]
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    if earlier is not None:
        expected, expected_lse = _merged((expected, expected_lse), earlier)
    if sinks:
        expected, with_sinks = _with_sinks(expected, expected_lse, of_heads)
        expected_lse = expected_lse if merges else with_sinks
    step = rmse_of_rounding(weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype]), out.dtype)
    measured, error = _judged(out, lse, expected, expected_lse, step)
    ways = (
        ["with sinks"] * sinks
        + ["in pieces"] * in_pieces
        + ["merged"] * (earlier is not None)
        + ["with rows of no sequence"] * long
    )
    how = " and ".join(ways)
    return (f"{how}: {measured}", error and f"{how}: {error}") if how else (measured, error)


@in_plain_tensors
def _with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count one more key for each head, whose value is 0."""
    share = torch.sigmoid(torch.where(lse == -math.inf, 0.0, lse - sinks.double()))
    return out * share[..., None], torch.logaddexp(lse, sinks.double())


@in_plain_tensors
def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural-log LSE over the keys of both results."""
    lse = torch.logaddexp(one[1], other[1])
    parts = [out * (own - lse).exp().nan_to_num(0.0)[..., None] for out, own in (one, other)]
    return parts[0] + parts[1], lse


def _chosen(variant: DecodeVariant, heads: int, lengths: tuple[int, ...], sums: bool = False) -> tuple[str, str | None]:
    """Call a decode of chosen keys, and compare it with float64.

    A tenth of the indices, and the first of each list, name no key. Rows that no list names are NaN.

    lengths: of the lists, one for each query token.
    sums: see `_decode`.
    """
    page, width, scale = 32, LATENT_DIM + ROPE_DIM, (LATENT_DIM + ROPE_DIM) ** -0.5
    tokens, top_k, slots = len(lengths), max(lengths), 32 * page
    indices = random_lists(tokens, top_k, (32, page), outside=0.1, front=1)
    named = named_slots(indices, slots, lengths)
    keys = torch.full((slots, width), math.nan, device="cuda")
    used = union_of(named).to("cuda")
    keys[used] = torch.randn(len(used), width, device="cuda")
    rows_of_keys = given_cache(variant, keys)
    numbers = keys_given(variant, rows_of_keys)
    row = query_row(variant)
    query = numbers_in(row, stored_as(row, 2 * torch.randn(tokens, heads, width, device="cuda")))
    out, lse = tsmla.tsmla_decode(
        given_query(variant, query),
        given_cache(variant, keys.view(-1, page, width)),
        torch.empty(tsmla.decode_workspace_size(tokens, 1, heads, top_k), dtype=torch.int8, device="cuda"),
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        None,
        None,
        None,
        scale,
        enable_pdl=True,
        return_lse=True,
        indices=indices.to("cuda", torch.int32),
        topk_length=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    )
    narrow = sums and not (heads <= HOPPER_FEW_ROWS and variant.row.apart)
    parts = []
    for token in range(tokens):
        chosen = named[token].to("cuda")
        own, seen = query[token : token + 1], numbers[chosen][:, None]
        given = tuple(x[chosen] for x in rows_of_keys) if variant.row.apart else rows_of_keys[chosen]
        made = _products(variant.arch, given_query(variant, own), given) if narrow else None
        parts.append(_attention(own, seen, seen[..., :LATENT_DIM], scale, False, made=made))
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    step = rmse_of_rounding(weight_dtype(variant.arch, TORCH_DTYPE_OF[variant.dtype]), out.dtype)
    measured, error = _judged(out, lse, expected, expected_lse / math.log(2), step)
    return f"{heads} heads: {measured}", error and f"{heads} heads: {error}"


@in_plain_tensors
def _judged(
    out: torch.Tensor, lse: torch.Tensor | None, expected: torch.Tensor, expected_lse: torch.Tensor, step: float
) -> tuple[str, str | None]:
    """Return how far results are from float64, in words, and what is wrong if that is more than a relative RMSE of
    `step`."""
    rmse = float((out.double() - expected).norm() / expected.norm())
    problems = [] if rmse <= step else [f"relative RMSE {rmse:.1e} is above {step:.1e}"]
    measured = f"relative RMSE {rmse:.1e}"
    if lse is not None:
        some = expected_lse.isfinite()
        off = float((lse.double() - expected_lse)[some].abs().max())
        measured += f", LSE off by {off:.1e}"
        if not off <= 1e-5 or not torch.equal(lse.double()[~some], expected_lse[~some]):
            problems.append(f"LSE is off by {off:.1e}, or rows without keys do not give -inf")
    return measured, "; ".join(problems) or None


def _products(arch: Arch, query: Factors, keys: Factors) -> torch.Tensor:
    """Return products of queries [queries, heads, d] and keys [keys, d], of which all heads see the same, as tensor
    cores sum them: [1, heads, queries, keys]."""
    whole = isinstance(query, torch.Tensor)
    pieces = [query] if isinstance(query, torch.Tensor) else [*query]
    rows = [piece.flatten(0, 1) for piece in pieces]
    made = products(rows[0] if whole else tuple(rows), keys, arch)
    return made.unflatten(0, pieces[0].shape[:2]).transpose(0, 1)[None]


@in_plain_tensors
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool,
    window: int = 2**31,
    limits: torch.Tensor | None = None,
    bits: torch.Tensor | None = None,
    made: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and natural-log LSE of one sequence in float64; a row without keys gives 0 and -inf.

    window: how many keys before its own a causal query sees at most.
    limits: how many of the first keys each query sees at most.
    bits: those of a key mask, [queries, keys or more].
    made: products of queries and keys that tensor cores make, where these lose so much that results are judged by them.
    """
    q, k, v = q.double().unflatten(1, (k.shape[1], -1)), k.double(), v.double()
    scores = (torch.einsum("qhgd,khd->hgqk", q, k) if made is None else made) * scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = scores.masked_fill(~seen.triu(len(k) - len(q) - window), -math.inf)
    if limits is not None:
        hidden = torch.arange(len(k)) >= limits[:, None]
        scores = scores.masked_fill(hidden.to(scores.device), -math.inf)
    if bits is not None:
        scores = scores.masked_fill(~bits[:, : len(k)].to(scores.device), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp()
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2), lse.flatten(0, 1).T
