"""Host time of vLLM's MLA backends in each call that a layer makes: forward_mqa (decode) and forward_mha (prefill).

    python -m benchmarks engine-host-time FLASH_ATTN_MLA TSMLA [--requests 4] [--prompt 512] [--new 64]

No CUDA graphs, and short contexts, so that the GPU is done before the host. Engines run one after the other.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import runner

from . import model
from .engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    model.add_arguments(parser)
    parser.add_argument("--requests", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--new", type=int, default=64, help="tokens generated from each (%(default)s)")
    parser.set_defaults(graphs="NONE", layers=6)


def run(options: argparse.Namespace) -> None:
    given = [options.prompt] * options.requests, options.new
    results = {}
    for backend in options.backends:
        engine = Engine(backend, 0.5, model.forwarded(options), options.patience).started()
        engine.host_times(*given, 0)
        results[str(backend)] = engine.host_times(*given, 1)
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
