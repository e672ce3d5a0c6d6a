"""Host time of vLLM's MLA backends in each call that a layer makes: forward_mqa (decode) and forward_mha (prefill).

    python -m benchmarks engine-host-time FLASH_ATTN_MLA TSMLA [--requests 4] [--prompt 512] [--new 64]

No CUDA graphs, and short contexts, so that the GPU is done before the host. Engines run one after the other; with
--cache-gib they start together.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import runner

from . import model
from .engine import EngineError, start_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    model.add_arguments(parser)
    parser.add_argument("--requests", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens generated from each (%(default)s)")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's, for each engine (%(default)s)")
    parser.set_defaults(graphs="NONE", layers=6)


def run(options: argparse.Namespace) -> None:
    given = [options.prompt] * options.requests, options.new
    results = {}
    for engine in start_all(options.backends, options.memory, model.forwarded(options), options.patience):
        if isinstance(engine, EngineError):
            raise engine
        engine.host_times(*given, 0)
        results[str(engine.backend)] = engine.host_times(*given, 1)
        engine.close()
    rows = [
        (name, method, len(times), min(times), statistics.median(times))
        for name, methods in results.items()
        for method, times in methods.items()
        if times
    ]
    print(runner.table(("backend", "method", "calls", "min us", "median us"), rows))
    record = {
        "certificate": runner.certificate(options.commit),
        "options": model.forwarded(options),
        "case": f"{options.requests}x{options.prompt}+{options.new}",
        "results": results,
    }
    print(runner.write_record(options.results, f"vllm-host-time-{model.label(options)}", record))
