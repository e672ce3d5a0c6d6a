"""docs/performance.md and the README's performance part, from the records in benchmarks/results/current.

    python -m benchmarks report

removes records that newer ones supersede, which git keeps, and writes both. Tests compare them with what it would
write. benchmarks/results/tried has records of what was compared once and a page quotes; benchmarks/results/in_git.txt
lists those that only git has.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import bench_prefill, charts, engine_tables, published

ROOT = Path(__file__).parents[1]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- begin: python -m benchmarks report -->", "<!-- end -->"
"""What the README's generated part stands between."""
_WHEEL = "vLLM 0.26's wheel"
PEERS = {
    "flash_attn_4": ("flash-attn-4 4.0.0b36", ""),
    "flash_attention_3": ("FlashAttention-3 from its own sources", ""),
    "flash_attention_3_ragged": ("its entry for cumulative lengths", ""),
    "fa3_mla": ("FlashAttention-3", _WHEEL),
    "fa3_prefill": ("FlashAttention-3 with cumulative lengths", _WHEEL),
    "flash_mla": ("FlashMLA", _WHEEL),
    "flashinfer_fa3": ("FlashInfer's kernels for Hopper", "flashinfer-python 0.7.2"),
    "flashinfer_fa2": ("its kernels for GPUs since Ampere", "flashinfer-python 0.7.2"),
    "flash_mla_fp8": ("FlashMLA for FP8", _WHEEL),
}
"""Other implementations in the records, by the names given to --against, and what they were a part of. Plans that
engines make once for all layers are not timed."""
PREFILLS = ("bf16", "e4m3", "256-bf16", "256-e4m3")
TIMED = ("prefill-bf16", "prefill-e4m3", "decode")
"""What the README quotes."""
LONG = 8192
"""Keys of prefills whose rates the README quotes; of shorter ones much of the time is none of computing."""
README_GPU = "H200"
"""The GPU whose records it quotes."""
COLD_STARTS = {
    "cold_start": "cold start after torch and CUDA",
    "cold_start_decode": "the same for decode",
    "cold_start_bindings_up": "pack and prefill after cuda.bindings",
    "cold_start_decode_prefill": "decode and prefill, newer, on another machine",
}
"""Without and with cuda.bindings imported beforehand: torch 2.13 does so itself, for torch 2.11 TVM-FFI does."""
_PAGE = """\
# Performance

Every row was measured by a command of this repository; the device, the driver, the date, the commit and the command
stand below each table. The records, with clocks, power and the spread of every timing, are in
`benchmarks/results/current/`. Rows with other libraries timed all in one process, launched in turn. A ratio is a *tie*
where the 95 % confidence interval of its median holds 1; in records without intervals, within 1 %.

- *Isolated*: launches with pauses between them. The SM clock was {isolated} MHz, lower in longer launches.
- *Back to back*: launches without pauses. The SM clock was {back_to_back} MHz: long runs reach the 700 W power limit.
- *Cold L2*: the L2 cache is flushed before each launch. *CUDA graph*: the call is captured once and replayed.
- Compare within a table: GPUs and runs differ by some per cent, single isolated medians by more.
- How it is timed: `benchmarks/protocol.py`. What the hardware allows: [cost-model.md](../emulator/docs/cost-model.md).

There are no figures for Blackwell: kernels for sm_100a and sm_103a are verified in emulation; not yet run on hardware.

This page is written by `python -m benchmarks report`.

{sections}
"""

_ABSENT = """\
Others are as vLLM's wheel builds them. FlashMLA from its own sources was not in these
runs; beside an earlier build of ours it was 0 to 5 % slower in batches of 128
(decode-nvidia-h200-20261122T060617.json, in git)."""
_OTHERS = """\
FlashAttention-3 is built from its own sources (0251105, CUDA 13.0). flash-attn-4, which was 0 to 4 % slower than ours
in bf16 (prefill-bf16-nvidia-h200-20261121T101536.json, in git), was not in these runs."""
_STREAMS = """\
Rows whose work is little beside their keys' bytes, beside FlashInfer's planned wrapper, too (the plan is not timed):"""
_FEW = """\
One to four requests beside the fastest of the same peers: our time in us, isolated, CUDA graph, cold L2, and its ratio
to the peer's, bold where ours is longer."""
_ROWS = """\
The same keys in caches of other rows, with one query token a request: isolated times in us, and in brackets of that on
bf16 rows. FlashMLA's decodes, of vLLM 0.26's wheel, are the dense one of the bf16 rows, and the sparse one of the
656-byte rows, which is given all keys."""
_CACHE = """\
`mla_write_cache` (*write*; *rotate* with the rotary embedding), `mla_read_cache` and `mla_quantize_q` beside the same
formulas in torch, vLLM 0.26's kernels, and torch's copy of as many bytes: isolated times in us, as CUDA graphs."""
_ENGINES = """\
New tokens per second of vLLM 0.26.0 on random models with dense layers of hidden size 2048. Backends of a record take
turns in one run, in an order drawn anew each round; the median of the rounds counts. Where a round of one reaches one
of the other, nothing is said but that. Attention is what kernels and copies named for it take, where it was profiled.
What the settings mean, and what the rows show: [vllm.md](vllm.md#measured)."""

_CAPTURED = """\
Engines capture a graph for the longest context that a model allows, here 131072 keys, and replay it while requests are
short: *captured* beside a call that knows its longest request. Head counts are those that tensor parallelism leaves."""
_HOST = """\
What a layer's call costs the host, without CUDA graphs, where the GPU is done sooner than the host:"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(options: argparse.Namespace) -> None:
    for path in published.superseded():
        path.unlink()
    PAGE.write_text(performance_page())
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{readme_part()}\n{END}{rest.partition(END)[2]}")


def performance_page() -> str:
    """docs/performance.md: one table per operator and of cold start, each with the birth certificate of its numbers."""
    prefills = [_prefill(record) for name in PREFILLS for record in published.of_devices(f"prefill-{name}")]
    decodes = published.of_devices("decode")
    cold = [_cold_start(head, published.newest(name)) for name, head in COLD_STARTS.items()]
    sections = {
        "Prefill": [_OTHERS, *prefills],
        "Decode": [
            _ABSENT,
            *(part for decode in decodes for part in (_decode(decode), charts.decode(decode, 128))),
        ],
        "Decode that streams keys": [_STREAMS, *map(_decode, published.of_devices("streams-decode"))],
        "Decode of few requests": [
            _FEW,
            *(_few(record, dtype) for record in published.of_devices("few-decode") for dtype in ("bf16", "e4m3")),
        ],
        "Decode of rows with scales": [_ROWS, *map(_rows, published.of_devices("rows-decode"))],
        "Batch-invariant decode": [_both_ways(published.newest("batch-invariant-decode"), "batch_invariant")],
        "Decode as engines capture it": [_CAPTURED, _both_ways(published.newest("shards-decode"), "captured")],
        "Engines": [
            _ENGINES,
            _engines(engine_tables.records()),
            _HOST,
            _host_times(published.newest("vllm-host-time-auto-16-heads")),
        ],
        "Cache writers and readers": [_CACHE, *map(_cache, published.of_devices("cache"))],
        "K/V pack and FP8 quantisation": [_pack(published.newest("pack"))],
        "Cold start": ["From the first `import tsmla` to the first result, and then each call's host time.", *cold],
    }
    return _PAGE.format(
        isolated=_clocks("isolated"),
        back_to_back=_clocks("back to back"),
        sections="\n\n".join("\n\n".join([f"## {title}", *parts]) for title, parts in sections.items()),
    )


def readme_part() -> str:
    """Four sentences, two charts, and where their numbers are from."""
    prefill, narrow, decode = (published.newest(name, README_GPU) for name in TIMED)
    sentences = [_of_prefill(prefill), _of_decode(decode), _of_8_bits(narrow, decode), _of_cold_start()]
    born = ", ".join(_born(name) for name in (*TIMED, "cold_start"))
    clocks = f"{_clocks('isolated', README_GPU)} MHz isolated, {_clocks('back to back', README_GPU)} MHz back to back"
    origin = f"{_device(prefill)}, SM clock {clocks}. Records: {born}."
    return "\n\n".join([
        "\n".join(textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ") for text in sentences),
        charts.prefill(prefill),
        charts.decode(decode, 16),
        textwrap.fill(origin, 120, break_on_hyphens=False),
    ])  # fmt: skip


def _of_prefill(record: dict[str, Any]) -> str:
    alone, on_end = (_rates(record, regime) for regime in ("isolated", "back to back"))
    return (
        f"bf16 prefill over {LONG // 1024}K keys or more computes {alone} TFLOP/s in isolated launches and {on_end} "
        f"back to back; {_compared(record['results'])}."
    )


def _rates(record: dict[str, Any], regime: str) -> str:
    """TFLOP/s of prefills that have something to do."""
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
        f"{record['ceilings']['matmul_bf16_tflop_s']:.0f}). In bf16 and e4m3, {_compared(record['results'])}."
    )


def _of_8_bits(prefill: dict[str, Any], decode: dict[str, Any]) -> str:
    wide, narrow = (
        {tuple(r["shape"]): r["timings"]["tsmla"]["median_us"] for r in results}
        for results in (published.results(decode, "isolated", dtype=dtype) for dtype in ("bf16", "e4m3"))
    )
    shares = [narrow[shape] / wide[shape] for shape in narrow.keys() & wide.keys()]
    return (
        f"In e4m3, such a prefill computes {_rates(prefill, 'isolated')} TFLOP/s in isolated launches; "
        f"{_compared(prefill['results'])}. A decode takes {min(shares):.2f} to {max(shares):.2f} of its time in bf16."
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
    """In how many rows we are faster, tie or are slower than the best of what ran in the same process."""
    timings = [result["timings"] for result in results if len(result["timings"]) > 1]
    names = sorted({name for timing in timings for name in timing} - {"tsmla"})
    ties = sum(published.is_tie(timing) for timing in timings)
    ratios = [timing["tsmla"]["median_us"] / published.best_peer(timing)["median_us"] for timing in timings]
    slower = sum(
        ratio > 1 and not published.is_tie(timing) for ratio, timing in zip(ratios, timings, strict=True)
    )
    whose = {PEERS[name][1] for name in names} - {""}
    *others, last = (PEERS[name][0] for name in names)
    who = (f"{', '.join(others)} and " if others else "") + last + "".join(f", all of {x}," for x in whose)
    return (
        f"beside {who} in the same process it is faster than the best in "
        f"{len(ratios) - ties - slower} of {len(ratios)} measurements, ties in {ties} and is slower in {slower}"
    )


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
    """SM clocks in MHz while prefill and decode were timed."""
    records = [record for name in TIMED for record in published.of_devices(name, device)]
    return _span(r["timings"]["tsmla"]["sm_clock_mhz"] for record in records for r in published.results(record, regime))


def _prefill(record: dict[str, Any]) -> str:
    """Both regimes of each shape, in TFLOP/s, next to whatever ran in the same process."""
    shapes: dict[str, list[str]] = {}
    first = record["results"][0]
    d_qk, dtype = first.get("dims", 192), first["dtype"]  # records before 2026-11-25 are all of 192 columns
    d_v, heads = bench_prefill.DIMS[d_qk]
    names = list(record["results"][0]["timings"])
    for result in record["results"]:
        sequences, queries, keys, causal = result["shape"]
        label = f"{sequences} x {queries} queries, {keys} keys, {'causal' if causal else 'full'}"
        rates = [f"{result['tflop'] / result['timings'][name]['median_us'] * 1e6:.0f}" for name in names]
        shapes.setdefault(label, []).append(" / ".join(rates) + _ratio(result["timings"]))
    who = " / ".join(names) + (" (ratio)" if len(names) > 1 else "")
    head = f"`tsmla_prefill`, {dtype}, ({d_qk}, {d_v}), {heads} heads"
    table = _table(
        [head, f"isolated, TFLOP/s: {who}", f"back to back: {who}"],
        ([label, *cells] for label, cells in shapes.items()),
    )
    return f"{table}\n\n{_certificate(record)}{_peers(names)}"


def _decode(record: dict[str, Any]) -> str:
    """A row per shape and dtype, both regimes of all candidates."""
    names = published.names(record)
    rows: dict[str, list[str]] = {}
    for result in record["results"]:
        requests, q_len, keys, heads, lengths = result["shape"]
        label = f"{requests} x {q_len} queries, {keys} keys ({lengths}), {heads} heads, {result['dtype']}"
        micros = {name: timing["median_us"] for name, timing in result["timings"].items()}
        times = " / ".join(f"{micros[name]:.1f}" if name in micros else "-" for name in names)
        ours = micros["tsmla"]
        rates = f"{result['bytes'] / ours * 1e-3:.0f}, {result['tflop'] / ours * 1e6:.0f}"
        cells = rows.setdefault(label, [f"{result['host_us']:.1f}"])
        cells.append(f"{times}{_ratio(result['timings'])}" + (f"; {rates}" if len(cells) == 1 else ""))
    who = " / ".join(names) + (" (ratio)" if len(names) > 1 else "")
    head = [
        "`tsmla_decode`, CUDA graph, cold L2",
        "host us/call",
        f"isolated, us: {who}; ours: GB/s, TFLOP/s",
        f"back to back: {who}",
    ]
    read = record["ceilings"]["read_gb_s"]
    table = _table(head, ([label, *cells] for label, cells in rows.items()))
    return f"{table}\n\n{_certificate(record)} A large read reached {read:.0f} GB/s in the same run.{_peers(names)}"


def _few(record: dict[str, Any], dtype: str) -> str:
    """A row for each number of requests, query tokens and keys, a column for each number of heads."""
    rows: dict[str, dict[int, str]] = {}
    for result in published.results(record, "isolated", dtype=dtype):
        requests, q_len, keys, heads, _ = result["shape"]
        cell = f"{result['timings']['tsmla']['median_us']:.1f}{_ratio(result['timings'])}"
        rows.setdefault(f"{requests} x {q_len} queries, {keys} keys", {})[heads] = cell
    heads = sorted({count for cells in rows.values() for count in cells})
    table = _table(
        [f"`tsmla_decode`, {dtype}", *(f"{count} heads" for count in heads)],
        ([label, *(cells.get(count, "") for count in heads)] for label, cells in rows.items()),
    )
    names = [name for name in published.names(record) if ("fp8" in name) == (dtype == "e4m3")]
    return f"{table}\n\n{_certificate(record)}{_peers(names)}"


def _rows(record: dict[str, Any]) -> str:
    """A row for each shape, a column for each kind of cache rows and each other library."""
    names = published.names(record)
    table = []
    for result in record["results"]:
        if result["regime"] != "isolated":
            continue
        requests, q_len, keys, heads, _ = result["shape"]
        micros = [result["timings"][name]["median_us"] for name in names]
        cells = [f"{us:.1f} ({us / micros[0]:.3f})" for us in micros[1:]]
        table.append([f"{requests} x {q_len} queries, {keys} keys, {heads} heads", f"{micros[0]:.1f}", *cells])
    return f"{_table(['`tsmla_decode`, CUDA graph, cold L2', *names], table)}\n\n{_certificate(record)}"


def _cache(record: dict[str, Any]) -> str:
    """A row for each operator, kind of rows and number of tokens; nothing where a library has no such kernel."""
    names = published.names(record)
    table = []
    for result in record["results"]:
        timings = result["timings"]
        if not timings["tsmla"]["graph"]:
            continue
        cells = [f"{timings[name]['median_us']:.1f}" if name in timings else "" for name in names]
        share = timings["copy"]["median_us"] / timings["tsmla"]["median_us"]
        label = f"{result['operator']}, {result['format']}, {result['tokens']} tokens"
        table.append([label, *cells, f"{share:.0%}"])
    return f"{_table(['', *names, 'of the copy'], table)}\n\n{_certificate(record)}"


def _ratio(timings: dict[str, Any]) -> str:
    """Our time over that of the best of others, which is bold where it is behind; nothing where there are none."""
    if len(timings) == 1:
        return ""
    ratio = timings["tsmla"]["median_us"] / published.best_peer(timings)["median_us"]
    if published.is_tie(timings):
        return f" ({ratio:.3f}, tie)"
    return f" (**{ratio:.3f}**)" if ratio > 1 else f" ({ratio:.3f})"


def _both_ways(record: dict[str, Any], other: str) -> str:
    """Shapes with one query length for all requests: what it costs to call the operator in an `other` way."""
    rows: dict[str, list[str]] = {}
    for result in published.results(record, "back to back"):
        requests, q_len, keys, heads, lengths = result["shape"]
        if lengths in ("fixed", "variable"):
            default, changed = (result["timings"][name]["median_us"] for name in ("tsmla", other))
            label = f"{requests} x {q_len} queries, {keys} keys ({lengths}), {heads} heads"
            rows.setdefault(label, []).append(f"{default:.1f} / {changed:.1f} ({changed / default:.2f} x)")
    head = ["`tsmla_decode`, back to back, cold L2", f"bf16, us: default / {other}", "e4m3"]
    return f"{_table(head, ([label, *cells] for label, cells in rows.items()))}\n\n{_certificate(record)}"


def _engines(records: Sequence[dict[str, Any]]) -> str:
    table = _table(engine_tables.HEAD, (row for record in records for row in engine_tables.rows(record)))
    return "\n".join([table, "", *(f"- {_certificate(record)}" for record in records)])


def _host_times(record: dict[str, Any]) -> str:
    table = _table(engine_tables.HOST_HEAD, engine_tables.host_rows(record))
    return f"{table}\n\n{_certificate(record)}"


def _pack(record: dict[str, Any]) -> str:
    rows = []
    for result in record["results"]:
        ours, theirs = result["timings"]["tsmla"], result["timings"]["torch"]
        if not ours["graph"]:
            continue
        rate = result["bytes"] / ours["median_us"] / 1e3
        rows.append([
            f"{result['tokens']} tokens, {result['heads']} heads",
            f"{ours['median_us']:.1f}",
            f"{rate:.0f} ({rate / record['ceilings']['copy_gb_s']:.0%} of a large copy)",
            f"{theirs['median_us'] / ours['median_us']:.1f}x",
        ])  # fmt: skip
    head = ["`mla_kv_pack_quantize_fp8`, bf16 to e4m3, CUDA graph, cold L2", "us", "GB/s", "faster than torch"]
    return f"{_table(head, rows)}\n\n{_certificate(record)}"


def _cold_start(title: str, record: dict[str, Any]) -> str:
    stages = ("import_ms", "tvm_ffi_ms", "load_ms", "first_ms", "total_ms", "call_us")
    rows = []
    for result in record["results"]:
        if result.get("runs"):
            medians = [statistics.median(run[stage] for run in result["runs"]) for stage in stages]
            rows.append([f"{result['family']}, {result['step']}", *(f"{value:.1f}" for value in medians)])
    head = [title, "import tsmla", "import tvm_ffi", "load", "first", "sum, ms", "us/call"]
    return f"{_table(head, rows)}\n\n{_certificate(record)}"


def _certificate(record: dict[str, Any]) -> str:
    born = record["certificate"]
    where = f"{born['device']}, driver {born['driver']}, torch {born['torch']}"
    command = born["command"].split(" --commit")[0].split(" --results")[0]
    return f"{where}, {born['date'][:10]}, commit {born['commit'][:7]}: `{command}`."


def _peers(names: Iterable[str]) -> str:
    known = [(name, *PEERS[name]) for name in names if name in PEERS]
    said = "".join(f" {name} is {what}{whose and f' of {whose}'}." for name, what, whose in known)
    return f"{said} *Ratio*: our time over that of the fastest of them, launched in turn with ours." if said else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
