"""Lowers barriers, fences, bulk copies and products of warpgroups to the operations that PTX has for them."""

from __future__ import annotations

import re

from ..ptx.encoding import SPACES
from ..ptx.lower_async import ELEMENTS, GATHER4, MULTICAST, PAIR, WGMMA_DEPTHS
from ..ptx.simple_ops import number_of
from .code import ALL_LANES, ONE_LANE, Code
from .lane_steps import number, only
from .lower_flow import _nothing
from .lower_memory import shared_address
from .model import ALWAYS, ZERO, Address, Descriptor, Instruction, Predicate, Register, Scoreboard

_INIT_NEEDS_NO_FENCE = 1 << 23
_MOST_ARRIVALS = 0x100000


def _bar(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "SYNC", "ARV", "DEFER_BLOCKING")
    names = dict(zip("ab", map(code.source, instruction.operands), strict=False))
    code.emit("barrier_sync" if "SYNC" in modifiers else "barrier_arrive", **names)


def _membar(code: Code, instruction: Instruction) -> None:
    only(code, instruction, "ALL", "CTA", "GPU", "SYS")
    code.emit("memory_fence")


def _fence(code: Code, instruction: Instruction) -> None:
    """S: of shared memory, for asynchronous accesses. T: what was stored to tensor memory is there."""
    match instruction.modifiers:
        case ("VIEW", "ASYNC", "S"):
            code.emit("proxy_fence", imm=2)
        case ("VIEW", "ASYNC", "T"):
            code.emit("tmem_wait_store")
        case _:
            raise code.refuse()


def _syncs(code: Code, instruction: Instruction) -> None:
    match instruction.modifiers:
        case ("EXCH", "64"):
            _initialise(code, instruction)
        case ("ARRIVE", "TRANS64", *rest):
            _arrive(code, instruction, rest)
        case ("PHASECHK", "TRANS64", *rest):
            _phase(code, instruction, rest)
        case _:
            raise code.refuse()


def _initialise(code: Code, instruction: Instruction) -> None:
    """A new barrier is a word of 64 bits: (2^20 - count) << 1 below (2^20 - count) << 11."""
    old, place, value = instruction.operands
    if not isinstance(old, Register) or old.number != ZERO:
        raise code.refuse()
    base, offset = shared_address(code, place)
    low = code.source(value, 2)
    code.emit(number_of("shr.u32"), lanes=ALL_LANES, d=code.scratch(), a=low, b=code.constant(1))
    code.emit(
        number_of("sub.s32"), lanes=ALL_LANES, d=code.scratch(), a=code.constant(_MOST_ARRIVALS), b=code.scratch()
    )
    code.emit(
        "mbarrier_init", lanes=ONE_LANE, a=base, imm=offset, b=code.scratch(),
        flags=SPACES["shared"] | _INIT_NEEDS_NO_FENCE,
    )  # fmt: skip


def _arrive(code: Code, instruction: Instruction, rest: list[str]) -> None:
    """ART0: as many arrivals as the register says, no bytes. A1T0: one. Neither: one, and so many bytes to come."""
    state, place, value = instruction.operands
    remote = "RED" in rest
    kinds = [part for part in rest if part != "RED"]
    if kinds not in ([], ["ART0"], ["A1T0"]) or not isinstance(state, Register) or state.number != ZERO:
        raise code.refuse()
    base, offset = shared_address(code, place)
    count = code.constant(1) if kinds == ["A1T0"] else code.source(value)
    flags = SPACES["shared::cluster" if remote else "shared"]
    code.emit("mbarrier_arrive", a=base, imm=offset, b=count, flags=flags, extra=int(not kinds))


def _phase(code: Code, instruction: Instruction, rest: list[str]) -> None:
    """The parity is bit 31. A TRYWAIT is followed, where it fails, by a sleep and a second look that may wait."""
    done, place, parity = instruction.operands
    if rest not in ([], ["TRYWAIT"]):
        raise code.refuse()
    base, offset = shared_address(code, place)
    code.emit(number_of("shr.u32"), d=code.scratch(), a=code.source(parity), b=code.constant(31))
    code.emit(
        "mbarrier_try", d=code.result(done), a=base, imm=offset, b=code.scratch(), flags=SPACES["shared"],
        extra=_LOOKS if rest else _ASKS_ONCE if asks_once(instruction) else 0,
    )  # fmt: skip


_ASKS_ONCE, _LOOKS = 2, 4


def asks_once(instruction: Instruction) -> bool:
    """Return whether a SYNCS.PHASECHK is an mbarrier.test_wait, after which its warp goes on either way. The second
    look of a wait is made only where the first one failed: its own result guards it."""
    done = instruction.operands[0]
    guarded = isinstance(done, Predicate) and instruction.guard.number == done.number
    return "PHASECHK" in instruction.modifiers and "TRYWAIT" not in instruction.modifiers and not guarded


def _copies_arrive(code: Code, instruction: Instruction) -> None:
    if instruction.modifiers != ("LDGSTSBAR", "64", "ARVCNT"):
        raise code.refuse()
    base, offset = shared_address(code, instruction.operands[0])
    code.emit("cp_async_arrive", a=base, imm=offset, flags=SPACES["shared"], extra=1)


def uniform(code: Code, operand: object, behind: int = 0) -> int:
    """The slot of a uniform register in brackets, or of one behind it."""
    if isinstance(operand, Address) and operand.base is None and operand.uniform and not operand.offset:
        operand = operand.uniform
    if not isinstance(operand, Register) or not operand.uniform or operand.number == ZERO:
        raise code.refuse()
    return code.source(Register(operand.number + behind, True))


def _load_tensor(code: Code, instruction: Instruction) -> None:
    """[UR] has the place in shared memory, the barrier and the coordinates; the other [UR] the tensor map's address."""
    rank, *rest = instruction.modifiers
    if set(rest) - {"2CTA", "GATHER4"} or not re.fullmatch("[1-5]D", rank) or len(instruction.operands) != 3:
        raise code.refuse()
    block, tensor_map, _ = instruction.operands
    gathers = "GATHER4" in rest
    count = 5 if gathers else int(rank[0])
    coordinates = tuple(uniform(code, block, 2 + i) for i in range(count))
    nothing = code.constant(0)
    code.emit(
        "bulk_load_tensor", lanes=ONE_LANE, a=uniform(code, block), b=uniform(code, tensor_map),
        c=uniform(code, block, 1), items=(*coordinates, nothing, nothing), extra=int(rank[0]),
        flags=SPACES["shared::cluster"] | (PAIR if "2CTA" in rest else 0) | (GATHER4 if gathers else 0),
    )  # fmt: skip


def _store_tensor(code: Code, instruction: Instruction) -> None:
    """[UR] has the place in shared memory and the coordinates; the other [UR] the tensor map's address."""
    (rank,) = instruction.modifiers
    block, tensor_map, _ = instruction.operands
    coordinates = tuple(uniform(code, block, 1 + i) for i in range(int(rank[0])))
    code.emit(
        "bulk_store_tensor", lanes=ONE_LANE, a=uniform(code, block), b=uniform(code, tensor_map), items=coordinates,
        e=code.constant(0), extra=int(rank[0]),
    )  # fmt: skip


def _copy_bytes(code: Code, instruction: Instruction) -> None:
    """[UR] has the place in shared memory and the barrier; the size counts 16 bytes."""
    if instruction.modifiers not in (("S", "G"), ("S", "S")):
        raise code.refuse()
    to, source, size, *_ = instruction.operands
    origin = "global" if instruction.modifiers[1] == "G" else "shared::cta"
    code.emit(number_of("shl.b32"), lanes=ALL_LANES, d=code.scratch(), a=uniform(code, size), b=code.constant(4))
    code.emit(
        "bulk_copy", lanes=ONE_LANE, a=uniform(code, to), b=uniform(code, source), c=code.scratch(),
        e=uniform(code, to, 1), items=3 * (code.constant(0),), flags=SPACES["shared::cluster"] | SPACES[origin] << 4,
    )  # fmt: skip


def _next_cluster(code: Code, instruction: Instruction) -> None:
    """The response's place in shared memory, and the barrier."""
    to_all = "BROADCAST" in only(code, instruction, "BROADCAST", "SELFCAST")
    response, barrier = instruction.operands
    code.emit(
        "cancel_cluster", lanes=ONE_LANE, a=uniform(code, response), b=uniform(code, barrier),
        items=(code.constant(0),), flags=SPACES["shared"] | (MULTICAST if to_all else 0),
    )  # fmt: skip


def _flush(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    if instruction.control.operands is None or instruction.control.result is not None:
        raise code.refuse("a group of bulk stores that is waited for to its end")
    code.emit("bulk_commit", lanes=ONE_LANE)


def _store_async(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    place, value = instruction.operands
    if not isinstance(place, Address) or place.uniform or place.base is None or place.base.suffixes != ("64",):
        raise code.refuse()
    code.emit("store_async", a=code.source(Register(place.base.number), 2), b=code.source(value), imm=place.offset)


def _warpgroup(code: Code, instruction: Instruction) -> None:
    match instruction.modifiers:
        case ("ARRIVE",):
            code.emit("wgmma_fence")
        case ("DEPBAR", "LE"):
            code.emit("wgmma_wait", imm=number(code, instruction.operands[1]))
        case _:
            raise code.refuse()


def _wgmma(code: Code, instruction: Instruction) -> None:
    shape, result_kind, *kinds = instruction.modifiers
    kinds = [kind.lower() for kind in kinds] or ["f16"]
    kinds = 2 * kinds if len(kinds) == 1 else kinds
    found = re.fullmatch(r"64x(\d+)x(\d+)", shape)
    if not found or result_kind != "F32" or any(WGMMA_DEPTHS.get(kind) != int(found[2]) for kind in kinds):
        raise code.refuse()
    operands = list(instruction.operands)
    last = operands.pop() if isinstance(operands[-1], Scoreboard) else None
    added: Predicate = operands.pop() if isinstance(operands[-1], Predicate) else Predicate(ALWAYS)  # type: ignore
    sums, *factors, also = operands
    columns = int(found[1])
    results = code.registers(sums, columns // 2, results=True)
    never = added.number == ALWAYS and added.negated
    if also != sums and not (never and also == Register(ZERO)):
        raise code.refuse()
    descriptor = factors[-1]
    if not isinstance(descriptor, Descriptor) or descriptor.kind != "gdesc" or descriptor.offset:
        raise code.refuse()
    if set(descriptor.suffixes) - {"tnspA", "tnspB"}:
        raise code.refuse()
    rows = code.registers(factors[0], 4) if len(factors) == 2 else ()
    names = {} if rows else {"a": code.source(descriptor.register, 2)}
    b = code.source(Register(descriptor.register.number + 2, True), 2)
    flags = ELEMENTS[kinds[0]] | ELEMENTS[kinds[1]] << 4
    flags |= ("tnspA" in descriptor.suffixes) << 10 | ("tnspB" in descriptor.suffixes) << 11
    scale = code.plain_predicate(added)
    code.products.update(results + rows)
    code.emit(
        "wgmma",
        b=b,
        c=scale,
        items=results + rows,
        extra=columns,
        imm=int(found[2]),
        width=len(rows),
        flags=flags,
        **names,
    )
    if last is not None:
        code.emit("wgmma_commit")


def _registers(code: Code, instruction: Instruction) -> None:
    match instruction.modifiers:
        case ("DEALLOC", "CTAPOOL"):
            code.emit("set_registers", imm=number(code, instruction.operands[0]), flags=0)
        case ("TRY_ALLOC", "CTAPOOL"):
            got, count = instruction.operands
            code.emit("set_registers", imm=number(code, count), flags=1)
            true = code.constant(0xFFFFFFFF)
            code.emit(number_of("mov.pred"), lanes=ALL_LANES, d=code.result(got), a=true)
        case _:
            raise code.refuse()


def _plain(name: str, lanes: int = 0, **fields):
    def lowered(code: Code, instruction: Instruction) -> None:
        only(code, instruction)
        code.emit(name, lanes=lanes, **fields)

    return lowered


ASYNC = {
    "BAR": _bar, "MEMBAR": _membar, "FENCE": _fence, "SYNCS": _syncs, "ARRIVES": _copies_arrive,
    "UCGABAR_ARV": _plain("cluster_arrive", flags=1), "UCGABAR_WAIT": _plain("cluster_wait"),
    "ACQBULK": _plain("grid_wait"), "PREEXIT": _plain("grid_launch"),
    "UTMACCTL": _nothing, "UTMALDG": _load_tensor, "UTMASTG": _store_tensor, "UGETNEXTWORKID": _next_cluster,
    "UTMACMDFLUSH": _flush, "STAS": _store_async, "UBLKCP": _copy_bytes,
    "WARPGROUP": _warpgroup, "HGMMA": _wgmma, "QGMMA": _wgmma, "USETMAXREG": _registers,
}  # fmt: skip
