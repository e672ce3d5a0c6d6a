"""tsmla_decode at serving shapes, alone or next to other implementations in the same run.

    python -m benchmarks decode [--dtypes bf16 e4m3] [--against NAME=MODULE:FUNCTION ...] [--seconds S] [--quick]
    python -m benchmarks decode --shapes shards --against captured=benchmarks.bench_decode:captured
    python -m benchmarks decode --shapes few --dtypes bf16 e4m3 --against NAME=MODULE:FUNCTION ...
    python -m benchmarks decode --shapes packs --dtypes bf16 --against NAME=MODULE:FUNCTION ...
    python -m benchmarks decode --shapes streams --dtypes bf16 --against NAME=MODULE:FUNCTION ...

Every time is that of a replayed CUDA graph of a whole call, attention and combine together, from a cold L2 and over
random keys in random pages. FUNCTION takes a Case and returns a callable that launches the other implementation on its
tensors and returns its output, or None where it cannot do a case. Results are compared with ours before timing, in both
regimes of `benchmarks/protocol.py`.

GB/s count each request's keys once, queries and outputs; TFLOP/s count 2 * (576 + 512) * heads * attended pairs.
`host us` is what a call through the public function costs the host, without a graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tsmla import tsmla_decode
from tsmla.problems.pages import page_tables

from . import protocol, runner
from .protocol import Candidate, Monitor

LATENT, ROPE, PAGE = 512, 64, 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
FIXED, VARIABLE, PACKED, MIXED, TURNS = "fixed", "variable", "packed", "mixed", "in turn"
SHORT_AMONG_MIXED = 28
"""Requests of one query token in mixed batches; all others have as many as stated."""
SHAPES = (
    *((128, q_len, 4096, heads, FIXED) for q_len in (1, 2) for heads in (16, 64, 128)),
    *((128, 1, 8192, heads, FIXED) for heads in (16, 64, 128)),
    (128, 2, 8192, 128, FIXED),
    *((4, 4, 81920, heads, FIXED) for heads in (16, 32, 128)),
    *((128, 1, 4096, heads, VARIABLE) for heads in (16, 128)),
    *((1, 1, keys, heads, FIXED) for keys in (1024, 8192) for heads in (16, 128)),
    *((128, q_len, 4096, heads, PACKED) for q_len, heads in ((1, 16), (1, 128), (2, 16))),
    *((32, q_len, keys, heads, MIXED) for q_len in (64, 128, 512) for keys in (4096, 32768) for heads in (16, 128)),
)
"""(requests, query tokens, keys, heads, lengths): batches at two contexts, speculation over long ones, small work. With
cum_seq_lens_q: the same number of query tokens for all requests, and one or many, or as many and one in turn."""
SHARDS = (
    *((128, 1, 4096, heads, FIXED) for heads in (3, 6, 12, 20, 24, 40, 96)),
    *((32, 16, 8192, heads, FIXED) for heads in (3, 12, 20)),
    *((requests, 1, keys, 16, FIXED) for requests in (1, 8) for keys in (512, 4096)),
)
"""Shapes with heads as tensor parallelism leaves them, with many query tokens of few heads, and with requests that are
short beside what a model allows."""
FEW = tuple(
    (requests, q_len, keys, heads, FIXED)
    for requests in (1, 2, 4)
    for q_len in (1, 4)
    for keys in (512, 4096, 32768)
    for heads in (8, 16, 64, 128)
)
"""Shapes of few requests, as one user or a small server has them: what a launch costs shows here."""
PACKS = (
    *((requests, 1, keys, heads, PACKED) for requests in (1, 8) for keys in (1024, 8192) for heads in (16, 128)),
    *((requests, q_len, keys, heads, TURNS) for requests in (4, 16, 64) for keys in (2048, 8192)
      for q_len, heads in ((8, 16), (2, 128))),
)  # fmt: skip
"""Shapes with cum_seq_lens_q of few requests, and of steps in which engines speculate for some."""
STREAMS = (
    *((128, 1, keys, heads, FIXED) for keys in (4096, 8192) for heads in (16, 64)),
    (4, 4, 81920, 16, FIXED),
    (32, 8, 8192, 8, FIXED),
)
"""Shapes whose work is little beside the bytes of their keys, which all SMs stream."""
SETS = {"serving": SHAPES, "shards": SHARDS, "few": FEW, "packs": PACKS, "streams": STREAMS}
MODEL_LENGTH = 2**17
"""Most keys of a request that a model allows; engines capture graphs for it."""
MAX_DIFFERENCE = {"bf16": 0.02, "fp16": 0.02, "e4m3": 0.06}
"""Relative RMS difference from tsmla's result above which another candidate does not compute the same thing."""
HOST_CALLS = 200


@dataclasses.dataclass
class Case:
    """One shape's tensors. `seq_lens` are random around the stated number of keys when lengths are variable.

    With `cum_seq_lens_q`, query is [tokens, heads, 576], and q_len is the most query tokens of a request.
    """

    requests: int
    q_len: int
    keys: int
    heads: int
    lengths: str
    query: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    scale: float
    attended: int
    cum_seq_lens_q: torch.Tensor | None = None

    @classmethod
    def make(cls, requests: int, q_len: int, keys: int, heads: int, lengths: str, dtype: torch.dtype) -> Case:
        counts = torch.full((requests,), keys)
        if lengths == VARIABLE:
            generator = torch.Generator().manual_seed(0)
            spread = torch.randn(requests, generator=generator) * keys / 2 + keys
            counts = spread.round().long().clamp_min(q_len)
        tables, pages = page_tables(counts.tolist(), PAGE, unused=0)
        cache = torch.empty(pages, PAGE, LATENT + ROPE, dtype=dtype, device="cuda")
        for piece in cache.split(4096):
            piece.copy_(torch.randn(piece.shape, device="cuda", dtype=torch.bfloat16))
        own, ends = [q_len] * requests, None
        shape: tuple[int, ...] = (requests, q_len)
        if lengths == MIXED:
            own[:SHORT_AMONG_MIXED] = [1] * SHORT_AMONG_MIXED
        if lengths == TURNS:
            own[1::2] = [1] * (requests // 2)
        if lengths in (PACKED, MIXED, TURNS):
            shape = (sum(own),)
            ends = torch.tensor([0, *itertools.accumulate(own)], dtype=torch.int32, device="cuda")
        query = torch.randn(*shape, heads, LATENT + ROPE, device="cuda").to(dtype)
        attended = sum(q * n - q * (q - 1) // 2 for q, n in zip(own, counts.tolist(), strict=True))
        seq_lens = counts.to(device="cuda", dtype=torch.int32)
        return cls(
            requests,
            q_len,
            keys,
            heads,
            lengths,
            query,
            cache,
            tables.to("cuda"),
            seq_lens,
            int(counts.max()),
            (LATENT + ROPE) ** -0.5,
            attended,
            ends,
        )

    @property
    def tflop(self) -> float:
        return 2 * (2 * LATENT + ROPE) * self.heads * self.attended / 1e12

    @property
    def bytes(self) -> int:
        keys = int(self.seq_lens.sum()) * (LATENT + ROPE) * self.kv_cache.element_size()
        rows = self.first_piece.shape[:-1].numel()
        query = rows * (LATENT + ROPE) * self.kv_cache.element_size()
        return keys + query + self.output().nbytes

    @property
    def whole_query(self) -> torch.Tensor:
        """The query, where it is one tensor."""
        assert isinstance(self.query, torch.Tensor)
        return self.query

    @property
    def first_piece(self) -> torch.Tensor:
        return self.query[0] if isinstance(self.query, tuple) else self.query

    def output(self) -> torch.Tensor:
        dtype = torch.bfloat16 if self.kv_cache.dtype.itemsize == 1 else self.kv_cache.dtype
        return torch.empty(*self.first_piece.shape[:-1], LATENT, device="cuda", dtype=dtype)

    def ours(self, **options: Any) -> Callable[[], torch.Tensor]:
        """Return a launch of tsmla into one output tensor, which it returns, with the callers' workspace.

        options: arguments of tsmla_decode, also in place of the case's own.
        """
        processors = torch.cuda.get_device_properties(self.kv_cache.device).multi_processor_count
        size = processors * self.heads * max(8, self.q_len) * (LATENT + 1) * 4
        workspace = torch.empty(size, dtype=torch.int8, device="cuda")
        out = self.output()
        arguments = {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": workspace,
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": self.max_seq_len,
            "softmax_scale": self.scale,
            "out": out,
            "cum_seq_lens_q": self.cum_seq_lens_q,
            "max_q_len": None if self.cum_seq_lens_q is None else self.q_len,
            **options,
        }

        def launch() -> torch.Tensor:
            tsmla_decode(**arguments)
            return out

        return launch


def batch_invariant(case: Case) -> Callable[[], torch.Tensor]:
    """Return tsmla with batch_invariant, for --against."""
    return case.ours(batch_invariant=True)


def base_2(case: Case) -> Callable[[], torch.Tensor]:
    """Return tsmla with an LSE of base 2, for --against."""
    return case.ours(lse=_lse(case))


def base_e(case: Case) -> Callable[[], torch.Tensor]:
    """Return tsmla with an LSE of base e, for --against."""
    return case.ours(lse=_lse(case), lse_base=math.e)


def _lse(case: Case) -> torch.Tensor:
    return torch.empty(case.first_piece.shape[:-1], dtype=torch.float32, device="cuda")


def captured(case: Case) -> Callable[[], torch.Tensor]:
    """Return tsmla as engines capture it, for --against: with max_seq_len and page tables of the model's longest
    context."""
    tables = torch.zeros(case.requests, MODEL_LENGTH // PAGE, dtype=torch.int32, device="cuda")
    tables[:, : case.block_tables.shape[1]] = case.block_tables
    return dataclasses.replace(case, max_seq_len=MODEL_LENGTH, block_tables=tables).ours()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=0.6)
    parser.add_argument("--shapes", choices=SETS, default="serving", help="(%(default)s)")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=["bf16", "e4m3"])
    parser.add_argument("--against", nargs="*", default=[], metavar="NAME=MODULE:FUNCTION", type=runner.other)
    parser.add_argument("--quick", action="store_true", help="every third shape only")


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    name = "decode" if options.shapes == "serving" else f"{options.shapes}-decode"
    with Monitor() as monitor:
        shared = {"certificate": runner.certificate(options.commit), "ceilings": protocol.ceilings(monitor)}
        for shape in SETS[options.shapes][:: 3 if options.quick else 1]:
            for dtype in options.dtypes:
                results += _measured(Case.make(*shape, DTYPES[dtype]), dtype, options, monitor)
                torch.cuda.empty_cache()
            paths = []
            for dtype in options.dtypes:  # a record each: kernels of one change while those of another stay
                own = [result for result in results if result["dtype"] == dtype]
                paths.append(runner.write_record(options.results, f"{name}-{dtype}", {**shared, "results": own}))
    print(f"ceilings: {', '.join(f'{name} {value:.0f}' for name, value in shared['ceilings'].items())}")
    names = list(dict.fromkeys(name for result in results for name in result["timings"]))
    header = ("requests", "q_len", "keys", "heads", "lengths", "dtype", "regime")
    times = (f"{name} {unit}" for name in names for unit in ("us", "GB/s", "TF/s"))
    print(runner.table((*header, *times, "host us", "MHz", "W"), (_row(result, names) for result in results)))
    print(*paths, sep="\n")


def _measured(case: Case, dtype: str, options: argparse.Namespace, monitor: Monitor) -> list[dict[str, Any]]:
    """Return one result for each regime."""
    launches = {"tsmla": case.ours(), **{name: make(case) for name, make in options.against}}
    launches = {name: launch for name, launch in launches.items() if launch is not None}
    protocol.agree(launches, MAX_DIFFERENCE[dtype])
    candidates = [Candidate(name, launch) for name, launch in launches.items()]
    shape = (case.requests, case.q_len, case.keys, case.heads, case.lengths)
    host_us = _host_us(launches["tsmla"])
    measured = {"shape": shape, "dtype": dtype, "tflop": case.tflop, "bytes": case.bytes, "host_us": host_us}
    return [
        {**measured, "timings": protocol.measure(candidates, regime, monitor, options.seconds, graph=True)}
        for regime in protocol.REGIMES
    ]


def _host_us(launch: Callable[[], Any]) -> float:
    """Return the median host time of a call, queued in batches that the GPU's queue has room for."""
    times = []
    for _ in range(HOST_CALLS // 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            launch()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def _row(result: dict[str, Any], names: Iterable[str]) -> tuple[object, ...]:
    numbers: list[object] = []
    for name in names:
        timing = result["timings"].get(name)
        micros = timing.median_us if timing else None
        numbers += (
            [micros, result["bytes"] / micros / 1e3, result["tflop"] / micros * 1e6] if micros else [None, None, None]
        )
    ours = result["timings"]["tsmla"]
    return *result["shape"], result["dtype"], ours.regime, *numbers, result["host_us"], ours.sm_clock_mhz, ours.power_w
