"""nvidia-cudnn-frontend's open CuTe DSL kernels of Blackwell: prefill of 192 and 128 dims, attention over chosen keys.

The prefill's wrapper talks to the driver before it launches. Only its plan is taken, therefore, and its function from
tensors to kernel arguments (both are Python), and the kernel is called with what that gives. That of chosen keys asks
torch for devices and streams.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any
from unittest import mock

import torch

from . import reference
from .control import Control, Package, Peer, Values, nothing

PACKAGE = Package("nvidia-cudnn-frontend", "1.32.0")
QUERIES, KEYS = 300, 700
BF16 = Values(out=3e-3, lse=2e-4)


def _entry(api: Any) -> tuple[Any, Any, list[str]]:
    """Return what launches a plan's kernel, and its parameters; an emulated one is its own entry."""
    from cudnn.sdpa.fwd import prepared

    kernel = api._compiled_kernel
    return kernel, kernel, list(prepared._host_parameter_order(api._k_mod._host))


def _prefill(causal: bool) -> Values:
    # Kernels that an earlier process compiled would be loaded, not compiled.
    os.environ["CUDNN_FRONTEND_DISABLE_COMPILED_CACHE"] = "1"
    from cudnn.sdpa.fwd import SdpaFwdDslSm100, prepared

    heads, scale = 2, 192**-0.5
    query, key, value = reference.packed([QUERIES], [KEYS], heads, torch.bfloat16)
    out = torch.empty(QUERIES, heads, 128, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(1, heads, QUERIES, 1, device="cuda")
    q, k, v, o = (tensor[None].transpose(1, 2) for tensor in (query, key, value, out))
    plan = SdpaFwdDslSm100(q, k, v, o, lse, is_causal=causal, causal_bottom_right=causal, scale_softmax=scale)
    plan.check_support()
    with mock.patch.object(prepared, "_positional_order", _entry):
        plan.compile()
    spec = plan._dense_spec
    facts = {
        name: prepared.facts_of_tensor(tensor) for name, tensor in {"q": q, "k": k, "v": v, "o": o, "lse": lse}.items()
    }
    arguments = prepared.bind_dense(spec, facts, None, 0)
    arguments[spec.index["scale_softmax_log2"]] = scale * math.log2(math.e)
    plan._compiled_kernel(*arguments)
    expected = reference.attention(query.cpu(), key.cpu(), value.cpu(), scale, causal)
    return reference.compared(out, lse[0, :, :, 0].T, [expected])


def _chosen(heads: int, width: int) -> Values:
    query, rows, lists, expected = reference.choosing(tokens=3, heads=heads, keys=700, top_k=384, width=width, unused=7)
    out, lse = gathered(query, rows, lists)
    return reference.compared(out, lse, expected)


def gathered(query: torch.Tensor, rows: torch.Tensor, lists: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [tokens, heads, 512] and the natural LSE [tokens, heads].

    query: [tokens, 64 heads, 576 or 512 columns], or [tokens, 128 heads, 512 columns]. rows: [keys, columns].
    lists: [tokens, top_k]; what is no row's number is no key.
    """
    from cudnn.deepseek_sparse_attention.sparse_attention_forward import _interface_sm100, api

    with (
        mock.patch.object(_interface_sm100, "_record_stream", nothing),
        mock.patch.object(torch.cuda, "device", nothing),
        mock.patch.object(torch.cuda.nvtx, "range", nothing),
    ):
        found = api.sparse_attention_forward_wrapper(query, rows, lists)
    return found["out"], found["lse"]


def _chosen_of(kernel_heads: int, width: int, requests: int, queries: int, keys: int, heads: int) -> None:
    """Call for tokens whose heads are filled up to those of a kernel."""
    gathered(*reference.to_choose(requests * queries, kernel_heads, keys, width))


def peers() -> list[Peer]:
    """Return the kernels to model: those of chosen keys."""
    return [
        Peer(
            PACKAGE,
            "decode",
            arch,
            "bf16",
            (512, width - 512),
            functools.partial(_chosen_of, heads, width),
            gathers=True,
            heads=heads,
        )
        for arch in ("sm_100a", "sm_103a")
        for heads, width in ((64, 576), (64, 512), (128, 512))
    ]


def controls() -> list[Control]:
    prefill = [
        Control(
            f"prefill, bf16, {'causal' if causal else 'full'}",
            PACKAGE,
            "sm_100a",
            functools.partial(_prefill, causal),
            BF16,
            lenient_tensor=True,
        )
        for causal in (True, False)
    ]
    chosen = [
        Control(
            f"chosen keys, bf16, {heads} heads of {width} dims",
            PACKAGE,
            "sm_100a",
            functools.partial(_chosen, heads, width),
            BF16,
            lenient_tensor=True,
        )
        for heads, width in ((64, 576), (64, 512), (128, 512))
    ]
    return [*prefill, *chosen]
