"""Runs the host half of an exported function for real, and records the launches that it makes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from .. import kept
from ..machine import SHARED_BYTES_PER_CTA, EmulationError, Launch
from ..ptx.model import Entry, Module
from .launch_config import KernelLimits, LaunchConfig, launch_of
from .memory import Extent, block_at
from .tensor import FAR, EmulatedTensor
from .tensor_map import DRIVER_DTYPES, SWIZZLES, TensorMap

_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER, _SHARED_MEMORY_MODE = 8, 14, 16
_STATIC_SHARED = 1
_REFUSED = 999

_OnAttribute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
_OnKernelAttribute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int))
_OnSetAttribute = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)
_OnLaunch = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(LaunchConfig), ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)
)


class _TensorMapCall(ctypes.Structure):
    """Arguments of cuTensorMapEncodeTiled, without the map."""

    _fields_ = [
        ("data_type", ctypes.c_int),
        ("rank", ctypes.c_uint32),
        ("address", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_uint64)),
        ("strides", ctypes.POINTER(ctypes.c_uint64)),
        ("box", ctypes.POINTER(ctypes.c_uint32)),
        ("element_strides", ctypes.POINTER(ctypes.c_uint32)),
        ("interleave", ctypes.c_int),
        ("swizzle", ctypes.c_int),
        ("promotion", ctypes.c_int),
        ("fill", ctypes.c_int),
    ]


_OnTensorMap = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_TensorMapCall), ctypes.c_void_p)


class _Host(ctypes.Structure):
    """The struct `Host` of double.c."""

    _fields_ = [
        ("device_attribute", _OnAttribute),
        ("kernel_attribute", _OnKernelAttribute),
        ("set_kernel_attribute", _OnSetAttribute),
        ("launch", _OnLaunch),
        ("encode_tensor_map", _OnTensorMap),
    ]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What host code may ask a device. Attribute numbers are cudaDeviceAttr's.

    shared_per_cta: Rubin's, too, since kernels use no more.
    """

    capability: tuple[int, int]
    processors: int
    shared_per_cta: int = SHARED_BYTES_PER_CTA

    def attribute(self, number: int) -> int:
        """Return a device attribute. Raises EmulationError for one that no kernel seen so far asks for."""
        known = {16: self.processors, 75: self.capability[0], 76: self.capability[1], 97: self.shared_per_cta}
        if number not in known:
            raise EmulationError(
                f"not implemented: host code asks for device attribute {number}; known: {sorted(known)}",
                kind="not implemented",
            )
        return known[number]


@dataclasses.dataclass
class _Recording:
    """One call of an exported function: the GPU that it asks, and what it did so far."""

    gpu: Gpu
    ptx: Module
    launches: list[Launch] = dataclasses.field(default_factory=list)
    error: BaseException | None = None

    def entry(self, kernel: bytes) -> Entry:
        """Return the PTX of a kernel by name."""
        entry = self.ptx.entries.get(kernel.decode())
        if entry is None:
            raise EmulationError(
                f"the host code launches {kernel.decode()}, which the PTX does not have; it has: "
                f"{', '.join(self.ptx.entries)}. The PTX must come from the same compile as the object",
                kind="launch",
            )
        return entry


class Library:
    """A library linked with the double, one per file and process. Its kernels are loaded at the first call."""

    def __init__(self, path: Path):
        self.path = path
        self._module = tvm_ffi.load_module(str(path))
        connect = ctypes.CDLL(str(path)).tsmla_emulator_connect
        # ctypes keeps callbacks alive only while they are referenced.
        self._callbacks = _Host(
            _OnAttribute(self._guarded(self._device_attribute)),
            _OnKernelAttribute(self._guarded(self._kernel_attribute)),
            _OnSetAttribute(self._guarded(self._set_kernel_attribute)),
            _OnLaunch(self._guarded(self._launch)),
            _OnTensorMap(self._guarded(_encode_tensor_map)),
        )
        connect(ctypes.byref(self._callbacks))
        self._limits: defaultdict[str, KernelLimits] = defaultdict(KernelLimits)
        self._lock = threading.Lock()
        self._recording: _Recording
        self._parameters: dict[str, dict[str, str]] = {}

    def function(self, symbol: str) -> Callable[..., Any]:
        """Return an exported TVM-FFI function. Raises AttributeError naming the symbol and the file."""
        try:
            return self._module.get_function(symbol)
        except AttributeError:
            raise AttributeError(f"{self.path} exports no function {symbol}") from None

    def parameters(self, symbol: str) -> dict[str, str]:
        """Return a function's parameters and the kind of each ("Tensor", "int32", "None", ..).

        They are read from the TypeError of calling it without any; there are none when that names none.
        """
        if symbol not in self._parameters:  # tvm_ffi takes a fifth of a second to raise
            function = self.function(symbol)
            content = self.path.read_bytes() + f"{symbol} {tvm_ffi.__version__}".encode()
            self._parameters[symbol] = kept.made_of(content, lambda: parameters_of(function))
        return self._parameters[symbol]

    def record(self, symbol: str, arguments: Sequence[Any], ptx: Module, gpu: Gpu) -> list[Launch]:
        """Call a function and return its launches, none of them run. Raises what its argument checks raise."""
        function = self.function(symbol)
        with self._lock:
            recording = self._recording = _Recording(gpu, ptx)
            try:
                function(*arguments)
            except BaseException:
                if recording.error:
                    raise recording.error from None
                raise
            if recording.error:
                raise recording.error
            return recording.launches

    def _guarded(self, callback: Callable[..., None]) -> Callable[..., int]:
        """Return a callback for C: an exception is kept for `record` to raise, and C sees an error code."""

        @functools.wraps(callback)
        def call(*arguments: Any) -> int:
            try:
                callback(*arguments)
                return 0
            except BaseException as error:  # nothing may pass through the C frames
                self._recording.error = error
                return _REFUSED

        return call

    def _device_attribute(self, number: int, value: Any) -> None:
        value[0] = self._recording.gpu.attribute(number)

    def _kernel_attribute(self, kernel: bytes, number: int, value: Any) -> None:
        if number != _STATIC_SHARED:
            raise EmulationError(
                f"not implemented: host code asks for attribute {number} of {kernel.decode()}", kind="not implemented"
            )
        value[0] = sum(array.size for array in self._recording.entry(kernel).shared.values())

    def _set_kernel_attribute(self, kernel: bytes, number: int, value: int) -> None:
        limits = self._limits[kernel.decode()]
        if number == _MAX_DYNAMIC_SHARED:
            static = sum(array.size for array in self._recording.entry(kernel).shared.values())
            if value + static > self._recording.gpu.shared_per_cta:
                raise EmulationError(
                    f"{kernel.decode()} wants up to {value} bytes of dynamic shared memory beside {static} static; "
                    f"a CTA has {self._recording.gpu.shared_per_cta}",
                    kind="launch",
                )
            limits.dynamic_shared = value
        elif number == _NON_PORTABLE_CLUSTER:
            limits.non_portable_cluster = bool(value)
        elif number == _SHARED_MEMORY_MODE:
            pass  # what CUDA 13's host code sets for sm_107a; the sizes above are checked all the same
        else:
            raise EmulationError(
                f"not implemented: host code sets attribute {number} of {kernel.decode()}", kind="not implemented"
            )

    def _launch(self, config: Any, kernel: bytes, arguments: Any) -> None:
        entry = self._recording.entry(kernel)
        processors = self._recording.gpu.processors
        launch = launch_of(config.contents, entry, arguments, self._limits[entry.name], processors)
        self._recording.launches.append(launch)


def _encode_tensor_map(call: Any, target: int) -> None:
    """Encode a tensor map. Raises ValueError for what a map cannot hold, and EmulationError for swizzles that are not
    known."""
    given = call.contents
    rank = given.rank
    if given.swizzle >= len(SWIZZLES):
        raise EmulationError(f"not implemented: tensor map of swizzle {given.swizzle}", kind="not implemented")
    made = TensorMap(
        address=given.address or 0,
        dtype=DRIVER_DTYPES[given.data_type],
        shape=tuple(given.sizes[:rank]),
        strides=tuple(given.strides[: rank - 1]),
        box=tuple(given.box[:rank]),
        element_strides=tuple(given.element_strides[:rank]),
        swizzle=SWIZZLES[given.swizzle],
        nan_fill=bool(given.fill),
        interleave=given.interleave,
    )
    ctypes.memmove(target, made.encode(), 128)


@functools.cache
def open_library(path: Path) -> Library:
    """Return the library at a path. The system keeps the first file that was loaded from it."""
    return Library(path)


def parameters_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return a TVM-FFI function's parameters and their kinds, as `Library.parameters` does."""
    with contextlib.suppress(IndexError):
        try:
            function()
        except TypeError as error:
            return dict(re.findall(r"[(,] ?(\w+): (\w+)", str(error).split("`")[1]))
    return {}


def extents(arguments: Sequence[Any], names: Sequence[str], writes: Callable[[str], bool]) -> list[Extent]:
    """Return the memory behind the tensors, torch's or CuTe's, among a call's arguments.

    An integer that is the address of an allocation, as functions with pointers take it, stands for all of that
    allocation. Raises TypeError for a tensor on the CPU.
    """
    found = []
    for position, argument in enumerate(arguments):
        name = names[position] if position < len(names) else f"argument {position}"
        if isinstance(argument, torch.Tensor) and not isinstance(argument, EmulatedTensor):
            raise TypeError(f"{name} is on {argument.device}; an emulated kernel takes tensors made with device='cuda'")
        if isinstance(argument, int) and (block := block_at(argument)):
            found.append(Extent(block.address, block.address + block.size, name, writes(name)))
        if hasattr(argument, "__tvm_ffi_object__"):
            spans = _spans(argument.__tvm_ffi_object__())
            for number, (start, end) in enumerate(spans):
                if end > start:
                    found.append(Extent(start, end, f"{name}[{number}]" if number else name, writes(name)))
    return found


def _spans(tensor: tvm_ffi.Tensor) -> list[tuple[int, int]]:
    """Return addresses [start, end) from a tensor's first to its last element; of each row, where rows are spread."""
    if 0 in tensor.shape:
        return [(tensor.data_ptr(), tensor.data_ptr())]
    starts, last = [0], 0
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        if stride >= FAR:
            starts = [start + place * stride for start in starts for place in range(size)]
        else:
            last += (size - 1) * stride
    bits = tensor.dtype.bits
    first = tensor.data_ptr()
    return [(first + start * bits // 8, first + (start + last + 1) * bits // 8) for start in starts]
