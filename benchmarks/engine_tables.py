"""The tables of real engines in docs/performance.md, from the records of `benchmarks.engines`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from . import published
from .engines.model import OURS
from .engines.throughput import attention_share

HEAD = (
    "cache", "heads, layers", "requests x prompt + new", "backend", "new tokens/s", "beside", "attention of GPU time",
)  # fmt: skip
HOST_HEAD = "backend", "method of each layer", "us of the host: least", "median", "calls"


def host_rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each backend and method, from a record of `benchmarks.engines.host_time`."""
    for name, methods in record["results"].items():
        for method, times in methods.items():
            if times:
                shown = f"{min(times):.0f}", f"{statistics.median(times):.0f}", f"{len(times)}"
                yield [_shown(name), f"`{method}`", *shown]


def _shown(name: str) -> str:
    """A backend as the tables call it."""
    return name.replace(OURS, "tsmla", 1)


def records() -> list[dict[str, Any]]:
    return published.all_of("vllm-throughput")


def rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each case and backend, the first of which the others are compared with."""
    options = record["options"]
    for result in record["results"]:
        requests, _, rest = result["case"].partition("x")
        new = int(requests) * int(rest.partition("+")[2])
        first, *_ = result["seconds"]
        drafts = options.get("speculate")
        drafting = f", {drafts['method']} {drafts['num_speculative_tokens']}" if drafts else ""
        for name, seconds in result["seconds"].items():
            profile = result.get("profile", {}).get(name)
            yield [
                "bf16" if options["kv"] == "auto" else options["kv"],
                f"{options['heads']}, {options['layers']}",
                f"{requests} x {rest.replace('+', ' + ')}{drafting}",
                _shown(name).replace(",", ", "),
                f"{new / statistics.median(seconds):,.0f}",
                _beside(first, result["seconds"][first], name, seconds),
                f"{attention_share(profile):.0%}" if profile else "",
            ]


def _beside(first: str, theirs: list[float], name: str, ours: list[float]) -> str:
    """How often more than the first backend; unclear where a round of one reaches one of the other."""
    if name == first:
        return ""
    ratio = statistics.median(theirs) / statistics.median(ours)
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return f"{ratio:.2f} x {first}" if apart else f"rounds overlap ({ratio:.2f})"
