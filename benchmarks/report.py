"""docs/measured/performance.md and the README's performance part, from the records in benchmarks/results/current.

    python -m benchmarks report

removes records that newer ones supersede, which git keeps, and writes both. Tests compare them with what it would
write. benchmarks/results/tried has records of what was compared once and a page quotes; benchmarks/results/in_git.txt
lists those that only git has.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import bench_prefill, charts, crossover_table, engine_tables, published

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "measured" / "performance.md"
BEGIN, END = "<!-- begin: python -m benchmarks report -->", "<!-- end -->"
"""The lines around the README's generated part."""
_WHEEL = "vLLM 0.26's wheel"
PEERS = {
    "flash_attn_4": ("flash-attn-4 4.0.0b36", ""),
    "flash_attention_3": ("FlashAttention-3 from its own sources", ""),
    "flash_attention_3_ragged": ("its entry for cumulative lengths", ""),
    "fa3_mla": ("FlashAttention-3", _WHEEL),
    "fa3": ("FlashAttention-3 with cumulative lengths", _WHEEL),
    "flash_mla": ("FlashMLA", _WHEEL),
    "flashinfer_fa3": ("FlashInfer's kernels for Hopper", "flashinfer-python (0.7.2, 0.7.4)"),
    "flashinfer_fa2": ("its kernels for GPUs since Ampere", "flashinfer-python (0.7.2, 0.7.4)"),
    "flash_mla_fp8": ("FlashMLA for FP8", _WHEEL),
}
"""Name given to --against -> the implementation, and what it was a part of. Plans that engines make once for all layers
are not timed."""
PREFILLS = ("bf16", "e4m3", "256-bf16", "256-e4m3")
DECODES = ("decode", "streams-decode", "few-decode", "packs-decode")
DTYPES = ("bf16", "e4m3")
TIMED = tuple(f"{call}-{dtype}" for dtype in DTYPES for call in ("decode", "prefill"))
"""Records that the page's first paragraphs quote."""
LONG = 8192
"""Least keys of prefills whose rates the page quotes: with fewer, launching and starting take much of the time."""
README_GPU = "H200"
"""The GPU whose records the page's first paragraphs quote, and the README first."""
SHAPES = {
    "decode": (
        (128, 1, 4096, 16, "fixed"), (128, 1, 4096, 16, "variable"), (128, 1, 4096, 128, "fixed"),
        (128, 1, 8192, 16, "fixed"), (128, 2, 8192, 128, "fixed"), (4, 4, 81920, 16, "fixed"),
        (32, 128, 32768, 16, "mixed"),
    ),
    "streams-decode": ((128, 1, 4096, 16, "fixed"), (32, 8, 8192, 8, "fixed")),
    "few-decode": (
        (1, 1, 512, 16, "fixed"), (1, 1, 4096, 16, "fixed"), (1, 1, 32768, 128, "fixed"), (4, 1, 512, 128, "fixed"),
        (4, 1, 4096, 128, "fixed"),
    ),
    "packs-decode": (
        (1, 1, 1024, 128, "packed"), (8, 1, 1024, 16, "packed"), (4, 2, 2048, 128, "in turn"),
        (16, 8, 8192, 16, "in turn"), (64, 2, 8192, 128, "in turn"),
    ),
    "rows-decode": (
        (128, 1, 4096, 16, "fixed"), (128, 1, 8192, 16, "fixed"), (128, 1, 4096, 128, "fixed"),
        (32, 1, 8192, 64, "fixed"), (1, 1, 8192, 128, "fixed"), (1, 1, 1024, 16, "fixed"),
    ),
    "chosen-decode": (
        (1, 1, 16), (8, 1, 16), (32, 1, 16), (128, 1, 16), (8, 1, 128), (32, 1, 128), (128, 1, 64), (128, 1, 128),
        (128, 2, 128),
    ),
    "prefill": (
        (1, 8192, 8192, True), (1, 8192, 8192, False), (1, 8192, 32768, True), (4, 512, 81920, True),
        (1, 1024, 1024, True), (16, 512, 512, True),
    ),
}  # fmt: skip
"""Kind of record -> the rows that the page shows.

decode: requests, query tokens, keys, heads, lengths.
chosen-decode: requests, query tokens, heads.
prefill: sequences, queries, keys, whether the mask is causal.
"""
ROW_BYTES = {"bf16": 1152, "fp8_ds_mla": 656, "e4m3": 576}
"""Cache rows of chosen keys -> what one of them takes."""
LATENT_COLUMNS = 576 + 512
"""Columns of a latent key and of its value."""
TOKENS = 8192
"""Tokens in the rows of cache operators and packs."""
_PAGE = """\
# Performance

Every row was measured by a command of this repository, beside other libraries in one process, launched in turn; the
records, with clocks, power, the spread of every timing and all other rows, are in `benchmarks/results/current/`. Times
are medians of isolated launches (with pauses between them; the SM clock was {isolated} MHz, lower in longer launches).
The last column is of launches without pauses ({back_to_back} MHz: long runs reach the 700 W power limit).

A *ratio* is our time over that of the fastest other library in the row: below 1, tsmla is faster; bold, it is slower. A
ratio is a *tie* where the 95 % confidence interval of its median holds 1 or, in records without intervals, within 1 %.
*Mixed* batches: four of the requests have so many query tokens, the others one. *Variable*: lengths vary by a half. *In
turn*: every second request has so many query tokens, the others one. *A gather*: a kernel that brings as many random
rows into shared memory and does nothing else (`python -m benchmarks microbench gather`). Decodes and cache operators
are replayed CUDA graphs, each from a cold L2. Compare within a table: GPUs and runs differ by some per cent.
`benchmarks/protocol.py` says how calls are timed; times modelled without a GPU are in
[timing-model.md](../../emulator/docs/timing-model.md).

There are no figures for Blackwell: kernels for sm_100a and sm_103a are verified in emulation; not yet run on hardware.

This page is written by `python -m benchmarks report`.

## In short

{in_short}

{sections}

## What else was measured

Since 2026-11-28 8-bit kernels of Hopper sum values in float32 or as float16 (changelog). Prefills in e4m3 on an H100
from before are left out, until they are measured again.

{cold_start} ({cold_certificate})

Calls with `batch_invariant=True`, graphs captured for the longest context, and calls with packs:
[log](../../kernels/log/hopper-decode.md#query-tokens-that-vary-and-requests-that-are-left-whole). Engines, in words:
[vLLM](vllm.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(options: argparse.Namespace) -> None:
    for path in published.superseded():
        path.unlink()
    PAGE.write_text(performance_page())
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{readme_part()}\n{END}{rest.partition(END)[2]}")


def performance_page() -> str:
    """Return docs/measured/performance.md: one table for each GPU, and how often each record's rows are faster, tie and
    are slower."""
    devices = dict.fromkeys(record["certificate"]["device"] for record in published.of_devices("decode-bf16"))
    return _PAGE.format(
        isolated=_clocks("isolated"),
        back_to_back=_clocks("back to back"),
        in_short=_in_short(),
        sections="\n\n".join(map(_gpu, devices)),
        cold_start=_of_cold_start(),
        cold_certificate=published.certificate(published.newest("cold_start")).rstrip("."),
    )


def _gpu(device: str) -> str:
    decode = published.newest("decode-bf16", device)
    ceilings = decode["ceilings"]
    kinds: list[tuple[str, Callable[[dict[str, Any]], Iterator[list[str]]]]] = [
        *((f"{kind}-{dtype}", functools.partial(_decode_rows, SHAPES[kind])) for kind in DECODES for dtype in DTYPES),
        ("rows-decode", _scaled_rows),
        ("chosen-decode", _chosen_rows),
        ("chosen-prefill", _chosen_prompt_rows),
        *((f"prefill-{name}", _prefill_rows) for name in PREFILLS),
        ("cache", _cache_rows),
        ("pack", _pack_rows),
    ]
    records = [(rows, record) for name, rows in kinds for record in published.of_devices(name, device)]
    table = [row for rows, record in records for row in rows(record)]
    engines = [record for record in engine_tables.records() if record["certificate"]["device"] == device]
    table += engine_tables.newest_rows(engines)
    head = ["call", "ours", "rate", "beside", "ratio", "back to back"]
    said = [f"- {published.certificate(record)}{_counted(record)}" for _, record in records]
    said += [f"- {published.certificate(record)}" for record in engines]
    return "\n".join(
        [
            f"## {device}",
            "",
            f"A large read reached {ceilings['read_gb_s']:.0f} GB/s in the same run as the decodes, a large matmul "
            f"{ceilings['matmul_bf16_tflop_s']:.0f} TFLOP/s.",
            "",
            _table(head, table),
            "",
            "Records:",
            "",
            *said,
            *crossover_table.lines(device),
        ]
    )


def readme_part() -> str:
    """Return the README's part: two reasons to use the kernels, with their numbers."""
    sentences = [
        f"**Nothing compiles when a server starts.** {_of_cold_start()}",
        f"**Faster than its peers, measured beside them.** {_beside_peers()} "
        "[Rates, charts and every row](docs/measured/performance.md).",
    ]
    return "\n".join(textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in sentences)


def _beside_peers() -> str:
    """How many rows of all tables of decode and prefill are faster than the fastest peer of the same run, on each
    GPU."""
    names = [*(f"{kind}-{dtype}" for kind in DECODES for dtype in DTYPES), *(f"prefill-{name}" for name in PREFILLS)]
    records = [record for name in names for record in published.of_devices(name)]
    days = sorted(record["certificate"]["date"][:10] for record in records)
    by_device: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        results = [result for result in record["results"] if len(result["timings"]) > 1]
        by_device.setdefault(record["certificate"]["device"], []).extend(results)
    counts = []
    for device, results in sorted(by_device.items(), key=lambda item: README_GPU not in item[0]):
        faster, ties = _standing(results)
        slower = len(results) - faster - ties
        most = max(x["timings"]["tsmla"]["median_us"] / published.best_peer(x["timings"])["median_us"] for x in results)
        rest = f"{slower} are slower, by {most - 1:.1%} at most" if slower else "none is slower"
        counts.append(f"on an {device.split(' 80GB')[0]} {faster} of {len(results)} take less time, {ties} tie, {rest}")
    return (
        "Decode and prefill in bf16 and e4m3, launched in turn in one process with FlashAttention-3, FlashMLA and "
        f"FlashInfer, of which the fastest counts ({days[0]} to {days[-1]}): {'; '.join(counts)}."
    )


def _standing(results: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Rows in which we are faster than the best of what ran in the same process, and rows that tie."""
    timings = [result["timings"] for result in results if len(result["timings"]) > 1]
    ties = [published.is_tie(timing) for timing in timings]
    faster = [timing["tsmla"]["median_us"] < published.best_peer(timing)["median_us"] for timing in timings]
    return sum(fast and not tie for fast, tie in zip(faster, ties, strict=True)), sum(ties)


def _in_short() -> str:
    """What bounds each kind of call and how near it comes, two charts, and where their numbers are from."""
    decode, prefill, narrow_decode, narrow_prefill = (published.newest(name, README_GPU) for name in TIMED)
    sentences = [_of_prefill(prefill), _of_decode(decode), _of_8_bits(narrow_prefill, narrow_decode)]
    born = ", ".join(_born(name) for name in TIMED)
    clocks = f"{_clocks('isolated', README_GPU)} MHz isolated, {_clocks('back to back', README_GPU)} MHz back to back"
    origin = f"{_device(prefill)}, SM clock {clocks}. Records: {born}."
    return "\n\n".join(
        [
            "\n".join(textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in sentences),
            charts.prefill(prefill),
            charts.decode(decode),
            textwrap.fill(origin, 120, break_on_hyphens=False),
        ]
    )


def _of_prefill(record: dict[str, Any]) -> str:
    alone, on_end = (_rates(record, regime) for regime in ("isolated", "back to back"))
    return (
        f"bf16 prefill over {LONG // 1024}K keys or more computes {alone} TFLOP/s in isolated launches and {on_end} "
        f"back to back; {_compared(record['results'])}."
    )


def _rates(record: dict[str, Any], regime: str) -> str:
    """Return the TFLOP/s of prefills of at least LONG keys."""
    results = (result for result in published.results(record, regime) if result["shape"][2] >= LONG)
    return _span(result["tflop"] / result["timings"]["tsmla"]["median_us"] * 1e6 for result in results)


def _of_decode(record: dict[str, Any]) -> str:
    batches = [
        result
        for result in published.results(record, "isolated", dtype="bf16")
        if result["shape"][0] > 1 and result["shape"][4] in ("fixed", "variable")
    ]
    few = _span(r["bytes"] / r["timings"]["tsmla"]["median_us"] * 1e-3 for r in batches if r["shape"][3] == 16)
    many = _span(r["tflop"] / r["timings"]["tsmla"]["median_us"] * 1e6 for r in batches if r["shape"][3] == 128)
    return (
        f"bf16 decode of several requests reads the cache at {few} GB/s with 16 heads (a large read: "
        f"{record['ceilings']['read_gb_s']:.0f}) and computes {many} TFLOP/s with 128 heads (a large matmul: "
        f"{record['ceilings']['matmul_bf16_tflop_s']:.0f}). Decodes in bf16: {_compared(record['results'])}."
    )


def _of_8_bits(prefill: dict[str, Any], decode: dict[str, Any]) -> str:
    return (
        f"In e4m3, such a prefill computes {_rates(prefill, 'isolated')} TFLOP/s in isolated launches; "
        f"{_compared(prefill['results'])}. Decodes in e4m3: {_compared(decode['results'])}."
    )


def _of_cold_start() -> str:
    sums = {
        result["step"]: statistics.median(run["total_ms"] for run in result["runs"])
        for result in published.newest("cold_start")["results"]
        if result["family"] == "prefill" and result.get("runs")
    }
    return (
        f"In a process that has torch and CUDA up, importing tsmla and the first prefill take {sums['binary']:.0f} ms "
        f"together from a shipped library, and {sums['jit'] / 1e3:.1f} s where the kernel is compiled just in time."
    )


def _compared(results: Sequence[dict[str, Any]]) -> str:
    """Return in how many rows tsmla is faster, ties or is slower than the best of what ran in the same process."""
    timings = [result["timings"] for result in results if len(result["timings"]) > 1]
    names = sorted({name for timing in timings for name in timing} - {"tsmla"})
    faster, ties = _standing(results)
    of: dict[str, list[str]] = {}
    for name in names:
        of.setdefault(PEERS[name][1], []).append(PEERS[name][0])
    who = ", and ".join(_named(own) + (f" of {whose}" if whose else "") for whose, own in of.items())
    return (
        f"beside {who} in the same process it is faster than the best in "
        f"{faster} of {len(timings)} measurements, ties in {ties} and is slower in {len(timings) - faster - ties}"
    )


def _named(names: Sequence[str]) -> str:
    *others, last = names
    return (f"{', '.join(others)} and " if others else "") + last


def _span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.0f} to {max(values):.0f}"


def _device(record: dict[str, Any]) -> str:
    born = record["certificate"]
    return f"{born['device']}, driver {born['driver']}, torch {born['torch']}"


def _born(name: str) -> str:
    born = published.newest(name, README_GPU)["certificate"]
    return f"`{name}` ({born['date'][:10]}, commit {born['commit']})"


def _clocks(regime: str, device: str = "") -> str:
    """Return the SM clocks in MHz while prefill and decode were timed."""
    records = [record for name in TIMED for record in published.of_devices(name, device)]
    return _span(r["timings"]["tsmla"]["sm_clock_mhz"] for record in records for r in published.results(record, regime))


def _both(record: dict[str, Any], **fields: object) -> list[dict[str, Any]]:
    """Return the isolated and the back-to-back result of a shape; nothing where the record has none."""
    return [x for regime in ("isolated", "back to back") for x in published.results(record, regime, **fields)]


def _row(call: str, results: Sequence[dict[str, Any]], rate: str) -> list[str]:
    """Return a shape's cells from its result in both regimes."""
    timings = [result["timings"] for result in results]
    others = {name: timing for name, timing in timings[0].items() if name != "tsmla"}
    if not others:
        return [call, _us(timings[0]["tsmla"]["median_us"]), rate, "", "", ""]
    peer = min(others, key=lambda name: others[name]["median_us"])
    beside = f"{peer} {_us(others[peer]['median_us'])}"
    return [call, _us(timings[0]["tsmla"]["median_us"]), rate, beside, *map(_ratio, timings)]


def _us(value: float) -> str:
    return f"{value:,.1f} us" if value < 1000 else f"{value:,.0f} us"


def _decode_rows(shapes: Sequence[tuple[Any, ...]], record: dict[str, Any]) -> Iterator[list[str]]:
    for shape in shapes:
        if results := _both(record, shape=[*shape]):
            us = results[0]["timings"]["tsmla"]["median_us"]
            few = results[0]["bytes"] / us * 1e-3, results[0]["tflop"] / us * 1e6
            rate = f"{few[0]:,.0f} GB/s, {few[1]:.0f} TFLOP/s"
            yield _row(f"decode {_decode_label(shape)}, {results[0]['dtype']}", results, rate)


def _decode_label(shape: Sequence[Any]) -> str:
    requests, q_len, keys, heads, lengths = shape
    return f"{requests} x {q_len} x {keys}{'' if lengths == 'fixed' else f' ({lengths})'}, {heads} heads"


def _scaled_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield rows with scales beside bf16 rows of as many keys: these records hold no ratios."""
    for shape in SHAPES["rows-decode"]:
        results = [x for x in record["results"] if x["shape"] == [*shape]]
        micros = [{name: timing["median_us"] for name, timing in x["timings"].items()} for x in results]
        for name in ("fp8_ds_mla", "snapmla"):
            ratios = [us[name] / us["bf16"] for us in micros]
            call = f"decode {_decode_label(shape)}, {name} rows"
            beside = f"bf16 rows {_us(micros[0]['bf16'])}"
            yield [call, _us(micros[0][name]), "", beside, *map(published.bold, ratios)]


def _chosen_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield decodes of chosen keys, each format beside the peer that is faster, and beside a kernel that only gathers
    the rows."""
    gathers = _gathers(record["certificate"]["device"])
    for shape in SHAPES["chosen-decode"]:
        results = [x for x in record["results"] if x["shape"] == [*shape]]
        micros = [{name: timing["median_us"] for name, timing in x["timings"].items()} for x in results]
        requests, q_len, heads = shape
        for name in ("bf16", "fp8_ds_mla"):
            ours, *_ = [us[name] for us in micros]
            peer = min(("FlashMLA sparse", "FA3 gather"), key=lambda peer: micros[0][peer])
            ratios = [us[name] / us[peer] for us in micros]
            keys = f"{record['top_k']} chosen keys of {record['slots']}"
            call = f"decode {requests} x {q_len}, {keys}, {heads} heads, {name} rows"
            row_bytes, lists = ROW_BYTES[name], int(requests) * int(q_len)
            rate = f"{lists * record['top_k'] * row_bytes / ours * 1e-3:,.0f} GB/s"
            if alone := gathers.get((row_bytes, f"{lists} lists")):
                rate += f", {alone / ours:.0%} of a gather"
            yield [call, _us(ours), rate, f"{peer} {_us(micros[0][peer])}", *map(published.bold, ratios)]


def _chosen_prompt_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield prompts of chosen keys, each format beside FlashMLA, and beside a kernel that only gathers the rows."""
    queries, top_k = record["queries"], record["top_k"]
    gathers = _gathers(record["certificate"]["device"], "microbench-gather-prompts")
    for shape in dict.fromkeys(tuple(x["shape"]) for x in record["results"]):
        results = [x for x in record["results"] if tuple(x["shape"]) == shape]
        micros = [{name: timing["median_us"] for name, timing in x["timings"].items()} for x in results]
        keys, heads = shape
        for name in (name for name in ROW_BYTES if name in micros[0]):
            ours = micros[0][name]
            alone = gathers.get((ROW_BYTES[name], f"{queries} lists of {keys}"))
            tflops = 2 * queries * top_k * heads * LATENT_COLUMNS / ours * 1e-6
            rate = f"{tflops:.0f} TFLOP/s" + (f", {alone / ours:.0%} of a gather" if alone else "")
            call = f"prefill {queries} tokens, {top_k} chosen keys of {keys}, {heads} heads, {name} rows"
            ratios = [us[name] / us["FlashMLA sparse"] for us in micros]
            beside = f"FlashMLA {_us(micros[0]['FlashMLA sparse'])}"
            yield [call, _us(ours), rate, beside, *map(published.bold, ratios)]


def _gathers(device: str, record_name: str = "microbench-gather") -> dict[tuple[int, str], float]:
    """Return (bytes of a row, lists in words) -> microseconds of a kernel that only gathers lists of 2,048 random rows,
    in the fastest of the ways that were measured."""
    found: dict[tuple[int, str], float] = {}
    for record in published.of_devices(record_name, device):
        for name, result in record["results"].items():
            _, _, order, row, lists, _ = name.split(".")
            if order == "random":
                of = int(row.removesuffix("B")), lists
                found[of] = min(result["value"], found.get(of, result["value"]))
    return found


def _prefill_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    first = record["results"][0]
    d_qk = first.get("dims", 192)  # records before 2026-11-25 are all of 192 columns
    d_v, heads = bench_prefill.DIMS[d_qk]
    for shape in SHAPES["prefill"]:
        results = _both(record, shape=[*shape])
        sequences, queries, keys, causal = shape
        call = f"prefill {sequences} x {queries} x {keys} {'causal' if causal else 'full'}, "
        rate = results[0]["tflop"] / results[0]["timings"]["tsmla"]["median_us"] * 1e6
        yield _row(f"{call}({d_qk}, {d_v}), {heads} heads, {first['dtype']}", results, f"{rate:.0f} TFLOP/s")


def _cache_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield writers, readers and the queries' quantiser beside torch and vLLM; the rate is a share of torch's large
    copy."""
    names = {
        "write": "mla_write_cache",
        "rotate": "mla_write_cache with rotation",
        "read": "mla_read_cache",
        "quantise": "mla_quantize_q",
    }
    for result in record["results"]:
        if result["tokens"] == TOKENS and result["timings"]["tsmla"]["graph"]:
            yield _copying_row(f"{names[result['operator']]} {TOKENS} tokens, {result['format']}", result)


def _pack_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    for result in record["results"]:
        if result["tokens"] == TOKENS and result["timings"]["tsmla"]["graph"]:
            yield _copying_row(f"mla_kv_pack_quantize_fp8 {TOKENS} tokens, {result['heads']} heads", result)


def _copying_row(call: str, result: dict[str, Any]) -> list[str]:
    micros = {name: timing["median_us"] for name, timing in result["timings"].items()}
    ours, copy = micros.pop("tsmla"), micros.pop("copy")
    peer = min(micros, key=lambda name: micros[name])
    ratio = published.bold(ours / micros[peer])
    return [call, _us(ours), f"{copy / ours:.0%} of a copy", f"{peer} {_us(micros[peer])}", ratio, ""]


def _counted(record: dict[str, Any]) -> str:
    """Return in how many rows of the whole record, in both regimes, tsmla is faster than the best of others that do the
    same."""
    rows = [x["timings"] for x in record["results"] if "tsmla" in x["timings"] and "copy" not in x["timings"]]
    rows = [timings for timings in rows if len(timings) > 1]
    if not rows:
        return ""
    ties = sum(map(published.is_tie, rows))
    ratios = [timings["tsmla"]["median_us"] / published.best_peer(timings)["median_us"] for timings in rows]
    slower = sum(ratio > 1 and not published.is_tie(x) for ratio, x in zip(ratios, rows, strict=True))
    return (
        f" All {len(rows)} measurements: faster than the best in {len(rows) - ties - slower}, ties in {ties}, slower "
        f"in {slower}; ratios {min(ratios):.2f} to {max(ratios):.2f}."
    )


def _ratio(timings: dict[str, Any]) -> str:
    """Return tsmla's time over that of the best of the others, in bold where tsmla is slower."""
    ratio = timings["tsmla"]["median_us"] / published.best_peer(timings)["median_us"]
    return f"{ratio:.3f}, tie" if published.is_tie(timings) else published.bold(ratio)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
