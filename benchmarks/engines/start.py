"""Start of vLLM with each MLA backend: from a started process to an engine that may be asked, and to its first token.

    python -m benchmarks engine-start FLASH_ATTN_MLA TSMLA [--rounds 2] [--prompt 64]

Each round starts each backend twice, in an order drawn anew: *cold*, with empty caches of compiled kernels, and then
*warm*, with what that left there. Engines run one after the other. The first of a machine also reads what it imports
from disk: start one before.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks import runner

from . import model
from .engine import Engine

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "TSMLA_CACHE_DIR")
"""Variables that name folders of compiled kernels."""
STATES = ("cold", "warm")
STAGES = ("up", "vllm", "first", "second")
"""Seconds from the start of a process until its engine may be asked, of which vLLM's own start, without its import;
then of the first prompt and its token, and of a second one of as many tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    model.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's (%(default)s)")


def run(options: argparse.Namespace) -> None:
    results: dict[str, dict[str, list[dict[str, float]]]] = {
        str(backend): {state: [] for state in STATES} for backend in options.backends
    }
    record = {
        "certificate": runner.certificate(options.commit),
        "options": model.forwarded(options),
        "prompt": options.prompt,
        "results": results,
    }
    for _ in range(options.rounds):
        for backend in random.sample(options.backends, len(options.backends)):
            with tempfile.TemporaryDirectory() as folder:
                for state in STATES:
                    start = _started(cached_in(backend, Path(folder)), options)
                    print(backend, state, *(f"{stage} {seconds:.1f} s" for stage, seconds in start.items()), flush=True)
                    results[str(backend)][state].append(start)
                    path = runner.write_record(options.results, f"vllm-start-{model.label(options)}", record)
    rows = [
        (name, state, len(starts), *(statistics.median(start[stage] for start in starts) for stage in STAGES))
        for name, states in results.items()
        for state, starts in states.items()
    ]
    print(runner.table(("backend", "caches", "starts", *(f"{stage} s" for stage in STAGES)), rows))
    print(path)


def cached_in(backend: model.Backend, folder: Path) -> model.Backend:
    """Return the backend whose process keeps compiled kernels in folders of `folder`."""
    named = tuple(f"{name}={folder / name.lower()}" for name in CACHES)
    return dataclasses.replace(backend, settings=(*backend.settings, *named))


def _started(backend: model.Backend, options: argparse.Namespace) -> dict[str, float]:
    """Start an engine, ask it twice, and end it."""
    begun = time.perf_counter()
    engine = Engine(backend, options.memory, model.forwarded(options), options.patience)
    try:
        vllm = engine.started().start_seconds
        up = time.perf_counter() - begun
        first, second = (engine.generate([options.prompt], 1, seed) for seed in (0, 1))
    finally:
        engine.close()
    return {"up": up, "vllm": vllm, "first": first, "second": second}
