"""Control flow, warps, shared memory and checks in machine code: small kernels of a warp or two."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sass_kernels import assembled, computed, run_lines
from small_kernels import text_of
from tsmla_emulator.run.machine import EmulationError, Options, parse
from tsmla_emulator.run.ptx.encoding import op_number
from tsmla_emulator.run.ptx.lower import lower as lower_ptx
from tsmla_emulator.run.ptx.lower_async import GATHER4, MULTICAST, PAIR
from tsmla_emulator.run.sass.code import Code, UnknownInstruction
from tsmla_emulator.run.sass.lower import lower

AHEAD = 4
"""Instructions that `computed` puts ahead of lines with one input."""


def at(position: int) -> str:
    """The address of one of the lines."""
    return hex(16 * (AHEAD + position))


def test_lanes_that_went_apart_meet_where_the_code_says():
    lines = [
        "ISETP.GE.AND P0, PT, R10, 0x10, PT",
        f"BSSY B0, {at(7)}",
        f"@P0 BRA {at(5)}",
        "MOV R20, 0x1",
        f"BRA {at(7)}",
        "MOV R20, 0x2",
        "NOP",
        "BSYNC B0",
        "VOTE.ANY R21, PT, P0",
    ]
    found, votes = computed(lines, np.arange(32), results=2)
    assert found.tolist() == 16 * [1] + 16 * [2] and set(votes.tolist()) == {0xFFFF0000}


def test_lanes_wait_for_those_that_come_from_behind():
    lines = [
        "ISETP.GE.AND P0, PT, R10, 0x10, PT",
        f"BSSY B0, {at(3)}",
        f"@P0 BRA {at(6)}",
        "BSYNC B0",
        "VOTE.ANY R20, PT, P0",
        f"BRA {at(8)}",
        "NOP",
        f"BRA {at(3)}",
        "NOP",
    ]
    (votes,) = computed(lines, np.arange(32))
    assert set(votes.tolist()) == {0xFFFF0000}


def test_a_jump_of_two_conditions_asks_both():
    lines = [
        "ISETP.GE.AND P0, PT, R10, 0x10, PT",
        "ISETP.LT.AND P1, PT, R10, 0x18, PT",
        "MOV R20, 0x1",
        f"@P0 BRA P1, {at(5)}",
        "MOV R20, 0x2",
        "NOP",
    ]
    (found,) = computed(lines, np.arange(32))
    assert found.tolist() == [1 if 16 <= i < 24 else 2 for i in range(32)]


def test_a_lane_that_ends_is_not_waited_for():
    lines = [f"BSSY B0, {at(3)}", "ISETP.EQ.U32.AND P0, PT, R10, 0x3, PT", "@P0 EXIT", "BSYNC B0", "MOV R20, 0x7"]
    (found,) = computed(lines, np.arange(32))
    assert found.tolist() == [0 if i == 3 else 7 for i in range(32)]


def test_calls_return_to_where_each_lane_came_from():
    lines = [
        "MOV R20, RZ",
        f"MOV R6, {at(4)}",
        "MOV R7, RZ",
        f"CALL.REL.NOINC {at(8)}",
        f"MOV R6, {at(6)}",
        f"CALL.REL.NOINC {at(8)}",
        "NOP",
        f"BRA {at(10)}",
        "IADD3 R20, R20, R10, RZ",
        "RET.REL.NODEC R6 0x0",
        "NOP",
    ]
    (found,) = computed(lines, np.arange(32))
    assert found.tolist() == [2 * i for i in range(32)]


def test_uniform_registers_are_the_warps():
    lines = [
        "ISETP.GE.AND P0, PT, R10, 0x5, PT",
        "@P0 R2UR UR6, R10",
        "UIADD3 UR6, UR6, 0x64, URZ",
        "UISETP.GT.AND UP0, UPT, UR6, 0x60, UPT",
        "MOV R20, UR6",
        "PLOP3.LUT P1, PT, PT, PT, UP0, 0x80, 0x0",
        "SEL R21, RZ, 0x1, !P1",
        "ELECT P2, UR7, PT",
        "SEL R22, RZ, 0x1, !P2",
        "REDUX.MAX.S32 UR8, R10",
        "SHFL.BFLY PT, R23, R10, 0x1, 0x1f",
        "MOV R24, UR8",
    ]
    found = computed(lines, np.arange(32), results=5)
    assert set(found[0].tolist()) == {105} and set(found[1].tolist()) == {1}
    assert found[2].tolist() == [1, *31 * [0]] and set(found[4].tolist()) == {31}
    assert found[3].tolist() == [i ^ 1 for i in range(32)]


def test_a_value_for_each_loop_over_different_ones():
    lines = [
        "PLOP3.LUT P0, PT, PT, PT, PT, 0x80, 0x8",
        "PLOP3.LUT P1, PT, PT, PT, PT, 0x8, 0x80",
        "PLOP3.LUT P1, PT, P1, P0, PT, 0xf2, 0x2f",
        "@P0 R2UR P1, UR4, R10",
        "@P0 PLOP3.LUT P0, PT, P1, PT, PT, 0x80, 0x8",
        "@!P1 MOV R20, UR4",
        f"@P0 BRA.U.ANY {at(2)}",
    ]
    values = np.arange(32) % 5
    (found,) = computed(lines, values, arch="sm_100a")
    assert found.tolist() == values.tolist()


EXCHANGE = [
    "S2R R0, SR_TID.X",
    "LDC.64 R2, c[0x0][0x210]",
    "IMAD.WIDE.U32 R2, R0, 0x4, R2",
    "LEA R4, R0, 0x400, 0x2",
    "LOP3.LUT R5, R0, 0x3f, RZ, 0x3c, !PT",
    "LEA R5, R5, 0x400, 0x2",
    "STS [R4], R0",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "LDS R6, [R5]",
    "STG.E desc[UR4][R2.64], R6",
    "EXIT",
]


def exchanged(lines: list[str]) -> np.ndarray:
    memory = np.zeros(64, np.uint32)
    run_lines(lines, memory, Options(happens_before=True), threads=64, shared_bytes=256)
    return memory


def test_warps_exchange_words_behind_a_barrier():
    assert exchanged(EXCHANGE).tolist() == [i ^ 63 for i in range(64)]


def test_a_race_names_the_address_and_the_opcode():
    without = ["NOP" if line.startswith("BAR") else line for line in EXCHANGE]
    with pytest.raises(EmulationError) as caught:
        exchanged(["NOP", *without])
    assert "machine code 0x0090, LDS" in str(caught.value)
    assert caught.value.kind in ("race", "poison")
    first = [*without[:6], *4 * ["NOP"], *without[6:]]
    memory = np.zeros(64, np.uint32)
    with pytest.raises(EmulationError, match="0x00a0, STS and read by .* 0x00c0, LDS are not ordered") as caught:
        run_lines(first, memory, Options(happens_before=True, quantum=11), threads=64, shared_bytes=256)
    assert caught.value.kind == "race"


def test_an_atomic_races_with_what_nothing_orders():
    behind = EXCHANGE.index("LDS R6, [R5]")
    atomic, again = "ATOMS.OR R7, [R4], R0", EXCHANGE[behind - 1]
    assert exchanged([*EXCHANGE[:behind], atomic, again, *EXCHANGE[behind:]]).tolist() == [i ^ 63 for i in range(64)]
    with pytest.raises(EmulationError, match="ATOMS.OR") as caught:
        exchanged([*EXCHANGE[:behind], atomic, *EXCHANGE[behind:]])
    assert caught.value.kind == "race"


def test_an_address_outside_of_the_memory_is_an_error():
    memory = np.zeros(32, np.uint32)
    with pytest.raises(EmulationError, match="machine code 0x0030, STG"):
        run_lines(
            ["S2R R0, SR_TID.X", "LDC.64 R2, c[0x0][0x210]", "IMAD.WIDE.U32 R2, R0, 0x8, R2",
             "STG.E desc[UR4][R2.64], R0", "EXIT"], memory,
        )  # fmt: skip


def ops_of(line: str) -> list:
    code = Code("sm_100a", 0)
    (instruction,) = assembled([line])
    lower(code, 0, instruction)
    return code.ops


@pytest.mark.parametrize(
    ("shape", "name"),
    [("", "128x256b"), ("128dp128bit", "128x128b"), ("4dp256bit", "4x256b"), ("4x32dp128bit", "32x128b.warpx4"),
     ("2x64dp128bit_lw02_lw13", "64x128b.warpx2::02_13"), ("2x64dp128bit_lw01_lw23", "64x128b.warpx2::01_23")],
)  # fmt: skip
def test_copies_to_tensor_memory_are_those_of_ptx(shape, name):
    modifiers = ".".join(part for part in ("UTCCP.T.S.2CTA", shape) if part)
    (op,) = ops_of(f"{modifiers} tmem[UR10+0x108], gdesc[UR4]")
    text = text_of(f"tcgen05.cp.cta_group::2.{name} [%r1+264], %d1;", 1, "sm_100a", 32)
    entry = parse(text).entries["k"]
    (ptx,) = (lower_ptx(entry, one) for one in entry.instructions if one.opcode.startswith("tcgen05"))
    assert (op.number, op.flags, op.extra, op.imm) == (ptx.op, ptx.flags, ptx.extra, ptx.imm)


def test_a_gathering_copy_has_five_coordinates():
    (op,) = ops_of("UTMALDG.2D.GATHER4.2CTA [UR8], [UR4], desc[UR6]")
    assert op.extra == 2 and op.flags & GATHER4 and op.flags & PAIR
    assert list(op.items[:5]) == [op.a + 2 + i for i in range(5)] and op.c == op.a + 1


@pytest.mark.parametrize("to_all", [False, True])
def test_the_next_cluster_is_asked_for(to_all):
    (op,) = ops_of(f"UGETNEXTWORKID.{'BROADCAST' if to_all else 'SELFCAST'} [UR8], [UR9]")
    assert op.number == op_number("cancel_cluster") and op.b == op.a + 1 and bool(op.flags & MULTICAST) == to_all


def test_registers_that_disable_lanes_are_read():
    (op,) = ops_of("UTCHMMA.2CTA tmem[UR42], gdesc[UR8], tmem[UR30], tmem[UR6], idesc[UR7], UR16, UPT")
    assert op.width == 9 and list(op.items[4:]) == [op.items[4] + i for i in range(8)]


@pytest.mark.parametrize(
    "line",
    ["FROB.X R0, R1", "IADD3.FROB R0, R1, R2, R3", "MUFU.SIN R0, R1", "LDG.E.STRONG.GPU R0, desc[UR4][R2.64]",
     "SHF.R.S64.HI R0, R1, R2, R3", "VIMNMX R0, R1, R2, P0", "FENCE.VIEW.TEXTURE", "MOV R0, R1.H1", "F2I.S64 R0, R1"],
)  # fmt: skip
def test_what_is_not_known_is_an_error_that_names_it(line: str):
    (instruction,) = assembled([line])
    instruction = dataclasses.replace(instruction, address=0x1230)
    with pytest.raises(UnknownInstruction) as caught:
        lower(Code("sm_90a", 0), 0, instruction)
    assert line.split()[0] in str(caught.value) and "at 0x1230" in str(caught.value)
