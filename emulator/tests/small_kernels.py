"""Kernels of a few PTX lines over numpy arrays, for the tests of the interpreter."""

from __future__ import annotations

import struct

import numpy as np
from tsmla_emulator.run.machine import Launch, Options, Region, Report, parse, run_launches

HEADER = ".version 8.8\n.target {arch}\n.address_size 64\n"
REGISTERS = ".reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<1024>; .reg .b64 %d<128>;"


def text_of(body: str, params: int, arch: str, threads: int, static: str = "") -> str:
    """An entry `k` whose pointers are in %d100, %d101, ..; %r1000 is the thread, %r1001 the lane, `smem` is dynamic."""
    declared = ", ".join(f".param .align 64 .b8 k_param_{i}[128]" for i in range(params))
    loads = "\n".join(f"ld.param.b64 %d{100 + i}, [k_param_{i}];" for i in range(params))
    return f"""{HEADER.format(arch=arch)}
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({declared})
.reqntid {threads}, 1, 1
{{
{REGISTERS}
{static}
{loads}
mov.u32 %r1000, %tid.x;
mov.u32 %r1001, %laneid;
{body}
ret;
}}
"""


def aligned(values: np.ndarray, align: int = 128) -> np.ndarray:
    """A copy at an address that is a multiple of `align`."""
    space = np.zeros(values.nbytes + align, np.uint8)
    start = -space.ctypes.data % align
    placed = space[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    placed[...] = values
    return placed


def run(
    body: str,
    *arguments: np.ndarray | bytes,
    threads: int = 32,
    grid: int = 1,
    cluster: int = 1,
    shared: int = 0,
    arch: str = "sm_90a",
    readonly: tuple[int, ...] = (),
    pdl: bool = False,
    cooperative: bool = False,
    static: str = "",
    workers: int = 1,
    **options,
) -> Report:
    """Run the body. Arrays are passed by address and may be written; bytes (a tensor map) fill a parameter."""
    module = parse(text_of(body, len(arguments), arch, threads, static))
    blocks = [a if isinstance(a, bytes) else struct.pack("<Q", a.ctypes.data) for a in arguments]
    params = b"".join(block.ljust(128, b"\0") for block in blocks)
    regions = [
        Region(a.ctypes.data, a.nbytes, f"argument {i}", i not in readonly)
        for i, a in enumerate(arguments)
        if isinstance(a, np.ndarray)
    ]
    launch = Launch("k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, params, pdl, cooperative)
    return run_launches(module, [launch], regions, Options(threads=workers, **options))


def lanewise(instruction: str, sources: list[np.ndarray], result: np.dtype | type, threads: int = 32) -> np.ndarray:
    """Apply `op D, S0, S1, ..` to every element; the operands' widths follow from the arrays' item sizes."""
    sources = [np.ascontiguousarray(s) for s in sources]
    count = len(sources[0])
    padded = -(-count // threads) * threads
    sources = [np.concatenate([s, np.zeros(padded - count, s.dtype)]) for s in sources]
    out = np.zeros(padded, result)
    names = {1: "h", 2: "h", 4: "r", 8: "d"}
    loads, operands = [], []
    for i, s in enumerate(sources):
        name = f"%{names[s.itemsize]}{i + 1}"
        loads.append(f"mad.wide.u32 %d50, %r900, {s.itemsize}, %d{100 + i};")
        loads.append(f"ld.global.b{8 * s.itemsize} {name}, [%d50];")
        operands.append(name)
    target = f"%{names[out.itemsize]}10"
    text = instruction.replace("D", target)
    for i, operand in enumerate(operands):
        text = text.replace(f"S{i}", operand)
    body = "\n".join(
        [
            "mov.u32 %r901, %ctaid.x;",
            f"mad.lo.s32 %r900, %r901, {threads}, %r1000;",
            *loads,
            text,
            f"mad.wide.u32 %d50, %r900, {out.itemsize}, %d{100 + len(sources)};",
            f"st.global.b{8 * out.itemsize} [%d50], {target};",
        ]
    )
    run(body, *sources, out, threads=threads, grid=padded // threads)
    return out[:count]


FILL = """
mov.b32 %r2, smem; shl.b32 %r1, %r1000, 4; add.s32 %r3, %r2, %r1; cvt.u64.u32 %d1, %r1; add.s64 %d2, %d100, %d1;
mov.b32 %r9, 0;
MORE:
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%d2]; st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};
add.s32 %r3, %r3, 2048; add.s64 %d2, %d2, 2048; add.s32 %r9, %r9, 1; setp.lt.s32 %p1, %r9, 32; @%p1 bra MORE;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
"""128 threads copy 64 KiB of the first argument to the start of shared memory, for the async proxy to read."""
