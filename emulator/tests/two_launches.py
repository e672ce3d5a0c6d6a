"""Somebody else's kernels: one call doubles a vector, then adds up neighbours, in two launches of different shape."""

from __future__ import annotations

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

THREADS = 64
CLUSTER = 2


@cute.kernel
def double(source: cute.Tensor, doubled: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    place = cta * THREADS + thread
    if place < source.shape[0]:
        doubled[place] = source[place] + source[place]


@cute.kernel
def add_neighbours(doubled: cute.Tensor, sums: cute.Tensor, offset: cutlass.Float32):
    cute.arch.griddepcontrol_wait()
    thread, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    place = cta * THREADS + thread
    if place < sums.shape[0]:
        sums[place] = doubled[2 * place] + doubled[2 * place + 1] + offset


@cute.jit
def run(source: cute.Tensor, doubled: cute.Tensor, sums: cute.Tensor, offset: cutlass.Float32, stream):
    double(source, doubled).launch(
        grid=(cute.ceil_div(source.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )
    ctas = cute.ceil_div(sums.shape[0], THREADS * CLUSTER) * CLUSTER
    add_neighbours(doubled, sums, offset).launch(
        grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream, use_pdl=True
    )


def compile_it(options: str):
    """What `cute.compile` makes of `run`: source [n], doubled [n], sums [n // 2], all float32, and an offset."""
    length, half = cute.sym_int32(), cute.sym_int32()
    tensors = [make_fake_tensor(cutlass.Float32, (n,), (1,), assumed_align=4) for n in (length, length, half)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(run, *tensors, cutlass.Float32(0.0), stream, options=options)
