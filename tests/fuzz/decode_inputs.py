"""What a call of tsmla_decode reads: random keys and queries as they are stored, and the numbers that these are."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from decode_rows import rounds
from tsmla.identity.support import LATENT_DIM

from . import reference_cache, scaled_rows
from .chosen_case import ChosenCase
from .decode_case import QUERIES, SCORED, WIDTH, DecodeCase
from .reference_decode import pages_of

LARGE = 2.0**12
"""How large the first key is beside others of one sign."""


class Keys(NamedTuple):
    """A request's keys in order: their numbers [keys, 576] in float64, scales [keys] where each has one that is not in
    its row, and which are keys: where they are copied one by one, those in pages that the cache does not have are
    none."""

    numbers: torch.Tensor
    scales: torch.Tensor | None
    there: torch.Tensor

    @property
    def counted(self) -> torch.Tensor:
        """[keys]: those that are not hidden by their own scale."""
        return self.there if self.scales is None else self.there & (self.scales != 0)

    @property
    def spoiling(self) -> torch.Tensor:
        """[keys]: those that make NaN of rows that see them."""
        numbers = ~self.numbers.isfinite().all(-1)
        return numbers if self.scales is None else numbers | ~(self.scales >= 0) | self.scales.isinf()


class Queries(NamedTuple):
    """The tensors that are given; the numbers [..., heads, 576] that they are, in float64; and scales [..., heads] that
    rows were divided by, if they were."""

    given: tuple[torch.Tensor, ...]
    numbers: torch.Tensor
    scales: torch.Tensor | None = None


class Inputs(NamedTuple):
    """On the CPU: query, tensors of the cache by name, page table, and the keys of each request."""

    query: Queries
    cache: dict[str, torch.Tensor]
    table: torch.Tensor
    keys: list[Keys]


def drawn(case: DecodeCase, arch: str = "") -> Inputs:
    """Random keys in random pages, with `unseen` in every row of the cache that no query token sees. The keys' numbers
    are those that kernels of `arch` read, which nobody needs to know of a call that is refused."""
    generator = torch.Generator().manual_seed(case.seed)
    used = [-(-length // case.page) for length in case.lengths]
    common = min([case.shared, *used])
    pages = common + sum(count - common for count in used) + case.more_pages
    order = torch.randperm(pages, generator=generator).tolist()
    first, order = order[:common], order[common:]
    if case.unused is None:
        table = torch.randint(-(2**31), 2**31, (case.batch, case.width), generator=generator)
    else:
        table = torch.full((case.batch, case.width), case.unused)
    for request, count in enumerate(used):
        own = [*first, *(order.pop() for _ in range(count - common))]
        table[request, :count] = torch.tensor(own, dtype=torch.int64)
    for request, column, value in case.missing:
        table[request, column] = value
    cache = torch.randn(pages, case.page, case.columns, generator=generator) * case.magnitude
    shape = (case.batch, case.q_len) if case.ends_q is None else (case.tokens,)
    query = torch.randn(*shape, case.heads, case.columns, generator=generator) * case.magnitude
    if case.values == "opposed":
        query, cache = -query.abs(), cache.abs()
    if case.values == "one sign":
        cache = of_one_sign(cache / case.magnitude)
    seen_rows = torch.zeros(pages, case.page, dtype=torch.bool)
    places = []
    for request, length in enumerate(case.lengths):
        at = pages_of(table[request].tolist(), length, case.page)
        places.append(at)
        someone = case.seen(request).any(0).tolist()
        for key, ((page, row), seen) in enumerate(zip(at, someone, strict=True)):
            if 0 <= page < pages:
                seen_rows[page, row] |= seen
                if case.values == "growing" and (case.shared == 0 or request == 0):
                    cache[page, row, -SCORED:] *= 0.02 + 3 * key / length
                if case.values == "one heavy key" and key == case.seed % length and not case.shared:
                    cache[page, row, -SCORED:] *= 12
                if case.values == "one sign" and key == 0 and (case.shared == 0 or request == 0):
                    cache[page, row] *= LARGE
    if case.values in ("uniform", "one sign"):
        query.zero_()
    if case.ends_q is not None:
        used_tokens = torch.zeros(case.tokens, dtype=torch.bool)
        used_tokens[case.computed] = True
        query[~used_tokens] = math.nan
    filler = torch.tensor(math.nan if case.dtype == "e4m3" else case.unseen)
    cache = cache_of(case, torch.where(seen_rows[..., None], cache, filler), places, generator)
    return Inputs(
        query_of(case, query), cache, table.to(torch.int32), _keys(case, cache, places, rounds_keys(case, arch))
    )


def of_one_sign(numbers: torch.Tensor) -> torch.Tensor:
    """Random numbers above 0 that e4m3 holds, also times LARGE."""
    return (numbers.abs() + 0.5) / 64


def cache_of(
    case: DecodeCase | ChosenCase,
    numbers: torch.Tensor,
    places: list[list[tuple[int, int]]],
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """The cache's tensors by name, whose rows hold numbers [pages, page, columns]. places: (page, row) of each
    request's keys."""
    if case.rows is None:
        return {"cache": numbers.to(case.torch_dtype)}
    sizes = scaled_rows.sizes(case.scaling, numbers.shape[:-1], generator) * 2.0**case.scaling.exponent
    rows = scaled_rows.stored(case.rows, numbers, sizes, _rounded(case))
    for request, key, scale in case.scaling.special:
        if request < len(places) and key < len(places[request]) and 0 <= places[request][key][0] < len(numbers):
            scaled_rows.replace_scale(case.rows, rows, places[request][key], scale)
    return rows


def _rounded(case: DecodeCase | ChosenCase) -> bool:
    return case.scaling.factors == "powers of two"


def rounds_keys(case: DecodeCase, arch: str) -> bool:
    """Whether 656-byte rows are rounded to bf16 before they are multiplied: the kernel of few query rows does not."""
    return case.ends_q is not None or case.batch_invariant or rounds(arch, case.q_len * case.heads)


def scored_as(case: DecodeCase | ChosenCase, rounded: bool) -> torch.dtype:
    """The dtype in which latent columns are multiplied; the kernel of few query rows widens e4m3. rounded: whether
    another takes the call, which rounds 656-byte rows."""
    return torch.float16 if case.rows_apart and not rounded else case.torch_dtype


def _keys(
    case: DecodeCase, cache: dict[str, torch.Tensor], places: list[list[tuple[int, int]]], rounded: bool
) -> list[Keys]:
    rows, scales = numbers_of(case, cache, rounded), cache.get("scale_cache")
    nowhere = torch.zeros(1, case.columns)  # what pages read as that the cache does not have
    rows = torch.cat([rows.flatten(0, 1), nowhere])
    if scales is not None:
        scales = torch.cat([scales.flatten(), torch.ones(1)]).double()
    found = []
    for request in places:
        pages = len(cache["cache"])
        at = [page * case.page + row if 0 <= page < pages else -1 for page, row in request]
        there = torch.tensor([place >= 0 or not case.gathered for place in at], dtype=torch.bool)
        found.append(Keys(rows[at], None if scales is None else scales[at], there))
    return found


def numbers_of(case: DecodeCase | ChosenCase, cache: dict[str, torch.Tensor], rounded: bool) -> torch.Tensor:
    """What the cache's rows stand for, [pages, page, columns] in float64, without scales that have a tensor of their
    own. rounded: rows with scales in them are first converted to bf16."""
    if case.rows is None:
        return cache["cache"].double()
    rows = reference_cache.numbers(case.rows, scaled_rows.bytes_of(cache))
    return rows.float().bfloat16().double() if rounded and "scale_cache" not in cache else rows


def query_of(case: DecodeCase | ChosenCase, numbers: torch.Tensor) -> Queries:
    """The query's tensors, which hold numbers [..., heads, columns]."""
    if case.rows is None:
        query = numbers.to(case.torch_dtype)
        return Queries(_pieces(case, query), query.double())
    numbers = numbers * 2.0**-case.scaling.exponent
    if case.rows_apart and not case.quantises:
        rows = scaled_rows.stored(case.rows, numbers, torch.ones(numbers.shape[:-1]), _rounded(case))
        if case.scaling.query_scales == "one for all heads":
            rows["scale_cache"] = rows["scale_cache"][..., :1].expand(numbers.shape[:-1])
        scales = rows["scale_cache"]
        return Queries(tuple(rows.values()), reference_cache.numbers(case.rows, scaled_rows.bytes_of(rows)), scales)
    query = numbers.bfloat16()
    return Queries(_pieces(case, query), *(_quantised(query) if case.quantises else (query.double(),)))


def _pieces(case: DecodeCase | ChosenCase, query: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (query,) if len(QUERIES[case.query]) == 1 or not case.rope else query.split((LATENT_DIM, case.rope), -1)


def _quantised(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that a bf16 query [..., 576] becomes by mla_quantize_q, in float64, and their scales."""
    found, scales = [], []
    for row in query.reshape(-1, WIDTH).float().numpy():
        parts = reference_cache.stored(row, "snapmla", 1.0, True)
        codes = torch.from_numpy(parts["codes"]).to(torch.uint8).view(reference_cache.E4M3).double()
        rope = torch.from_numpy(parts["rope"]).bfloat16().double()
        scales.append(float(parts["scales"][0]))
        found.append(torch.cat([codes, rope]) * scales[-1])
    numbers = torch.stack(found).reshape(query.shape) if found else query.double()
    return numbers, torch.tensor(scales, dtype=torch.float64).reshape(query.shape[:-1])
