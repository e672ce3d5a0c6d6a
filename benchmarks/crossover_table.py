"""The performance page's table of prompts whose tokens chose their keys: by a mask, or by lists."""

from __future__ import annotations

import textwrap

from . import published
from .bench_prefill import DIMS

Micros = dict[tuple[int, int, int], dict[str, float]]
"""(queries, keys, heads) -> microseconds of each way."""
_LATENT_COLUMNS = 576 + 512
"""Columns of a latent key and of its value."""
_E4M3 = "lists e4m3"
_TEXT = """\
Queries choose {top_k:,} random keys of those before them. *Lists*: the fastest of tsmla_sparse_prefill with rows in
bf16, the same in fp8_ds_mla, and FlashMLA's sparse prefill. The other rows: the time of tsmla_key_mask and
tsmla_prefill with that mask, over that of lists; in bold, lists win. *Lists e4m3*: tsmla_sparse_prefill of e4m3
queries and rows, over lists. The last columns say up to how many keys a mask
wins, in whole prompts and in the last queries of one; between the lengths that were measured, ratios are taken to lie
on lines. For each query and head, a mask of (192, 128) multiplies 2 x 320 numbers a key that it sees, of (256, 256)
2 x 512, and a list 2 x 1,088 a key that is chosen: with 64 heads or more, where lists fill their tiles, products alone
are equal at {equal} keys a query, and prompts of twice as many. Random keys leave out no tile of keys: where choices
lie near each other, masks are faster. Launches are without pauses. What is not timed, and to be added for whole layers:
expanding keys and values from the latent rows, for a mask; the projections to and from the latent space, for lists.
{beside}"""


def lines(device: str) -> list[str]:
    """Return the section's lines, with an empty one before; none where nothing was measured on this GPU."""
    records = published.of_devices("prefill-crossover", device)
    if not records:
        return []
    (record,) = records
    micros: Micros = {}
    for result in record["results"]:
        queries, keys = result["shape"]
        of_ways = {name: timing["median_us"] for name, timing in result["timings"].items()}
        micros[queries, keys, result["heads"]] = of_ways
    shapes = list(dict.fromkeys((queries, keys) for queries, keys, _ in micros))
    labels = (f"{keys // 1024}K" if queries == keys else f"{queries:,} of {keys // 1024}K" for queries, keys in shapes)
    head = ["heads", "way", *labels, "prompts to", "last to"]
    table = [row for heads in dict.fromkeys(heads for *_, heads in micros) for row in _rows(micros, shapes, heads)]
    equal = " and ".join(f"{record['top_k'] * _LATENT_COLUMNS // (d_qk + d_v):,}" for d_qk, (d_v, _) in DIMS.items())
    text = _TEXT.format(top_k=record["top_k"], equal=equal, beside=_beside_flash_mla(micros))
    return [
        "",
        "### Chosen keys of a prompt: by a mask, or by lists",
        "",
        textwrap.fill(text, 120),
        "",
        *(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *table)),
        "",
        published.certificate(record),
    ]


def _rows(micros: Micros, shapes: list[tuple[int, int]], heads: int) -> list[list[str]]:
    of_shapes = [micros[queries, keys, heads] for queries, keys in shapes]
    beside = [name for name in of_shapes[0] if not name.startswith("masked ") and name != _E4M3]
    lists = [min(ways[name] for name in beside) for ways in of_shapes]
    rows = [[str(heads), "lists", *(f"{us:,.0f} us" for us in lists), "", ""]]
    if _E4M3 in of_shapes[0]:
        of_lists = (ways[_E4M3] / best for ways, best in zip(of_shapes, lists, strict=True))
        rows.append([str(heads), _E4M3, *map(published.bold, of_lists), "", ""])
    for name in (name for name in of_shapes[0] if name.startswith("masked ")):
        _, dims, dtype = name.split(" ")
        ratios = [ways[name] / best for ways, best in zip(of_shapes, lists, strict=True)]
        by_keys: tuple[dict[int, float], dict[int, float]] = {}, {}
        for (queries, keys), ratio in zip(shapes, ratios, strict=True):
            by_keys[queries < keys][keys] = ratio
        way = f"masked ({dims}, {DIMS[int(dims)][0]}) {dtype}"
        rows.append([str(heads), way, *map(published.bold, ratios), *map(up_to, by_keys)])
    return rows


def up_to(ratios: dict[int, float]) -> str:
    """Return, in words, up to how many keys a ratio is below 1, from ratios at some numbers of keys."""
    before: tuple[int, float] | None = None
    for keys, ratio in sorted(ratios.items()):
        if ratio > 1 and before is None:
            return f"below {keys / 1024:.0f}K"
        if ratio > 1 and before is not None:
            crossing = before[0] + (keys - before[0]) * (1 - before[1]) / (ratio - before[1])
            return f"{crossing / 1024:.0f}K"
        before = keys, ratio
    return f"over {max(ratios) / 1024:.0f}K"


def _beside_flash_mla(micros: Micros) -> str:
    theirs = [ways for ways in micros.values() if "FlashMLA sparse" in ways]
    said = []
    for form in ("bf16", "fp8_ds_mla", "e4m3"):
        ratios = [ways[f"lists {form}"] / ways["FlashMLA sparse"] for ways in theirs if f"lists {form}" in ways]
        said += [f"{min(ratios):.2f} to {max(ratios):.2f} in {form}"] if ratios else []
    return f"Of FlashMLA's time, tsmla_sparse_prefill takes {', '.join(said)}." if said else ""
