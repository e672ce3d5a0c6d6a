"""The decoder of machine code says what nvdisasm says, about all that ships, and refuses what it does not know."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from nvdisasm_text import disassembled
from tsmla.loading.toolchain import shipped_libraries
from tsmla_emulator.run.sass.decode import UNIFORM_BITS, decoded
from tsmla_emulator.run.sass.image import kernels
from tsmla_emulator.run.sass.model import (
    BYTES,
    Address,
    Control,
    Descriptor,
    Float,
    Instruction,
    Integer,
    MachineCodeError,
    Predicate,
    Register,
    Target,
)
from tsmla_emulator.run.sass.tables import forms

each_architecture = pytest.mark.parametrize("architecture", UNIFORM_BITS)


@functools.cache
def shipped(architecture: str) -> list[bytes]:
    """The different instructions of all kernels that this installation has for an architecture."""
    found = {
        kernel.code[at : at + BYTES]: None
        for library in sorted(shipped_libraries().glob(f"*_{architecture}_*.so"))
        for kernel in kernels(library)
        for at in range(0, len(kernel.code), BYTES)
    }
    assert found, f"no library for {architecture} in {shipped_libraries()}"
    return list(found)


@each_architecture
def test_every_instruction_that_ships_is_what_nvdisasm_says(architecture):
    code = b"".join(shipped(architecture))
    for ours, theirs in zip(decoded(code, architecture), disassembled(code, architecture), strict=True):
        assert ours == theirs


OTHERS = [
    (0x000100124D0079E7, 0x0045E20008000000),  # UTCCP.T.S, and with every shape
    (0x00010016270079E7, 0x0007E20008200000),
    (0x000000040A0079E7, 0x0001D80008180000),
    (0x000000040A0079E7, 0x0001D80008100000),
    (0x000000040A0079E7, 0x0001D80009000000),
    (0x000000040A0079E7, 0x0001D80009080000),
    (0x000000040A0079E7, 0x0001D80009100000),
    (0x000004040A0079E7, 0x0001D80009300000),
    (0x00004A30040075B4, 0x0003E20008109000),  # UTMALDG.2D.GATHER4
    (0x00002440040075B4, 0x0007E20008309000),
    (0x00000000060073CA, 0x000FF40008000000),  # UGETNEXTWORKID.SELFCAST
    (0x00000000040013CA, 0x000FEC0008000100),  # UGETNEXTWORKID.BROADCAST
    (0xFE0000040604797E, 0x020EE20008529F08),  # LDG.E.NA.ENL2.LTC256B.256.CONSTANT
    (0xFE0000060C10797E, 0x008F620008509F0C),  # LDG.E.NA.EFL2.LTC256B.256.CONSTANT
    (0xFFFFFE04020C797E, 0x000EE20008521910),  # LDG.E.NA.ENL2.256
    (0xFFFFC00C02147981, 0x002EAA000C1E9D00),  # LDG.E.128.CONSTANT
    (0xF80000082404797F, 0x0009E8000F121814),  # STG.E.ENL2.256
    (0xFFFFC00C0210797F, 0x008FE8000F121804),
    (0xF8000C048A08797F, 0x0001E2000F52184A),  # STG.E.NA.ENL2.256
    (0x0000000400047300, 0x000E6A00000E0000),  # FLO.U32
    (0x0000000500057245, 0x000FC60000201400),  # I2FP.F32.S32
    (0x0000000500157245, 0x000FE20000201000),  # I2FP.F32.U32
    (0xFF80000024307876, 0x000FE40007810025),  # FMNMX3.FTZ
    (0x001006082A0079EA, 0x0007E2000FA0001E),  # UTCHMMA.2CTA
    (0x00080636420075EA, 0x0005E2000FA00345),  # UTCQMMA.2CTA
    (0x00000034000079ED, 0x0001E20008040005),  # STTM
]
"""Instructions of other projects' kernels on sm_100a, and of small ones, of a kind that does not ship."""
OTHERS_OF_HOPPER = [
    (0x0000000D00021D05, 0x000E6C000821F000),  # F2I.FTZ.U32.TRUNC.NTZ of a uniform register
    (0x0000000800067845, 0x000FC6000020D000),  # I2FP.F32.U32.RZ of a constant
]
"""Instructions of variants of our kernels on sm_90a that were not kept."""


@pytest.mark.parametrize(("others", "architecture"), [(OTHERS, "sm_100a"), (OTHERS_OF_HOPPER, "sm_90a")])
def test_instructions_of_other_kernels_are_what_nvdisasm_says(others, architecture):
    code = b"".join((high << 64 | low).to_bytes(BYTES, "little") for low, high in others)
    assert decoded(code, architecture) == disassembled(code, architecture)


@each_architecture
def test_a_changed_bit_is_read_as_nvdisasm_reads_it_or_refused(architecture):
    draw = random.Random(architecture)
    accepted = []
    for word in draw.sample(shipped(architecture), 3000):
        changed = int.from_bytes(word, "little") ^ 1 << draw.randrange(128)
        try:
            decoded(changed.to_bytes(BYTES, "little"), architecture)
        except MachineCodeError:
            continue
        accepted.append(changed.to_bytes(BYTES, "little"))
    assert 1000 < len(accepted) < 2000
    code = b"".join(accepted)
    for ours, theirs in zip(decoded(code, architecture), disassembled(code, architecture), strict=True):
        assert ours == theirs


@each_architecture
def test_no_two_forms_are_of_the_same_bits(architecture):
    by_code: dict[int, list[tuple[int, int]]] = {}
    for form in forms(architecture):
        by_code.setdefault(form.code, []).append(form.on(UNIFORM_BITS[architecture]).pattern())
    for patterns in by_code.values():
        for (mask, value), (other_mask, other) in itertools.combinations(patterns, 2):
            assert (value ^ other) & mask & other_mask


def one(low: int, high: int, architecture: str) -> Instruction:
    (found,) = decoded((high << 64 | low).to_bytes(BYTES, "little"), architecture)
    return found


def uniform(number: int) -> Register:
    return Register(number, uniform=True)


def test_a_load_as_data():
    """@!P0 LDG.E.128 R4, desc[UR6][R12.64]"""
    assert one(0x000000060C048981, 0x000EA8000C1E1D00, "sm_90a") == Instruction(
        address=0,
        guard=Predicate(0, negated=True),
        opcode="LDG",
        modifiers=("E", "128"),
        operands=(Register(4), Descriptor("desc", uniform(6), address=Address(Register(12, suffixes=("64",))))),
        control=Control(stall=4, result=2),
    )


@pytest.mark.parametrize(
    ("architecture", "low", "high", "name", "operands"),
    [
        ("sm_90a", 0x3F80000008087421, 0x001FCC0000000000, "FADD", (Register(8), Register(8), Float(0x3F800000))),
        ("sm_90a", 0x0000001000900947, 0x000FEA0003800000, "BRA", (Target(0x1250),)),
        (
            "sm_90a", 0x41E0001098587DF0, 0x000FD8000FF01858, "HGMMA.64x128x16.F32.BF16",
            (Register(88), Register(152), Descriptor("gdesc", uniform(16), suffixes=("tnspB",)), Register(88),
             Predicate(0, uniform=True, negated=True)),
        ),
        (
            "sm_90a", 0x00013002030075A7, 0x000E640008000178, "SYNCS.PHASECHK.TRANS64.TRYWAIT",
            (Predicate(0), Address(Register(3), uniform(56), 0x130), Register(2)),
        ),
        (
            "sm_100a", 0x00FF08200A0005EA, 0x0005E2000FA00004, "UTCHMMA.2CTA",
            (Descriptor("gdesc", uniform(10)), Descriptor("gdesc", uniform(32)), Descriptor("tmem", uniform(4)),
             Descriptor("tmem", uniform(8)), Descriptor("idesc", uniform(9)),
             Predicate(7, uniform=True, negated=True)),
        ),
        (
            "sm_100a", 0x00010005002479EE, 0x000FE400082C0000, "LDTM.x32",
            (Register(36), Descriptor("tmem", uniform(5), offset=0x100)),
        ),
        (
            "sm_100a", 0x00000049280E7249, 0x082FE2000100000E, "FFMA2",
            (Register(14), Register(40, suffixes=("F32x2", "HI_LO")), Register(73, suffixes=("F32",)),
             Register(14, suffixes=("F32x2", "HI_LO"))),
        ),
        (
            "sm_100a", 0x40004040050B1890, 0x000FE200087FE4FF, "UIADD3.X",
            (uniform(11), Predicate(7, uniform=True), Predicate(7, uniform=True), uniform(5), Integer(0x40004040),
             uniform(255), Predicate(0, uniform=True), Predicate(7, uniform=True, negated=True)),
        ),
    ],
)  # fmt: skip
def test_operands_as_data(architecture, low, high, name, operands):
    found = one(low, high, architecture)
    assert (found.name, found.operands) == (name, operands)


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0x00000049280E7249, 0x082FE2000100000E, Control(stall=1, awaits=0b10, reuse=0b10)),  # FFMA2
        (0x0000000A07FF75B2, 0x0044E20008000100, Control(stall=1, result=3, operands=2, awaits=0b100)),  # SYNCS.EXCH
        (0x00010005002479EE, 0x000FE400082C0000, Control(stall=2)),  # LDTM
        (0x00010005002479EE, 0x000FC400082C0000, Control(stall=2, yields=True)),
    ],
)
def test_what_the_scheduler_is_told(low, high, told):
    assert one(low, high, "sm_100a").control == told


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0x00000000000075AA, 0x000FE20000000000, "opcode 0x5aa is not known at 0x0 (sm_90a): 0x"),
        (0x0000580701007387, 0x0023E20000100800, "STL: local memory, to which registers are spilled, is not emulated"),
        (0x0000580701007983, 0x0023E20000100800, "LDL: local memory, to which registers are spilled, is not emulated"),
        (0x3F80000008087421, 0x001FCC0000000010, "FADD: bits 68 are not known at 0x0 (sm_90a): 0x"),
        (0x00013002030075A7, 0x000E6400080001B8, "SYNCS.PHASECHK.TRANS64: bits 70, 71 are not known at 0x0"),
        (0x0000000000077919, 0x000E620000002800, "S2R at 0x0: bits 72 to 79 are 0x28: 0x"),
        (0x3F80000008087421, 0x001F8C0000000000, "FADD at 0x0: its result frees scoreboard 6: 0x"),
        (0x3F80000008087421, 0x201FCC0000000000, "FADD at 0x0: operands 0b1000 are reused: 0x"),
    ],
)
def test_what_is_not_known_is_named(low, high, said):
    with pytest.raises(MachineCodeError) as error:
        one(low, high, "sm_90a")
    assert str(error.value).startswith(said)


def test_another_architecture_is_refused():
    with pytest.raises(MachineCodeError, match="machine code of sm_120a; known: sm_90a, sm_100a, sm_103a"):
        decoded(b"", "sm_120a")
