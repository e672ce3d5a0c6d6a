"""Counts the wgmma instructions of a Hopper kernel whose operand descriptors are computed in vector registers.

wgmma takes the descriptors of its operands from uniform registers. Where ptxas believes that threads of a warp may have
parted, it may not use the uniform datapath, computes them in vector registers and moves them over (R2UR) before each
product: a third more instructions in the main loop of a prefill, and 5 to 10 % of its time.
"""

from __future__ import annotations

from tsmla.loading.elf import Elf

_INSTRUCTION_BYTES = 16
_PRODUCT, _MOVE = (0x1FC, 0x1F0), (0x1FF, 0x0CA)
"""(mask, value) of the opcodes HGMMA and QGMMA, and of R2UR, as cuobjdump 13 names them."""
_NEAR = 24
"""How many instructions before a product may move its descriptors."""


def products(image: Elf) -> list[tuple[int, int]]:
    """Return, for each kernel of an image, how many wgmma it has, and before how many of them a vector register is
    moved (after the wgmma before)."""
    return [_products(section.data) for section in image.sections if section.name.startswith(".text.")]


def _products(code: bytes) -> tuple[int, int]:
    found = moved = 0
    since_move = _NEAR + 1
    for at in range(0, len(code), _INSTRUCTION_BYTES):
        opcode = int.from_bytes(code[at : at + 2], "little")
        since_move += 1
        if opcode & _MOVE[0] == _MOVE[1]:
            since_move = 0
        elif opcode & _PRODUCT[0] == _PRODUCT[1]:
            found += 1
            moved += since_move <= _NEAR
            since_move = _NEAR + 1
    return found, moved
