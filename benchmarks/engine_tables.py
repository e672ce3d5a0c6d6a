"""Rows of docs/measured/performance.md on real engines, from the records of `benchmarks.engines`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from . import published
from .engines.model import OURS, Backend


def records() -> list[dict[str, Any]]:
    return [record for name in ("vllm-throughput", "vllm-first-token", "sglang") for record in published.all_of(name)]


def newest_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of records, of those that are about the same the one of the last record, in the first one's
    place."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        found |= {(row[0], row[3]): row for row in rows(record)}
    return list(found.values())


def rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each case and backend of tsmla's, beside the first backend, or the fastest with this one's
    arguments, such as how GPUs share work."""
    for given in record["results"]:
        result = given | {"seconds": {name: [*map(_whole, rounds)] for name, rounds in given["seconds"].items()}}
        first, *others = map(Backend.parse, result["seconds"])
        for backend in others:
            if _is_ours(backend):
                alike = [x for x in (first, *others) if not _is_ours(x) and x.arguments == backend.arguments]
                beside = min(alike or [first], key=lambda x: statistics.median(result["seconds"][str(x)]))
                yield _row(record["options"], result, beside, backend)


def _is_ours(backend: Backend) -> bool:
    """Whether a backend is tsmla's; SGLang's names are in lower case."""
    return backend.name.upper() == OURS


def _whole(seconds: float | list[float]) -> float:
    """Return the seconds of a round, of which SGLang's records have those of prompts and of steps apart."""
    return sum(seconds) if isinstance(seconds, list) else seconds


def _row(options: dict[str, Any], result: dict[str, Any], first: Backend, backend: Backend) -> list[str]:
    requests, _, rest = result["case"].partition("x")
    prompt, _, new = rest.partition("+")
    seconds = result["seconds"][str(backend)]
    drafts = options.get("speculate")
    engine = "vLLM" if backend.name == OURS else "SGLang"
    said = [
        f"{engine} {requests} x {prompt}, first token" if new == "1" else f"{engine} {requests} x {prompt} + {new}",
        "prompts cached" if options.get("cached") else "",
        "chosen keys" if options.get("sparse") else "",
        f"{drafts['method']} {drafts['num_speculative_tokens']}" if drafts else "",
        f"drafts by {backend.arguments['drafts']}" if "drafts" in backend.arguments else "",
        f"{options['heads']} heads" + (" of 256 columns" if options.get("dims") == 256 else ""),
        f"{options['layers']} layers",
        f"{cache_of(backend, options)} cache",
        f"{backend.gpus} GPUs" if backend.gpus > 1 else "",
        "which share contexts" if backend.arguments.get("decode_context_parallel_size", 1) > 1 else "",
        *(f"{name}={value}" for name, value in backend.environment.items()),
    ]
    tokens = f"{int(requests) * int(new) / statistics.median(seconds):,.0f} tokens/s"
    time, rate = (f"{statistics.median(seconds) * 1e3:,.0f} ms", "") if new == "1" else ("", tokens)
    cache = cache_of(first, options)
    alike = first.name != backend.name and cache == cache_of(backend, options)
    beside = first.name if alike else f"{first.name}, {cache} cache"
    return [", ".join(filter(None, said)), time, rate, beside, _ratio(result["seconds"][str(first)], seconds), ""]


def cache_of(backend: Backend, options: dict[str, Any]) -> str:
    """Return the dtype of a backend's cache, in words."""
    cache = backend.arguments.get("kv_cache_dtype", options["kv"])
    return "bf16" if cache == "auto" else cache


def _ratio(theirs: list[float], ours: list[float]) -> str:
    """Return tsmla's time over the other's; a tie where a round of one reaches one of the other."""
    ratio = statistics.median(ours) / statistics.median(theirs)
    apart = max(ours) < min(theirs) or max(theirs) < min(ours)
    return f"{ratio:.3f}" if apart else f"{ratio:.3f}, tie"
