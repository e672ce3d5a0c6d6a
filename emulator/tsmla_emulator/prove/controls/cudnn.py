"""nvidia-cudnn-frontend's open CuTe DSL prefill of Blackwell, 192 and 128 dims.

Its wrapper talks to the driver before it launches. Only its plan is taken, therefore, and its function from tensors to
kernel arguments (both are Python), and the kernel is called with what that gives.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any
from unittest import mock

import torch

from . import reference
from .control import Control, Package, Values

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


def controls() -> list[Control]:
    return [
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
