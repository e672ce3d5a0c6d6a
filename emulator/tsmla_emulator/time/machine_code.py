"""Reads the machine code of a kernel from the library that holds it: what each instruction does, and what ptxas wrote
into it for the scheduler. No disassembler is needed.

An instruction has 16 bytes:

    bits 0-8        the operation
    bits 12-15      the guard
    bits 105-108    clocks after which the next instruction may follow
    bits 110-112    the scoreboard that its result frees (7: none)
    bits 113-115    the scoreboard that its operands free (7: none)
    bits 116-121    the scoreboards that it awaits, a bit each

Compared with nvdisasm 13.0 in kernels for sm_90a and sm_100a.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tsmla_emulator.run.sass.image import kernels
from tsmla_emulator.run.sass.model import BYTES

ALWAYS = 7  # the predicate that is true
WAIT, TEST, ARRIVE, POLL = "wait", "test", "arrive", "poll"
_NAMES = {
    **dict.fromkeys(
        (2, 3, 5, 6, 7, 0xB, 0xC, 0xF, 0x10, 0x11, 0x12, 0x13, 0x16, 0x19, 0x1C, 0x2F, 0x36, 0x46, 0x48), "alu"
    ),
    0x08: "select", 0x09: "maximum", 0x76: "maximum",
    0x20: "fma", 0x21: "fma", 0x23: "fma", 0x24: "integer", 0x25: "integer", 0x27: "integer", 0x30: "integer",
    0x31: "integer", 0x35: "integer", 0x49: "fma2", 0x4A: "fma2", 0x4B: "fma2",
    0x3E: "convert", 0x105: "special", 0x106: "special", 0x109: "special", 0x108: "special",
    0x3B: "ldmatrix", 0x44: "stmatrix", 0x184: "load_shared", 0x188: "store_shared", 0x18C: "load_shared",
    0x189: "shuffle", 0xCC: "shuffle", 0x1C4: "shuffle", 0x181: "load_global", 0x186: "store_global",
    0x182: "constant", 0x1AC: "constant", 0x119: "constant", 0x1C3: "constant",
    0x1F0: "wgmma", 0x1F3: "wgmma", 0x1EA: "product", 0x1E9: "commit", 0x1ED: "tensor_store", 0x1EE: "tensor_load",
    0x11D: "named", 0x1C7: "cluster", 0x1C8: "registers", 0x1B4: "load", 0x1B5: "store", 0x1AE: "copy", 0x1B2: "init",
    0x1C6: "fence", 0x192: "fence", 0x147: "branch", 0x14D: "exit", 0x150: "exit", 0x15D: "sleep",
}  # fmt: skip
"""Bits 0 to 8 of an instruction -> its name here. Others take an issue slot and the clocks that they say: uniform
instructions, NOP, BSSY."""


@dataclasses.dataclass(frozen=True)
class Coded:
    """One instruction of machine code.

    guarded: it may do nothing.
    target: position that a branch goes to.
    size: for shared memory, in units of 128 bytes; for a special function, 2 if it is EX2.
    Scoreboards are numbers from 0, or None.
    """

    name: str
    guarded: bool
    target: int | None
    stall: int
    awaits: int
    result: int | None
    operands: int | None
    size: int


def instructions(library: Path, entry: str) -> list[Coded]:
    """Return the instructions of a kernel in a library or object; none when the library does not hold it."""
    for kernel in kernels(library):
        if kernel.entry == entry:
            code = kernel.code
            words = [int.from_bytes(code[at : at + BYTES], "little") for at in range(0, len(code), BYTES)]
            return [_decoded(words, position) for position in range(len(words))]
    return []


def _decoded(words: list[int], position: int) -> Coded:
    word = words[position]
    name = _NAMES.get(word & 0x1FF, "other")
    guarded, target, size = word >> 12 & 7 != ALWAYS, None, 0
    if word & 0x1FF == 0x1A7:  # SYNCS
        name = WAIT if word >> 72 & 1 else POLL if _after_sleep(words, position) else TEST if word >> 76 & 1 else ARRIVE
    elif word & 0x1FF == 0x1C6 and word >> 73 & 1:  # FENCE.VIEW.ASYNC.T
        name = "tensor_fence"
    elif word & 0x1FF == 0x1C5:  # WARPGROUP.DEPBAR, .ARRIVE
        name = "wgmma_wait" if word >> 80 & 1 else "fence"
    elif name == "branch" and word >> 33 & 1 and word >> 91 & 1:  # BRA.DIV: taken by warps whose lanes went apart
        name = "other"
    elif name == "branch":
        offset = (word >> 16 & 0xFF) | (word >> 34 & (1 << 48) - 1) << 8
        target = position + 1 + (offset - (1 << 56) * (offset >> 55)) * 4 // BYTES
        guarded = guarded or word >> 87 & 7 != ALWAYS or bool(word >> 32 & 1)  # another predicate; BRA.U
    elif name in ("ldmatrix", "stmatrix"):
        size = 1 << (word >> 72 & 3)
    elif name in ("load_shared", "store_shared"):
        size = {5: 2, 6: 4}.get(word >> 73 & 7, 1)
    elif name == "special":
        size = word >> 74 & 15 if word & 0x1FF == 0x108 else 0
    result, operands = word >> 110 & 7, word >> 113 & 7
    return Coded(
        name,
        guarded,
        target,
        word >> 105 & 15,
        word >> 116 & 63,
        result if result < 6 else None,
        operands if operands < 6 else None,
        size,
    )


def _after_sleep(words: list[int], position: int) -> bool:
    return any(word & 0x1FF == 0x15D for word in words[max(0, position - 2) : position])
