"""Makes an entry ready for the interpreter: packed instructions, operand lists, constants, and where each came from."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

from ..machine import Launch
from .encoding import Constant, Encoded, Reference, Slot, op_number, shared_layout
from .lower import lower
from .model import Entry, Register
from .placement import place_registers
from .simple_ops import number_of

PACK = struct.Struct("<HBBiiiiiiIIHHq")
_NONE = -(2**31)
_TALK = re.compile(r"(atom|red)\.|(ld|st)\..*(acquire|release|relaxed|volatile)")


@dataclass(frozen=True)
class Program:
    """An entry in the interpreter's form.

    code: 48-byte instructions, one per PTX instruction, in the layout of core/machine.h.
    clusters_talk: some instructions order CTAs by global memory: atomics, releases, acquires and what polls.
    """

    entry: Entry
    code: bytes
    lists: tuple[int, ...]
    constants: tuple[int, ...]
    slots: int
    static_shared: int
    clusters_talk: bool

    def block_bytes(self, launch: Launch) -> int:
        """Return how long the block is that the code takes parameters from."""
        return len(launch.params)

    def block(self, launch: Launch, address: int) -> bytes:
        """Return that block, which will lie at this address."""
        return launch.params


class _Constants:
    def __init__(self) -> None:
        self.values: list[int] = []
        self.places: dict[Constant, int] = {}

    def place(self, constant: Constant) -> int:
        if constant not in self.places:
            self.places[constant] = len(self.values)
            self.values += [constant.value >> 32 * half & 0xFFFFFFFF for half in range(constant.slots)]
        return ~self.places[constant]


def build_program(entry: Entry) -> Program:
    """Encode every instruction of an entry. Raises NotImplementedInstruction for the first unknown one."""
    encoded = [lower(entry, instruction) for instruction in entry.instructions]
    encoded.append(Encoded(op_number("exit")))  # falling off the end returns
    loaded = _loaded_registers(encoded)
    wgmma = {r for item in encoded if item.op == op_number("wgmma") for r in [*item.writes, *item.reads]}
    places, slots = place_registers(encoded, entry.labels)
    constants = _Constants()
    lists: list[int] = []
    code = b"".join(_pack(item, places, constants, lists, entry.labels, loaded, wgmma) for item in encoded)
    talk = any(_TALK.match(i.opcode) and ".shared" not in i.opcode for i in entry.instructions)
    return Program(entry, code, tuple(lists), tuple(constants.values), slots, shared_layout(entry)[1], talk)


_MOVES = {number_of("mov.b16"), number_of("mov.b32"), number_of("mov.b64"), op_number("pack"), op_number("unpack")}


def _loaded_registers(code: list[Encoded]) -> set[Register]:
    """Return registers that can hold what tcgen05.ld loaded, directly or through moves."""
    loaded = {register for item in code if item.op == op_number("tmem_load") for register in item.writes}
    size = -1
    while size != len(loaded):
        size = len(loaded)
        for item in code:
            if item.op in _MOVES and not loaded.isdisjoint(item.reads):
                loaded.update(item.writes)
    return loaded


def _pack(
    item: Encoded,
    places: dict[Register, int],
    constants: _Constants,
    lists: list[int],
    labels,
    loaded: set[Register],
    wgmma: set[Register],
) -> bytes:
    def place(reference: Reference) -> int:
        if reference is None:
            return _NONE
        if isinstance(reference, Constant):
            return constants.place(reference)
        return reference.index if isinstance(reference, Slot) else places[reference]

    guard, negated = (-1, 0) if item.guard is None else (places[item.guard[0]], int(item.guard[1]))
    first = len(lists)
    lists += map(place, item.items)
    imm = item.imm if item.target is None else labels[item.target]
    operands = (place(item.d), place(item.a), place(item.b), place(item.c), place(item.e))
    bits = negated | 2 * (not loaded.isdisjoint(item.reads))
    if item.op != op_number("wgmma") and not wgmma.isdisjoint(item.writes):
        bits |= 4
    return PACK.pack(item.op, bits, item.width, guard, *operands, item.flags, first, len(item.items), item.extra, imm)
