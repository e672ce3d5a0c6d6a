"""`tsmla demo`: one small call of each operator, and how far its results are from float64.

Calls run on this machine's GPU, or in the emulator where there is none.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsupportedError
from ..identity.arch import Arch
from ..identity.row_format import ROWS
from ..identity.support import LATENT_DIM, ROPE_DIM
from ..loading import gpu, resolve
from . import emulated

if TYPE_CHECKING:
    import torch

BF16_LIMIT = 1e-2
"""Relative RMSE allowed of results in bf16: four times its rounding step, far below an all-zero result's 1."""
E4M3_LIMIT = 0.05
"""Relative RMSE allowed of results that are rounded to e4m3, whose rounding step is 1/16."""
LSE_LIMIT = 1e-4
"""Largest difference allowed of a log-sum-exp."""
CACHE_FORMAT, QUERY_FORMAT, PAGE = "fp8_ds_mla", "snapmla", 64


class Result(NamedTuple):
    """One result of a call: its error, and how large that may be."""

    name: str
    error: float
    limit: float


class Called(NamedTuple):
    """What an operator was called with, in words, how long that took, and what came of it."""

    inputs: str
    seconds: float
    results: list[Result]


def demo(emulate: str | None = None) -> int:
    """Print the report. Returns the process's exit status: 0 if every result is good, 1 if not or if nothing can run.

    emulate: the architecture to emulate, also where there is a GPU.
    """
    arch, found = gpu.current_arch()
    if arch is not None and emulate is None:
        print(found)
        status = _run_all()
        for variant, step in resolve.served().items():
            print(f"{step}: {variant.symbol()}")
        return status
    if not emulated.installed():
        print(
            f"tsmla: demo has nothing to run on: {found}; to run it in the emulator: {emulated.INSTALL}",
            file=sys.stderr,
        )
        return 1
    arch = Arch(emulate or Arch.SM90A)
    print(f"{found}\nemulating {arch} ({arch.gpus}) on the CPU", flush=True)
    emulated.prepare(emulated.examples(arch))
    with emulated.emulation(arch):
        return _run_all()


def _run_all() -> int:
    """Run every call and print the table of results, row by row. Returns the exit status."""
    import torch

    torch.manual_seed(0)
    print("\nErrors against float64: relative RMSE; of a log-sum-exp (lse), the largest difference.\n")
    _print_row("operator", "called with", "result", "error", "allowed", "first call")
    good = True
    for name, run in CALLS.items():
        try:
            called = run()
        except UnsupportedError as error:
            _print_row(name, f"not run: {error}")
            continue
        head: tuple[str, ...] = (name, called.inputs)
        tail: tuple[str, ...] = (f"{called.seconds * 1e3:.1f} ms",)
        for result in called.results:
            right = result.error <= result.limit
            if not right:
                tail = (*tail, "WRONG")
            _print_row(*head, result.name, f"{result.error:.1e}", f"{result.limit:.0e}", "  ".join(tail))
            head, tail, good = ("", ""), (), good and right
    print("\nall results are good" if good else "\nsome results are WRONG")
    return 0 if good else 1


def _print_row(*cells: str) -> None:
    widths = (-24, -43, -6, 8, 8, 12)
    texts = (f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, width in zip(cells, widths, strict=False))
    print("  ".join(texts).rstrip(), flush=True)


def _pack() -> Called:
    from ..operators.pack import mla_kv_pack_quantize_fp8

    tokens, heads = 64, 4
    k_nope, v = _random(tokens, heads, 128), _random(tokens, heads, 128)
    k_pe = _random(tokens, 64)
    (k_out, v_out), seconds = _timed(lambda: mla_kv_pack_quantize_fp8(k_nope, k_pe, v))
    key = _joined(k_nope, k_pe[:, None].expand(-1, heads, -1))
    results = [Result("key", _rmse(k_out, key), E4M3_LIMIT), Result("value", _rmse(v_out, v), E4M3_LIMIT)]
    return Called(f"{tokens} tokens, {heads} heads, bf16 to e4m3", seconds, results)


def _prefill() -> Called:
    import torch

    from ..operators.prefill import tsmla_prefill

    lengths, heads = (130, 70), 2
    q, k, v = (_random(sum(lengths), heads, width) for width in (192, 192, 128))
    ends = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device="cuda")
    scale = 1 / math.sqrt(192)
    (out, lse), seconds = _timed(
        lambda: tsmla_prefill(q, k, v, None, ends, max(lengths), len(lengths), scale, is_causal=True, return_lse=True)
    )
    sequences = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    parts = [_attention(*own, scale) for own in sequences]
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    text = f"sequences of {lengths[0]} and {lengths[1]} tokens, {heads} heads"
    return Called(text, seconds, _attended(out, lse, expected, expected_lse))


def _decode() -> Called:
    import torch

    from ..operators.decode import tsmla_decode
    from ..operators.workspace import decode_workspace_size
    from ..problems.pages import keys_in, page_tables

    lengths, q_len, heads = (300, 70), 1, 16
    width = LATENT_DIM + ROPE_DIM
    tables, pages = page_tables(lengths, PAGE)
    cache, q = _random(pages, PAGE, width), _random(len(lengths), q_len, heads, width)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    size = decode_workspace_size(len(lengths), q_len, heads, max(lengths))
    workspace = torch.empty(size, dtype=torch.int8, device="cuda")
    scale = 1 / math.sqrt(192)
    (out, lse), seconds = _timed(
        lambda: tsmla_decode(
            q, cache, workspace, LATENT_DIM, ROPE_DIM, tables.to("cuda"), seq_lens, max(lengths), scale, return_lse=True
        )
    )
    keys = [own[:, None].expand(-1, heads, -1) for own in keys_in(cache, tables, lengths)]
    parts = [_attention(q[b], k, k[..., :LATENT_DIM], scale) for b, k in enumerate(keys)]
    expected, expected_lse = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    text = f"requests of {lengths[0]} and {lengths[1]} keys, {heads} heads"
    return Called(text, seconds, _attended(out, lse, expected, expected_lse / math.log(2)))


def _sparse_prefill() -> Called:
    import torch

    from ..operators.sparse_prefill import tsmla_sparse_prefill

    tokens, top_k, keys, heads = 3, 130, 500, 16
    rows, q = _random(keys, LATENT_DIM + ROPE_DIM), _random(tokens, heads, LATENT_DIM + ROPE_DIM)
    lists = torch.stack([torch.randperm(keys)[:top_k] for _ in range(tokens)])
    scale = 1 / math.sqrt(192)
    (out, lse), seconds = _timed(lambda: tsmla_sparse_prefill(q, rows, lists.int().to("cuda"), scale, return_lse=True))
    chosen = [rows[own.to("cuda"), None].expand(-1, heads, -1) for own in lists]
    parts = [_attention(q[t : t + 1], k, k[..., :LATENT_DIM], scale) for t, k in enumerate(chosen)]
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    text = f"{tokens} tokens, {top_k} of {keys} keys, {heads} heads"
    return Called(text, seconds, _attended(out, lse, expected, expected_lse))


def _write_cache() -> Called:
    keys, rows, slots, seconds = _written()
    from ..problems.rows import numbers_in

    stored = numbers_in(ROWS[CACHE_FORMAT], rows.flatten(0, 1)[slots])
    text = f"{len(slots)} keys, into {CACHE_FORMAT} rows of {ROWS[CACHE_FORMAT].bytes} bytes"
    return Called(text, seconds, _of_rows(stored, keys))


def _read_cache() -> Called:
    import torch

    from ..operators.read_cache import mla_read_cache

    keys, rows, slots, _ = _written()
    read = torch.empty_like(keys)
    kv_c, k_pe = read.split([LATENT_DIM, ROPE_DIM], -1)
    _, seconds = _timed(lambda: mla_read_cache(rows, kv_c, k_pe, indices=slots, format=CACHE_FORMAT))
    return Called(f"{len(slots)} keys, from {CACHE_FORMAT} rows", seconds, _of_rows(read, keys))


def _quantize_q() -> Called:
    from ..operators.quantize_q import mla_quantize_q
    from ..problems.rows import numbers_in

    tokens, heads = 2, 16
    query = _random(tokens, heads, LATENT_DIM + ROPE_DIM)
    rows, seconds = _timed(lambda: mla_quantize_q(query))
    text = f"{tokens} tokens, {heads} heads, to {QUERY_FORMAT} rows"
    return Called(text, seconds, _of_rows(numbers_in(ROWS[QUERY_FORMAT], rows), query))


def _key_mask() -> Called:
    import torch

    from ..operators.key_mask import tsmla_key_mask

    tokens, top_k, keys = 5, 2048, 8000
    lists = torch.stack([torch.randperm(keys)[:top_k] for _ in range(tokens)])
    mask, seconds = _timed(lambda: tsmla_key_mask(lists.int().to("cuda"), keys))
    bits = (mask.cpu()[..., None] >> torch.arange(32) & 1).flatten(1).float()
    wanted = torch.zeros_like(bits).scatter_(1, lists, 1.0)
    return Called(
        f"{tokens} tokens, {top_k} of {keys} keys", seconds, [Result("mask", _rmse(bits, wanted), BF16_LIMIT)]
    )


CALLS: dict[str, Callable[[], Called]] = {
    "mla_kv_pack_quantize_fp8": _pack,
    "tsmla_prefill": _prefill,
    "tsmla_decode": _decode,
    "tsmla_sparse_prefill": _sparse_prefill,
    "mla_write_cache": _write_cache,
    "mla_read_cache": _read_cache,
    "mla_quantize_q": _quantize_q,
    "tsmla_key_mask": _key_mask,
}


def _written(count: int = 100) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Keys, the cache that `mla_write_cache` has written them to, their slots, and the seconds that it took."""
    import torch

    from ..operators.write_cache import mla_write_cache

    keys = _random(count, LATENT_DIM + ROPE_DIM)
    kv_c, k_pe = keys.split([LATENT_DIM, ROPE_DIM], -1)
    row = ROWS[CACHE_FORMAT]
    cache = torch.zeros(-(-count // PAGE), PAGE, row.bytes, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    slots = torch.randperm(count).to("cuda")
    _, seconds = _timed(lambda: mla_write_cache(kv_c, k_pe, slots, cache, format=CACHE_FORMAT))
    return keys, cache, slots, seconds


def _random(*shape: int) -> torch.Tensor:
    import torch

    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def _joined(*pieces: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat(pieces, -1)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal (bottom-right) attention of one sequence in float64: [tokens, heads, d_v] and its natural-log LSE."""
    import torch

    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    return out, scores.logsumexp(-1).T


def _attended(out: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor, expected_lse: torch.Tensor) -> list[Result]:
    largest = (lse.double() - expected_lse).abs().max().item()
    return [Result("out", _rmse(out, expected), BF16_LIMIT), Result("lse", largest, LSE_LIMIT)]


def _of_rows(rows: torch.Tensor, expected: torch.Tensor) -> list[Result]:
    """Rows of 576 numbers: the latent part is rounded to e4m3, the rope part is not."""
    pieces = zip(rows.split([LATENT_DIM, ROPE_DIM], -1), expected.split([LATENT_DIM, ROPE_DIM], -1), strict=True)
    latent, rope = (_rmse(given, own) for given, own in pieces)
    return [Result("latent", latent, E4M3_LIMIT), Result("rope", rope, BF16_LIMIT)]


def _rmse(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the expected numbers, in float64."""
    return ((given.double() - expected.double()).norm() / expected.double().norm()).item()


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the seconds until the GPU has it."""
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, time.perf_counter() - started
