"""Argument checks shared by the operators. Each raises ArgumentError with operator, argument, given and accepted."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence

import torch

from .errors import ArgumentError, UnsupportedError
from .variant import Arch, Dtype

TORCH_DTYPES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: Dtype.BF16,
    torch.float16: Dtype.FP16,
    torch.float8_e4m3fn: Dtype.E4M3,
    torch.float8_e5m2: Dtype.E5M2,
}
TORCH_DTYPE_OF: dict[Dtype, torch.dtype] = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}

SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 2.0**127 * (2 - 2.0**-23)
"""Normal float32 numbers, which is what kernels multiply by."""

_arch_by_index: dict[int, Arch] = {}


def arch_of(device: torch.device) -> Arch:
    """The architecture whose kernels a CUDA device runs; cached per device index."""
    index = torch.cuda.current_device() if device.index is None else device.index
    arch = _arch_by_index.get(index)
    if arch is None:
        capability = torch.cuda.get_device_capability(index)
        arch = Arch.from_capability(*capability)
        if arch is None:
            known = ", ".join(f"{a} ({a.gpus})" for a in Arch)
            raise UnsupportedError(
                f"GPU {index} is {torch.cuda.get_device_name(index)} with compute capability "
                f"{capability[0]}.{capability[1]}; tsmla has kernels for {known}"
            )
        _arch_by_index[index] = arch
    return arch


def dtype_of(dtype: torch.dtype) -> Dtype:
    """tsmla's name of a torch dtype; `dtype_in` is the check that also names the argument."""
    found = TORCH_DTYPES.get(dtype)
    if found is None:
        raise ArgumentError(f"{dtype} is not a dtype that tsmla's kernels know; they know {_listed(TORCH_DTYPES)}")
    return found


def cuda(operator: str, name: str, tensor: torch.Tensor) -> torch.device:
    """A CUDA tensor; returns its device."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{operator}: {name} is a {type(tensor).__name__}; it must be a CUDA tensor")
    if not tensor.is_cuda:
        raise ArgumentError(f"{operator}: {name} is on {tensor.device}; it must be a CUDA tensor")
    return tensor.device


def same_device(operator: str, name: str, tensor: torch.Tensor, reference: str, device: torch.device) -> None:
    """A tensor on `device`, which is where the argument called `reference` is."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{operator}: {name} is a {type(tensor).__name__}; it must be a tensor on {device}")
    if tensor.device != device:
        raise ArgumentError(
            f"{operator}: {name} is on {tensor.device} but {reference} is on {device}; all tensors must share a device"
        )


def ndim(operator: str, name: str, tensor: torch.Tensor, layout: Sequence[str]) -> None:
    """A tensor with one dimension per entry of `layout`, such as ("tokens", "heads", "d_qk")."""
    if tensor.ndim != len(layout):
        raise ArgumentError(
            f"{operator}: {name} has shape {_shape(tensor.shape)}; it must have {len(layout)} dimensions "
            f"[{', '.join(layout)}]"
        )


def shape(operator: str, name: str, tensor: torch.Tensor, expected: Sequence[int]) -> None:
    """A tensor of exactly this shape."""
    if tuple(tensor.shape) != tuple(expected):
        raise ArgumentError(f"{operator}: {name} has shape {_shape(tensor.shape)}; it must be {_shape(expected)}")


def dtype_in(operator: str, name: str, tensor: torch.Tensor, accepted: Iterable[torch.dtype]) -> None:
    """A tensor of one of the accepted torch dtypes."""
    if tensor.dtype not in accepted:
        raise ArgumentError(f"{operator}: {name} is {tensor.dtype}; accepted: {_listed(accepted)}")


def last_dim_contiguous(operator: str, name: str, tensor: torch.Tensor) -> None:
    """A tensor whose last dimension has stride 1; the outer strides are free."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ArgumentError(
            f"{operator}: {name} has strides {tuple(tensor.stride())}; its last dimension must have stride 1 "
            f"(pass {name}.contiguous())"
        )


def contiguous(operator: str, name: str, tensor: torch.Tensor) -> None:
    """A tensor without gaps, in row-major order."""
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"{operator}: {name} has shape {_shape(tensor.shape)} and strides {tuple(tensor.stride())}; "
            "it must be contiguous"
        )


def aligned(operator: str, name: str, tensor: torch.Tensor, multiple: int) -> None:
    """A tensor whose address, and whose outer strides in bytes, are multiples of `multiple` bytes."""
    if tensor.data_ptr() % multiple:
        raise ArgumentError(
            f"{operator}: {name} starts at address {tensor.data_ptr():#x}; it must be aligned to {multiple} bytes "
            f"({name}.clone() is)"
        )
    size = tensor.element_size()
    for stride, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True):
        if extent > 1 and stride * size % multiple:
            raise ArgumentError(
                f"{operator}: {name} has strides {tuple(tensor.stride())} of {size}-byte elements; the outer strides "
                f"must be multiples of {multiple} bytes ({multiple // size} elements; those of {name}.contiguous() are)"
            )


def number(operator: str, name: str, value: float) -> float:
    """A Python number, as a float."""
    if type(value) is float:
        return value
    if not isinstance(value, numbers.Real):
        raise ArgumentError(
            f"{operator}: {name} is a {type(value).__name__}; it must be a Python number "
            "(reading a tensor here would wait for the GPU)"
        )
    return float(value)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)


def _shape(sizes: Iterable[int]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"
