"""The README's performance section, from the newest records in benchmarks/results.

    python -m benchmarks.report
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PEERS = {
    "flash_attn_4": "flash-attn-4 4.0.0b36",
    "flash_mla": "FlashMLA 9241ae3 (attention and combine, without the kernel that plans them)",
}
"""Other implementations in the records, by the names given to --against."""


def performance_section() -> str:
    """Markdown: one table per operator and of cold start, each with the birth certificate of its numbers, and charts of
    the decode."""
    prefills = [_prefill(dtype, _newest(f"prefill-{dtype}")) for dtype in ("bf16", "e4m3")]
    return "\n\n".join([*prefills, *_decodes(), _pack(_newest("pack")), *_cold_starts()])


def _newest(name: str) -> dict[str, Any]:
    return json.loads(max(RESULTS.glob(f"{name}-*.json"), key=lambda path: path.stem[-15:]).read_text())


def _prefill(dtype: str, record: dict[str, Any]) -> str:
    """Both regimes of each shape, in TFLOP/s, next to whatever ran in the same process."""
    shapes: dict[str, list[str]] = {}
    names = list(record["results"][0]["timings"])
    for result in record["results"]:
        sequences, queries, keys, causal = result["shape"]
        label = f"{sequences} x {queries} queries, {keys} keys, {'causal' if causal else 'full'}"
        rates = [f"{result['tflop'] / result['timings'][name]['median_us'] * 1e6:.0f}" for name in names]
        shapes.setdefault(label, []).append(" / ".join(rates))
    who = " / ".join(names)
    table = _table(
        [f"`tsmla_prefill`, {dtype}, (192, 128), 128 heads", f"isolated, TFLOP/s: {who}", f"back to back: {who}"],
        ([label, *cells] for label, cells in shapes.items()),
    )
    return f"{table}\n\n{_certificate(record)}{_peers(names)}"


def _decodes() -> list[str]:
    """The newest decode record, if there is one: a row per shape and dtype, both regimes of all candidates; charts."""
    if not any(RESULTS.glob("decode-*.json")):
        return []
    record = _newest("decode")
    names = list(dict.fromkeys(name for result in record["results"] for name in result["timings"]))
    rows: dict[str, list[str]] = {}
    for result in record["results"]:
        requests, q_len, keys, heads, lengths = result["shape"]
        label = f"{requests} x {q_len} queries, {keys} keys ({lengths}), {heads} heads, {result['dtype']}"
        micros = {name: timing["median_us"] for name, timing in result["timings"].items()}
        times = " / ".join(f"{micros[name]:.1f}" if name in micros else "-" for name in names)
        ours = micros["tsmla"]
        rates = f"{result['bytes'] / ours * 1e-3:.0f}, {result['tflop'] / ours * 1e6:.0f}"
        rows.setdefault(label, [f"{result['host_us']:.1f}"]).append(f"{times} ({rates})")
    who = " / ".join(names)
    head = [
        "`tsmla_decode`, CUDA graph, cold L2",
        "host us/call",
        f"isolated, us: {who} (ours: GB/s, TFLOP/s)",
        "back to back",
    ]
    read = record["ceilings"]["read_gb_s"]
    table = _table(head, ([label, *cells] for label, cells in rows.items()))
    born = f"{_certificate(record)} A large read reached {read:.0f} GB/s in the same run.{_peers(names)}"
    return [f"{table}\n\n{born}", *_decode_charts(record, names)]


def _decode_charts(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    """bf16, lengths that do not vary: bandwidth where memory bounds it, arithmetic where that does."""
    kinds = (
        (16, "bytes", 1e-3, "GB/s", "read_gb_s", "a large read"),
        (128, "tflop", 1e6, "TFLOP/s", "matmul_bf16_tflop_s", "a large matmul"),
    )
    charts = []
    for wanted, amount, per_us, unit, highest, what in kinds:
        ceiling = record["ceilings"][highest]
        labels, series = [], {name: [] for name in names}
        for result in record["results"]:
            requests, q_len, keys, heads, lengths = result["shape"]
            regime = result["timings"]["tsmla"]["regime"]
            if (result["dtype"], heads, lengths, regime) == ("bf16", wanted, "fixed", "isolated") and requests > 1:
                labels.append(f'"{requests} x {q_len} x {keys}"')
                for name in names:
                    series[name].append(f"{result[amount] / result['timings'][name]['median_us'] * per_us:.0f}")
        lines = [values for name, values in series.items() if name != "tsmla"] + [[f"{ceiling:.0f}"] * len(labels)]
        body = [
            f'    title "tsmla_decode, bf16, {wanted} heads, isolated: requests x queries x keys"',
            f"    x-axis [{', '.join(labels)}]",
            f'    y-axis "{unit}" 0 --> {ceiling * 1.05:.0f}',
            f"    bar [{', '.join(series['tsmla'])}]",
            *(f"    line [{', '.join(values)}]" for values in lines),
        ]
        others = ", ".join([*(name for name in names if name != "tsmla"), f"{what} ({ceiling:.0f} {unit})"])
        chart = "\n".join(["```mermaid", "xychart-beta", *body, "```"])
        charts.append(f"{chart}\n\nBars: tsmla. Lines, all measured in the same run: {others}.")
    return charts


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


def _cold_starts() -> list[str]:
    """Without and with cuda.bindings imported beforehand: torch 2.13 does so itself, for torch 2.11 TVM-FFI does."""
    heads = {
        "cold_start": "cold start after torch and CUDA",
        "cold_start_decode": "the same for decode",
        "cold_start_bindings_up": "pack and prefill after cuda.bindings",
    }
    return [_cold_start(head, _newest(name)) for name, head in heads.items()]


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
    return f"{where}, {born['date'][:10]}, commit {born['commit']}: `{command}`."


def _peers(names: Iterable[str]) -> str:
    return "".join(f" {name} is {PEERS[name]}, launched in turn with ours." for name in names if name in PEERS)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    print(performance_section())
