"""Costs of executed PTX instructions on a machine: pipe and clocks, latency, use of shared units.

PTX stands for what ptxas makes of it, by the rules in RULES; emulator/docs/timing-model.md says how good that is. What
operations do to others costs the same in machine code (executed.py).
"""

from __future__ import annotations

import collections
import dataclasses
import re

from ..run.ptx.encoding import COMPLEX_OPS, SPACES, Encoded
from ..run.ptx.lower import lower
from ..run.ptx.lower_async import FILLS, KINDS
from ..run.ptx.model import Entry, Instruction, Register
from ..run.ptx.simple_ops import simple_count
from .classes import class_of
from .machines import Machine
from .rates import UnknownRate, blackwell_fill, blackwell_mma, hopper_mma

KINDS_OF_REPLAY = (
    "plain free init arrive wait named_sync named_arrive cluster_arrive cluster_wait load store store_commit "
    "store_wait wgmma wgmma_commit wgmma_wait tensor_load tensor_store tensor_wait_load tensor_wait_store product "
    "commit copy copy_commit copy_wait copy_arrive stall"
).split()
"""Kinds of instructions, in the order of core/replay.h."""
PIPES = "none fma alu mufu convert move tensor_memory warp_product".split()
RULES = {
    "code": "machine code, as it was executed: ptxas's order, stall counts and scoreboards",
    "rate": "the machine table has a rate of its own",
    "moved": "a move, packing or parameter load: ptxas renames",
    "fused": "a product that one sum alone uses, one of two maxima, or a jump over one instruction",
    "anchor": "a barrier, copy or matrix instruction, modelled as an event",
    "integer": "addresses and predicates: half a pipe slot, since ptxas drops or moves half to the uniform pipe",
    "other": "one issue slot",
}


@dataclasses.dataclass
class Cost:
    """The cost of one instruction; core/replay.h explains the fields. `rule`: the one of RULES that it came from."""

    rule: str
    kind: str = "plain"
    pipe: str = "none"
    slots: int = 1
    occupancy: int = 0
    latency: int = 0
    port: int = 0
    value: int = 0
    operands: int = 0
    registers: int = 0
    loads: int = 0
    ordered: int = 0
    stall: int = 0
    awaits: int = 0
    sets: int = 0
    line: int = 0


class Text:
    """What an entry's text says on any machine: encoded instructions, those that others do the work of, the registers
    that each reads and writes, as numbers, and those that ask once whether a phase is complete."""

    def __init__(self, entry: Entry, arch: str):
        self.entry = entry
        self.encoded = [lower(entry, instruction) for instruction in entry.instructions]
        self.fused = _fused(entry, self.encoded, arch)
        self.operands = _operands(self.encoded)
        self.tests = {n for n, one in enumerate(entry.instructions) if one.opcode.startswith("mbarrier.test_wait")}


def costs_of(text: Text, machine: Machine) -> list[Cost]:
    """Return the cost of each instruction of an entry. Raises UnknownRate for an instruction that nobody gave one."""
    return [
        Cost("fused", "free") if position in text.fused else _cost(instruction, item, machine)
        for position, (instruction, item) in enumerate(zip(text.entry.instructions, text.encoded, strict=True))
    ]


def _operands(encoded: list[Encoded]) -> list[tuple[list[int], list[int]]]:
    numbers: dict[Register, int] = {}

    def number(register: Register) -> int:
        return numbers.setdefault(register, len(numbers))

    found = []
    for item in encoded:
        guard = [item.guard[0]] if item.guard else []
        writes = [] if item.runs_late else item.writes  # products land at a wait, which orders what follows
        found.append(([number(r) for r in dict.fromkeys([*guard, *item.reads])], [number(r) for r in writes]))
    return found


@dataclasses.dataclass(frozen=True)
class Operation:
    """One of the interpreter's operations, from PTX or from machine code.

    name: one of encoding.COMPLEX_OPS; "" for one that each lane does by itself.
    flags, extra, imm: as the interpreter has them. items: how many operands it lists. described: its first factor is in
        shared memory, where it has factors.
    """

    name: str
    flags: int
    extra: int
    imm: int
    items: int
    described: bool


def operation(op: int, flags: int, extra: int, imm: int, items: int, described: bool) -> Operation:
    """Return an operation by its number."""
    named = simple_count() <= op < simple_count() + len(COMPLEX_OPS)
    return Operation(COMPLEX_OPS[op - simple_count()] if named else "", flags, extra, imm, items, described)


def product_clocks(flags: int, descriptor: int, ctas: int) -> int:
    """Return the clocks of a tcgen05.mma with these flags on each SM that takes part; of a tcgen05.cp, whose descriptor
    is its bytes, too. Raises UnknownRate."""
    if flags & FILLS:
        return round(blackwell_fill(descriptor))
    if flags & 15 not in (KINDS["kind::f16"], KINDS["kind::f8f6f4"]):
        raise UnknownRate("no rate is known for a tcgen05.mma of this kind")
    rows, columns = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    in_tensor_memory, ws = flags >> 4 & 1, bool(flags >> 5 & 1)
    return round(blackwell_mma(rows, columns, ctas == 2, not in_tensor_memory, ws))


def _fused(entry: Entry, encoded: list[Encoded], arch: str) -> set[int]:
    """Return the positions of instructions whose work another one does."""
    readers: collections.Counter[Register] = collections.Counter()
    reader: dict[Register, int] = {}
    for position, item in enumerate(encoded):
        for register in item.reads:
            readers[register] += 1
            reader[register] = position
    found = set()
    for position, (instruction, item) in enumerate(zip(entry.instructions, encoded, strict=True)):
        if len(item.writes) == 1 and readers[item.writes[0]] == 1 and instruction.guard is None:
            user = entry.instructions[reader[item.writes[0]]]
            opcode, other = instruction.opcode, user.opcode
            sums = opcode.startswith("mul.") and re.match(r"(add|sub)\.", other)
            if sums and opcode.endswith("f32") and other.endswith("f32"):
                found.add(position)
            elif sums and opcode.endswith("f32x2") and other.endswith("f32x2"):
                found.add(position)
            elif arch != "sm_90a" and _two_maxima(instruction, user) and reader[item.writes[0]] not in found:
                if position not in {p for p in found if entry.instructions[p].opcode.startswith("max")}:
                    found.add(position)
    for label, target in entry.labels.items():
        jump = entry.instructions[target - 2] if target >= 2 else None
        if jump is not None and jump.opcode.startswith("bra") and jump.guard is not None:
            if getattr(jump.operands[0], "name", "") == label:
                found.add(target - 2)
    return _alternate(entry, encoded, found, reader)


def _two_maxima(first: Instruction, second: Instruction) -> bool:
    both = (first, second)
    return all(re.match(r"max\.(.*\.)?f32$", i.opcode) and len(i.operands) == 3 for i in both)


def _alternate(entry: Entry, encoded: list[Encoded], found: set[int], reader: dict[Register, int]) -> set[int]:
    """Keep every second maximum of a chain of free ones: an instruction that takes three numbers does the work of
    two."""
    kept = set(found)
    for position in sorted(found):
        if entry.instructions[position].opcode.startswith("max") and position in kept:
            kept.discard(reader[encoded[position].writes[0]])
    return kept


def _cost(instruction: Instruction, item: Encoded, m: Machine) -> Cost:
    opcode, kind = instruction.opcode, class_of(instruction.opcode)
    found = operation(item.op, item.flags, item.extra, item.imm, len(item.items), item.a is not None)
    name = found.name
    if name == "nop":
        return Cost("moved", "free")
    if (anchor := effect(found, m)) is not None:
        return anchor
    if kind == "move":
        return Cost("moved", "free")
    if kind == "fp32":
        return Cost("rate", pipe="fma", occupancy=m.fma.clocks, latency=m.fma_latency.clocks)
    if kind == "fp32x2":
        return Cost("rate", pipe="fma", occupancy=2 * m.fma.clocks, latency=m.fma_latency.clocks)
    if kind == "fp32 min/max":
        return Cost("rate", pipe="alu", occupancy=m.alu.clocks, latency=m.alu_latency.clocks)
    if kind == "special function":
        clocks = m.exponential.clocks if opcode.startswith("ex2") else m.special.clocks
        return Cost("rate", pipe="mufu", occupancy=clocks, latency=m.special_latency.clocks)
    if kind == "convert":
        if re.search(r"(bf16x2|f16x2|e4m3x2|e5m2x2)", opcode):
            return Cost("rate", pipe=m.convert_pipe, occupancy=m.convert.clocks, latency=m.alu_latency.clocks)
        return Cost("integer", pipe="alu", occupancy=1, latency=m.alu_latency.clocks)
    if kind == "compare, select" and opcode.endswith("f32"):
        return Cost("rate", pipe="alu", occupancy=m.alu.clocks, latency=m.alu_latency.clocks)
    if kind in ("integer", "compare, select"):
        return Cost("integer", pipe="alu", occupancy=1, latency=m.alu_latency.clocks)
    if kind == "across lanes":
        if opcode.startswith("shfl"):
            return Cost("rate", pipe="move", occupancy=m.shuffle.clocks, latency=m.shuffle_latency.clocks, port=1)
        return Cost("other", latency=m.alu_latency.clocks)
    if name in ("load", "store", "atomic"):
        moved = 32 * item.width * max(1, len(item.items))
        if item.flags & 7 == SPACES["global"]:
            return Cost(
                "rate", pipe="move", occupancy=m.shuffle.clocks, latency=m.load_latency.clocks if name != "store" else 0
            )
        latency = m.shared_latency.clocks if name != "store" else 0
        return Cost(
            "rate", pipe="move", occupancy=1, latency=latency, port=-(-moved // 128), loads=int(name != "store")
        )
    if name in ("ldmatrix", "stmatrix"):
        latency = m.shared_latency.clocks if name == "ldmatrix" else 0
        return Cost("rate", pipe="move", occupancy=1, latency=latency, port=len(item.items), loads=int(latency > 0))
    if name == "mma":
        return Cost("rate", pipe="warp_product", occupancy=m.warp_product.clocks, latency=m.warp_product_latency.clocks)
    if kind in ("branch", "synchronise"):
        return Cost("other")
    raise UnknownRate(f"the timing model has no cost for {opcode} at line {instruction.line}")


EFFECTS = {
    "mbarrier_init": "init", "mbarrier_arrive": "arrive", "mbarrier_expect": "arrive", "mbarrier_try": "wait",
    "barrier_sync": "named_sync", "barrier_arrive": "named_arrive", "cluster_arrive": "cluster_arrive",
    "cluster_wait": "cluster_wait", "bulk_load_tensor": "load", "bulk_store_tensor": "store", "bulk_copy": "load",
    "cancel_cluster": "load", "bulk_commit": "store_commit", "bulk_wait": "store_wait", "wgmma": "wgmma",
    "wgmma_commit": "wgmma_commit", "wgmma_wait": "wgmma_wait", "tmem_load": "tensor_load",
    "tmem_store": "tensor_store", "tmem_wait_load": "tensor_wait_load", "tmem_wait_store": "tensor_wait_store",
    "tmem_mma": "product", "tmem_copy": "product", "tmem_commit": "commit", "cp_async": "copy",
    "cp_async_commit": "copy_commit", "cp_async_wait": "copy_wait", "cp_async_arrive": "copy_arrive",
}  # fmt: skip
"""Operation that acts on others, or waits for them -> its kind."""
STALLS = {
    "proxy_fence": "proxy_fence", "memory_fence": "memory_fence", "set_registers": "set_registers",
    "tmem_alloc": "tensor_alloc", "tmem_find": "tensor_alloc", "tmem_dealloc": "", "wgmma_fence": "",
    "tensor_fence": "", "grid_wait": "",
}  # fmt: skip
"""Operation that stops its warp -> the machine's number of clocks for that; "" for one clock."""


def acts(one: Operation) -> bool:
    """Return whether an operation is more than its pipe and its result: whether `effect` gives it a cost."""
    return one.name in EFFECTS or one.name in STALLS


def effect(one: Operation, m: Machine) -> Cost | None:
    """Return the cost of an operation that acts on others, waits for them or stops its warp; None for others."""
    if one.name in STALLS:
        taken = STALLS[one.name]
        return Cost("anchor", "stall", value=getattr(m, taken).clocks if taken else 1)
    kind = EFFECTS.get(one.name)
    if kind is None:
        return None
    if kind == "copy":  # value: clocks until the first byte
        latency = m.load_latency_hbm.clocks
        return Cost("anchor", kind, "move", occupancy=m.shuffle.clocks, port=32 * one.extra // 128, value=latency)
    if one.name == "bulk_copy" and one.flags & 15 == SPACES["global"]:
        return Cost("anchor", "store")
    if kind in ("store_wait", "copy_wait", "wgmma_wait"):
        return Cost("anchor", kind, value=one.imm)
    if kind == "wgmma":
        operands = 32 * (one.extra + 64 * one.described) / 128
        clocks = max(hopper_mma(one.extra), operands)
        return Cost("anchor", kind, value=round(clocks), operands=round(operands), registers=int(not one.described))
    if kind in ("tensor_load", "tensor_store"):
        load = kind == "tensor_load"
        rate = m.tensor_load_rate if load else m.tensor_store_rate
        clocks = max(1, round(one.items * 128 / rate.value))
        latency = (m.tensor_load_latency if load else m.tensor_store_latency).clocks
        return Cost("anchor", kind, "tensor_memory", occupancy=clocks, latency=clocks + latency)
    return Cost("anchor", kind)
