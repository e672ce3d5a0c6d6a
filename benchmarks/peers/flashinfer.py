"""FlashInfer as a user installs it: flashinfer-python's planned wrapper of absorbed MLA over pages (0.7.2, 0.7.4).

It has kernels of its own for Hopper ("fa3") and kernels for GPUs since Ampere ("fa2"). A wrapper is planned once for
all layers, which is not timed. For bench_decode:

    python -m benchmarks decode --against flashinfer_fa3=benchmarks.peers.flashinfer:fa3
    python -m benchmarks decode --shapes streams --dtypes bf16 --against \\
        flashinfer_fa3=benchmarks.peers.flashinfer:fa3 flashinfer_fa2=benchmarks.peers.flashinfer:fa2
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..bench_decode import LATENT, PAGE, ROPE, Case

Launch = Callable[[], torch.Tensor]
DTYPES = (torch.bfloat16, torch.float16)
EIGHT_BITS = torch.float8_e4m3fn
WORKSPACE_BYTES = 128 << 20
"""Bytes that FlashInfer's documentation tells users to reserve."""


def fa3(case: Case) -> Launch | None:
    """Return a launch of FlashInfer's kernels for Hopper."""
    return _planned(case, "fa3")


def fa2(case: Case) -> Launch | None:
    """Return a launch of FlashInfer's kernels for all GPUs since Ampere."""
    return _planned(case, "fa2")


def _planned(case: Case, backend: str) -> Launch | None:
    """Return a wrapper's `run` on the case's tensors.

    It takes no query in two pieces here. Keys in e4m3 it turns into bf16 and has a bf16 query for them: the case's own
    in bf16, which is exact, and made once, outside of what is timed.
    """
    if isinstance(case.query, tuple) or case.kv_cache.dtype not in (*DTYPES, EIGHT_BITS):
        return None
    mla, device = _mla(), case.query.device
    query, scales = case.query.reshape(-1, case.heads, LATENT + ROPE), {}
    if case.kv_cache.dtype == EIGHT_BITS:
        query, scales = query.bfloat16(), {"ckv_scale": 1.0, "kpe_scale": 1.0}
    ends = case.cum_seq_lens_q
    if ends is None:
        ends = torch.arange(case.requests + 1, device=device, dtype=torch.int32) * case.q_len
    pages = (case.seq_lens + PAGE - 1) // PAGE
    page_ends = torch.zeros_like(ends)
    page_ends[1:] = pages.cumsum(0)
    columns = torch.arange(case.block_tables.shape[1], device=device)
    indices = case.block_tables[columns < pages[:, None]]
    wrapper = mla.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=device), backend=backend
    )
    wrapper.plan(
        metadata=mla.MLAPlanMetadata.csr(ends, page_ends, indices, case.seq_lens),
        num_heads=case.heads,
        head_dim_ckv=LATENT,
        head_dim_kpe=ROPE,
        page_size=PAGE,
        causal=case.q_len > 1,
        sm_scale=case.scale,
        q_data_type=query.dtype,
        kv_data_type=case.kv_cache.dtype,
    )
    out = torch.empty(*query.shape[:-1], LATENT, dtype=query.dtype, device=device)
    return lambda: wrapper.run(query=query, kv_cache=case.kv_cache, out=out, **scales)


def _mla() -> Any:
    """Import the module. Raises ModuleNotFoundError where it is not installed."""
    return importlib.import_module("flashinfer.mla")
