"""Mutants of machine code: what they change, what notices them, and when they are called redundant."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import numpy as np
import pytest
from sass_kernels import assembled
from shipped_kernels import BUILT
from tsmla_emulator.prove import check
from tsmla_emulator.prove.dataflow.demanded import permuted
from tsmla_emulator.prove.dataflow.flow import passed
from tsmla_emulator.prove.dataflow.unwritten import unwritten
from tsmla_emulator.prove.dataflow.values import Values
from tsmla_emulator.prove.machine_mutants.__main__ import tried
from tsmla_emulator.prove.machine_mutants.sites import Mutant, mutants
from tsmla_emulator.prove.machine_mutants.subject import REDUNDANT, SURVIVES, Subject, of_wait
from tsmla_emulator.prove.machine_mutants.table import Findings, Reasons, kept, render
from tsmla_emulator.prove.machine_mutants.waits import Waits
from tsmla_emulator.prove.mutation import reasons as mutation
from tsmla_emulator.run.machine import parse
from tsmla_emulator.run.record import Record
from tsmla_emulator.run.sass.image import kernels
from tsmla_emulator.run.sass.uses import uses_of

DOCS = Path(__file__).parents[1] / "docs"
ROW_KERNELS = (
    "tsmla_key_mask_{}",
    "tsmla_pack_{}_bf16_to_e4m3_d128x64x128",
    "tsmla_read_cache_{}_bf16_d512e4m3s128x64",
    "tsmla_write_cache_{}_bf16_d512e4m3s128x64",
)


@pytest.mark.parametrize("family", ROW_KERNELS)
def test_what_is_said_of_row_kernels_of_sm_100a_holds_for_sm_103a(family: str):
    """Their machine code is the same."""
    one, other = (
        [kernel.code for kernel in kernels(BUILT(check.find(family.format(architecture))).library)]
        for architecture in ("sm_100a", "sm_103a")
    )
    assert one == other != []


def of_lines(*lines: str) -> list[Mutant]:
    code = assembled([*lines, "EXIT"])
    return [*mutants("k", "sm_90a", code, uses_of("sm_90a", code))]


def same(at: int, instead: str, *lines: str) -> bool:
    """Whether these lines do the same with another one in a place."""
    code = assembled([*lines, "EXIT"])
    (other,) = assembled([instead])
    return Values("sm_90a", code, uses_of("sm_90a", code)).same(at, other)


STORE = "STG.E desc[UR4][R2.64], R10"


def test_what_mutants_change():
    found = [str(mutant) for mutant in of_lines("@P0 LDG.E R10, desc[UR4][R2.64]")]
    assert len(found) == len({*found}) == 4
    assert "predicate (guard) at 0x0" in found[0] and "@!P0 LDG" in found[0]
    assert any("LDG.E R11" in one for one in found) and any("desc[UR6]" in one for one in found)
    assert any("[R4.64+0x0]" in one for one in found), "an address is two registers"


def test_a_barrier_s_test_finds_that_its_phase_is_over():
    (found,) = (x for x in of_lines("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0") if x.kind == "barrier")
    assert str(found).endswith("now ISETP.EQ.U32.AND P0, PT, RZ, RZ, PT")


def test_numbers_that_a_descriptor_is_made_of_are_changed():
    made = "UMOV UR7, 0x40000040", "UMOV UR8, 0x1"
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
    found = [x for x in of_lines(*made, product) if x.kind == "descriptor"]
    assert {x.at for x in found} == {0, 2}
    assert sum(x.at == 0 for x in found) == 16, "of the second word, distance and swizzle"


def test_what_follows_the_word_of_a_product_s_kinds_is_not_of_it():
    made = "UMOV UR15, 0x4010", "UMOV UR16, 0x4020"
    code = assembled([*made, "UTCQMMA gdesc[UR4], gdesc[UR16], tmem[UR12], tmem[UR14], idesc[UR15], UPT", "EXIT"])
    found = [x for x in mutants("k", "sm_100a", code, uses_of("sm_100a", code)) if x.kind == "descriptor"]
    assert sum(x.at == 0 for x in found) == 32
    assert sum(x.at == 1 for x in found) == 14, "where a factor lies"


def test_a_result_that_nobody_reads_may_be_any():
    line = "FADD R10, R11, R12"
    assert same(0, "FADD R10, R11, R13", line)
    assert not same(0, "FADD R10, R11, R13", line, STORE)


def test_equal_registers_are_one():
    lines = "FADD R12, R11, R11", "FADD R13, R11, R11", "FADD R10, R12, R12", STORE
    assert same(2, "FADD R10, R12, R13", *lines)
    assert not same(2, "FADD R10, R12, R14", *lines)
    loads = "LDG.E R12, desc[UR4][R2.64]", "LDG.E R13, desc[UR4][R2.64]", *lines[2:]
    assert not same(2, "FADD R10, R12, R13", *loads), "memory may have changed"


def test_a_register_that_ways_leave_different_is_another():
    lines = "MOV R12, R11", "@P0 BRA 0x30", "FADD R12, R11, R11", "FADD R10, R12, R11", STORE
    assert not same(3, "FADD R10, R11, R11", *lines)
    assert same(3, "FADD R10, R11, R11", lines[0], lines[1], "NOP", *lines[3:])


def test_the_sign_of_what_a_launch_decides_is_zero():
    number, sign = "S2R R5, SR_CTAID.X", "SHF.R.S32.HI R6, RZ, 0x1f, R5"
    lines = sign, "IMAD R7, R6, R8, R9", "FADD R10, R7, R7", STORE
    assert same(2, "IMAD R7, R6, R11, R9", number, *lines)
    assert not same(2, "IMAD R7, R6, R8, R11", number, *lines)
    assert not same(2, "IMAD R7, R6, R11, R9", "LDG.E R5, desc[UR4][R2.64]", *lines)
    assert not same(2, "IMAD R7, R6, R11, R9", "@P0 S2R R5, SR_CTAID.X", *lines), "what it was before may be any number"


def test_the_upper_half_of_twice_what_a_launch_decides_is_zero():
    number, product, lines = (
        "S2R R5, SR_CTAID.X",
        "IMAD.WIDE R6, R5, {}, RZ",
        ("IMAD R7, R7, R8, RZ", "FADD R10, R7, R7"),
    )
    for factor, short in (("0x2", True), ("0x4", False)):
        assert same(2, "IMAD R7, R7, R11, RZ", number, product.format(factor), *lines, STORE) == short
    assert not same(2, "IMAD R7, R7, R11, RZ", "LDG.E R5, desc[UR4][R2.64]", product.format("0x2"), *lines, STORE)


def test_a_mask_changes_nothing_that_another_takes_away():
    made, low = "MOV R5, R11", "LOP3.LUT R6, R5, 0x1f, RZ, 0xc0, !PT"
    for taken, alike in (("0x4", True), ("0x8", False)):
        lines = "SHF.R.U32.HI R7, RZ, 0x2, R5", f"LOP3.LUT R10, R7, {taken}, RZ, 0xc0, !PT", STORE
        assert same(2, "SHF.R.U32.HI R7, RZ, 0x2, R6", made, low, *lines) == alike


def test_bits_of_a_place_in_shared_memory_are_known():
    made = "S2UR UR5, SR_CgaCtaId", "UMOV UR6, 0x400", "ULEA UR6, UR5, UR6, 0x18", "UIADD3 UR6, UR6, 0x4800, URZ"
    lines = (
        *made,
        "USHF.R.U32.HI UR6, URZ, 0x4, UR6",
        "ULOP3.LUT UR7, UR6, 0x3fc0, URZ, {}, !UPT",
        "IMAD.U32 R10, RZ, RZ, UR7",
    )
    for table, other, alike in (
        ("0xc0", "0x3fd0", True),
        ("0xc0", "0x3f80", False),
        ("0xfc", "0x3f80", True),
        ("0xfc", "0x3fd0", False),
    ):
        code = [line.format(table) for line in lines]
        assert same(5, code[5].replace("0x3fc0", other), *code, STORE) == alike


def test_what_a_guard_decided_is_known_under_it():
    made, mask = "@P0 MOV R5, 0x10", "LOP3.LUT R10, R5, {}, RZ, 0xc0, !PT"

    def alike(guard: str, other: str, between: str = "NOP") -> bool:
        own, instead = (guard + mask.format(number) for number in ("0x3fc0", other))
        return same(2, instead, made, between, own, STORE)

    assert alike("@P0 ", "0x3fc4") and not alike("@P0 ", "0x3fd0")
    assert not alike("", "0x3fc4") and not alike("@!P0 ", "0x3fc4"), "elsewhere, it may be any number"
    assert not alike("@P0 ", "0x3fc4", "ISETP.EQ.U32.AND P0, PT, R6, R7, PT"), "the guard is another one"


def test_last_bits_of_a_sum_that_nobody_reads_may_be_any():
    lines = "IMAD R5, R6, {}, RZ", "IADD3 R7, R5, 0x1200, RZ", "LOP3.LUT R10, R7, {}, RZ, 0xc0, !PT", STORE
    for factor, mask, alike in (("0xa00", "0x1e00", 1), ("0x280", "0x1e00", 0), ("0xa00", "0x1f00", 0)):
        code = lines[0].format(factor), lines[1], lines[2].format(mask), STORE
        assert same(1, "IADD3 R7, R5, 0x1300, RZ", *code) == bool(alike)


def test_a_vote_whether_a_lane_was_elected_or_was_not():
    vote = "VOTEU.ANY UP1, {}P0"
    for first, alike in (("ELECT P0, URZ, PT", True), ("ISETP.EQ.U32.AND P0, PT, R6, R7, PT", False)):
        lines = first, vote.format(""), "@UP1 UMOV UR4, URZ", "IMAD.U32 R10, RZ, RZ, UR4", STORE
        assert same(1, vote.format("!"), *lines) == alike


def test_what_all_lanes_have_may_come_from_any():
    take = "@{}P0 R2UR UR7, R7"
    for made, elected, alike in (
        ("IMAD.U32 R7, RZ, RZ, UR5", "ELECT P0, URZ, PT", True),
        ("S2R R7, SR_TID.X", "ELECT P0, URZ, PT", False),
        ("LDG.E R7, desc[UR4][R2.64]", "ELECT P0, URZ, PT", False),
        ("IMAD.U32 R7, RZ, RZ, UR5", "ISETP.EQ.U32.AND P0, PT, R6, R8, PT", False),
    ):
        lines = made, elected, take.format(""), "IMAD.U32 R10, RZ, RZ, UR7", STORE
        assert same(2, take.format("!"), *lines) == alike, (made, elected)
    only_there = (
        "ELECT P0, URZ, PT",
        "@P0 IMAD.U32 R7, RZ, RZ, UR5",
        take.format(""),
        "IMAD.U32 R10, RZ, RZ, UR7",
        STORE,
    )
    assert not same(2, take.format("!"), *only_there)


def test_bits_of_a_sum_above_those_that_are_read_may_be_any():
    count, loop = "IADD3 R5, R5, {}, RZ", ("LOP3.LUT R10, R5, {}, RZ, 0xc0, !PT", STORE, "@P0 BRA 0x10")
    for mask, other, alike in (("0x1", "0x41", True), ("0x40", "0x41", False), ("0x7f", "0x41", False)):
        lines = "NOP", count.format("0x1"), loop[0].format(mask), *loop[1:]
        assert same(1, count.format(other), *lines) == alike, (mask, other)
    carries = "IADD3 R5, P1, R5, {}, RZ"
    lines = "NOP", carries.format("0x1"), loop[0].format("0x1"), "@P1 FADD R10, R10, R10", *loop[1:]
    assert not same(1, carries.format("0x41"), *lines), "a carry depends on all bits"
    of_two = (
        "UIADD3.64 UR8, UR6, 0x1, URZ",
        "ULOP3.LUT UR9, UR9, 0x1, URZ, 0xc0, !UPT",
        "IMAD.U32 R10, RZ, RZ, UR9",
        STORE,
    )
    add = "UIADD3 UR6, UR4, {}, URZ"
    assert not same(0, add.format("0x41"), add.format("0x1"), *of_two), "so does the upper half of 64 bits"


def test_a_table_has_eight_bits():
    line = "LOP3.LUT R10, R12, R26, RZ, {}, !PT"
    for other, alike in (("0x4000fc", True), ("0xfd", False)):
        assert same(0, line.format(other), line.format("0xfc"), STORE) == alike


def test_what_lanes_are_known_to_have_a_uniform_register_has():
    lines = ("SHF.L.U32 R7, R6, 0x4, RZ", "R2UR UR7, R7", "ULOP3.LUT UR8, UR7, 0x3fc0, URZ, 0xc0, !UPT")
    for other, alike in (("0x3fc8", True), ("0x3fd0", False)):
        code = (*lines, "IMAD.U32 R10, RZ, RZ, UR8", STORE)
        assert same(2, lines[2].replace("0x3fc0", other), *code) == alike


def test_a_wait_reads_its_phase_from_one_bit():
    lines = ("LOP3.LUT R3, R3, {}, RZ, 0xc0, !PT", "IMAD.U32 R0, R3, -0x80000000, RZ")
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0"
    for mask, factor, behind, alike in (
        ("0x1", "-0x7fffff00", wait, True),
        ("0x1", "-0x7fffff00", "STG.E desc[UR4][R2.64], R0", False),
        ("0x1", "0x40000000", wait, False),
        ("0x3", "-0x7fffff00", wait, False),
    ):
        code = (lines[0].format(mask), lines[1], behind, "@P0 EXIT")
        assert same(1, lines[1].replace("-0x80000000", factor), *code) == alike, (mask, factor, behind)
    wide = (
        "LOP3.LUT R3, R3, 0x1, RZ, 0xc0, !PT",
        "IMAD.WIDE R6, R3, 0x1, RZ",
        "LOP3.LUT R10, R7, 0x1, RZ, 0xc0, !PT",
        STORE,
    )
    assert not same(1, wide[1].replace("0x1", "-0x7fffffff"), *wide), "a sign has an upper half"


def test_factors_that_differ_above_what_is_read_give_the_same():
    lines = ("IMAD.SHL.U32 R16, R6, 0x8, RZ", "LOP3.LUT R10, R16, {}, RZ, 0xc0, !PT")
    for mask, factor, alike in (
        ("0x8", "0x1008", True),
        ("0xfff", "0x1008", True),
        ("0x1000", "0x1008", False),
        ("0x8000", "0x1008", False),
        ("0x8", "0xc", False),
    ):
        code = (lines[0], lines[1].format(mask), STORE)
        assert same(0, lines[0].replace("0x8", factor), *code) == alike, (mask, factor)
    assert not same(0, lines[0].replace("0x8", "0x1008"), lines[0], "IMAD.U32 R10, R16, 0x1, RZ", STORE)


def test_nothing_is_known_of_what_is_shifted_by_a_register():
    lines = "UMOV UR6, 0x40", "USHF.R.U32.HI UR6, URZ, UR8, UR6", "ULOP3.LUT UR7, UR6, 0x3fc0, URZ, 0xc0, !UPT"
    assert not same(2, lines[2].replace("0x3fc0", "0x3fc4"), *lines, "IMAD.U32 R10, RZ, RZ, UR7", STORE)


def test_a_choice_passes_on_what_matters():
    lines = "PRMT R5, R11, 0x7632, R12", "SEL R6, R5, R13, P0", "IMAD.U32 R10, R6, 0x10000, RZ"
    assert same(0, "PRMT R5, R11, 0x7632, R14", *lines, STORE)
    assert not same(0, "PRMT R5, R14, 0x7632, R12", *lines, STORE)
    assert not same(0, "PRMT R5, R11, 0x7632, R14", *lines, STORE, "STG.E desc[UR4][R2.64], R6")


def test_the_sign_of_a_maximum_with_zero_is_zero():
    made, sign = "VIMNMX.RELU R5, R12, R13, PT", "SHF.R.S32.HI R6, RZ, 0x1f, R5"
    assert same(1, "SHF.R.S32.HI R6, RZ, 0x1f, RZ", made, sign, "FADD R10, R6, R6", STORE) is False
    lines = made, "VIMNMX.RELU R7, R12, R14, PT", sign, "FADD R10, R6, R6", STORE
    assert same(2, "SHF.R.S32.HI R6, RZ, 0x1f, R7", *lines)
    assert not same(2, "SHF.R.S32.HI R6, RZ, 0x1f, R14", *lines)


def test_bits_that_a_shift_made_zero_may_be_taken():
    for shift in ("SHF.L.U32 R5, R6, 0xb, RZ", "IMAD.SHL.U32 R5, R6, 0x800, RZ"):
        lines = shift, "LOP3.LUT R10, R5, 0x800, RZ, 0xc0, !PT", STORE
        assert same(1, "LOP3.LUT R10, R5, 0x804, RZ, 0xc0, !PT", *lines)
        assert not same(1, "LOP3.LUT R10, R5, 0x1800, RZ, 0xc0, !PT", *lines)
        assert not same(1, "LOP3.LUT R10, R6, 0x804, RZ, 0xc0, !PT", *lines)
    lines = "SHF.R.U32.HI R5, RZ, 0x4, R6", "LOP3.LUT R10, R5, 0x3fc0, RZ, 0xc0, !PT", STORE
    assert same(1, "LOP3.LUT R10, R5, 0x80003fc0, RZ, 0xc0, !PT", *lines)
    assert not same(1, "LOP3.LUT R10, R5, 0x8003fc0, RZ, 0xc0, !PT", *lines)


def test_bits_that_are_shifted_out_do_not_matter():
    lines = "PRMT R10, R14, 0x7632, R15", "IMAD.U32 R10, R10, 0x10000, RZ", STORE
    assert same(0, "PRMT R10, R14, 0x7632, R16", *lines)
    assert not same(0, "PRMT R10, R13, 0x7632, R15", *lines)
    assert not same(0, "PRMT R10, R14, 0x7632, R16", lines[0], STORE)
    assert permuted(0x7632, 0xFFFF) == (0xFFFF0000, 0)


def test_reads_that_may_come_before_any_write():
    code = assembled(["@P0 MOV R10, RZ", "@P0 FADD R11, R10, R10", "@!P0 FADD R11, R10, R10", "EXIT"])
    found = {at for at, slot in unwritten(code, uses_of("sm_90a", code)) if slot in uses_of("sm_90a", code)[0].written}
    assert found == {2}


def test_accesses_have_the_description_of_the_driver():
    right, access = "ULDC.64 UR4, c[0x0][0x208]", "LDG.E R10, desc[UR4][R2.64]"
    for lines, wrong in (((right, access), 0), ((access,), 1), ((right, "UMOV UR5, 0x0", access), 1)):
        code = assembled([*lines, "EXIT"])
        assert len(Values("sm_90a", code, uses_of("sm_90a", code)).descriptions()) == wrong


def test_a_guard_that_holds_in_no_lane_is_passed():
    code = assembled(["NOP", "@P0 BRA 0x40", "@P1 NOP", "NOP", "EXIT"])
    assert passed(code, frozenset({0, 3, 4})) == {0, 1, 2, 3, 4}
    assert passed(code, frozenset({0})) == {0, 1}


def test_rows_lie_far_apart(tmp_path: Path):
    """In a second call of kernels that are not attention, so that upper words of addresses matter."""
    verdict = check.check(check.find(ROW_KERNELS[1].format("sm_90a")), record_to=tmp_path, compiled=BUILT, spreads=True)
    (path,) = tmp_path.glob("*.npz")
    regions = {region.name: region for region in Record(path).regions}
    apart = regions["v[1]"].address - regions["v"].address
    assert verdict.error is None and apart > 2**32 * 2 and "k_out[36]" in regions


def test_numbers_of_a_record_may_be_any(tmp_path: Path):
    check.check(check.find(ROW_KERNELS[1].format("sm_90a")), record_to=tmp_path, compiled=BUILT)
    (path,) = tmp_path.glob("*.npz")
    record = Record(path)
    one, again, other = (record.with_any_numbers(frozenset({"v", "k_nope"}), seed) for seed in (1, 1, 2))
    before, drawn = (numbers_of(x) for x in (record, one))
    assert drawn == numbers_of(again) != numbers_of(other)
    assert {name for name in before if before[name] != drawn[name]} == {"k_nope+v"}
    exponents = np.frombuffer(drawn["k_nope+v"], np.uint16) >> 7 & 255
    assert exponents.min() == 0 and exponents.max() > 200


def test_a_call_of_attention_has_other_lengths_and_numbers(tmp_path: Path):
    check.check(check.find("tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse"), record_to=tmp_path, compiled=BUILT)
    record = Record(sorted(tmp_path.glob("*.npz"))[0])
    one, again, other = (record.with_other_lengths(frozenset({"q"}), 16, 7, seed) for seed in (1, 1, 2))
    before, drawn = (numbers_of(x) for x in (record, one))
    assert drawn == numbers_of(again) != numbers_of(other)
    assert {name for name in before if before[name] != drawn[name]} == {"q", "cum_seq_lens_q", "cum_seq_lens_kv"}
    ends = [np.frombuffer(x["cum_seq_lens_kv"], np.int32).tolist() for x in (before, drawn)]
    assert sorted(ends[0]) == sorted(ends[1]) and sum(one != other for one, other in zip(*ends, strict=True)) == 2
    exponents = np.frombuffer(drawn["q"], np.uint16) >> 7 & 255
    assert 127 + 8 < exponents.max() < 255, "larger ones than before, and none that is no number"


def numbers_of(record: Record) -> dict[str, bytes]:
    return {region.name: record.content(region.name) for region in record.regions}


WAITING = """
.visible .entry k(.param .u64 p)
{
    .reg .b32 %r<4>;
    .reg .pred %p<2>;
    mov.u32 %r1, 0;
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r1;
    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r1;
    ret;
}
"""


def test_a_wait_of_the_ptx_is_found_by_the_loop_that_is_made_of_it():
    text = ".version 8.8\n.target sm_90a\n.address_size 64\n" + WAITING.strip()
    line = 1 + text.splitlines().index("    mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r1;")
    wait, again = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0", "@!P0 BRA 0x30"
    code = assembled([wait, again, "EXIT", wait, again, "EXIT", wait, "@P0 BRA 0x30", "EXIT"])
    lines = {0x0: line - 1, 0x30: line + 1, 0x50: line - 1}
    waits = Waits(code, uses_of("sm_90a", code), lines, parse(text), "k")
    found = [waits.of(at) for at in range(len(code))]
    assert [at for at, site in enumerate(found) if site] == [0, 1, 3, 4]
    assert {site.label for site in found if site} == {"mbarrier.try_wait always true (2 of 2)"}
    for name, reason in (("mbarrier.try_wait always true (2 of 2)", "It waits twice."), ("mbarrier.try_wait", None)):
        reasons = mutation.Reasons({"k": ((mutation.Mutants.of_name(name), "It waits twice."),)})
        assert waits.reason(0, ["k"], reasons) == reason
        assert waits.reason(0, ["k", "another"], reasons) is None


def test_what_says_for_which_phase_a_wait_asks_is_of_it():
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0"
    code = assembled(["MOV R0, RZ", "MOV R1, RZ", "UMOV UR4, 0x400", wait, "@!P0 " + wait, "EXIT"])
    found = of_wait(code, uses_of("sm_90a", code))
    assert found == [True, False, True, False, False, False], "the second test has the first one's predicate only"


def test_reasons_are_for_survivors():
    found = Findings(
        "tsmla_k_sm_90a", 0, 0, {"wait": 3}, {"wait": {SURVIVES: 2, "hazard": 1}}, ["wait at 0x10", "wait at 0x20"], []
    )
    reasons = Reasons((("It waits twice.", ("*_sm_90a",), ("wait at 0x1.*", "wait at 0x3.*")),))
    page = render([found], reasons, Path("why.json"))
    assert "--table FILE --reasons why.json\n```" in page and "--reasons" not in render([found])
    assert "| 1 | 1 | 0 | 66.6 % |" in page and "- 1: It waits twice." in page
    assert "wait at 0x20" in page and "wait at 0x10" not in page
    assert reasons.unused([found]) == ["wait at 0x3.*"]


def test_shipped_reasons_are_for_kernels_of_the_page():
    page = (DOCS / "machine-mutants.md").read_text()
    reasons = Reasons.read(DOCS / "machine-mutant-reasons.json")
    of_page = re.findall(r"^\| (tsmla_\w+) \|", page, re.MULTILINE)
    for reason, symbols, patterns in reasons.entries:
        assert all(fnmatch.filter(of_page, symbol) for symbol in symbols)
        assert f": {reason}" in " ".join(page.split()) and all(re.compile(pattern) for pattern in patterns)


@pytest.fixture(scope="module")
def findings() -> Findings:
    return tried(Subject(check.find("tsmla_key_mask_sm_90a"), BUILT), 12, processes=2)


def test_nearly_all_mutants_of_a_kernel_are_noticed_or_redundant(findings: Findings):
    for kind in ("wait", "stall", "barrier", "predicate", "register"):
        verdicts = findings.verdicts[kind]
        assert verdicts.get(SURVIVES, 0) <= 1, findings.survivors
        assert sum(verdicts.values()) - sum(verdicts.get(rule, 0) for rule in REDUNDANT) > 0


def test_the_page_says_what_was_kept(findings: Findings, tmp_path: Path):
    findings.save(tmp_path)
    assert kept(tmp_path) == [findings]
    page = render([findings])
    assert f"| {findings.symbol} | 12 a kind |" in page and "## Kinds" in page
    assert max(map(len, (line for line in page.splitlines() if not line.startswith("|")))) <= 120
