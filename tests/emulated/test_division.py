"""Divisions by what the host has told as a `Divisor` are exact for every number of 31 bits."""

from __future__ import annotations

import random
import tempfile

import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tsmla_kernels.parts.division import Divisor, divisor_of, quotient, quotient_up

MOST = 2**31 - 1
DIVIDENDS = 512


class Divider:
    """One thread for each dividend."""

    @cute.jit
    def __call__(self, dividends: cute.Tensor, down: cute.Tensor, up: cute.Tensor, value: Int32, stream):
        self.kernel(dividends, down, up, divisor_of(value)).launch(
            grid=(1, 1, 1), block=(DIVIDENDS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, dividends: cute.Tensor, down: cute.Tensor, up: cute.Tensor, divisor: Divisor):
        index, _, _ = cute.arch.thread_idx()
        dividend = dividends[index]
        down[index] = quotient(dividend, divisor)
        if dividend <= MOST - divisor.value:
            up[index] = quotient_up(dividend, divisor)


@pytest.fixture(scope="module")
def divider():
    def ints():
        return make_fake_tensor(Int32, (DIVIDENDS,), (1,), assumed_align=4)

    options = f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_90a --dump-dir={tempfile.mkdtemp()}"
    return cute.compile(
        Divider(), ints(), ints(), ints(), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True), options=options
    )


def divisors() -> list[int]:
    around = {2**n + d for n in range(1, 31) for d in (-1, 0, 1)} | {3, 5, 7, 10, 641, MOST - 1, MOST}
    return sorted(around) + [random.randrange(1, 2 ** random.randrange(1, 32)) for _ in range(40)]


@pytest.mark.archs("sm_90a")
def test_every_divisor_gives_the_quotient(gpu, divider):
    divide = gpu.emulation.adopt(divider)
    for value in divisors():
        edges = [k * value + d for k in (0, 1, 2, MOST // value - 1, MOST // value) for d in (-1, 0, 1)]
        edges = [n for n in (*edges, MOST, MOST - 1, MOST - value) if 0 <= n <= MOST]
        numbers = edges + [random.randrange(2 ** random.randrange(1, 32)) for _ in range(DIVIDENDS - len(edges))]
        down, up = (torch.full((DIVIDENDS,), -1, dtype=torch.int32, device="cuda") for _ in range(2))
        divide(torch.tensor(numbers, dtype=torch.int32, device="cuda"), down, up, value)
        assert down.tolist() == [n // value for n in numbers], value
        assert up.tolist() == [-(-n // value) if n <= MOST - value else -1 for n in numbers], value
