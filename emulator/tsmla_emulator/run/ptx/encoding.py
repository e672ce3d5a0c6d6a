"""One instruction on its way to the interpreter: operands still as registers and constants, effects named."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from .model import Address, Entry, Immediate, Instruction, NotImplementedInstruction, Operand, Register, Sink, Symbol
from .simple_ops import number_of, simple_count

# Instructions that are not lane-wise; the interpreter's names are these in capitals with OP_ in front.
COMPLEX_OPS = (
    "nop bra exit trap special pack unpack load store atomic "
    "mbarrier_init mbarrier_fence mbarrier_invalidate mbarrier_arrive mbarrier_expect mbarrier_complete mbarrier_try "
    "barrier_sync barrier_arrive warp_sync cluster_arrive cluster_wait proxy_fence tensor_fence grid_wait grid_launch "
    "memory_fence set_registers elect shuffle vote active_mask reduce map_rank rank_of ldmatrix stmatrix mma "
    "cp_async cp_async_commit cp_async_wait cp_async_arrive "
    "bulk_copy bulk_load_tensor bulk_store_tensor bulk_commit bulk_wait cancel_cluster query_cancel "
    "wgmma wgmma_fence wgmma_commit wgmma_wait "
    "tmem_alloc tmem_dealloc tmem_relinquish tmem_load tmem_store tmem_wait_load tmem_wait_store tmem_mma "
    "tmem_copy tmem_commit "
    "begin_meeting meet leave_meeting jump load_constant read_uniform store_async await_loads tmem_find tmem_free"
).split()

# Slots every warp has: a sink, the CTA's rank << 24 (a 64-bit pair), the address of the parameter block (a pair).
SINK_SLOT, SHARED_SLOT, PARAM_SLOT, FIRST_FREE_SLOT = 0, 2, 4, 6

SPACES = {"generic": 0, "global": 1, "shared": 2, "shared::cta": 2, "shared::cluster": 3, "param": 4}
SIGNED, WIDE_ADDRESS = 1 << 8, 1 << 9


@functools.cache
def op_number(name: str) -> int:
    """The interpreter's number of a complex instruction."""
    return simple_count() + COMPLEX_OPS.index(name)


def first_sass_number() -> int:
    """The first number of the lane-wise operations of machine code (sass/lane_ops.py)."""
    return simple_count() + len(COMPLEX_OPS)


def enum_text() -> str:
    """The C++ enumeration of the complex instructions."""
    lines = [f"  OP_{name.upper()} = {op_number(name)}," for name in COMPLEX_OPS]
    lines.append(f"  OP_SASS_LANES = {first_sass_number()},")
    lines += [f"  OP_MOVE{width} = {number_of(f'mov.b{width}')}," for width in (16, 32, 64)]
    return "enum ComplexOp : unsigned {\n" + "\n".join(lines) + "\n};\n"


def register_width(register: Register) -> int:
    """Return the slots that a register takes: a slot has 32 lanes of 32 bits each."""
    kind = register.kind
    return 2 if kind.endswith("64") else 4 if kind.endswith("128") else 1


@dataclass(frozen=True)
class Constant:
    """A constant, equal in every lane. slots: how many 32-bit halves it has, low first."""

    value: int
    slots: int = 1


@dataclass(frozen=True)
class Slot:
    """A fixed slot of the register file."""

    index: int


Reference = Register | Constant | Slot | None


@dataclass
class Encoded:
    """An encoded instruction, without slot numbers. waits: marks where asynchronous register writes land."""

    op: int
    d: Reference = None
    a: Reference = None
    b: Reference = None
    c: Reference = None
    e: Reference = None
    items: tuple[Reference, ...] = ()
    guard: tuple[Register, bool] | None = None
    flags: int = 0
    width: int = 0
    extra: int = 0
    imm: int = 0
    target: str | None = None
    writes: list[Register] = field(default_factory=list)
    reads: list[Register] = field(default_factory=list)
    runs_late: bool = False
    awaits_all: bool = False


class Encoder:
    """Turns the operands of one instruction into references and notes which registers it reads and writes."""

    def __init__(self, entry: Entry, instruction: Instruction):
        self.entry = entry
        self.instruction = instruction
        self.operands = instruction.operands
        self.parts = instruction.opcode.split(".")
        self.reads: list[Register] = []
        self.writes: list[Register] = []

    def refuse(self, what: str | None = None) -> NotImplementedInstruction:
        return NotImplementedInstruction(what or self.instruction.text, self.instruction.line)

    def build(self, name: str | int, **fields) -> Encoded:
        number = name if isinstance(name, int) else op_number(name)
        return Encoded(number, guard=self.instruction.guard, reads=self.reads, writes=self.writes, **fields)

    def source(self, operand: Operand, kind: str = "b32") -> Reference:
        if isinstance(operand, Register):
            self.reads.append(operand)
            return operand
        if isinstance(operand, Immediate):
            return self.constant(operand, kind)
        raise self.refuse()

    def constant(self, operand: Immediate, kind: str) -> Constant:
        if kind == "pred":
            return Constant(0xFFFFFFFF if operand.value else 0)
        if kind.endswith("64") or kind == "x2":
            return Constant(operand.value & (2**64 - 1), 2)
        if kind.endswith("16"):
            return Constant(operand.value & 0xFFFF)
        return Constant(operand.value & 0xFFFFFFFF)

    def destination(self, operand: Operand) -> Reference:
        if isinstance(operand, Sink):
            return None
        if not isinstance(operand, Register):
            raise self.refuse()
        self.writes.append(operand)
        return operand

    def number(self, operand: Operand) -> int:
        if not isinstance(operand, Immediate):
            raise self.refuse(f"a register where a constant is expected in {self.instruction.text!r}")
        return operand.value

    def address(self, operand: Operand) -> tuple[Reference, int, int]:
        """Return (base, byte offset, flags) of `[..]`."""
        if not isinstance(operand, Address):
            raise self.refuse()
        base = operand.base
        if isinstance(base, Register):
            self.reads.append(base)
            return base, operand.offset, WIDE_ADDRESS if register_width(base) == 2 else 0
        if isinstance(base, Immediate):
            return Constant(base.value & (2**64 - 1), 2), operand.offset, WIDE_ADDRESS
        slot, offset = self.symbol(base)
        return slot, operand.offset + offset, WIDE_ADDRESS

    def symbol(self, symbol: Symbol) -> tuple[Slot, int]:
        """Return (slot of the window's base, byte offset) of a shared array or a parameter."""
        for param in self.entry.params:
            if param.name == symbol.name:
                return Slot(PARAM_SLOT), param.offset + symbol.offset
        layout, _ = shared_layout(self.entry)
        if symbol.name not in layout:
            raise self.refuse(f"name {symbol.name!r}")
        return Slot(SHARED_SLOT), layout[symbol.name] + symbol.offset


def shared_layout(entry: Entry) -> tuple[dict[str, int], int]:
    """Return the window offsets of the shared arrays (static ones first, then the dynamic one) and the end of the
    static part."""
    offset, places = 0x400, {}
    dynamic_align = 16
    for array in entry.shared.values():
        if array.size:
            offset = -(-offset // array.align) * array.align
            places[array.name] = offset
            offset += array.size
        else:
            dynamic_align = max(dynamic_align, array.align)
    start = offset if offset == 0x400 else -(-offset // dynamic_align) * dynamic_align
    for array in entry.shared.values():
        if not array.size:
            places[array.name] = start
    return places, start
