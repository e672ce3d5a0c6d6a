"""Tokens and log-probabilities of vLLM's MLA backends on one model, against the first backend's.

    python -m benchmarks engine-tokens FLASH_ATTN_MLA TSMLA FLASHMLA [--kv fp8] [--batched-tokens 2048]
    python -m benchmarks engine-tokens FLASH_ATTN_MLA TSMLA --speculate ngram_gpu:3 --new 200
    python -m benchmarks engine-tokens FLASHMLA_SPARSE TSMLA --sparse [--kv fp8_ds_mla]
    python -m benchmarks engine-tokens TSMLA TSMLA,tensor_parallel_size=2,decode_context_parallel_size=2 --cache-gib 4

Greedy generation from prompts of 1 to 20,000 tokens. Rounding differs between backends, so that tokens may part where
two are nearly as probable: compare with how vLLM's own backends part from each other. Log-probabilities are compared
up to there. A backend on several GPUs is also compared with itself on one, where that is named in front of it.

Backends run one after the other, each with the GPU for itself; with --cache-gib they start together. One that fails is
told of, and left out.

With --alone, every backend is also compared with itself, each prompt alone in its batch: what VLLM_BATCH_INVARIANT
promises to be the same, bit for bit, as long as prompts are not cut into other chunks.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from typing import Any

from benchmarks import runner

from . import model
from .engine import Engine, EngineError, start_all

LENGTHS = [17, 700, 3000, 12000, 64, 65, 1, 20000]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    model.add_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of prompts (%(default)s)")
    parser.add_argument("--new", type=int, default=48, help="tokens generated from each (%(default)s)")
    parser.add_argument("--memory", type=float, default=0.6, help="share of the GPU's (%(default)s)")
    parser.add_argument("--alone", action="store_true", help="generate from each prompt alone, too")
    parser.add_argument("--same", type=int, help="exit status 1 when fewer tokens in all are alike")


def run(options: argparse.Namespace) -> None:
    told: dict[str, list[dict[str, list]]] = {}
    results: dict[str, list[dict[str, Any]]] = {}
    started: dict[str, float] = {}
    failed: dict[str, str] = {}
    record = {
        "certificate": runner.certificate(options.commit),
        "options": model.forwarded(options),
        "lengths": options.lengths,
        "start_seconds": started,
        "failed": failed,
        "results": results,
    }
    engines = start_all(options.backends, options.memory, model.forwarded(options), options.patience)
    for backend, engine in zip(options.backends, engines, strict=True):
        try:
            if isinstance(engine, EngineError):
                raise engine
            told |= _tokens(engine, options)
            started[str(backend)] = engine.start_seconds
        except EngineError as error:
            failed[str(backend)] = str(error)
            print(error, flush=True)
        for name, against in _pairs(backend, told):
            results[f"{name} against {against}"] = _compared(told, name, against, options)
        path = runner.write_record(options.results, f"vllm-tokens-{model.label(options)}", record)
    print(path)
    short = options.same is not None and any(sum(r["alike"] for r in rows) < options.same for rows in results.values())
    if failed or short:
        raise SystemExit(1)


def _pairs(backend: model.Backend, told: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield which tokens of a backend are compared, and with which, of those that were told."""
    name = str(backend)
    if name not in told:
        return
    for against in dict.fromkeys((next(iter(told)), str(backend.on_one_gpu()))):
        if against in told and against != name:
            yield name, against
    if (alone := f"{name} alone") in told:
        yield alone, name


def _compared(
    told: dict[str, list[dict[str, list]]], name: str, against: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = compared(told[against], told[name])
    alike, total = sum(row["alike"] for row in rows), options.new * len(options.lengths)
    print(f"{name} against {against}: {alike} of {total} tokens alike")
    header = ("prompt", "alike", "log-probability within")
    shown = [(n, r["alike"], f"{r['within']:.1e}") for n, r in zip(options.lengths, rows, strict=True)]
    print(runner.table(header, shown), flush=True)
    return rows


def compared(theirs: list[dict[str, list]], mine: list[dict[str, list]]) -> list[dict[str, Any]]:
    """Return, for each prompt, how many first tokens are alike, and how far their log-probabilities are apart."""
    rows = []
    for their, own in zip(theirs, mine, strict=True):
        pairs = zip(their["tokens"], own["tokens"], strict=True)
        alike = next((i for i, (x, y) in enumerate(pairs) if x != y), len(own["tokens"]))
        both = zip(their["logprobs"][:alike], own["logprobs"][:alike], strict=True)
        rows.append({"alike": alike, "within": max((abs(x - y) for x, y in both), default=0.0)})
    return rows


def _tokens(engine: Engine, options: argparse.Namespace) -> dict[str, list[dict[str, list]]]:
    """Return what the backend generates, and under a second name what it generates from each prompt alone."""
    try:
        name = str(engine.backend)
        told = {name: engine.tokens(options.lengths, options.new, 0)}
        if options.alone:
            told[f"{name} alone"] = engine.tokens(options.lengths, options.new, 0, together=False)
        if options.speculate:
            drafted, accepted = engine.drafted()
            print(f"{name}: {accepted} of {drafted} drafted tokens accepted", flush=True)
        return told
    finally:
        engine.close()
