"""An engine in a process of its own, which does what it is told, so that several can take turns on one GPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from . import model

_PATIENCE = 900.0
"""Seconds that an answer may take."""


class EngineError(SystemExit):
    """An engine did not start, or did not do what it was told."""


Begun = tuple[float, int, dict[str, Callable[..., Any]]]
"""Seconds that an engine took to start, keys that its cache holds, and what it may be asked, by name."""


class Engine:
    """A backend's engine: `start`ed, it may be asked.

    start_seconds: how long vLLM took to start, its import aside. cache_tokens: how many keys its cache holds, on all
    GPUs together.
    """

    start_seconds: float
    cache_tokens: int

    def __init__(self, backend: model.Backend, memory: float, options: dict[str, Any], patience: float = _PATIENCE):
        self.backend, self._patience = backend, patience
        context = multiprocessing.get_context("spawn")
        self._end, theirs = context.Pipe()
        given = backend, memory, options
        self._process = context.Process(target=_serve, args=(theirs, self.begin, *given), daemon=True)
        self._process.start()
        theirs.close()

    @staticmethod
    def begin(backend: model.Backend, memory: float, options: dict[str, Any]) -> Begun:
        """Start vLLM in this process."""
        llm, seconds = model.start(backend, memory, options)
        does: dict[str, Callable[..., Any]] = {
            "generate": _generate,
            "tokens": _tokens,
            "drafted": _drafted,
            "profile": _profile,
            "host_times": _host_times,
        }
        return seconds, _cache_tokens(llm), {name: functools.partial(do, llm) for name, do in does.items()}

    def started(self) -> Engine:
        """Wait until the engine may be asked."""
        self.start_seconds, self.cache_tokens = self._answer()
        print(f"{self.backend}: up after {self.start_seconds:.0f} s, {self.cache_tokens} keys fit", flush=True)
        return self

    def generate(self, lengths: list[int], new: int, seed: int) -> float:
        """Return the seconds for prompts of these lengths with `new` tokens each."""
        return self._ask("generate", lengths, new, seed)

    def tokens(self, lengths: list[int], new: int, seed: int, together: bool = True) -> list[dict[str, list]]:
        """Return the tokens of each prompt and their log-probabilities. together: generate for all prompts at once, or
        for each alone."""
        return self._ask("tokens", lengths, new, seed, together)

    def drafted(self) -> tuple[int, int]:
        """Return how many tokens a speculating engine has drafted so far, and how many of them were accepted."""
        return self._ask("drafted")

    def profile(self, lengths: list[int], new: int, seed: int) -> list[tuple[str, float, int]]:
        """Return (kernel, milliseconds, calls) of one `generate`, longest first."""
        return self._ask("profile", lengths, new, seed)

    def host_times(self, lengths: list[int], new: int, seed: int) -> dict[str, list[float]]:
        """Return host microseconds of each call of a backend's methods during one `generate`, by method."""
        return self._ask("host_times", lengths, new, seed)

    def close(self, seconds: float = 60.0) -> None:
        """Let the engine end, for so many seconds, or kill it."""
        with contextlib.suppress(OSError):
            self._end.send(None)
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()

    def _ask(self, *what: Any) -> Any:
        try:
            self._end.send(what)
        except OSError:
            raise EngineError(f"{self.backend}: the engine's process ended") from None
        return self._answer()

    def _answer(self) -> Any:
        if not self._end.poll(self._patience):
            raise EngineError(f"{self.backend}: no answer in {self._patience:.0f} s")
        try:
            fine, answer = self._end.recv()
        except (EOFError, OSError):
            raise EngineError(f"{self.backend}: the engine's process ended") from None
        if not fine:
            raise EngineError(f"{self.backend}: {answer}")
        return answer


def start_all(
    backends: Sequence[model.Backend], memory: float, options: dict[str, Any], patience: float
) -> Iterator[Engine | EngineError]:
    """Yield the engine of each backend once it is up, or why it did not come up.

    memory: the share of the GPU's that each has. Engines whose caches have a size (`cache_gib`) start at the same time,
    others one after the other, since each measures the GPU's memory.
    """
    engines = (Engine(backend, memory, options, patience) for backend in backends)
    for engine in list(engines) if options["cache_gib"] else engines:
        try:
            yield engine.started()
        except EngineError as error:
            engine.close(1)
            yield error


def _serve(
    end: Connection, begin: Callable[..., Begun], backend: model.Backend, memory: float, options: dict[str, Any]
) -> None:
    try:
        multiprocessing.current_process().daemon = False  # so that it may have processes of its own, one for each GPU
        os.environ.update(backend.environment)
        seconds, cache_tokens, does = begin(backend, memory, options)
        end.send((True, (seconds, cache_tokens)))
        while (asked := end.recv()) is not None:
            name, *given = asked
            end.send((True, does[name](*given)))
    except Exception:
        end.send((False, traceback.format_exc()))


def _cache_tokens(llm: Any) -> int:
    config = llm.llm_engine.vllm_config
    shards = config.parallel_config.decode_context_parallel_size
    return config.cache_config.num_gpu_blocks * config.cache_config.block_size * shards


def _generate(llm: Any, lengths: list[int], new: int, seed: int) -> float:
    given, how = model.prompts(lengths, seed), model.sampling(new, logprobs=False)
    started = time.perf_counter()
    llm.generate(given, how, use_tqdm=False)
    return time.perf_counter() - started


def _tokens(llm: Any, lengths: list[int], new: int, seed: int, together: bool) -> list[dict[str, list]]:
    prompts, how = model.prompts(lengths, seed), model.sampling(new, logprobs=True)
    calls = [prompts] if together else [[prompt] for prompt in prompts]
    outputs = [output for given in calls for output in llm.generate(given, how, use_tqdm=False)]
    return [
        {
            "tokens": list(done.token_ids),
            "logprobs": [step[token].logprob for step, token in zip(done.logprobs, done.token_ids, strict=True)],
        }
        for (done,) in (output.outputs for output in outputs)
    ]


def _drafted(llm: Any) -> tuple[int, int]:
    counters = {metric.name: metric for metric in llm.get_metrics()}
    return tuple(counters[f"vllm:spec_decode_num_{which}_tokens"].value for which in ("draft", "accepted"))


def _profile(llm: Any, lengths: list[int], new: int, seed: int) -> list[tuple[str, float, int]]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        _generate(llm, lengths, new, seed)
        torch.cuda.synchronize()
    milliseconds: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.Counter()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            milliseconds[event.name] += event.device_time / 1000
            calls[event.name] += 1
    return [(name, ms, calls[name]) for name, ms in sorted(milliseconds.items(), key=lambda item: -item[1])]


def _host_times(llm: Any, lengths: list[int], new: int, seed: int) -> dict[str, list[float]]:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    taken: dict[str, list[float]] = {"forward_mqa": [], "forward_mha": []}

    def timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
        def calls(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                into.append((time.perf_counter() - started) * 1e6)

        return calls

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    backends = [layer.impl for layer in layers if isinstance(layer, MLAAttention)]
    for impl in backends:
        for name, times in taken.items():
            setattr(impl, name, timed(getattr(impl, name), times))
    _generate(llm, lengths, new, seed)
    for impl in backends:
        for name in taken:
            delattr(impl, name)
    return taken
