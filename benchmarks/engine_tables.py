"""Rows of docs/measured/performance.md on real engines, from the records of `benchmarks.engines`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from . import published
from .engines.model import OURS


def records() -> list[dict[str, Any]]:
    return published.all_of("vllm-throughput")


def rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each case and backend of tsmla's, beside the first of the others."""
    options = record["options"]
    for result in record["results"]:
        requests, _, rest = result["case"].partition("x")
        new = int(requests) * int(rest.partition("+")[2])
        first, *_ = result["seconds"]
        drafts = options.get("speculate")
        choosing = ", chosen keys" if options.get("sparse") else ""
        drafting = f", {drafts['method']} {drafts['num_speculative_tokens']}" if drafts else ""
        for name, seconds in result["seconds"].items():
            if name.startswith(OURS):
                call = (
                    f"vLLM {requests} x {rest.replace('+', ' + ')}{choosing}{drafting}, {options['heads']} heads, "
                    f"{options['layers']} layers, {'bf16' if options['kv'] == 'auto' else options['kv']} cache"
                    + name.removeprefix(OURS).replace(",", ", ")
                )
                tokens = f"{new / statistics.median(seconds):,.0f} tokens/s"
                yield [call, "", tokens, *_beside(first, result["seconds"][first], seconds), ""]


def _beside(first: str, theirs: list[float], ours: list[float]) -> tuple[str, str]:
    """Return the other backend's time, and tsmla's over it; a tie where a round of one reaches one of the other."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return first, f"{ratio:.3f}" if apart else f"{ratio:.3f}, tie"
