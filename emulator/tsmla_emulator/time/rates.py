"""Clocks of matrix instructions at the highest rate that is known, and where each figure is from."""

from __future__ import annotations


class UnknownRate(ValueError):
    """Nobody told how fast an instruction is; the text names it."""


def hopper_mma(columns: int) -> float:
    """Return the clocks of one wgmma m64nNk(32 bytes): 4096 bf16 or 8192 fp8 FLOP a clock and SM."""
    return columns / 2


def blackwell_fill(source: int) -> float:
    """Return the clocks of one tcgen05.cp of so many bytes of shared memory, which come at 128 bytes a clock.

    The tensor core is taken to do nothing else meanwhile. Nobody measured it.
    """
    return source / 128


def blackwell_mma(rows: int, columns: int, pair: bool, a_shared: bool, ws: bool = False) -> float:
    """Return the clocks of one tcgen05.mma of 32 bytes depth, kind f16 or f8f6f4, on every SM that takes part.

    From github.com/lookup1980/microbench-blackwell (umma_throughput):

    - 128 rows an SM run at 8192 bf16 or 16384 fp8 FLOP a clock;
    - 64 rows run at half of that without a pair, at the full rate in a pair;
    - operands in shared memory come at 128 bytes a clock.

    `.ws` with fewer than 128 rows was not measured; the full rate is assumed.
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
