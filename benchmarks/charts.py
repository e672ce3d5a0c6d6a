"""The charts of docs/measured/performance.md: rates of tsmla and others beside what the GPU reached at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import published


def prefill(record: dict[str, Any]) -> str:
    """Return the chart of causal shapes back to back, which arithmetic bounds."""
    chosen = [result for result in published.results(record, "back to back") if result["shape"][3]]
    labels = [" x ".join(_short(number) for number in result["shape"][:3]) for result in chosen]
    title = "tsmla_prefill, bf16, 128 heads, causal: sequences x queries x keys"
    return _chart(title, labels, chosen, published.names(record), _TFLOP_S, record["ceilings"])


def decode(record: dict[str, Any]) -> str:
    """Return the chart of bf16 decodes with 16 heads and lengths that do not vary, which memory bounds."""
    chosen = [
        result
        for result in published.results(record, "isolated", dtype="bf16")
        if result["shape"][0] > 1 and result["shape"][3:] == [16, "fixed"]
    ]
    labels = [" x ".join(str(number) for number in result["shape"][:3]) for result in chosen]
    title = "tsmla_decode, bf16, 16 heads: requests x queries x keys"
    return _chart(title, labels, chosen, published.names(record), _GB_S, record["ceilings"])


_GB_S = ("bytes", 1e-3, "GB/s", "read_gb_s", "a large read")
_TFLOP_S = ("tflop", 1e6, "TFLOP/s", "matmul_bf16_tflop_s", "a large matmul")
"""What a chart shows: the amount of work, its factor per microsecond, the unit, the ceiling and what that was."""


def _chart(
    title: str,
    labels: Sequence[str],
    results: Sequence[dict[str, Any]],
    names: Sequence[str],
    quantity: tuple[str, float, str, str, str],
    ceilings: dict[str, float],
) -> str:
    amount, per_us, unit, highest, what = quantity
    others = [name for name in names if name != "tsmla"]
    chosen = [lambda timings: timings["tsmla"], *([published.best_peer] if others else [])]
    series = [
        [f"{result[amount] / choose(result['timings'])['median_us'] * per_us:.0f}" for result in results]
        for choose in chosen
    ]
    ceiling = ceilings[highest]
    top = 1.05 * max(ceiling, *(float(value) for values in series for value in values))
    quoted = ", ".join(f'"{label}"' for label in labels)
    body = [
        f'    title "{title}"',
        f"    x-axis [{quoted}]",
        f'    y-axis "{unit}" 0 --> {top:.0f}',
        f"    bar [{', '.join(series[0])}]",
        *(f"    line [{', '.join(values)}]" for values in series[1:]),
        f"    line [{', '.join([f'{ceiling:.0f}'] * len(labels))}]",
    ]
    chart = "\n".join(["```mermaid", "xychart-beta", *body, "```"])
    fastest = ["the fastest of " + ", ".join(others) if len(others) > 1 else others[0]] if others else []
    lines = ", ".join([*fastest, f"{what} ({ceiling:.0f} {unit})"])
    regime = results[0]["timings"]["tsmla"]["regime"]
    return f"{chart}\nBars: tsmla, {regime}. Lines, all measured in the same run: {lines}."


def _short(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)
