"""`tsmla demo`: run the operators on small inputs and compare them with torch, saying what was found and what ran."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import gpu, resolve, toolchain, trust
from ..errors import ManifestError, UnsupportedError
from ..manifest import MANIFEST_FILE
from ..row_format import ROWS, SCALE_BYTES
from . import emulated
from .verify import verify_directory

if TYPE_CHECKING:
    import torch

RMSE_LIMIT = 1e-2
"""Relative RMSE allowed against float64: four times the rounding step of bf16, far below an all-zero output's 1."""
FP8_LIMIT = 0.05
"""Of numbers rounded to e4m3, whose rounding step is 1/16."""


def demo() -> int:
    """Print the report. Returns the process's exit status: 0 unless a library or a result is wrong."""
    arch, found = gpu.current_arch()
    print(found)
    if arch is None:
        return _without_gpu()
    import torch

    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    torch.manual_seed(0)
    caches = [functools.partial(_cache, format) for format in ROWS]
    good = [*map(_show, (_pack, _prefill, _decode)), *map(_show, caches)]
    for variant, step in resolve.served().items():
        print(f"ran {variant.symbol()}: {step}")
    return 0 if all(good) else 1


def _without_gpu() -> int:
    print("nothing can run here; checked instead that the precompiled libraries are intact and load:")
    directory = toolchain.shipped_libraries()
    try:
        results = verify_directory(directory)
    except ManifestError as error:
        print(f"  none to check: {error}")
        if not trust.missing(directory / MANIFEST_FILE):
            return 1
        results = []
    for result in results:
        found = result.problem or "hash, manifest, sources, symbols, signatures ok"
        print(f"  {result.file}: {result.kernels} kernels, {found}")
    if any(result.problem for result in results):
        return 1
    if not emulated.installed():
        print(f"to run kernels here, in emulation: {emulated.INSTALL}")
        return 0
    print("running one kernel of each operator in the emulator:")
    return 0 if emulated.verify_emulated(emulated.EXAMPLES) else 1


def _show(run: Callable[[], tuple[str, bool]]) -> bool:
    try:
        text, good = run()
    except UnsupportedError as error:
        print(f"not run: {error}")
        return True
    print(f"{text}: {'ok' if good else 'WRONG'}")
    return good


def _pack() -> tuple[str, bool]:
    import torch

    from ..pack import mla_kv_pack_quantize_fp8

    tokens, heads = 1024, 128
    k_nope, v = (torch.randn(tokens, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k_pe = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
    (k_out, v_out), times = _timed(lambda: mla_kv_pack_quantize_fp8(k_nope, k_pe, v))
    k_expected = torch.cat([k_nope, k_pe[:, None].expand(-1, heads, -1)], dim=-1).to(k_out.dtype)
    wrong = _differing(k_out, k_expected) + _differing(v_out, v.to(v_out.dtype))
    return (
        f"mla_kv_pack_quantize_fp8, {tokens} tokens, {heads} heads: {wrong} bytes differ from torch; {times}",
        wrong == 0,
    )


def _prefill() -> tuple[str, bool]:
    import torch

    from ..prefill import tsmla_prefill

    lengths, heads = (700, 324), 16
    ends = [0, *(sum(lengths[: i + 1]) for i in range(len(lengths)))]
    q, k = (torch.randn(ends[-1], heads, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(ends[-1], heads, 128, device="cuda", dtype=torch.bfloat16)
    cum = torch.tensor(ends, dtype=torch.int32, device="cuda")
    scale = 1 / math.sqrt(192)
    (out, lse), times = _timed(
        lambda: tsmla_prefill(
            q, k, v, cum.diff(), cum, max(lengths), len(lengths), scale, is_causal=True, return_lse=True
        )
    )
    parts = [_attention(q[a:b], k[a:b], v[a:b], scale) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    expected, expected_lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    rmse = ((out.double() - expected).square().mean() / expected.square().mean()).sqrt().item()
    lse_error = (lse.double() - expected_lse).abs().max().item()
    text = (
        f"tsmla_prefill, sequences of {lengths} tokens, {heads} heads, causal: "
        f"relative RMSE {rmse:.1e} and LSE error {lse_error:.1e} against float64; {times}"
    )
    return text, rmse < RMSE_LIMIT and lse_error < RMSE_LIMIT


def _decode() -> tuple[str, bool]:
    import torch

    from ..decode import tsmla_decode
    from ..support import LATENT_DIM, ROPE_DIM
    from ..workspace import decode_workspace_size

    lengths, q_len, heads, page = (5000, 324), 2, 16, 64
    width = LATENT_DIM + ROPE_DIM
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages), device="cuda", dtype=torch.int32).split(pages)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    cache = torch.randn(sum(pages), page, width, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(len(lengths), q_len, heads, width, device="cuda", dtype=torch.bfloat16)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    size = decode_workspace_size(len(lengths), q_len, heads, max(lengths))
    workspace = torch.empty(size, dtype=torch.int8, device="cuda")
    scale = 1 / math.sqrt(width)
    (out, lse), times = _timed(
        lambda: tsmla_decode(
            q, cache, workspace, LATENT_DIM, ROPE_DIM, tables, seq_lens, max(lengths), scale, return_lse=True
        )
    )
    keys = [cache[own.long()].reshape(-1, 1, width)[:length] for own, length in zip(order, lengths, strict=True)]
    parts = [
        _attention(q[b], k.expand(-1, heads, -1), k[..., :LATENT_DIM].expand(-1, heads, -1), scale)
        for b, k in enumerate(keys)
    ]
    expected, expected_lse = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    rmse = ((out.double() - expected).square().mean() / expected.square().mean()).sqrt().item()
    lse_error = (lse.double() - expected_lse / math.log(2)).abs().max().item()
    text = (
        f"tsmla_decode, requests of {lengths} keys, {q_len} query tokens, {heads} heads: "
        f"relative RMSE {rmse:.1e} and LSE error {lse_error:.1e} against float64; {times}"
    )
    return text, rmse < RMSE_LIMIT and lse_error < RMSE_LIMIT


def _cache(format: str, count: int = 1024) -> tuple[str, bool]:
    """Keys through a cache of this format: what they take there, and what is lost. Keys are normal numbers; the rope
    parts, and one latent number of every 64th key, are 20 times as large."""
    import torch

    from ..checks import TORCH_DTYPE_OF
    from ..read_cache import mla_read_cache
    from ..support import CACHE_DTYPES, LATENT_DIM, ROPE_DIM
    from ..write_cache import mla_write_cache

    row, page = ROWS[format], 64
    dtype = TORCH_DTYPE_OF[CACHE_DTYPES[format][0]]
    kv_c, k_pe = (torch.randn(count, width, device="cuda") for width in (LATENT_DIM, ROPE_DIM))
    kv_c[::64, 77] *= 20
    kv_c, k_pe = kv_c.to(dtype), (k_pe * 20).to(dtype)

    def tensor(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((-(-count // page), page, width), math.nan, device="cuda").to(dtype)

    first, rope = (TORCH_DTYPE_OF[piece.dtype] for piece in row.pieces)
    cache: dict[str, Any] = {"cache": tensor((LATENT_DIM if row.apart else row.bytes // first.itemsize), first)}
    size = row.bytes
    if row.apart:
        cache |= {"rope_cache": tensor(ROPE_DIM, rope), "scale_cache": tensor(1, torch.float32)[..., 0]}
        size += SCALE_BYTES * row.scales_per_row
    slots = torch.randperm(count, device="cuda")
    got = torch.empty_like(kv_c), torch.empty_like(k_pe)
    mla_write_cache(kv_c, k_pe, slots, **cache, format=format)
    mla_read_cache(kv_c=got[0], k_pe=got[1], indices=slots, **cache, format=format)
    both = zip(got, (kv_c, k_pe), strict=True)
    errors = [float((read.double() - key.double()).norm() / key.double().norm()) for read, key in both]
    text = (
        f"cache of {format} rows, {size} bytes a key: {count} keys written and read with relative RMSE "
        f"{errors[0]:.1e} (latent) and {errors[1]:.1e} (rope)"
    )
    return text, max(errors) < (FP8_LIMIT if first.itemsize == 1 else 1e-30)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal (bottom-right) attention of one sequence in float64: [tokens, heads, d_v] and its natural-log LSE."""
    import torch

    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
    scores = scores.masked_fill(hidden, -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())
    return out, scores.logsumexp(-1).T


def _differing(given: torch.Tensor, expected: torch.Tensor) -> int:
    import torch

    return int((given.view(torch.uint8) != expected.view(torch.uint8)).sum())


def _timed(call: Callable[[], Any]) -> tuple[Any, str]:
    """The result, and how long the first call took and later ones take on average."""
    import torch

    torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    repeats = 50
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return result, f"first call {first * 1e3:.1f} ms, then {begin.elapsed_time(end) / repeats * 1e3:.1f} us each"
