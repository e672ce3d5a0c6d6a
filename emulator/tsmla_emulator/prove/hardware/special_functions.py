"""Finds the polynomials of MUFU.EX2, MUFU.RCP and MUFU.LG2 in results that a GPU left.

    python -m tsmla_emulator.prove.hardware.special_functions DIRECTORY

DIRECTORY holds what `hardware.products record` wrote. The coefficients are printed as run/core/special_functions.h has
them. A function's fraction has pieces by its high bits; in each, a result is cut off from

    c0 * 2^12 + rounding + c1 * low + c2 * square(low)

with `low` the other bits and a square without its low columns. Each recorded result bounds that number from both
sides; the search tries each c2 and c1 near the function's derivatives, and refuses a piece that more than one triple,
or none, explains.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

_FRACTIONS = 1 << 23


@dataclasses.dataclass(frozen=True)
class Function:
    """A special function of the fraction k / 2^23 of a number from 1 to 2.

    units: bits behind the point of the sum. dropped: columns that its square lacks. second: half the second derivative
    at a fraction. c2_step: c2 is a multiple of it.
    """

    pieces: int
    units: int
    dropped: int
    rounding: int
    second: Callable[[float], float]
    c2_step: int = 1


FUNCTIONS = {
    "ex2": Function(64, 38, 19, 2018, lambda f: np.log(2) ** 2 / 2 * 2**f),
    "lg2": Function(64, 38, 19, 837, lambda f: -np.log2(np.e) / 2 / (1 + f) ** 2, c2_step=2),
    "rcp": Function(128, 39, 17, 2023, lambda f: (1 + f) ** -3),
}


def squares(count: int, dropped: int) -> np.ndarray:
    """Return the squares of all numbers of `count` bits, without partial products below a column, in units of it."""
    x = np.arange(1 << count, dtype=np.int64)
    bits = [x >> place & 1 for place in range(count)]
    whole = np.zeros_like(x)
    for i in range(count):
        for j in range(i, count):
            column = 2 * i if i == j else i + j + 1
            if column >= dropped:
                whole += (bits[i] & bits[j]) << column
    return whole >> dropped


def bounds(name: str, recorded: np.lib.npyio.NpzFile, units: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest sums that a recorded result of each fraction can have been cut off from."""
    words = np.cumsum(recorded[f"{name}_steps"], dtype=np.uint32)
    scale = 1 << units
    if name != "lg2":
        values = words.view(np.float32).astype(np.float64) / (2 if name == "ex2" else 1)
        place = scale >> (23 if name == "ex2" else 24)
        least = np.round(values * scale).astype(np.int64)
        return least, least + place - 1
    octaves = words.view(np.float32).astype(np.float64).reshape(4, _FRACTIONS)
    kept = 1 << 36  # what is summed with the exponent
    places = [np.maximum(np.spacing(np.abs(x).astype(np.float32)).astype(np.float64) * kept, 1) for x in octaves]
    above, below = octaves[2] * kept, -octaves[1] * kept
    least = np.maximum(above, kept - below - places[1]).astype(np.int64)
    most = np.minimum(above + places[2] - 1, kept - 1 - below).astype(np.int64)
    least[0], most[0] = least[1] - (2 << 13), least[1]  # log2(1) is 0 by itself
    return least * (scale // kept), most * (scale // kept) + scale // kept - 1


def pieces_of(name: str, recorded: np.lib.npyio.NpzFile) -> list[tuple[int, int, int]]:
    """Return c0, c1 and c2 of each piece. Raises ValueError where not exactly one triple explains what was recorded."""
    function = FUNCTIONS[name]
    least, most = bounds(name, recorded, function.units)
    width = _FRACTIONS // function.pieces
    low = np.arange(width, dtype=np.int64)
    square = squares(width.bit_length() - 1, function.dropped)
    some = np.random.Generator(np.random.PCG64(0)).choice(width, 4000, replace=False)
    found = []
    for piece in range(function.pieces):
        lower, upper = (x[piece * width : (piece + 1) * width] for x in (least, most))
        near = function.second((piece + 0.5) / function.pieces) * 2.0 ** (function.units - 46 + function.dropped)
        reach = abs(near) * 0.03 + 3
        first = int((near - reach) // function.c2_step) * function.c2_step
        explains = []
        for c2 in range(first, int(near + reach) + 1, function.c2_step):
            rest = c2 * square
            slope = (lower[-1] + upper[-1] - lower[0] - upper[0]) / 2 - rest[-1]
            for c1 in range(int(slope / (width - 1)) - 8, int(slope / (width - 1)) + 10):
                sums = c1 * low + rest + function.rounding
                if (lower - sums)[some].max() > (upper - sums)[some].min():
                    continue
                c0 = int((upper - sums).min()) >> 12
                if (lower - sums).max() <= c0 << 12:
                    explains.append((c0, c1, c2))
        if len(explains) != 1:
            raise ValueError(f"{name}, piece {piece}: {len(explains)} triples explain what was recorded")
        found += explains
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    recorded = np.load(parser.parse_args().directory / "special.npz")
    print(recorded["certificate"])
    for name in FUNCTIONS:
        print(name, *(f"{{{c0}, {c1}, {c2}}}," for c0, c1, c2 in pieces_of(name, recorded)), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
