"""Registers that machine code uses before the scoreboards say that it may."""

from __future__ import annotations

import dataclasses

import pytest
from sass_kernels import assembled
from tsmla_emulator.prove.dataflow.hazards import Analysis, timed_by_scoreboards
from tsmla_emulator.prove.dataflow.latencies import Distance, Seen, Spacing, known_of, lowered, seen, too_soon
from tsmla_emulator.prove.dataflow.multiplied import multiplied
from tsmla_emulator.run.sass.model import Instruction
from tsmla_emulator.run.sass.uses import uses_of


def controlled(*lines: str | tuple[str, dict]) -> list[Instruction]:
    """Lines, some with fields of Control, as instructions."""
    texts = [line if isinstance(line, str) else line[0] for line in (*lines, "EXIT")]
    code: list[Instruction] = []
    for instruction, line in zip(assembled(texts), (*lines, "EXIT"), strict=True):
        changes = {} if isinstance(line, str) else line[1]
        control = dataclasses.replace(instruction.control, **changes)
        code.append(dataclasses.replace(instruction, control=control))
    return code


def found(*lines: str | tuple[str, dict]) -> list[str]:
    """Address and kind of each hazard of these lines."""
    code = controlled(*lines)
    analysis = Analysis(code, uses_of("sm_90a", code), timed_by_scoreboards([code]))
    return [f"{hazard.instruction.address:#x} {hazard.kind}" for hazard in analysis.hazards()]


LOAD = ("LDG.E R10, desc[UR4][R2.64]", {"result": 0})


def test_a_result_is_awaited_before_it_is_read_or_overwritten():
    assert found(LOAD, ("FADD R11, R10, R12", {"awaits": 1})) == []
    assert found(LOAD, ("FADD R11, R10, R12", {"awaits": 2})) == ["0x10 read"]
    assert found(LOAD, "MOV R10, R12") == ["0x10 overwritten"]
    assert found(LOAD, ("NOP", {"awaits": 1}), "MOV R10, R12") == []


def test_each_register_of_a_wide_result_counts():
    wide = ("LDG.E.128 R8, desc[UR4][R2.64]", {"result": 3})
    assert found(wide, "FADD R20, R11, R12") == ["0x10 read"]
    assert found(wide, "FADD R20, R12, R13") == []


def test_operands_are_read_before_they_are_overwritten():
    store = ("STS [R2], R10", {"operands": 1})
    assert found(store, "MOV R10, R12") == ["0x10 overwritten"]
    assert found(store, "FADD R11, R10, R12", ("MOV R10, R12", {"awaits": 2})) == []


def test_a_result_says_that_operands_were_read():
    load = ("LDG.E R12, desc[UR4][R2.64]", {"result": 0, "operands": 1})
    assert found(load, ("MOV R2, R12", {"awaits": 1})) == []
    assert found(load, "MOV R2, R13") == ["0x10 overwritten"]


def test_of_one_unit_a_later_scoreboard_says_enough():
    first, second = "MUFU.EX2 R10, R11", ("MUFU.EX2 R12, R13", {"result": 0})
    assert found(first, second, ("FADD R14, R10, R12", {"awaits": 1})) == []
    assert found(second, first, ("FADD R14, R10, R12", {"awaits": 1})) == ["0x20 read"]


def test_it_holds_on_every_way_through_the_code():
    condition = ("@P0 BRA 0x30", {})
    assert found(LOAD, condition, ("NOP", {"awaits": 1}), "FADD R11, R10, R12") == ["0x30 read"]
    assert found(condition, "NOP", LOAD, ("FADD R11, R10, R12", {"awaits": 1})) == []


def test_what_opposite_guards_do_never_meets():
    load = (f"@P1 {LOAD[0]}", LOAD[1])
    assert found(load, "@!P1 MOV R10, R12") == []
    assert found(load, "ISETP.NE.U32.AND P1, PT, R5, RZ, PT", "@!P1 MOV R10, R12") == ["0x20 overwritten"]


@pytest.mark.parametrize("line", ["IMAD.WIDE R9, R12, R13, R14", "HMMA.16816.F32 R8, R12, R16, R20"])
def test_results_of_several_registers(line):
    assert found(LOAD, line) == ["0x10 overwritten"]


def spaced(*lines: str | tuple[str, dict]) -> list[Distance]:
    code = controlled(*lines)
    return [*Spacing(code, uses_of("sm_90a", code)).distances()]


def late(clocks: int) -> list[Distance]:
    """Distances of three sums, each read by the next so many clocks behind it."""
    stall = {"stall": clocks}
    return spaced(*((f"FADD R{i}, R{i - 1}, R9", stall) for i in range(11, 15)))


@pytest.mark.parametrize("clocks", [4, 3])
def test_a_fixed_time_passes_before_a_result_is_read(clocks):
    """ptxas leaves 4 clocks between two additions."""
    known = known_of(seen(late(4)))
    assert known["FADD register"]["any"] == 4
    assert len(too_soon(late(clocks), known)) == (0 if clocks == 4 else 3 + 4)  # each stall is too short, too


def test_clocks_pass_on_the_shortest_way():
    jump = ("@P0 BRA 0x30", {"stall": 5})
    found = spaced(("FADD R10, R11, R12", {"stall": 1}), jump, ("NOP", {"stall": 9}), "FADD R13, R10, R12")
    assert [one.clocks for one in found if one.kind == "register"] == [6]
    later = (
        ("@P0 BRA 0x50", {"stall": 5}),
        ("NOP", {"stall": 9}),
        "FADD R13, R10, R12",
        "EXIT",
        ("BRA 0x30", {"stall": 5}),
    )
    found = spaced(("FADD R10, R11, R12", {"stall": 1}), *later)
    assert [one.clocks for one in found if one.kind == "register"] == [11]


def test_a_stall_counts_for_all_that_is_under_way():
    code = controlled(("FADD R10, R11, R12", {"stall": 1}), ("NOP", {"stall": 4}), "FADD R13, R10, R12")
    spacing = Spacing(code, uses_of("sm_90a", code))
    assert [one.clocks for one in spacing.with_stall(1, 2) if one.kind == "register"] == [3]
    assert [one.kind for one in spacing.with_stall(2, 2)] == ["next"]


def test_what_ptxas_leaves_once_is_no_latency():
    once = [*late(4), *spaced(("FADD R10, R11, R12", {"stall": 9}), "FMUL R13, R10, R12")]
    assert "FMUL" not in known_of(seen(once))["FADD register"]
    often = [*late(4), *3 * spaced(("FADD R10, R11, R12", {"stall": 9}), "FMUL R13, R10, R12")]
    assert known_of(seen(often))["FADD register"]["FMUL"] == 9


def test_what_happens_to_be_far_apart_is_no_latency():
    def apart(clocks: int) -> list[Distance]:
        return spaced(("FADD R10, R11, R12", {"stall": clocks - 4}), ("NOP", {"stall": 4}), "FMUL R13, R10, R12")

    spread = [*late(4), *3 * apart(9), *(one for clocks in range(10, 15) for one in 2 * apart(clocks))]
    assert "FMUL" not in known_of(seen(spread))["FADD register"], "3 of 13"
    assert known_of(seen([*late(4), *3 * apart(16)]))["FADD register"]["FMUL"] == 16
    assert "FMUL" not in known_of(seen([*late(4), *3 * apart(17)]))["FADD register"]
    assert known_of(seen(3 * apart(17)))["FADD register"]["any"] == 16


def apart(first: str, second: str, clocks: int) -> Seen:
    """Three times a result that is used so many clocks behind it."""
    return seen(3 * spaced((f"{first} R10, R11, R12", {"stall": clocks}), f"{second} R13, R10, R12"))


def test_what_is_known_is_lowered_to_what_is_seen():
    known = {"FADD register": {"any": 4, "FMUL": 9}, "FADD next": {"any": 4}}
    assert lowered(known, apart("FADD", "FMUL", 9)) == known
    assert lowered(known, apart("FADD", "FMUL", 8))["FADD register"] == {"any": 4, "FMUL": 8}
    assert lowered(known, apart("FADD", "FMUL", 3))["FADD register"] == {"any": 3}
    assert lowered(known, apart("FADD", "FADD", 3))["FADD register"] == {"any": 3, "FMUL": 9}
    assert lowered(known, apart("FMUL", "FADD", 5))["FMUL register"] == {"any": 5}
    assert known["FADD register"] == {"any": 4, "FMUL": 9}


def test_what_was_seen_is_never_too_soon():
    first, second = late(4), late(3)
    known = lowered(known_of(seen(first)), seen(second))
    assert known == known_of(seen(first + second))
    assert too_soon(second, known) == too_soon(first, known) == []


def test_what_follows_a_jump_by_a_table_is_looked_at():
    table = ("BRX R20 -0x10", {})
    assert found("BRA 0x30", LOAD, "FADD R11, R10, R12", table) == ["0x20 read"]


FIRST = "HGMMA.64x8x16.F32.BF16 R24, R12, gdesc[UR4], R24"
CLOSED = f"{FIRST}, gsb0"
NONE_LEFT, ONE_LEFT = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def of_products(*lines: str) -> list[str]:
    """Address and kind of what uses a register of a product that may be under way."""
    code = controlled(*lines)
    return [f"{one.instruction.address:#x} {one.kind}" for one in multiplied(code, uses_of("sm_90a", code))]


@pytest.mark.parametrize(
    ("line", "kind"),
    [("MOV R15, R2", "overwritten"), ("MOV R27, R2", "overwritten"), ("FADD R2, R3, R24", "read"), ("MOV R2, R12", "")],
)
def test_registers_of_a_product_are_awaited(line, kind):
    expected = [f"0x10 {kind}"] if kind else []
    assert of_products(CLOSED, line) == expected
    assert of_products(CLOSED, ONE_LEFT, line) == [one.replace("0x10", "0x20") for one in expected]
    assert of_products(CLOSED, NONE_LEFT, line) == []


OTHER = "HGMMA.64x8x16.F32.BF16 R40, R16, gdesc[UR4], R40, gsb0"


def test_a_wait_leaves_the_last_groups():
    assert of_products(CLOSED, OTHER, ONE_LEFT, "MOV R12, R2", "MOV R16, R2") == ["0x40 overwritten"]
    assert of_products(FIRST, ONE_LEFT, "MOV R12, R2") == ["0x20 overwritten"], "its group is not closed"
    assert of_products(FIRST, NONE_LEFT, "MOV R12, R2") == ["0x20 overwritten"]
    assert of_products(FIRST, CLOSED, NONE_LEFT, "MOV R12, R2") == []


def test_products_go_on_with_each_other_s_sums():
    assert of_products(FIRST, CLOSED) == []
    assert of_products(CLOSED, "HGMMA.64x8x16.F32.BF16 R12, R8, gdesc[UR4], R12, gsb0") == ["0x10 overwritten"]
    assert of_products(CLOSED, "HGMMA.64x8x16.F32.BF16 R40, R24, gdesc[UR4], R40, gsb0") == ["0x10 read"]


def test_products_are_awaited_on_every_way():
    assert of_products(CLOSED, "@P0 BRA 0x30", NONE_LEFT, "MOV R12, R2") == ["0x30 overwritten"]
    assert of_products("NOP", "MOV R12, R2", CLOSED, "@P0 BRA 0x10", NONE_LEFT) == ["0x10 overwritten"]
    for ways in ((CLOSED, "@P0 BRA 0x30", OTHER), ("@P0 BRA 0x30", CLOSED, OTHER, CLOSED)):
        assert len(of_products(*ways, ONE_LEFT, "MOV R12, R2")) == 1, "of the way that closed fewer groups"
