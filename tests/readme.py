"""The examples of the README and docs/deployment.md, as tests run them: each has the names that earlier ones left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tsmla.row_format import ROWS
from tsmla.support import (
    CACHE_DTYPES,
    DECODE_OUT_DTYPES,
    DECODE_ROWS,
    LATENT_DIM,
    PACK_DTYPES,
    PACK_OUT_DTYPES,
    PREFILL_DIMS,
    PREFILL_DTYPES,
    QUANTIZED_QUERIES,
    ROPE_DIM,
    why_unsupported,
)
from tsmla.variant import (
    SHIPPED_ARCHS,
    Arch,
    DecodeVariant,
    Dtype,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    WriteCacheVariant,
)

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PREFILL, DECODE, PACK = _PYTHON.findall(README)
GRAPH, WATCH = _PYTHON.findall((ROOT / "docs" / "deployment.md").read_text())
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


def support_table() -> str:
    """What exists, as the README's Markdown table, asked of `why_unsupported`."""
    rows = [
        (f"`tsmla_prefill`, {dtype} in, {out} out, head dims {', '.join(map(str, dims))}", list(there))
        for dtype in Dtype
        for out in Dtype
        if any(out in dtypes.get(dtype, ()) for dtypes in PREFILL_DTYPES.values())
        for there, dims in _prefills(dtype, out).items()
    ]
    rows += [
        (
            f"`tsmla_decode`, {dtype} in, {out_dtype} out, latent {LATENT_DIM}, rope {ROPE_DIM}",
            [
                why_unsupported(DecodeVariant(arch, dtype, out_dtype, lse=True)) is None
                for arch in SHIPPED_ARCHS
            ],
        )
        for dtype, out_dtype in DECODE_OUT_DTYPES.items()
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
    head = ["operator", *(f"{arch} ({arch.gpus})" for arch in SHIPPED_ARCHS)]
    body = [[name, *("yes" if there else "not yet" for there in cells)] for name, cells in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body))


def _prefills(dtype: Dtype, out: Dtype) -> dict[tuple[bool, ...], list[tuple[int, int]]]:
    """Which architectures have a prefill -> the head dims of which that is so."""
    found: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for dims in PREFILL_DIMS:
        there = tuple(why_unsupported(_prefill(arch, dtype, out, *dims)) is None for arch in SHIPPED_ARCHS)
        if any(there):
            found.setdefault(there, []).append(dims)
    return found


def _decoded(name: str) -> tuple[Dtype, ...]:
    """Dtypes of queries for which some decode reads such rows besides those of the query's own dtype."""
    return next((rows[name] for rows in DECODE_ROWS.values() if name in rows), ())


def _why_row(arch: Arch, dtype: Dtype, name: str) -> str | None:
    return why_unsupported(DecodeVariant(arch, dtype, DECODE_OUT_DTYPES[dtype], lse=True, row=ROWS[name]))


def _prefill(arch: Arch, dtype: Dtype, out: Dtype, d_qk: int, d_v: int) -> PrefillVariant:
    return PrefillVariant(arch, dtype, out, d_qk, d_v, causal=True, lse=True)
