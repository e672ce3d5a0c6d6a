"""Tensors made of right ones whose memory is not what torch says they hold, for tests of what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(tensor.shape, dtype=tensor.dtype)


ODD: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (
        lambda x: torch.sparse_coo_tensor(size=x.shape, dtype=x.dtype),
        r"has the layout torch.sparse_coo; it must be .* \(pass {name}.to_dense\(\)\)",
    ),
    "nested": (lambda x: torch.nested.as_nested_tensor([x.float()]), r"is a nested tensor; .*{name}.values\(\)"),
    "jagged": (
        lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
        r"is a nested tensor; .*{name}.values\(\)",
    ),
    "negated": (torch._neg_view, r"is a view that torch negates .* \(pass {name}.resolve_neg\(\)\)"),
    "fake": (_fake, "is a FakeTensor without memory; "),
}
"""What makes each from an ordinary tensor, and what is said about it; {name} stands for the argument's."""

FLOATS_ONLY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "needs a gradient": (
        lambda x: x.detach().requires_grad_(),
        r"requires a gradient, and none is computed here; .* {name}.detach\(\).* torch.inference_mode\(\)",
    ),
}
"""Such tensors, whose dtype has gradients."""

OVERLAPPING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded": lambda x: x[:1].expand(x.shape),
    "expanded over heads": lambda x: x[..., :1, :].expand(x.shape),
    "overlapping rows": lambda x: x.as_strided(x.shape, (*(16 for _ in x.shape[:-1]), 1)),
}
"""What makes an output whose elements share memory from one whose elements do not."""


def far_apart(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """Place what a tensor's first dimension counts so many elements apart. Only the first of it has memory."""
    within = sum((extent - 1) * step for extent, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
    room = ((len(tensor) - 1) * stride + within) * tensor.element_size()
    memory = (ctypes.c_ubyte * room).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, (stride, *tensor.stride()[1:]))
