"""Tokens and throughput of SGLang's MLA backends on one model: processes side by side on one GPU, asked in turn.

    python -m benchmarks engine-sglang fa3 flashmla tsmla --heads 16 --case 16x4096+128 --case 64x1024+128

It runs SGLang's model runner as SGLang's own benchmark of one batch does (0.5.17, sglang.benchmark.one_batch): its
attention backends, memory pools, CUDA graphs of decodes and sampling, without its scheduler. The first backend is what
others are compared with. Tokens are greedy, from prompts of which what is behind --cut tokens comes in a second pass,
over a context in the cache. A case is REQUESTSxPROMPT+NEW tokens: all prompts in one pass, then steps of all requests.
Rounds ask each backend once, in an order drawn anew, with the same prompts; the first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import runner

from . import model, weights
from .engine import Begun, Engine, EngineError
from .throughput import Case
from .tokens import compared

LENGTHS = [17, 700, 3000, 64, 65, 1500, 2, 6000]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    parser.add_argument("backends", nargs="+", type=model.Backend.parse, help="names as --attention-backend takes them")
    parser.add_argument("--kv", default="auto", help="SGLang's --kv-cache-dtype (%(default)s)")
    parser.add_argument("--heads", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--max-len", type=int, default=16384, help="longest context, in tokens (%(default)s)")
    parser.add_argument("--max-seqs", type=int, default=64, help="most requests of a batch (%(default)s)")
    parser.add_argument("--cache-tokens", type=int, default=81920, help="keys of each cache (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of prompts (%(default)s)")
    parser.add_argument("--cut", type=int, default=900, help="tokens of a prompt's first pass (%(default)s)")
    parser.add_argument("--new", type=int, default=48, help="tokens generated from each (%(default)s)")
    parser.add_argument("--case", type=Case, action="append", default=[], help="REQUESTSxPROMPT+NEW; repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="counted ones (%(default)s)")
    parser.add_argument("--patience", type=float, default=300, help="seconds that an answer may take (%(default)s)")


class _Process(Engine):
    """A backend's model runner in a process of its own."""

    @staticmethod
    def begin(backend: model.Backend, memory: float, options: dict[str, Any]) -> Begun:
        """Load SGLang's model runner in this process."""
        batches, seconds = _start(backend.name, options)
        return seconds, batches.runner.max_total_num_tokens, {"tokens": batches.tokens, "batch": batches.batch}

    def batch(self, case: Case, seed: int) -> tuple[float, float]:
        """Return the seconds of a case's prompts, and those of its steps."""
        return self._ask("batch", case.requests, case.prompt, case.new, seed)

    def cut_tokens(self, lengths: list[int], cut: int, new: int) -> list[dict[str, list]]:
        """Return the tokens of each prompt and their log-probabilities."""
        return self._ask("tokens", lengths, cut, new)


def run(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in ("kv", "heads", "layers", "max_len", "max_seqs", "cache_tokens")}
    given |= {"dims": 192, "sparse": False, "speculate": None}
    results: dict[str, Any] = {}
    seconds: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    engines = []
    for engine in [_Process(backend, 0.0, given, options.patience) for backend in options.backends]:
        try:
            engine.started()
            engines.append(engine)
        except EngineError as error:
            failed[str(engine.backend)] = str(error)
            print(error, flush=True)
            engine.close(1)
    record = {
        "certificate": runner.certificate(options.commit),
        "model": model.shape(given),
        "options": given,
        "lengths": options.lengths,
        "start_seconds": {str(engine.backend): engine.start_seconds for engine in engines},
        "failed": failed,
        "tokens": results,
        "results": seconds,
    }
    told = {str(engine.backend): engine.cut_tokens(options.lengths, options.cut, options.new) for engine in engines}
    first = next(iter(told), "")
    for name in list(told)[1:]:
        results[f"{name} against {first}"] = rows = compared(told[first], told[name])
        alike, total = sum(row["alike"] for row in rows), options.new * len(options.lengths)
        print(f"{name} against {first}: {alike} of {total} tokens alike", flush=True)
        shown = [(n, r["alike"], f"{r['within']:.1e}") for n, r in zip(options.lengths, rows, strict=True)]
        print(runner.table(("prompt", "alike", "log-probability within"), shown), flush=True)
    name = f"sglang-{options.kv}-{options.heads}-heads"
    path = runner.write_record(options.results, name, record)
    for case in options.case:
        seconds.append({"case": str(case), "seconds": _taken(engines, case, options.rounds)})
        print(runner.table(*_table(case, seconds[-1]["seconds"])), flush=True)
        path = runner.write_record(options.results, name, record)
    for engine in engines:
        engine.close(5)
    print(path)
    if failed:
        raise SystemExit(1)


def _taken(engines: Sequence[_Process], case: Case, rounds: int) -> dict[str, list[tuple[float, float]]]:
    taken: dict[str, list[tuple[float, float]]] = {str(engine.backend): [] for engine in engines}
    for turn in range(rounds + 1):
        for engine in random.sample(engines, len(engines)):
            times = engine.batch(case, turn)
            if turn:
                taken[str(engine.backend)].append(times)
    return taken


def _table(case: Case, taken: dict[str, list[tuple[float, float]]]) -> tuple[Sequence[str], list[Sequence[object]]]:
    rows: list[Sequence[object]] = []
    for name, times in taken.items():
        prompts, steps = (statistics.median(part) for part in zip(*times, strict=True))
        rows.append((name, case.requests * case.new / (prompts + steps), prompts, steps))
    return (str(case), "new tokens/s", "prompts s", "steps s"), rows


def _start(backend: str, options: dict[str, Any]) -> tuple[_Batches, float]:
    """Load the model in this process; return its batches, and the seconds without imports."""
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs
    from tsmla.integrations import sglang as plugin

    plugin.register()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model.shape(options)))
        arguments = ServerArgs(
            model_path=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            kv_cache_dtype=options["kv"],
            attention_backend=backend,
            page_size=plugin.PAGE,
            context_length=options["max_len"],
            max_running_requests=options["max_seqs"],
            max_total_tokens=options["cache_tokens"],
            mem_fraction_static=0.6,
            chunked_prefill_size=-1,
            cuda_graph_max_bs_decode=options["max_seqs"],
            cuda_graph_backend_prefill="disabled",
            disable_radix_cache=True,
            disable_overlap_schedule=True,
            sampling_backend="pytorch",
            random_seed=0,
            log_level="warning",
        )
        one_batch._set_envs_and_config(arguments)
        one_batch.initialize_moe_config(arguments)
        one_batch.get_tokenizer = lambda *_, **__: None
        loads = one_batch.ModelRunner.load_model

        def load_model(runner: Any, *given: Any, **named: Any) -> Any:
            result = loads(runner, *given, **named)
            first = next(runner.model.parameters())
            runner.model.load_weights(weights.drawn(model.shape(options), first.dtype, first.device))
            return result

        one_batch.ModelRunner.load_model = load_model
        loaded, _ = one_batch.load_model(arguments, PortArgs.init_new(arguments), 0, 0)
    return _Batches(loaded), time.perf_counter() - started


class _Batches:
    """Batches of a model runner, one at a time."""

    def __init__(self, loaded: Any) -> None:
        self._loaded, self.runner = loaded, loaded.torch_runner

    def tokens(self, lengths: list[int], cut: int, new: int) -> list[dict[str, list]]:
        given = [prompt["prompt_token_ids"] for prompt in model.prompts(lengths, 0)]
        found: list[dict[str, list]] = [{} for _ in given]
        for long in (False, True):
            chosen = [index for index, ids in enumerate(given) if (len(ids) > cut) == long]
            if not chosen:
                continue
            self._loaded.clear()
            requests = [_request(index, given[index][:cut]) for index in chosen]
            token, logits, batch = self._loaded.extend(requests)
            if long:
                slots = self.runner.req_to_token_pool.req_to_token
                for request, index in zip(requests, chosen, strict=True):
                    request.full_untruncated_fill_ids.extend(given[index][cut:])
                    request.prefix_indices = slots[request.req_pool_idx, :cut].to(request.prefix_indices.dtype)
                    request.logprob_start_len = -1
                    request.set_extend_range(cut, len(given[index]))
                token, logits, batch = self._loaded.extend(requests)
            for index, row in zip(chosen, self._told(token, logits, batch, new), strict=True):
                found[index] = row
        return found

    def _told(self, token: Any, logits: Any, batch: Any, new: int) -> list[dict[str, list]]:
        told: list[dict[str, list]] = [{"tokens": [], "logprobs": []} for _ in token.tolist()]
        for step in range(new):
            if step:
                token, logits = self._loaded.decode(token, batch)
            most = logits.float().log_softmax(-1).gather(1, token.long()[:, None])[:, 0]
            for row, own, logprob in zip(told, token.tolist(), most.tolist(), strict=True):
                row["tokens"].append(own)
                row["logprobs"].append(logprob)
        return told

    def batch(self, requests: int, prompt: int, new: int, seed: int) -> tuple[float, float]:
        self._loaded.clear()
        given = [_request(i, p["prompt_token_ids"]) for i, p in enumerate(model.prompts([prompt] * requests, seed))]
        self._loaded.synchronize()
        begun = time.perf_counter()
        token, _, batch = self._loaded.extend(given)
        self._loaded.synchronize()
        first = time.perf_counter()
        for _ in range(new - 1):
            token, _ = self._loaded.decode(token, batch)
        self._loaded.synchronize()
        return first - begun, time.perf_counter() - first


def _request(number: int, ids: list[int]) -> Any:
    """Make a request of SGLang's whose prompt is computed whole."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", ids),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=4096),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    request.set_extend_range(0, len(ids))
    return request
