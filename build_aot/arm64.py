"""Checks that aarch64 machine code stays within the baseline, Armv8.0-A with floating point and Advanced SIMD.

An instruction has 32 bits, so there is nothing to walk. Only encodings that every such processor has are known.
Everything else is reported (LSE atomics, LDAPR, SVE, SME, half-precision arithmetic, dot products, the optional CRC and
cryptography, pointer authentication outside of hints, ...), and so are system instructions, which libraries have no use
for. An error here can thus only reject too much. Encodings: Arm Architecture Reference Manual (DDI 0487), chapter C4.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_BYTES = 4

_BASE = (
    # Immediates: addresses, add and subtract, logical, move wide, bit fields, extract
    (0x1F000000, 0x10000000), (0x1F800000, 0x11000000), (0x1F800000, 0x12000000), (0x1F800000, 0x12800000),
    (0x1F800000, 0x13000000), (0x7FA00000, 0x13800000),
    # Branches; SVC, BRK, HLT, UDF; hints, which older processors take for NOP; barriers; TPIDR_EL0, FPCR, FPSR
    (0x7C000000, 0x14000000), (0x7E000000, 0x34000000), (0x7E000000, 0x36000000), (0xFF000010, 0x54000000),
    (0xFFFFFC1F, 0xD61F0000), (0xFFFFFC1F, 0xD63F0000), (0xFFFFFC1F, 0xD65F0000),
    (0xFFE0001F, 0xD4000001), (0xFFE0001F, 0xD4200000), (0xFFE0001F, 0xD4400000), (0xFFFF0000, 0x00000000),
    (0xFFFFF01F, 0xD503201F), (0xFFFFF0FF, 0xD503305F), (0xFFFFF0DF, 0xD503309F), (0xFFFFF0FF, 0xD50330BF),
    (0xFFDFFFE0, 0xD51BD040), (0xFFDFFFC0, 0xD51B4400),
    # Loads and stores: exclusive, exclusive pairs, ordered, literal, pairs, one register
    (0x3FA00000, 0x08000000), (0xBFA00000, 0x88200000), (0x3FA08000, 0x08808000), (0x3B000000, 0x18000000),
    (0x3A000000, 0x28000000), (0x3B000000, 0x39000000), (0x3B200000, 0x38000000), (0x3B204C00, 0x38204800),
    # Registers: divide, shift, reverse and count, logical, add and subtract, conditional, multiply
    (0x7FE0F800, 0x1AC00800), (0x7FE0F000, 0x1AC02000), (0x7FFFF000, 0x5AC00000), (0x7FFFF800, 0x5AC01000),
    (0x1F000000, 0x0A000000), (0x1F200000, 0x0B000000), (0x1FE00000, 0x0B200000), (0x1FE0FC00, 0x1A000000),
    (0x3FE00410, 0x3A400000), (0x3FE00800, 0x1A800000), (0x7FE00000, 0x1B000000), (0xFF600000, 0x9B200000),
    (0xFF608000, 0x9B400000),
)  # fmt: skip
_FLOAT = (
    # Conversions, moves to and from general registers
    (0x5FA00000, 0x1E000000), (0x5FA6FC00, 0x1E200000), (0x5FB8FC00, 0x1E200000), (0xFFFEFC00, 0x9EAE0000),
    # One operand, from half precision; comparisons; immediates; two operands, selections; three operands
    (0xFFB87C00, 0x1E204000), (0xFFFF7C00, 0x1EE24000), (0xFFA0FC07, 0x1E202000), (0xFFA01FE0, 0x1E201000),
    (0xFFA00C00, 0x1E200400), (0xFFA00C00, 0x1E200800), (0xFFA00C00, 0x1E200C00), (0xFF800000, 0x1F000000),
)  # fmt: skip
_SIMD = (
    # Structures in memory: whole registers and lanes, each with and without post-index
    (0xBFBF0000, 0x0C000000), (0xBFA00000, 0x0C800000), (0xBF9F0000, 0x0D000000), (0xBF800000, 0x0D800000),
    # Vectors: three registers of one kind, of two kinds, two, across lanes, copies, permutations, immediates, shifts
    (0x9F200400, 0x0E200400), (0x9F200C00, 0x0E200000), (0x9F3E0C00, 0x0E200800), (0x9F3E0C00, 0x0E300800),
    (0x9FE08400, 0x0E000400), (0xBF208C00, 0x0E000800), (0xBFE08400, 0x2E000000), (0xBFE08C00, 0x0E000000),
    (0x9FF80C00, 0x0F000400), (0x9F800400, 0x0F000400),
    # Scalars, in the same order
    (0xDF200400, 0x5E200400), (0xDF200C00, 0x5E200000), (0xDF3E0C00, 0x5E200800), (0xDF3E0C00, 0x5E300800),
    (0xFFE08400, 0x5E000400), (0xDF800400, 0x5F000400),
)  # fmt: skip
_LATER = (
    # Among pairs: STGP, and 64-bit forms of later versions. FJCVTZS, BFCVT
    (0xFE400000, 0x68000000), (0xFA000000, 0xE8000000), (0xFFFFFC00, 0x1E7E0000), (0xFFFFFC00, 0x1E634000),
    # Three registers of one kind: FMLAL and the like, FAMAX, FAMIN, FSCALE; of two kinds: PMULL of 64 bits
    (0xBF20FC00, 0x0E20EC00), (0xBF20FC00, 0x2E20CC00), (0x9FA0FC00, 0x0EA0DC00), (0xBFA0FC00, 0x2EA0FC00),
    (0xBFE0FC00, 0x0EE0E000),
    # Two registers: FRINT32, FRINT64, BFCVTN and conversions of 8 bits; across lanes: half precision
    (0x9FBFEC00, 0x0E21E800), (0x8FBFEC00, 0x0EA16800), (0xAF3FEC00, 0x0E30C800), (0xAF3FFC00, 0x0E30F800),
    # Immediates and shifts of half precision
    (0x9FF80C00, 0x0F000C00), (0x9FF0FC00, 0x0F10E400), (0x9FF0FC00, 0x0F10FC00), (0xDFF0FC00, 0x5F10E400),
    (0xDFF0FC00, 0x5F10FC00),
)  # fmt: skip
"""Encodings of later versions, within those above."""
_BY_ELEMENT = {
    False: {1: 2, 5: 2, 9: 2, **dict.fromkeys((2, 3, 6, 7, 8, 10, 11, 12, 13), 0)},
    True: {9: 2, **dict.fromkeys((0, 2, 4, 6, 10), 0)},
}
"""Products with one element: bit 29 of the instruction -> opcode -> lowest size (below 2, floats are halves)."""


def beyond_baseline(code: bytes) -> Iterator[str]:
    """Yield a sentence for the first instruction of `code` that Armv8.0-A lacks; nothing when there is none."""
    for at in range(0, len(code) - _BYTES + 1, _BYTES):
        (word,) = struct.unpack_from("<I", code, at)
        if not _is_baseline(word):
            yield f"an instruction later than Armv8.0-A at offset {at:#x}: {word:08x}"
            return
    if len(code) % _BYTES:
        yield "the last instruction is cut off"


def _is_baseline(word: int) -> bool:
    if word & 0x8F000400 == 0x0F000000 and word & 0x50000000 in (0, 0x40000000, 0x50000000):
        return word >> 22 & 3 >= _BY_ELEMENT[bool(word >> 29 & 1)].get(word >> 12 & 15, 4)
    if any(word & mask == value for mask, value in _LATER):
        return False
    return any(word & mask == value for mask, value in (*_BASE, *_FLOAT, *_SIMD))
