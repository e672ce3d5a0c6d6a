"""The README's and the docs' examples and tables: tests run the first, with the names of earlier ones, and make the
second."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.support import (
    CACHE_DTYPES,
    DECODE_OUT_DTYPES,
    LATENT_DIM,
    PACK_DTYPES,
    PACK_OUT_DTYPES,
    PREFILL_DIMS,
    QUANTIZED_QUERIES,
    ROPE_DIM,
    why_unsupported,
)
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

ROOT = Path(__file__).parents[1]
README, SUPPORT, DEPLOYMENT = (
    (ROOT / page).read_text() for page in ("README.md", "docs/reference/support.md", "docs/deploy/deployment.md")
)
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PREFILL, DECODE = _PYTHON.findall(README)
(PACK,) = _PYTHON.findall(SUPPORT)
GRAPH, WATCH = _PYTHON.findall(DEPLOYMENT)
SMALLER = {
    "heads = 128\n": "heads = 2\n",
    "batch, q_len, heads, keys = 8, 2, 16, 6000": "batch, q_len, heads, keys = 2, 2, 3, 130",
    "tokens, heads = 8192, 128": "tokens, heads = 16, 2",
}
"""Sizes in the examples, and those that an emulator takes seconds for."""


def run(example: str, names: dict[str, Any], smaller: bool = False) -> None:
    """Run one example in `names`."""
    if smaller:
        (size,) = (size for size in SMALLER if size in example)
        example = example.replace(size, SMALLER[size])
    exec(compile(example, "example", "exec"), names)


def promised(example: str, name: str) -> tuple[tuple[int, ...], str]:
    """Shape and dtype that an example's comments give for a result, such as `out [1024, 128, 128] bf16`."""
    found = re.search(rf"#.*\b{name} \[([\d, ]+)\] (\w+)", example)
    assert found, f"the example does not say what {name} is"
    return tuple(map(int, found[1].split(","))), found[2]


def short_table() -> str:
    """What each operator takes, as the README's Markdown table, asked of `why_unsupported`."""

    def prefills(arch: Arch) -> list[Variant]:
        return [_prefill(arch, dtype, outs[0], 192, 128) for dtype, outs in arch.facts.prefill.items()]

    def masked(arch: Arch) -> list[Variant]:
        return [_prefill(arch, dtype, outs[0], 192, 128, True) for dtype, outs in arch.facts.prefill.items()]

    def decodes(arch: Arch) -> list[Variant]:
        return [DecodeVariant(arch, dtype, out, lse=True) for dtype, out in DECODE_OUT_DTYPES.items()]

    def of_rows(names: list[str], arch: Arch) -> list[Variant]:
        return [
            DecodeVariant(arch, dtype, DECODE_OUT_DTYPES[dtype], lse=True, row=ROWS[name])
            for name in names
            for dtype in _decoded(name)
        ]

    decoded = [name for name in ROWS if _decoded(name)]
    scaled = [name for name in decoded if ROWS[name].scales]
    latent = [name for name in decoded if not ROWS[name].has("rope")]

    def chosen(arch: Arch) -> list[Variant]:
        return [
            DecodeVariant(arch, dtype, out, True, ROWS.get(name, uniform_row(dtype)), gathers=True)
            for name, (dtype, out) in _gathered().items()
        ]

    def packs(arch: Arch) -> list[Variant]:
        return [PackVariant(arch, dtype, out, 128, 64, 128) for dtype in PACK_DTYPES for out in PACK_OUT_DTYPES]

    def caches(arch: Arch) -> list[Variant]:
        kinds = WriteCacheVariant, ReadCacheVariant
        return [kind(arch, dtype, ROWS[name]) for name, of in CACHE_DTYPES.items() for dtype in of for kind in kinds]

    def queries(arch: Arch) -> list[Variant]:
        return [QuantizeQVariant(arch, dtype, ROWS[name]) for name, of in QUANTIZED_QUERIES.items() for dtype in of]

    rows: list[tuple[str, str, Callable[[Arch], list[Variant]]]] = [
        ("`tsmla_prefill`", ", ".join(Arch.SM90A.facts.prefill), prefills),
        ("", "masks of chosen keys (sparse attention)", masked),
        ("`tsmla_decode`", f"{', '.join(DECODE_OUT_DTYPES)} caches", decodes),
        ("", f"{', '.join(scaled)} caches, rows with scales", functools.partial(of_rows, scaled)),
        ("", f"{', '.join(latent)} caches, rows of 512 without rope", functools.partial(of_rows, latent)),
        ("", "lists of chosen keys (sparse attention)", chosen),
        ("`mla_kv_pack_quantize_fp8`", f"{', '.join(PACK_DTYPES)} to {', '.join(PACK_OUT_DTYPES)}", packs),
        ("`mla_write_cache`, `mla_read_cache`", f"{', '.join(CACHE_DTYPES)} rows", caches),
        ("`mla_quantize_q`", f"queries to {', '.join(QUANTIZED_QUERIES)} rows", queries),
        ("`tsmla_key_mask`", "lists of chosen keys to masks", lambda arch: [KeyMaskVariant(arch)]),
    ]

    def exists(of: Callable[[Arch], list[Variant]], arch: Arch) -> str:
        return _said(all(why_unsupported(variant) is None for variant in of(arch)))

    body = [[name, takes, *(exists(of, arch) for arch in SHIPPED_ARCHS)] for name, takes, of in rows]
    return _table(["operator", "takes"], body)


def _gathered() -> dict[str, tuple[Dtype, Dtype]]:
    """Return the rows whose keys some architecture gathers one by one, and the dtypes of query and output."""
    found = {}
    for arch in Arch:
        queries = {dtype.value: dtype for dtype in arch.facts.gathered_dtypes}
        queries |= {name: arch.facts.decode_rows[name][0] for name in arch.facts.gathered_rows}
        found |= {name: (dtype, DECODE_OUT_DTYPES[dtype]) for name, dtype in queries.items()}
    return found


def support_table() -> str:
    """Every combination that exists, as the Markdown table of docs/reference/support.md, asked of `why_unsupported`."""
    rows = [
        (f"`tsmla_prefill`{what}, {dtype} in, {out} out, head dims {', '.join(map(str, dims))}", list(there))
        for masked, what in ((False, ""), (True, " with a key mask"))
        for dtype in Dtype
        for out in Dtype
        if any(out in arch.facts.prefill.get(dtype, ()) for arch in Arch)
        for there, dims in _prefills(dtype, out, masked).items()
    ]
    rows += [
        (
            f"`tsmla_decode`, {dtype} in, {out_dtype} out, latent {LATENT_DIM}, rope {ROPE_DIM}",
            [why_unsupported(DecodeVariant(arch, dtype, out_dtype, lse=True)) is None for arch in SHIPPED_ARCHS],
        )
        for dtype, out_dtype in DECODE_OUT_DTYPES.items()
    ]
    rows += [
        (
            f"`tsmla_decode` of chosen keys, {row} rows",
            [
                why_unsupported(DecodeVariant(arch, *dtypes, True, ROWS.get(row), True)) is None
                for arch in SHIPPED_ARCHS
            ],
        )
        for row, dtypes in _gathered().items()
    ]
    rows += [
        (
            f"`mla_kv_pack_quantize_fp8`, {dtype} in, {', '.join(PACK_OUT_DTYPES)} out",
            [
                why_unsupported(PackVariant(arch, dtype, PACK_OUT_DTYPES[0], 128, 64, 128)) is None
                for arch in SHIPPED_ARCHS
            ],
        )
        for dtype in PACK_DTYPES
    ]
    rows += [
        (
            f"`tsmla_decode`, cache of {name} rows, query {', '.join(_decoded(name))}",
            [all(_why_row(arch, dtype, name) is None for dtype in _decoded(name)) for arch in SHIPPED_ARCHS],
        )
        for name in ROWS
        if _decoded(name)
    ]
    rows += [
        (
            f"`mla_write_cache`, `mla_read_cache`, {name} rows, {', '.join(dtypes)} outside of the cache",
            [
                all(
                    why_unsupported(kind(arch, dtype, ROWS[name])) is None
                    for kind in (WriteCacheVariant, ReadCacheVariant)
                    for dtype in dtypes
                )
                for arch in SHIPPED_ARCHS
            ],
        )
        for name, dtypes in CACHE_DTYPES.items()
    ]
    rows += [
        (
            f"`mla_quantize_q`, {', '.join(dtypes)} in, as {name} rows out",
            [
                all(why_unsupported(QuantizeQVariant(arch, d, ROWS[name])) is None for d in dtypes)
                for arch in SHIPPED_ARCHS
            ],
        )
        for name, dtypes in QUANTIZED_QUERIES.items()
    ]
    rows.append(("`tsmla_key_mask`", [why_unsupported(KeyMaskVariant(arch)) is None for arch in SHIPPED_ARCHS]))
    return _table(["operator"], [[name, *map(_said, cells)] for name, cells in rows])


def _said(there: bool) -> str:
    return "yes" if there else "not yet"


def _table(first: list[str], rows: list[list[str]]) -> str:
    """A Markdown table with a column for each architecture behind the first ones."""
    head = [*first, *(f"{arch} ({arch.gpus})" for arch in SHIPPED_ARCHS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def _prefills(dtype: Dtype, out: Dtype, masked: bool) -> dict[tuple[bool, ...], list[tuple[int, int]]]:
    """Which architectures have a prefill -> the head dims of which that is so."""
    found: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for dims in PREFILL_DIMS:
        there = tuple(why_unsupported(_prefill(arch, dtype, out, *dims, masked)) is None for arch in SHIPPED_ARCHS)
        if any(there):
            found.setdefault(there, []).append(dims)
    return found


def _decoded(name: str) -> tuple[Dtype, ...]:
    """Dtypes of queries for which some decode reads such rows besides those of the query's own dtype."""
    return next((arch.facts.decode_rows[name] for arch in Arch if name in arch.facts.decode_rows), ())


def _why_row(arch: Arch, dtype: Dtype, name: str) -> str | None:
    return why_unsupported(DecodeVariant(arch, dtype, DECODE_OUT_DTYPES[dtype], lse=True, row=ROWS[name]))


def _prefill(arch: Arch, dtype: Dtype, out: Dtype, d_qk: int, d_v: int, masked: bool = False) -> PrefillVariant:
    return PrefillVariant(arch, dtype, out, d_qk, d_v, causal=not masked, lse=True, masked=masked)
