"""Runs a tsmla variant through its operator on a small problem in emulation, and compares it with torch.

`tsmla verify --emulated` and `tsmla-emulator run SYMBOL` are these functions with text around them.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import tsmla
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.call import OPERATORS
from tsmla.identity.plan import DEALS
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.support import CACHE_DTYPES, PREFILL_DIMS, pack_dims
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
from tsmla.problems import decode as decode_problems
from tsmla.problems import kept
from tsmla.problems import key_mask as key_mask_problems
from tsmla.problems import pack as pack_problems
from tsmla.problems import query as query_problems
from tsmla.problems.cases import Case, DecodeCase, MaskCase, PackCase, cases_of, kind_of
from tsmla.problems.memory import Memory
from tsmla.problems.sums import sums_of

from ..run.emulate import Call, emulated
from ..run.host.compile import Compiled
from ..run.machine import Options
from .calls.chosen import chosen
from .calls.decode import (
    DECODE_BOUNDS,
    DECODE_BOUNDS_ROWS,
    DECODE_BOUNDS_WINDOWS,
    DECODE_DIFFERING,
    DECODE_DIVIDED,
    DECODE_HIDING,
    DECODE_LENGTHS,
    DECODE_SMS,
    HOPPER_FEW_ROWS,
    HOPPER_PAIR_ROWS,
    HOPPER_TURNED_ROWS,
    Way,
    decode,
    decode_rows,
    small_page,
    turns_values,
)
from .calls.prefill import (
    PREFILL_BOUNDS,
    PREFILL_DEEP,
    PREFILL_LENGTHS,
    PREFILL_LISTED,
    PREFILL_SMS,
    Lengths,
    prefill,
    prefill_kernels,
)

SCRATCH = frozenset(x.name for operator in OPERATORS.values() for x in operator.tensors if x.scratch)
"""Names of tensors that are no results: nobody need write all of them."""
_BOOLS = (False, True)
CASE_ROWS = 1024
"""Rows of the cases of `tsmla selftest` that `at_bounds` adds, at most."""


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
        rows = dict.fromkeys((uniform_row(dtype), *ROWS.values()))  # each once, in the same order every time
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
    divided: bool = False,
) -> Verdict:
    """Call the variant's operator on inputs drawn from `seed`, once for each kernel that it chooses from.

    All calls of one kernel go before those of the next. Raises EmulationError and what the operator raises.

    lengths: query and KV lengths of a prefill's sequences.
    decode_lengths: keys of a decode's requests.
    record_to, compiled: see `emulated`.
    all_ways: call a prefill a second time, in pieces if its dims allow, and merging if it has an LSE; and call each
        kernel of a decode also with requests that differ in query tokens.
    at_bounds: also call a prefill with sinks, once with PREFILL_BOUNDS and as in `all_ways`, and two deep ones; a
        decode, in all of these ways, with visible lengths and with DECODE_BOUNDS, and with what calls need not have,
        and its last kernel with lengths that hide nothing (one that gathers keys otherwise with lists of chosen keys
        alone, with this over pages, too); other operators with all cases of `tsmla selftest` that have few rows.
    spreads: see `emulated`; not for attention, whose host code knows how results lie.
    divided: call a decode over pages as the cases of `tsmla selftest` in which ranks divide the keys, and as
        DECODE_DIVIDED, not otherwise.
    """
    torch.manual_seed(seed)
    ways: dict[str, Any] = {"processors": emulated_sms(variant), "spreads": spreads}
    with emulated(variant.arch.value, options, record_to=record_to, compiled=compiled, **ways) as gpu:
        judged = make_calls(variant, lengths, decode_lengths, all_ways, at_bounds, options.hardware_sums, divided)
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
        # Rows of a cache that nobody wrote hold poison, as do 32 keys that a mask shows, and a pack's spare tokens.
        may_be_poison = divided or isinstance(variant, WriteCacheVariant | ReadCacheVariant | KeyMaskVariant)
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
    divided: bool = False,
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
            judged += [prefill(variant, lengths, merges, long, sums) for merges in _BOOLS[: 1 + all_ways]]
            if at_bounds:
                judged.append(prefill(variant, PREFILL_BOUNDS, False, long, sums, sinks=True))
                judged += [prefill(variant, lengths, merges, long, sums, sinks=True) for merges in (True, False)]
                deep = PREFILL_LISTED if variant.masked else PREFILL_DEEP
                judged += [prefill(variant, deep, merges, long, sums, sinks=True, deep=True) for merges in _BOOLS]
    elif divided:
        cases = [x for x in cases_of(kind_of(variant), full=True) if isinstance(x, DecodeCase) and x.ranks > 1]
        cases += [dataclasses.replace(x, page=small_page(variant, x.page)) for x in DECODE_DIVIDED]
        judged = _judged(decode_problems, variant, cases)
    else:
        judged = []
        for rows in decode_rows(variant.arch, variant.row, variant.gathers):
            if variant.gathers:
                judged.append(chosen(variant, rows, decode_lengths, sums))
            if at_bounds or not variant.gathers:
                judged += [
                    decode(variant, own_rows, key_counts or decode_lengths, way, sums)
                    for own_rows, key_counts, way in _ways(variant, rows, all_ways, at_bounds)
                ]
    return judged


def _ways(
    variant: DecodeVariant, rows: int, all_ways: bool, at_bounds: bool
) -> Iterator[tuple[int, tuple[int, ...] | None, Way]]:
    """Yield the decodes over pages of one of a variant's kernels: query rows of a request, keys of requests where they
    are not the usual, and how. rows: those of its small decode."""
    ways = _BOOLS[: 1 + all_ways]
    yield from ((rows, None, Way(varies)) for varies in ways)
    if not at_bounds:
        return
    most = rows == decode_rows(variant.arch, variant.row, variant.gathers)[-1]
    hiding, heads = (HOPPER_TURNED_ROWS, 2) if turns_values(variant) and most else (rows, None)
    if rows == HOPPER_PAIR_ROWS:  # requests of one token are divided among pairs
        yield rows // 2, DECODE_HIDING, Way(hides=True, heads=rows // 2)
    else:
        yield hiding, DECODE_HIDING, Way(hides=True, heads=heads)
    if all_ways:
        yield hiding, DECODE_HIDING, Way(True, hides=True, heads=heads)
    yield rows, None, Way(other=True)
    if all_ways:
        differs = DEALS[variant.arch].row_tile + 2, DECODE_DIFFERING
        yield *(differs if most else (rows, None)), Way(True, other=True)
    heads, tokens = 1, max(rows, DECODE_BOUNDS_ROWS if most else HOPPER_FEW_ROWS)
    if rows == HOPPER_PAIR_ROWS:
        heads, tokens = rows // 2, 1
    for varies, window in itertools.product(ways, DECODE_BOUNDS_WINDOWS):
        yield tokens * heads, DECODE_BOUNDS, Way(varies, window=window, heads=heads)
    if variant.gathers:  # tokens see their own key or none: there are keys between those that others see
        several = max(tokens, 4) * heads
        yield from ((several, DECODE_HIDING, Way(varies, hides=True, window=0, heads=heads)) for varies in ways)
    elif most:
        yield tokens * heads, DECODE_BOUNDS, Way(True, tells=True, window=DECODE_BOUNDS_WINDOWS[0], heads=heads)


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
    return _judged(tests, variant, cases)


def _judged(tests: Any, variant: Variant, cases: Iterable[Case]) -> list[tuple[str, str | None]]:
    """Run cases of `tsmla selftest`."""
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
