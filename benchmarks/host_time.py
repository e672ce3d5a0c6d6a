"""Host microseconds of one operator call, in parts.

    python -m benchmarks host-time [--stub]

call: the whole operator.
kernel: the compiled function alone, with the call's own arguments (TVM-FFI, tensor maps, launch).
allocation: what the call's results take.
rest: the difference: checks, the lookup of the kernel, scales.
first: a call when nothing is known of its kind but its kernel is resolved: every check, the variant made.

Figures are medians over batches of calls, shorter than the GPU's launch queue and waited for between batches. --stub
needs no GPU: tensors are on the CPU, and a function that does nothing takes the kernel's place.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import statistics
import time
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Variant
from tsmla.loading import resolve
from tsmla.operators import checks

from . import runner

BATCHES, CALLS = 200, 100
HEADER = ("operator", "call", "kernel", "allocation", "rest", "first")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stub", action="store_true", help="without a GPU, and without kernels")


def run(options: argparse.Namespace) -> None:
    stub = options.stub
    device = "cpu" if stub else "cuda"
    with _stubbed() if stub else contextlib.nullcontext():
        rows = [_row(name, *case, stub) for name, case in _cases(device).items()]
    where = platform.processor() or platform.machine()
    print(f"{where}, Python {platform.python_version()}, torch {torch.__version__}")
    print(runner.table(HEADER, rows))


def _cases(device: str) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return small problems: the GPU must be done with a call before the host has prepared the next."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    ends = torch.tensor([0, 16], dtype=torch.int32, device=device)
    prefill = {
        "query": zeros(16, 4, 192),
        "key": zeros(16, 4, 192),
        "value": zeros(16, 4, 128),
        "seq_lens": None,
        "cum_seq_lens": ends,
        "max_seq_len": 16,
        "batch_size": 1,
        "softmax_scale": 0.1,
        "cum_seq_lens_q": ends.clone(),
    }
    pack = {"k_nope": zeros(16, 4, 128), "k_pe": zeros(16, 1, 64), "v": zeros(16, 4, 128)}
    fp8 = torch.float8_e4m3fn
    outputs = {"k_out": zeros(16, 4, 192, dtype=fp8), "v_out": zeros(16, 4, 128, dtype=fp8)}
    lengths = torch.tensor([64, 70], dtype=torch.int32, device=device)
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    decode: dict[str, Any] = {
        "query": zeros(2, 1, 16, 576),
        "kv_cache": zeros(4, 64, 576),
        "workspace_buffer": zeros(Arch.SM90A.sms * 16 * 8 * 513 * 4, dtype=torch.int8),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": tables,
        "seq_lens": lengths,
        "max_seq_len": 70,
        "softmax_scale": 0.1,
    }
    pieces = zeros(2, 1, 16, 512), zeros(2, 1, 16, 64)
    parallel = {"causal_seqs": 2 * lengths, "cp_world": 2, "return_lse": True}
    return {
        "decode": (tsmla.tsmla_decode, decode),
        "decode, LSE": (tsmla.tsmla_decode, {**decode, "return_lse": True}),
        "decode, out=": (tsmla.tsmla_decode, {**decode, "out": zeros(2, 1, 16, 512)}),
        "decode, out=, query in pieces": (tsmla.tsmla_decode, {**decode, "query": pieces, "out": zeros(2, 1, 16, 512)}),
        "decode, 4-D cache, LSE, parallel": (
            tsmla.tsmla_decode,
            {**decode, **parallel, "kv_cache": decode["kv_cache"][:, None]},
        ),
        "prefill": (tsmla.tsmla_prefill, prefill),
        "prefill, LSE": (tsmla.tsmla_prefill, {**prefill, "return_lse": True}),
        "prefill, out=": (tsmla.tsmla_prefill, {**prefill, "out": zeros(16, 4, 128)}),
        "pack": (tsmla.mla_kv_pack_quantize_fp8, pack),
        "pack, k_out=, v_out=": (tsmla.mla_kv_pack_quantize_fp8, {**pack, **outputs}),
    }


def _row(name: str, operator: Callable[..., Any], arguments: dict[str, Any], stub: bool) -> tuple[object, ...]:
    result = operator(**arguments)
    results = result if isinstance(result, tuple) else (result,)
    given = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    made = [(tuple(x.shape), x.stride(), x.dtype) for x in results if not any(x is argument for argument in given)]
    kernel, passed = _launch(operator, arguments)

    def allocate() -> None:
        for shape, strides, dtype in made:
            torch.empty_strided(shape, strides, dtype=dtype, device=given[0].device)

    def first() -> None:
        resolve.calls.clear()
        operator(**arguments)

    call = _microseconds(lambda: operator(**arguments), stub)
    parts = (_microseconds(lambda: kernel(*passed), stub), _microseconds(allocate, stub) if made else 0.0)
    return (name, call, *parts, call - sum(parts), _microseconds(first, stub))


def _launch(operator: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """Return the kernel that a call reaches, and what it is called with."""
    seen: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    found = resolve.kernel

    def watched(variant: Variant) -> Callable[..., None]:
        kernel = found(variant)
        return lambda *passed: seen.append((kernel, passed))

    resolve.calls.clear()
    with mock.patch.object(resolve, "kernel", watched):
        operator(**arguments)
    resolve.calls.clear()
    return seen[0]


def _microseconds(work: Callable[[], None], stub: bool) -> float:
    """Return the microseconds of one call. What surrounds it (a lambda) is included, and takes less than 0.05."""
    times = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        for _ in range(CALLS):
            work()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
        if not stub:
            torch.cuda.synchronize()
    return statistics.median(times)


@contextlib.contextmanager
def _stubbed() -> Iterator[None]:
    """Make CPU tensors pass for those of an H200, and kernels do nothing."""
    nothing = resolve.Resolved(lambda *arguments: None, "stub")
    properties = types.SimpleNamespace(multi_processor_count=Arch.SM90A.sms)
    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (resolve, "_search", lambda variant: nothing),
            (checks, "cuda", checks.stored),
            (checks, "arch_of", lambda device: Arch.SM90A),
            (torch.cuda, "get_device_properties", lambda device: properties),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield
