"""From a started process to the first result: shipped binary, warm compile cache, and compiler, for each operator.

    python -m benchmarks cold-start [--commit HASH] [--repeats N] [--family F ...] [--step S ...]

Each row is the median over fresh processes, in milliseconds. "ready" is everything before: Python, torch, a CUDA
context, the inputs. "all four" is what tsmla adds to it: importing tsmla, importing TVM-FFI, loading the library, the
first call. Then come a second call and the host's microseconds per call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from . import runner

FAMILIES = ("pack", "prefill", "decode")
STEPS = ("binary", "jit", "cached")
"""How the kernel is found. binary: the shipped library; jit: compile, with an empty cache; cached: what that left
behind, in a new process."""
STAGES = ("ready_ms", "import_ms", "tvm_ffi_ms", "load_ms", "first_ms", "total_ms", "second_ms", "call_us")
CALLS = 1000
TIMEOUT_SECONDS = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    parser.add_argument("--repeats", type=int, default=5, help="processes per row; compiling rows take 2 (%(default)s)")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="operators to start")
    parser.add_argument("--step", nargs="+", choices=STEPS, default=list(STEPS), help="where kernels come from")
    parser.add_argument(
        "--bindings-up",
        action="store_true",
        help="import cuda.bindings before the clock starts, as torch 2.13 does; torch 2.11 leaves that to TVM-FFI",
    )
    parser.add_argument("--child", choices=FAMILIES, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    if options.child:
        print(json.dumps(_child(options.child, options.started, options.bindings_up)))
        return
    runner.require_gpu()
    results = [
        _row(family, step, options.repeats, options.bindings_up) for family in options.family for step in options.step
    ]
    record = {"certificate": runner.certificate(options.commit), "results": results}
    name = "cold_start_bindings_up" if options.bindings_up else "cold_start"
    if options.family != list(FAMILIES):
        name = "_".join([name, *options.family])
    path = runner.write_record(options.results, name, record)
    header = (
        "operator",
        "step",
        "runs",
        "ready",
        "import",
        "tvm_ffi",
        "load",
        "first",
        "all four",
        "second",
        "us/call",
    )
    print(runner.table(header, (_cells(result) for result in results)))
    for result in results:
        if "failed" in result:
            print(f"{result['family']} {result['step']}: {result['failed']}")
    print(path)


def _row(family: str, step: str, repeats: int, bindings_up: bool) -> dict[str, Any]:
    """Return stages of `repeats` processes, or why there are none."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TSMLA_BACKEND": "binary" if step == "binary" else "jit"}
        runs: list[dict[str, float]] = []
        if step == "cached":
            repeats += 1  # the first one fills the cache
        elif step == "jit":
            repeats = min(repeats, 2)
        for i in range(repeats):
            directory = os.path.join(cache, str(i) if step == "jit" else "kept")
            try:
                runs.append(_process(family, bindings_up, {**environment, "TSMLA_CACHE_DIR": directory}))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                return {"family": family, "step": step, "failed": str(error)}
        runs = runs[1:] if step == "cached" else runs
    return {"family": family, "step": step, "runs": runs}


def _process(family: str, bindings_up: bool, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks", "cold-start", "--child", family, "--started", str(time.time())]
    command += ["--bindings-up"] * bindings_up
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(f"exit status {done.returncode}: {last[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _child(family: str, started: float, bindings_up: bool) -> dict[str, float]:
    """Time one start from inside; `started` is time.time() just before the process was made."""
    import torch

    if bindings_up:
        import cuda.bindings.driver  # noqa: F401
    inputs = {"pack": _pack_inputs, "prefill": _prefill_inputs, "decode": _decode_inputs}[family]()
    torch.cuda.synchronize()
    ready = time.time()
    operator, variant = _import(family)
    imported = time.time()
    import tvm_ffi  # noqa: F401  (what tsmla imports first when it loads a library; a serving engine often has it)
    from tsmla.loading import resolve

    interface = time.time()

    resolve.kernel(variant)
    loaded = time.time()
    operator(**inputs)
    torch.cuda.synchronize()
    first = time.time()
    operator(**inputs)
    torch.cuda.synchronize()
    second = time.time()
    for _ in range(CALLS):
        operator(**inputs)
    called = time.time()
    torch.cuda.synchronize()
    stages = {
        "ready_ms": ready - started,
        "import_ms": imported - ready,
        "tvm_ffi_ms": interface - imported,
        "load_ms": loaded - interface,
        "first_ms": first - loaded,
        "total_ms": first - ready,
        "second_ms": second - first,
        "call_us": (called - second) / CALLS * 1e3,
    }
    return {name: value * 1e3 for name, value in stages.items()}


def _import(family: str) -> tuple[Any, Any]:
    """Return the operator and the variant that the inputs below need."""
    import torch
    import tsmla
    from tsmla import Arch, DecodeVariant, Dtype, PackVariant, PrefillVariant

    arch = Arch.from_capability(*torch.cuda.get_device_capability())
    if arch is None:
        raise SystemExit("this GPU has no kernels")
    if family == "pack":
        return tsmla.mla_kv_pack_quantize_fp8, PackVariant(arch, Dtype.BF16, Dtype.E4M3, 128, 64, 128)
    if family == "decode":
        return tsmla.tsmla_decode, DecodeVariant(arch, Dtype.BF16, Dtype.BF16, False)
    return tsmla.tsmla_prefill, PrefillVariant(arch, Dtype.BF16, Dtype.BF16, 192, 128, True, False)


def _zeros(*shape: int, dtype: str = "bfloat16") -> Any:
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")


def _pack_inputs() -> dict[str, Any]:
    return {"k_nope": _zeros(4, 16, 128), "k_pe": _zeros(4, 1, 64), "v": _zeros(4, 16, 128)}


def _prefill_inputs() -> dict[str, Any]:
    import torch

    return {
        "query": _zeros(16, 4, 192),
        "key": _zeros(16, 4, 192),
        "value": _zeros(16, 4, 128),
        "seq_lens": None,
        "cum_seq_lens": torch.tensor([0, 16], dtype=torch.int32, device="cuda"),
        "max_seq_len": 16,
        "batch_size": 1,
        "softmax_scale": 0.1,
    }


def _decode_inputs() -> dict[str, Any]:
    import torch

    # The callers' formula for the workspace: tsmla is not imported yet.
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return {
        "query": _zeros(1, 1, 16, 576),
        "kv_cache": _zeros(1, 64, 576),
        "workspace_buffer": _zeros(sms * 16 * 8 * 513 * 4, dtype="int8"),
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": _zeros(1, 1, dtype="int32"),
        "seq_lens": torch.tensor([64], dtype=torch.int32, device="cuda"),
        "max_seq_len": 64,
        "softmax_scale": 0.1,
    }


def _cells(result: dict[str, Any]) -> tuple[object, ...]:
    runs = result.get("runs", [])
    medians = (statistics.median(run[stage] for run in runs) if runs else None for stage in STAGES)
    return (result["family"], result["step"], len(runs), *medians)
