"""Lowers jumps, convergence, votes and what reads special registers."""

from __future__ import annotations

from ..ptx.encoding import SIGNED
from ..ptx.lower import SPECIAL_REGISTERS
from ..ptx.simple_ops import number_of
from .code import ALL_LANES, NONE, Code
from .lane_steps import lane_op, lanes_of, only
from .model import ALWAYS, Convergence, Instruction, Predicate, Register, Special, Target

TO_WARP = 1 << 24
_SPECIAL = {
    "SR_TID.X": "%tid.x", "SR_TID.Y": "%tid.y", "SR_TID.Z": "%tid.z",
    "SR_CTAID.X": "%ctaid.x", "SR_CTAID.Y": "%ctaid.y", "SR_CTAID.Z": "%ctaid.z",
    "SR_LANEID": "%laneid", "SR_CgaCtaId": "%cluster_ctarank",
}  # fmt: skip
_SHARED_WINDOW = "SR_SWINHI"
"""The upper half of generic addresses of shared memory: 0 here."""
_VOTES = {"ALL": 0, "ANY": 1, "EQ": 2}
_BALLOT = 3
_SHUFFLES = {"IDX": 0, "UP": 1, "DOWN": 2, "BFLY": 3}
_ALL_OF_THREE = 0x80
_REDUCTIONS = {"": 3, "SUM": 0, "MIN": 1, "MAX": 2, "AND": 3, "OR": 4, "XOR": 5}


def _nothing(code: Code, instruction: Instruction) -> None:
    code.emit("nop")


def _target(code: Code, instruction: Instruction) -> int:
    last = instruction.operands[-1] if instruction.operands else None
    if not isinstance(last, Target):
        raise code.refuse()
    return last.address


def _bra(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "U", "DIV", "CONV", "ANY")
    target = _target(code, instruction)
    condition = instruction.operands[:-1]
    if modifiers & {"DIV", "CONV"}:  # lanes that are apart would go elsewhere to meet: they meet here
        (members,) = condition
        code.emit("warp_sync", a=code.source(members))
        if "CONV" in modifiers:
            code.emit("bra", target=target)
        return
    if "ANY" in modifiers:  # all lanes go where any of them goes
        if condition:
            raise code.refuse()
        asked, inverted = code.predicate(instruction.guard)
        if inverted:
            raise code.refuse()
        code.emit("vote", d=code.scratch(), a=asked, imm=_VOTES["ANY"], guard=NONE)
        code.emit("bra", target=target, guard=code.scratch())
        return
    if not condition:
        code.emit("bra", target=target)
        return
    (predicate,) = condition
    if not isinstance(predicate, Predicate) or ("U" in modifiers) != predicate.uniform:
        raise code.refuse()
    both = [instruction.guard, predicate, Predicate(ALWAYS)]
    lane_op(code, instruction, "lut_of_predicates", [code.scratch()], both, _ALL_OF_THREE, always=True)
    code.emit("bra", target=target, guard=code.scratch())


def _call(code: Code, instruction: Instruction) -> None:
    if instruction.modifiers != ("REL", "NOINC"):
        raise code.refuse()
    code.emit("bra", target=_target(code, instruction))


def _jump(code: Code, instruction: Instruction) -> None:
    """BRX and RET: to the register behind the place."""
    register, place = instruction.operands
    returns = instruction.opcode == "RET"
    if instruction.modifiers != (("REL", "NODEC") if returns else ()) or not isinstance(register, Register):
        raise code.refuse()
    if not isinstance(place, Target):
        raise code.refuse()
    code.emit("jump", a=code.source(register), imm=place.address, table=True)


def _convergence(name: str):
    def lowered(code: Code, instruction: Instruction) -> None:
        only(code, instruction, "RECONVERGENT")
        barrier = instruction.operands[0]
        if not isinstance(barrier, Convergence):
            raise code.refuse()
        code.emit(name, imm=barrier.number)

    return lowered


def _warpsync(code: Code, instruction: Instruction) -> None:
    modifiers = only(code, instruction, "ALL", "COLLECTIVE")
    if "COLLECTIVE" in modifiers:
        code.emit("trap")  # behind a BRA.DIV that nobody takes
        return
    members = code.constant(0xFFFFFFFF) if "ALL" in modifiers else code.source(instruction.operands[0])
    code.emit("warp_sync", a=members)


def _trap(code: Code, instruction: Instruction) -> None:
    code.emit("trap")


def _exit(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    if instruction.operands:
        raise code.refuse()
    code.emit("exit")


def _special(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    result, special = instruction.operands
    if not isinstance(special, Special):
        raise code.refuse()
    if special.name == _SHARED_WINDOW:
        code.emit(number_of("mov.b32"), lanes=_lanes(instruction), d=code.result(result), a=code.constant(0))
        return
    if special.name not in _SPECIAL:
        raise code.refuse()
    index = SPECIAL_REGISTERS.index(_SPECIAL[special.name])
    code.emit("special", lanes=_lanes(instruction), d=code.result(result), imm=index, width=4)


def _lanes(instruction: Instruction) -> int:
    return ALL_LANES if instruction.opcode == "S2UR" else lanes_of(instruction)


def _to_warp(operand) -> int:
    return TO_WARP if operand.uniform else 0


def _vote(code: Code, instruction: Instruction) -> None:
    (kind,) = instruction.modifiers
    if kind not in _VOTES:
        raise code.refuse()
    *results, asked = instruction.operands
    source = code.plain_predicate(asked)
    flags = _to_warp(results[0])
    if len(results) == 2 and kind == "ANY":
        other = code.result(results[1])
        code.emit("vote", d=code.result(results[0]), items=(other,), a=source, imm=_BALLOT, flags=flags)
    elif len(results) == 1 and isinstance(results[0], Predicate):
        code.emit("vote", d=code.result(results[0]), a=source, imm=_VOTES[kind], flags=flags)
    else:
        raise code.refuse()


def _shuffle(code: Code, instruction: Instruction) -> None:
    (kind,) = instruction.modifiers
    valid, result, *sources = instruction.operands
    if kind not in _SHUFFLES:
        raise code.refuse()
    a, b, c = map(code.source, sources)
    found = code.result(valid)
    items = (found,) if found >= 0 else ()
    code.emit("shuffle", d=code.result(result), a=a, b=b, c=c, items=items, imm=_SHUFFLES[kind])


def _elect(code: Code, instruction: Instruction) -> None:
    only(code, instruction)
    leads, leader, among = instruction.operands
    if among != Predicate(ALWAYS):
        raise code.refuse()
    code.emit("elect", d=code.result(leader), items=(code.result(leads),), flags=_to_warp(leader))


def _redux(code: Code, instruction: Instruction) -> None:
    kind, *signed = instruction.modifiers or ("",)
    if kind not in _REDUCTIONS or signed not in (["S32"], []):
        raise code.refuse()
    result, source = instruction.operands
    flags = _to_warp(result) | (SIGNED if signed else 0)
    code.emit("reduce", d=code.result(result), a=code.source(source), imm=_REDUCTIONS[kind], flags=flags)


def _r2ur(code: Code, instruction: Instruction) -> None:
    """A predicate before the result is true in lanes that hold something else: loops over all values end with it."""
    modifiers = only(code, instruction, "BROADCAST", "FILL")
    *others, result, source = instruction.operands
    code.emit(
        "read_uniform", lanes=ALL_LANES if "FILL" in modifiers else 0, d=code.result(result), a=code.source(source),
        items=tuple(map(code.result, others)),
    )  # fmt: skip


FLOW = {
    "NOP": _nothing, "YIELD": _nothing, "ERRBAR": _nothing, "CGAERRBAR": _nothing, "NANOSLEEP": _nothing,
    "BRA": _bra, "CALL": _call, "RET": _jump, "BRX": _jump, "EXIT": _exit,
    "BSSY": _convergence("begin_meeting"), "BSYNC": _convergence("meet"), "BREAK": _convergence("leave_meeting"),
    "ENDCOLLECTIVE": _trap, "BPT": _trap, "WARPSYNC": _warpsync, "S2R": _special, "S2UR": _special,
    "VOTE": _vote, "VOTEU": _vote, "SHFL": _shuffle, "ELECT": _elect, "REDUX": _redux, "CREDUX": _redux, "R2UR": _r2ur,
}  # fmt: skip
