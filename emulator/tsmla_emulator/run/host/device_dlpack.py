"""Hands out CPU memory through DLPack as if it were on CUDA device 0."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_CUDA = 2
_CODES = {torch.float8_e4m3fn: 10, torch.float8_e5m2: 12}
"""DLPack's codes of dtypes that torch 2.9 does not hand out: their bytes are handed out instead, with this code."""
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _ManagedTensor(ctypes.Structure):
    """The beginning of a DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
    ]


def as_cuda_dlpack(tensor: torch.Tensor) -> Any:
    """Return a DLPack capsule (unversioned) of a CPU tensor that names CUDA 0 as its device."""
    code = _CODES.get(tensor.dtype)
    capsule = (tensor if code is None else tensor.view(torch.uint8)).__dlpack__()
    managed = _ManagedTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    managed.device_type, managed.device_id = _CUDA, 0
    if code is not None:
        managed.dtype_code = code
    return capsule
