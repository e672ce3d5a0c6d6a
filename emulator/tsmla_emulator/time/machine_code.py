"""What an instruction of machine code costs on a machine but for what it does to others: its pipe, its latency, and its
share of shared memory's clocks.

What ptxas wrote into it for the scheduler is in run/sass/model.Control.
"""

from __future__ import annotations

from ..run.sass.model import Instruction
from .costs import Cost
from .machines import Machine

_OPCODES = {
    "alu": "CS2R ELECT FMNMX FMNMX3 FSEL FSETP IABS IADD3 ISETP LEA LOP3 MOV P2R PLOP3 PRMT SEL SHF VIADD VIADDMNMX "
    "VIMNMX VIMNMX3 VOTE",
    "fma": "FADD FFMA FMUL HADD2 HFMA2 IMAD",
    "fma2": "FADD2 FFMA2 FMUL2",
    "convert": "F2FP",
    "special": "F2I FLO I2F MUFU POPC",
    "load_shared": "ATOMS LDS LDSM",
    "store_shared": "STS STSM",
    "shuffle": "CREDUX REDUX SHFL",
    "load_global": "LDG",
    "store_global": "STG",
    "constant": "LDC LDCU S2R S2UR",
    "warp_product": "HMMA",
}
_KINDS = {opcode: kind for kind, opcodes in _OPCODES.items() for opcode in opcodes.split()}
"""Opcode -> its kind here. Others take an issue slot and the clocks that they say: uniform instructions, branches, NOP,
BSSY."""
_WORDS = {"64": 2, "128": 4, "2": 2, "4": 4}
"""Modifier of an access to shared memory -> how many units of 128 bytes a warp moves."""


def plain(instruction: Instruction, m: Machine) -> Cost:
    """Return the cost of an instruction by its pipe and its result alone."""
    kind, modifiers = _KINDS.get(instruction.opcode, ""), instruction.modifiers
    match kind:
        case "fma" | "fma2":
            return Cost("code", pipe="fma", occupancy=m.fma.clocks * (2 if kind == "fma2" else 1))
        case "alu":
            return Cost("code", pipe="alu", occupancy=m.alu.clocks)
        case "convert":
            return Cost("code", pipe=m.convert_pipe, occupancy=m.convert.clocks)
        case "special":
            clocks = m.exponential.clocks if modifiers == ("EX2",) else m.special.clocks
            return Cost("code", pipe="mufu", occupancy=clocks, latency=m.special_latency.clocks)
        case "warp_product":
            clocks, latency = m.warp_product.clocks, m.warp_product_latency.clocks
            return Cost("code", pipe="warp_product", occupancy=clocks, latency=latency)
        case "shuffle":
            return Cost("code", pipe="move", occupancy=m.shuffle.clocks, latency=m.shuffle_latency.clocks, port=1)
        case "load_shared" | "store_shared":
            load = kind == "load_shared"
            words = _WORDS.get(modifiers[-1], 1) if modifiers else 1
            latency = m.shared_latency.clocks if load else 0
            return Cost("code", pipe="move", occupancy=1, latency=latency, port=words, loads=int(load))
        case "load_global" | "store_global":
            latency = m.load_latency.clocks if kind == "load_global" else 0
            return Cost("code", pipe="move", occupancy=m.shuffle.clocks, latency=latency)
        case "constant":
            return Cost("code", latency=m.constant_latency.clocks)
    if modifiers == ("VIEW", "ASYNC", "S"):  # a fence, which frees a scoreboard when it is done
        return Cost("code", latency=m.proxy_fence.clocks)
    return Cost("code")
