"""Which of a model's prefills are served."""

from __future__ import annotations

import torch

from ...identity.arch import Arch
from ...identity.dtype import Dtype
from ...identity.support import PREFILL_DIMS, prefill_dims
from ...operators.checks import TORCH_DTYPES


def why_not_prefilled(arch: Arch | None, dtype: torch.dtype, fp8: bool, dims: tuple[int, int, int]) -> str | None:
    """Return a sentence that says why heads of (nope, rope, value) dims are not prefilled; None when they are.

    dtype: the model's. fp8: whether inputs are quantised.
    """
    nope, rope, value = dims
    if (nope + rope, value) not in PREFILL_DIMS:
        shown = ", ".join(map(str, PREFILL_DIMS))
        return f"tsmla prefills heads of (query, value) dims {shown}, not ({nope + rope}, {value})"
    if fp8 and dtype is not torch.bfloat16:
        return f"FP8 prefill writes bfloat16, and the model is in {name_of(dtype)}"
    if arch is not None and TORCH_DTYPES.get(dtype) not in arch.facts.prefill:
        return f"tsmla prefills {', '.join(map(str, arch.facts.prefill))} on {arch}, not {name_of(dtype)}"
    read = Dtype.E4M3 if fp8 else TORCH_DTYPES[dtype]
    if arch is not None and (nope + rope, value) not in (there := prefill_dims(arch, read)):
        shown = ", ".join(map(str, there))
        return f"tsmla prefills {read} heads of (query, value) dims {shown} on {arch}, not ({nope + rope}, {value})"
    return None


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as engines' options spell it."""
    return str(dtype).removeprefix("torch.")
