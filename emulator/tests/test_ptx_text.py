"""The parser and the placement of registers."""

from __future__ import annotations

import contextlib
import re

import numpy as np
import pytest
from small_kernels import run, text_of
from tsmla_emulator.run.core.binding import place
from tsmla_emulator.run.machine import parse
from tsmla_emulator.run.ptx.model import (
    Address,
    Call,
    Immediate,
    NotImplementedInstruction,
    Pair,
    PtxError,
    Register,
    Sink,
    Source,
    Vector,
)
from tsmla_emulator.run.ptx.program import build_program


def entry(body: str):
    return parse(text_of(body, 1, "sm_100a", 32)).entries["k"]


def first(body: str):
    """The first instruction after the preamble."""
    return entry(body).instructions[3]


def test_header_and_parameters():
    module = parse("""
.version 8.8
.target sm_103a, debug
.address_size 64
/* two
   lines */ .visible .entry one ( .param .align 64 .b8 p0[128], .param .u32 p1, .param .align 8 .b8 p2[12],
   .param .u64 .ptr .global .align 16 p3 )
.reqntid 256, 2, 1
.minnctapersm 1
{ ret; }
.entry two() { ret; }
""")
    assert module.target == "sm_103a" and module.version == "8.8" and list(module.entries) == ["one", "two"]
    one = module.entries["one"]
    assert [(p.name, p.offset, p.size, p.align) for p in one.params] == [
        ("p0", 0, 128, 64),
        ("p1", 128, 4, 4),
        ("p2", 136, 12, 8),
        ("p3", 152, 8, 8),
    ]
    assert one.param_bytes == 160 and one.reqntid == (256, 2, 1) and module.entries["two"].reqntid is None


def test_operand_forms():
    assert first("ld.shared.b32 %r1, [smem+16];").operands[1].base.offset == 16
    assert first("ld.global.b32 %r1, [%d1+-16];").operands[1] == Address(Register("%d1", "b64"), -16)
    assert first("ld.global.b32 %r1, [%d1 + 0x8];").operands[1] == Address(Register("%d1", "b64"), 8)
    assert first("mov.b32 %r1, 0f3F800000;").operands[1] == Immediate(0x3F800000, 32)
    assert first("mov.b32 %r1, -0x10;").operands[1] == Immediate(-16)
    assert first("elect.sync %r1|%p1, -1;").operands[0] == Pair(Register("%r1", "b32"), Register("%p1", "pred"))
    assert isinstance(first("mbarrier.arrive.shared::cluster.b64 _, [%r1];").operands[0], Sink)
    vector = first("st.global.v4.b32 [%d1], {0, %r2, 0, 0};").operands[1]
    assert vector == Vector((Immediate(0), Register("%r2", "b32"), Immediate(0), Immediate(0)))
    tile = first("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d1, {%r1, %r2}], [%r3];").operands[0]
    assert tile == Address(Register("%d1", "b64"), 0, (Register("%r1", "b32"), Register("%r2", "b32")))


@pytest.mark.parametrize("at_the_end", [False, True], ids=["file first", "file last"])
def test_guards_and_sources(at_the_end):
    text, file = text_of(".loc 2 17 3\n@!%p1 mov.b32 %r1, 4;", 1, "sm_90a", 32), '\n.file 2 "/x/softmax.py"\n'
    module = parse(text + file if at_the_end else text.replace(".address_size 64", ".address_size 64" + file))
    instruction = module.entries["k"].instructions[3]
    assert instruction.guard == (Register("%p1", "pred"), True)
    assert (instruction.source.file, instruction.source.line) == ("/x/softmax.py", 17)
    assert instruction.text == "@!%p1 mov.b32 %r1, 4"


def test_scopes_rename_registers_and_labels():
    asm = "{ .reg .pred P1; LAB: setp.ne.b32 P1, %r1, 0; @P1 bra.uni DONE; bra.uni LAB; DONE: }"
    made = entry(asm + "\n" + asm + ".reg .b64 wide<3>; mov.b64 wide2, 0;")
    guards = [i.guard[0].name for i in made.instructions if i.guard]
    assert len(set(guards)) == 2
    targets = [made.labels[i.operands[0].name] for i in made.instructions if i.opcode == "bra.uni"]
    assert targets == [6, 3, 9, 6]


def test_a_register_that_hides_an_outer_one():
    out = np.zeros(2, np.uint32)
    run(
        "mov.b32 %r1, 5; { .reg .b32 %r1; mov.b32 %r1, 9; st.global.b32 [%d100], %r1; } st.global.b32 [%d100+4], %r1;",
        out,
    )
    assert out.tolist() == [9, 5]


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("\nmov.b32 %q9, 1;", "^PTX line [0-9]+: not implemented: mov.b32 %q9, 1$"),
        ("\nmov.b32 %r1, , 1;", "cannot read operand '' of 'mov.b32 %r1, , 1'"),
        ("\nld.global.b32 %r1, [];", "cannot read operand '' of"),
        ("\nbra;", "branch to unknown label in 'bra'"),
        ("\nmov.b32 %r1, 08;", "unknown name '08'"),
        ("\n.shared .b3 x;", "cannot read .shared '.b3 x'"),
        ("\nbra NOWHERE;", "branch to unknown label in 'bra NOWHERE'"),
        ("\nld.global.b32 %r1, [nothing];", "unknown name 'nothing'"),
        ("\n.local .b8 depot[16];", r"^PTX line [0-9]+: not implemented: .local +.b8 depot\[16\];$"),
    ],
)
def test_unreadable_text_is_refused_with_its_line(body, match):
    with pytest.raises(PtxError, match=match) as caught:
        text = text_of(body, 1, "sm_90a", 32)
        parse(text)
        build_program(parse(text).entries["k"])
    assert caught.value.line == text[: text.index(body)].count("\n") + 2


def test_text_that_ends_anywhere_is_read_or_refused():
    text = text_of('mov.b32 %r1, {0}; .shared .b32 x; .pragma "nounroll"; @%p1 bra A; A: bra.uni A;', 1, "sm_90a", 32)
    for end in range(len(text)):
        with contextlib.suppress(PtxError):
            parse(text[:end])


@pytest.mark.parametrize(
    "instruction",
    [
        "sin.approx.f32 %r1, %r2",
        "ld.local.b32 %r1, [%d1]",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r1], %d1",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1",
        "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r1}, [%r2], 16",
        "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r1}, %d1, %d2, %r2, 0, %p1, 1, 1, 0, 0",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2}], [%r6]",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1}, {%r2}, {%r3}, {%r4}",
        "mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1",
        "setp.lt.s32 %p1|%p2, %r1, %r2",
    ],
)
def test_unknown_instructions_are_refused_loudly(instruction):
    made = entry(instruction + ";")
    with pytest.raises(
        NotImplementedInstruction, match=f"^PTX line [0-9]+: not implemented: {re.escape(instruction)}$"
    ) as caught:
        build_program(made)
    assert caught.value.line == made.instructions[3].line


def test_registers_share_slots_when_their_lives_do_not_meet():
    chain = "".join(f"add.s32 %r{i + 1}, %r{i}, 1;" for i in range(500))
    out = np.zeros(1, np.uint32)
    run("mov.b32 %r0, 0;" + chain + "st.global.b32 [%d100], %r500;", out)
    assert out[0] == 500
    assert build_program(entry("mov.b32 %r0, 0;" + chain)).slots < 40


def test_values_live_around_loops_keep_their_slots():
    out = np.zeros(1, np.uint32)
    run(
        """
    mov.b32 %r1, 1; mov.b32 %r2, 0; mov.b32 %r3, 10;
LOOP:
    add.s32 %r4, %r2, %r1; mul.lo.s32 %r5, %r4, 2; shr.u32 %r6, %r5, 1; mov.b32 %r2, %r6;
    add.s32 %r1, %r1, 1; setp.le.u32 %p1, %r1, %r3; @%p1 bra LOOP;
    mov.b32 %r7, 77; mov.b32 %r8, 88;
    st.global.b32 [%d100], %r2;
    """,
        out,
    )
    assert out[0] == 55


def test_an_instruction_is_named_by_role_function_and_edge():
    inner = Call("parts/pipeline.wait_full", 90, "mbarrier_wait")
    edge = Call("sm90/decode/row64/load.load", 30, "kv.wait_full")
    kernel = Call("sm90/decode/row64/kernel.kernel", 170, "load")
    load, kernel_file = "sm90/decode/row64/load.load", "sm90/decode/row64/kernel.kernel"
    helped = Call("sm90/keys.help", 12, "convert")
    helper = Call(kernel_file, 190, "stream.help")
    ours = entry("mov.b32 %r1, 0;")
    at = ours.instructions[3]
    named = f"PTX line {at.line} ("
    for calls, said in (
        ((inner, edge, kernel), "role load, sm90/decode/row64/load.load: kv.wait_full, pipeline.py:91)"),
        ((Call(load, 31, ""), kernel), f"role load, {load}, pipeline.py:91)"),
        ((inner, helped, helper), "role convert, sm90/keys.help: convert, pipeline.py:91)"),
        ((Call(kernel_file, 8, "arch.sync"),), f"{kernel_file}: arch.sync, pipeline.py:91)"),
        ((inner,), "pipeline.py:91)"),
    ):
        at.source = Source("pipeline.py", 91, calls)
        assert place(ours, 3) == named + said
    at.source = None
    assert place(ours, 3) == f"PTX line {at.line}"
    assert place(ours, len(ours.instructions)) == "the end of the kernel"
