"""Reads the CUDA runtime's launch configuration from memory, and refuses what the hardware would not take."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from typing import Any, NoReturn

from ..machine import EmulationError, Launch
from ..ptx.model import Entry

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
DEFAULT_DYNAMIC_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may ask for without raising its limit first."""

_COOPERATIVE, _CLUSTER, _PDL = 2, 4, 6
_ATTRIBUTE_NAMES = {_COOPERATIVE: "cooperative", _CLUSTER: "cluster dimension", _PDL: "programmatic serialization"}


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("padding", ctypes.c_int32), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    """The struct cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


@dataclasses.dataclass
class KernelLimits:
    """What host code allowed a kernel through cudaFuncSetAttribute."""

    dynamic_shared: int = DEFAULT_DYNAMIC_SHARED
    non_portable_cluster: bool = False


def launch_of(config: LaunchConfig, entry: Entry, arguments: Any, limits: KernelLimits, processors: int) -> Launch:
    """Return the record of a launch, with parameters copied from `arguments` (an array of addresses, one per PTX
    parameter).

    Raises EmulationError of kind "launch" for what a GPU refuses, and for attributes that are not implemented.
    """
    params = bytearray(entry.param_bytes)
    for param, address in zip(entry.params, arguments[: len(entry.params)], strict=True):
        params[param.offset : param.offset + param.size] = ctypes.string_at(address, param.size)
    cluster, pdl, cooperative = _attributes(config, entry.name)
    launch = Launch(
        entry=entry.name,
        grid=_three(config.grid),
        block=_three(config.block),
        cluster=cluster,
        shared_bytes=config.shared_bytes,
        params=bytes(params),
        pdl=pdl,
        cooperative=cooperative,
    )
    check(launch, entry, limits, processors)
    return launch


def check(launch: Launch, entry: Entry, limits: KernelLimits, processors: int) -> None:
    """Raise EmulationError unless a GPU with so many SMs would take this launch of this entry.

    A cooperative launch may have no more CTAs than SMs, as if each took the whole of one.
    """
    check_of_any_host(launch, entry)
    most = MAX_CLUSTER if limits.non_portable_cluster else PORTABLE_CLUSTER
    if math.prod(launch.cluster) > most:
        _refuse(entry, f"cluster {launch.cluster} has {math.prod(launch.cluster)} CTAs; this kernel may have {most}")
    if launch.cooperative and math.prod(launch.grid) > processors:
        _refuse(entry, f"grid {launch.grid} of a cooperative launch; {processors} CTAs are there at the same time")
    if launch.shared_bytes > limits.dynamic_shared:
        given = f"{launch.shared_bytes} bytes of dynamic shared memory"
        _refuse(entry, f"{given}; this kernel may have {limits.dynamic_shared}")


def check_of_any_host(launch: Launch, entry: Entry) -> None:
    """Raise EmulationError for what no GPU takes, whatever host code allowed, which records do not say."""
    threads, ctas = math.prod(launch.block), math.prod(launch.cluster)
    if any(not 1 <= size <= most for size, most in zip(launch.grid, MAX_GRID, strict=True)):
        _refuse(entry, f"grid is {launch.grid}; each size must be 1 to {MAX_GRID}")
    if not 1 <= threads <= MAX_THREADS:
        _refuse(entry, f"block is {launch.block}, {threads} threads; a CTA has 1 to {MAX_THREADS}")
    if entry.reqntid and launch.block != entry.reqntid:
        _refuse(entry, f"block is {launch.block}; the kernel was compiled for exactly {entry.reqntid} (.reqntid)")
    if any(part < 1 or size % part for size, part in zip(launch.grid, launch.cluster, strict=True)):
        _refuse(entry, f"grid {launch.grid} is not a multiple of the cluster {launch.cluster}")
    if ctas > MAX_CLUSTER:
        _refuse(entry, f"cluster {launch.cluster} has {ctas} CTAs; a cluster has up to {MAX_CLUSTER}")
    if len(launch.params) < entry.param_bytes:
        _refuse(entry, f"{len(launch.params)} bytes of parameters; the kernel takes {entry.param_bytes}")


def _refuse(entry: Entry, text: str) -> NoReturn:
    raise EmulationError(f"launch of {entry.name} refused: {text}", kind="launch")


def _attributes(config: LaunchConfig, kernel: str) -> tuple[tuple[int, int, int], bool, bool]:
    """Return (cluster, whether the launch is programmatically serialised, whether it is cooperative)."""
    cluster, pdl, cooperative = (1, 1, 1), False, False
    for attribute in config.attributes[: config.attribute_count]:
        if attribute.id == _CLUSTER:
            cluster = _three(attribute.value)
        elif attribute.id == _PDL:
            pdl = bool(attribute.value[0])
        elif attribute.id == _COOPERATIVE:
            cooperative = bool(attribute.value[0])
        else:
            raise EmulationError(
                f"not implemented: launch attribute {attribute.id} of {kernel}; implemented: "
                + ", ".join(f"{number} ({name})" for number, name in _ATTRIBUTE_NAMES.items()),
                kind="not implemented",
            )
    return cluster, pdl, cooperative


def _three(values: Any) -> tuple[int, int, int]:
    return values[0], values[1], values[2]
