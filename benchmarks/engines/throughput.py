"""Throughput of vLLM's MLA backends on one model, or, with cases of one new token, the time to it: engines side by side
on one GPU, asked in turn.

    python -m benchmarks engine-throughput auto TSMLA FLASHMLA --heads 128 --case 64x4096+256 --case 16x16384+256
    python -m benchmarks engine-throughput FLASHMLA_SPARSE TSMLA --sparse --kv fp8_ds_mla --case 64x4096+256
    python -m benchmarks engine-throughput FLASHMLA TSMLA --cached --case 8x65537+512 --profile 8x65537+64

The first backend is what others are compared with. A case is REQUESTSxPROMPT+NEW tokens. Every round asks each backend
once, in an order drawn anew, with the same prompts. Before a case's rounds each backend is given a quarter of its
requests, with --cached all of them: that is not counted. The record is written after every case. Backends share
--memory of the GPU equally: when their caches cannot hold a case, name fewer.

--cached: all rounds have the same prompts, which vLLM keeps, so that they measure decode. A prompt of one token more
than fills pages leaves one to compute. --profile: says where GPU time goes in one more run of a case.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import runner

from . import model
from .engine import Engine, EngineError, start_all

_ATTENTION = ("mla", "fmha", "flash", "attn", "attention", "tsmla", "concat", "merge", "gather", "pack")
"""Parts of names of kernels for attention, and of copies that only attention needs."""


class Case:
    def __init__(self, text: str):
        requests, _, rest = text.partition("x")
        prompt, _, new = rest.partition("+")
        try:
            self.requests, self.prompt, self.new = int(requests), int(prompt), int(new)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: expected REQUESTSxPROMPT+NEW, such as 64x4096+256") from None

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.new}"

    def given(self, seed: int, requests: int | None = None) -> tuple[list[int], int, int]:
        return [self.prompt] * (requests or self.requests), self.new, seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    model.add_arguments(parser)
    parser.add_argument("--case", type=Case, action="append", required=True, help="REQUESTSxPROMPT+NEW; repeatable")
    parser.add_argument("--rounds", type=int, default=4, help="counted ones (%(default)s)")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's, for all engines (%(default)s)")
    parser.add_argument("--profile", type=Case, action="append", default=[], help="REQUESTSxPROMPT+NEW; repeatable")


def _name(options: argparse.Namespace) -> str:
    """Return what a record is called, by which a newer one supersedes it: the cache is in it that all backends have."""
    kind = "first-token" if all(case.new == 1 for case in options.case) else "throughput"
    caches = {backend.arguments.get("kv_cache_dtype", options.kv) for backend in options.backends}
    kv = caches.pop() if len(caches) == 1 else options.kv
    label = model.label(argparse.Namespace(**{**vars(options), "kv": kv}))
    return f"vllm-{kind}-{label}{'-cached' * options.cached}"


def run(options: argparse.Namespace) -> None:
    each = options.memory / len(options.backends)
    engines = []
    for engine in start_all(options.backends, each, model.forwarded(options), options.patience):
        if isinstance(engine, EngineError):
            raise engine
        engines.append(engine)
    name = _name(options)
    results: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    record = {
        "certificate": runner.certificate(options.commit),
        "model": model.shape(model.forwarded(options)),
        "options": model.forwarded(options),
        "backends": [str(backend) for backend in options.backends],
        "start_seconds": {str(engine.backend): engine.start_seconds for engine in engines},
        "cache_tokens": {str(engine.backend): engine.cache_tokens for engine in engines},
        "results": results,
        "profiles": profiles,
    }
    for case in options.case:
        results.append(_case(engines, case, options.rounds, options.cached))
        path = runner.write_record(options.results, name, record)
    for case in options.profile:
        profiles[str(case)] = {str(engine.backend): engine.profile(*case.given(seed=0)) for engine in engines}
        for backend, kernels in profiles[str(case)].items():
            _show(f"{case}, {backend}", kernels)
        path = runner.write_record(options.results, name, record)
    for engine in engines:
        engine.close()
    print(path)


def _case(engines: list[Engine], case: Case, rounds: int, cached: bool) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {str(engine.backend): [] for engine in engines}
    for engine in engines:
        engine.generate(*case.given(seed=0, requests=case.requests if cached else -(-case.requests // 4)))
    for turn in range(1, rounds + 1):
        for engine in random.sample(engines, len(engines)):
            seconds[str(engine.backend)].append(engine.generate(*case.given(seed=0 if cached else turn)))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = medians[str(engines[0].backend)]
    rows = [
        (name, case.requests * case.new / median, first / median, min(seconds[name]), median, max(seconds[name]))
        for name, median in medians.items()
    ]
    header = (str(case), "new tokens/s", f"x {engines[0].backend}", "min s", "median s", "max s")
    print(runner.table(header, rows), flush=True)
    return {"case": str(case), "seconds": seconds}


def attention_share(kernels: Sequence[tuple[str, float, int]]) -> float:
    """Return what share of GPU time is attention with the copies around it, by the names of kernels."""
    total = sum(ms for _, ms, _ in kernels)
    return sum(ms for kernel, ms, _ in kernels if any(word in kernel.lower() for word in _ATTENTION)) / total


def _show(name: str, kernels: Sequence[tuple[str, float, int]]) -> None:
    """Print the longest kernels of a run, and what share of GPU time is attention."""
    total, share = sum(ms for _, ms, _ in kernels), attention_share(kernels)
    print(f"{name}: {total:.0f} ms of GPU time, {share:.0%} in kernels named for attention")
    print(runner.table(("ms", "calls", "kernel"), [(ms, calls, kernel[:90]) for kernel, ms, calls in kernels[:15]]))
