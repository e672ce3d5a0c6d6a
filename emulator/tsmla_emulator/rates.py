"""What GPUs can do at most, and where each figure is from: clocks of MMAs, memory, exponentials."""

from __future__ import annotations

from dataclasses import dataclass


class UnknownRate(ValueError):
    """An instruction of which nobody told how fast it is; the text names it."""


@dataclass(frozen=True)
class Rates:
    """What one GPU can do at most. Rates are per SM and clock, except for those of memory: bytes a second of the GPU.

    l2: None where no figure is known. `clock` is the boost maximum in MHz.
    """

    gpu: str
    processors: int
    clock: float
    exponentials: float
    l2: float | None
    hbm: float
    fp32: float = 128
    shared_bytes: float = 128
    issue: float = 4

    def per_clock(self, bytes_a_second: float) -> float:
        """One SM's share, in bytes a clock."""
        return bytes_a_second / self.processors / (self.clock * 1e6)


RATES = {
    "sm_90a": Rates("H200", 132, 1980, exponentials=16, l2=7e12, hbm=4.8e12),
    "sm_100a": Rates("B200", 148, 1965, exponentials=16, l2=None, hbm=8e12),
    "sm_103a": Rates("B300", 148, 2000, exponentials=32, l2=None, hbm=8e12),
}
"""Sources: SMs, clocks, HBM: NVIDIA's data sheets and Chips and Cheese's B200 article; the B300's clock is what 16.36
TFLOP/s an SM in github.com/Antoniomv7/gb300-microbench implies, its SM count is not verified. Exponentials: the
FlashAttention-4 paper (Hopper, B200) and NVIDIA's "Making softmax more efficient" (B300). Shared memory 128 bytes, FP32
128 lanes, 4 warp instructions: CUDA C++ programming guide. Hopper's L2: 5.5 to 7 TB/s is commonly measured."""


def hopper_mma(columns: int) -> float:
    """Clocks of one wgmma m64nNk(32 bytes): 4096 bf16 or 8192 fp8 FLOP a clock and SM."""
    return columns / 2


def blackwell_mma(rows: int, columns: int, pair: bool, a_shared: bool, ws: bool = False) -> float:
    """Clocks of one tcgen05.mma of 32 bytes depth, kind f16 or f8f6f4, on every SM that takes part.

    From github.com/lookup1980/microbench-blackwell (umma_throughput): 128 rows an SM at 8192 bf16 or 16384 fp8 FLOP a
    clock; 64 rows without a pair at half of that, in a pair at the full rate; operands in shared memory come at 128
    bytes a clock. `.ws` with fewer than 128 rows was not measured; the full rate is assumed.
    """
    if ws:
        clocks = columns / 2 * min(1, rows / 128)
    elif pair:
        clocks = columns / 2 * rows / 256
    else:
        clocks = columns / 2
    share = 2 if pair else 1
    operands = 32 * (columns // share + (rows // share if a_shared else 0))
    return max(clocks, operands / 128)
