"""CPU tensors in guarded memory that say they are on cuda:0, and a mode in which torch makes them for device="cuda".

Operators see `is_cuda`, `device`, `data_ptr` and strides as on a GPU; torch's own operations on them run on the CPU and
give emulated tensors again. What torch refuses on a GPU (numpy(), mixing with CPU tensors) is refused here too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import tvm_ffi
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from . import memory
from .device_dlpack import as_cuda_dlpack

Function = TypeVar("Function", bound=Callable[..., Any])

DEVICE = torch.device("cuda", 0)
_CUDA_DLPACK = (2, 0)
_UNINITIALISED = {
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.empty_permuted,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
_MIXING_ALLOWED = {
    torch.Tensor.copy_,
    torch.Tensor.__getitem__,
    torch.Tensor.__setitem__,
    torch.Tensor.to,
    torch.Tensor.type_as,
}
FAR = 0x2_B6D0_0000
"""Elements that the rows of spread tensors lie apart, beside what they did before. Upper bits of its lower word are
set, as they are in addresses."""
_MOST_SPREAD = 1 << 42
"""Bytes from the first to the last one of a spread tensor, at most: a process has 2**47."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes -> the integer dtype of that width."""
_POISON = int.from_bytes(bytes([memory.POISON] * 8), "little", signed=True)
"""Poison as an integer of 64 bits, which has the same value in any narrower width."""
_NOT_ON_CUDA: set[Any] = {torch.Tensor.numpy, torch.Tensor.__array__}


class EmulatedTensor(torch.Tensor):
    """A tensor in guarded memory. Make it with device="cuda" inside `emulated`, or with `to_device`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return DEVICE.index

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return self.clone()

    def __format__(self, specification: str) -> str:
        return format(plain(self), specification)

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return _CUDA_DLPACK

    def __dlpack__(self, **_: Any) -> Any:
        return as_cuda_dlpack(plain(self))

    @property
    def __dlpack_c_exchange_api__(self) -> Any:  # type: ignore[override]
        raise AttributeError("torch's own exchange would give the CPU's address space away")

    def __tvm_ffi_object__(self) -> tvm_ffi.Tensor:
        return tvm_ffi.from_dlpack(self)


class EmulatedDevice(TorchFunctionMode):
    """While active, torch functions with device="cuda" give emulated tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


def to_device(tensor: torch.Tensor) -> EmulatedTensor:
    """Return a copy in guarded memory, with the same strides unless elements share memory."""
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
        strides = torch.empty(tensor.shape, device="meta").stride()
    made = _allocated(tensor.shape, strides, tensor.dtype, written=True)
    plain(made).copy_(tensor)
    return made


def spread(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield copies whose rows lie more than 2**32 elements apart, in memory that nobody has until it is written: first
    all rows, then those of the outermost dimension alone. None has too many of them."""
    order = sorted(range(tensor.dim()), key=lambda at: (tensor.shape[at] > 1, tensor.stride(at), -at), reverse=True)
    for count in (tensor.dim() - 1, 1):
        strides, apart = [*tensor.stride()], FAR
        for at in reversed(order[:count]):
            strides[at] += apart
            apart *= tensor.shape[at]
        if apart * tensor.dtype.itemsize <= _MOST_SPREAD:
            made = _allocated(tensor.shape, strides, tensor.dtype, written=True, sparse=True)
            plain(made).copy_(plain(tensor))
            yield made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """View an emulated tensor's memory as an ordinary CPU tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def in_plain_tensors(function: Function) -> Function:
    """Have a function of numbers get ordinary CPU tensors for emulated ones, in lists and dataclasses, too.

    So no result on its way has guarded memory of its own. Those that it returns have, if any tensor given was emulated.
    """

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        emulated = False

        def given(value: Any) -> Any:
            nonlocal emulated
            if isinstance(value, EmulatedTensor):
                emulated = True
                return plain(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = [field.name for field in dataclasses.fields(value) if field.init]
                return dataclasses.replace(value, **{name: tree_map(given, getattr(value, name)) for name in fields})
            return value

        args, kwargs = tree_map(given, (args, kwargs))
        result = function(*args, **kwargs)
        if not emulated:
            return result
        return tree_map(lambda x: to_device(x) if isinstance(x, torch.Tensor) else x, result)

    return called  # type: ignore[return-value]


def unwritten(tensor: torch.Tensor) -> int:
    """Return how many elements hold nothing but poison."""
    content = plain(tensor)
    if content.dtype == torch.complex128:  # no integer is as wide
        return int((torch.view_as_real(content).view(torch.int64) == _POISON).all(-1).count_nonzero())
    return int((content.view(_INTEGERS[content.dtype.itemsize]) == _POISON).count_nonzero())


def _allocated(shape, strides, dtype: torch.dtype, written: bool = False, sparse: bool = False) -> EmulatedTensor:
    """Memory for a tensor. written: the caller writes all elements, which need not be all of the memory. sparse: nobody
    writes the rest."""
    span = 0 if 0 in shape else sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    whole = written and span == math.prod(shape) > 0
    _, buffer = memory.allocate(max(1, span) * dtype.itemsize, poisoned=not (whole or sparse))
    content = torch.frombuffer(buffer, dtype=torch.uint8)
    return content.view(dtype).as_strided(shape, strides).as_subclass(EmulatedTensor)


def _call(func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a torch function on the CPU and put its result where it would be: on the emulated device or on the CPU."""
    given = _tensors(args, kwargs)
    emulated = any(isinstance(tensor, EmulatedTensor) for tensor in given)
    target: str | None
    called = func
    if func in (torch.Tensor.cuda, torch.Tensor.cpu):
        called, target, args, kwargs = torch.Tensor.cpu, func.__name__, args[:1], {}
    else:
        target, args, kwargs = _without_device(func, args, kwargs)
    if not emulated and target != "cuda":
        return called(*args, **kwargs)
    _refuse(func, given)
    with torch._C.DisableTorchFunctionSubclass():
        result = called(*args, **kwargs)
    if target == "cpu":
        return tree_map(lambda x: plain(x).clone() if isinstance(x, torch.Tensor) else x, result)
    return tree_map(lambda x: _placed(x, func in _UNINITIALISED) if isinstance(x, torch.Tensor) else x, result)


def _placed(tensor: torch.Tensor, uninitialised: bool) -> EmulatedTensor:
    if isinstance(tensor, EmulatedTensor):
        return tensor
    if memory.block_at(tensor.untyped_storage().data_ptr()):
        return tensor.as_subclass(EmulatedTensor)
    if uninitialised:
        return _allocated(tensor.shape, tensor.stride(), tensor.dtype)
    return to_device(tensor)


def _without_device(func: Callable[..., Any], args: tuple, kwargs: dict) -> tuple[str | None, tuple, dict]:
    """Return which kind of device ("cuda", "cpu") a call asks for, None if it does not say, and the call for the
    CPU."""
    asked = kwargs.get("device")
    if func is torch.Tensor.to:
        others = [x for x in args[1:] if isinstance(x, str | torch.device | torch.Tensor)]
        if others:
            asked = others[0]
            args = (args[0], *(_on_cpu(x) for x in args[1:]))
    if isinstance(asked, torch.Tensor):
        asked = asked.device
    if asked is None:
        return None, args, kwargs
    kind = torch.device(asked).type if isinstance(asked, str | torch.device) else "cuda"
    if kind == "cuda" and "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    return kind, args, kwargs


def _on_cpu(x: Any) -> Any:
    if isinstance(x, str | torch.device):
        return "cpu"
    return plain(x) if isinstance(x, torch.Tensor) else x


def _refuse(func: Callable[..., Any], given: list[torch.Tensor]) -> None:
    """Raise what torch raises on a GPU, so that a test cannot pass here and fail there."""
    if func in _NOT_ON_CUDA:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first (emulated device)")
    if func not in _MIXING_ALLOWED and any(not isinstance(t, EmulatedTensor) and t.dim() for t in given):
        if any(isinstance(tensor, EmulatedTensor) for tensor in given):
            name = getattr(func, "__name__", str(func))
            raise RuntimeError(f"{name}: expected all tensors on one device, found cuda:0 (emulated) and cpu")


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            flat.append(value)
        elif isinstance(value, list | tuple):
            flat.extend(x for x in value if isinstance(x, torch.Tensor))
    return flat
