"""The timing model: kernels of a few lines whose time can be worked out by hand, and rates for all that is shipped."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from shipped_kernels import BUILT
from small_kernels import run, text_of
from tsmla_emulator import cli
from tsmla_emulator.prove import check
from tsmla_emulator.run.machine import parse
from tsmla_emulator.time import band, machines, problem
from tsmla_emulator.time.costs import Text, costs_of
from tsmla_emulator.time.machines import H100, MACHINES, Value
from tsmla_emulator.time.rates import UnknownRate
from tsmla_emulator.time.replay import Memory, Prepared, replay

NEAR = Memory(latency=500, rate=64)


def clocks(body: str, *arguments: np.ndarray, threads: int = 32, machine: machines.Machine = H100, **options) -> int:
    """The replay's clocks of a kernel with this body, less those of the same kernel without one."""
    taken = []
    for text_ in (body, ""):
        report = run(text_, *arguments, threads=threads, trace=(0,), **options)
        entry = parse(text_of(text_, len(arguments), "sm_90a", threads, options.get("static", ""))).entries["k"]
        taken.append(replay(Prepared(Text(entry, "sm_90a"), machine), report.traces, NEAR).clocks)
    return taken[0] - taken[1]


def changed(**values: float) -> machines.Machine:
    return dataclasses.replace(
        H100, **{name: dataclasses.replace(getattr(H100, name), value=value) for name, value in values.items()}
    )


def test_a_chain_takes_its_latencies_and_no_more():
    body = "mov.b32 %r1, 0f3F800000;\n" + 40 * "ex2.approx.ftz.f32 %r1, %r1;\n"
    assert clocks(body) == pytest.approx(39 * H100.special_latency.value, abs=4)


@pytest.mark.parametrize(("warps", "expected"), [(1, 8 * 64), (4, 8 * 64), (8, 2 * 8 * 64)])
def test_warps_of_one_sub_partition_share_its_units(warps, expected):
    body = "".join(f"ex2.approx.ftz.f32 %r{i % 8}, %r1000;\n" for i in range(64))
    assert clocks(body, threads=32 * warps) == pytest.approx(expected, abs=12)


def test_other_pipes_work_meanwhile_and_one_pipe_takes_turns():
    exponentials = [f"ex2.approx.ftz.f32 %r{i % 8}, %r1000;\n" for i in range(64)]
    products = [f"fma.rn.f32 %r{8 + i % 8}, %r1000, %r1000, %r1000;\n" for i in range(64)]
    maxima = [f"max.f32 %r{16 + i % 8}, %r1000, %r1000;\n" for i in range(64)]
    conversions = [f"cvt.rn.bf16x2.f32 %r{24 + i % 8}, %r1000, %r1000;\n" for i in range(64)]
    both = [line for pair in zip(exponentials, products, strict=True) for line in pair]
    assert clocks("".join(both)) == pytest.approx(clocks("".join(exponentials)), abs=4)
    same = [line for pair in zip(maxima, conversions, strict=True) for line in pair]  # both in the ALU on Hopper
    assert clocks("".join(same)) == pytest.approx(2 * clocks("".join(maxima)), abs=12)


def test_a_narrow_window_is_the_order_of_the_text():
    line = "ex2.approx.ftz.f32 %r{0}, %r{0};\nex2.approx.ftz.f32 %r{0}, %r{0};\n"
    body = "".join(line.format(i) for i in range(16))  # chains of two, one after the other
    assert clocks(body, machine=changed(window=1)) > 1.5 * clocks(body, machine=changed(window=64))


TWO_BARRIERS = """
mov.b32 %r1, smem;
shr.u32 %r2, %r1000, 5;
setp.ne.s32 %p1, %r1000, 0;
@%p1 bra READY;
mbarrier.init.shared.b64 [%r1], 1;
mbarrier.init.shared.b64 [%r1+8], 1;
READY:
bar.sync 0;
setp.ne.s32 %p2, %r1001, 0;
@%p2 bra DONE;
"""
"""Two mbarriers for one arrival each; then lane 0 of every warp goes on, with the warp's number in %r2."""

HANDOVER = (
    TWO_BARRIERS
    + """
mov.b32 %r3, 0;
setp.ne.s32 %p3, %r2, 0;
@%p3 bra SECOND;
FIRST:
mbarrier.arrive.shared.b64 _, [%r1];
and.b32 %r4, %r3, 1;
WAIT1: mbarrier.try_wait.parity.shared.b64 %p4, [%r1+8], %r4;
@!%p4 bra WAIT1;
add.s32 %r3, %r3, 1;
setp.lt.s32 %p5, %r3, {times};
@%p5 bra FIRST;
bra DONE;
SECOND:
and.b32 %r4, %r3, 1;
WAIT2: mbarrier.try_wait.parity.shared.b64 %p4, [%r1], %r4;
@!%p4 bra WAIT2;
mbarrier.arrive.shared.b64 _, [%r1+8];
add.s32 %r3, %r3, 1;
setp.lt.s32 %p5, %r3, {times};
@%p5 bra SECOND;
DONE:
"""
)


def test_two_warps_that_hand_a_token_to_and_fro_take_what_was_measured():
    few, many = (clocks(HANDOVER.format(times=times), threads=64, shared=64, async_mode="late") for times in (10, 50))
    assert (many - few) / 40 / 2 == pytest.approx(87.9, rel=0.05)  # mbarrier.handover.two_warps


COPY = """
mov.b32 %r1, smem;
setp.ne.s32 %p1, %r1000, 0;
@%p1 bra DONE;
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {total};
add.s32 %r2, %r1, 1024;
{copies}
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra WAIT;
DONE:
"""
ONE_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+{at}], [%d100], {size}, [%r1];\n"


@pytest.mark.parametrize("count", [1, 4])
def test_a_copy_takes_its_latency_and_bytes_take_turns(count):
    size = 16384
    source = np.zeros(size, np.uint8)
    copies = "".join(ONE_COPY.format(at=i * size, size=size) for i in range(count))
    taken = clocks(COPY.format(total=count * size, copies=copies), source, shared=1024 + count * size)
    around = H100.barrier_wake.value
    assert taken == pytest.approx(NEAR.latency + count * size / NEAR.rate + around, abs=30)


def test_lanes_copies_take_shared_memory_a_latency_and_their_share_of_memory():
    source = np.zeros(512, np.uint8)
    each = "mov.b32 %r1, smem;\nmad.lo.s32 %r2, %r1001, 16, %r1;\nmad.wide.u32 %d1, %r1001, 16, %d100;\n"

    def taken(copies: int, rate: float) -> int:
        lines = copies * "cp.async.cg.shared.global [%r2], [%d1], 16;\n"
        body = f"{each}{lines}cp.async.commit_group;\ncp.async.wait_group 0;\n"
        report = run(body, source, shared=512, trace=(0,))
        entry = parse(text_of(body, 1, "sm_90a", 32)).entries["k"]
        return replay(Prepared(Text(entry, "sm_90a"), H100), report.traces, Memory(500, rate)).clocks

    assert taken(1, 1e3) == pytest.approx(H100.load_latency_hbm.value, abs=40)  # not a copy engine's
    assert (taken(60, 16) - taken(10, 16)) / 50 == pytest.approx(512 / 16, abs=0.5)
    assert (taken(60, 1e3) - taken(10, 1e3)) / 50 == pytest.approx(512 / 128, abs=0.5)


PRODUCTS_OF_A_WARP = """
mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0; mov.b32 %r5, 0;
"""


def test_a_warps_products_follow_each_other_at_their_latency_or_their_rate():
    line = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r{0}, %r{1}, %r{2}, %r{3}}}, {{%r1, %r2, %r3, %r4}}, "
        "{{%r1, %r5}}, {{%r{0}, %r{1}, %r{2}, %r{3}}};\n"
    )
    zeros = "".join(f"mov.b32 %r{i}, 0;\n" for i in range(20, 100))
    chain = clocks(PRODUCTS_OF_A_WARP + zeros + 16 * line.format(20, 21, 22, 23))
    others = clocks(
        PRODUCTS_OF_A_WARP + zeros + "".join(line.format(*range(20 + 4 * i, 24 + 4 * i)) for i in range(16))
    )
    assert chain == pytest.approx(15 * H100.warp_product_latency.value, abs=12)  # nobody waits for the last
    assert others == pytest.approx(15 * H100.warp_product.value, abs=12)


ASKING = (
    TWO_BARRIERS
    + """
setp.eq.s32 %p3, %r2, 1;
@%p3 bra OTHER;
setp.eq.s32 %p3, %r2, 2;
@%p3 bra ASKS;
{first}
mbarrier.arrive.shared.b64 _, [%r1];
bra DONE;
OTHER:
{other}
mbarrier.arrive.shared.b64 _, [%r1+8];
bra DONE;
ASKS:
{before}
TEST: mbarrier.test_wait.parity.shared.b64 %p4, [%r1], 0;
@%p4 bra SHORT;
{instead}
{long}
bra WAIT;
SHORT:
{short}
WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r1], 0;
@!%p5 bra WAIT;
DONE:
"""
)
INSTEAD = "mbarrier.test_wait.parity.shared.b64 %p6, [%r1+8], 0;\n@!%p6 bra TEST;"


def chain(steps: int) -> str:
    return steps * "ex2.approx.ftz.f32 %r3, %r3;\n"


def asked(first: int, other: int, instead: str = "") -> float:
    """Steps of chains until a kernel ends whose third warp, 20 steps on, takes 10 more if the first warp has arrived
    after its `first` steps, else 80; or waits for that or for what the second warp does after `other` steps."""
    parts = {"first": first, "other": other, "before": 20, "long": 80, "short": 10}
    body = ASKING.format(**{name: chain(steps) for name, steps in parts.items()}, instead=instead)
    entry = parse(text_of(body, 0, "sm_90a", 96)).entries["k"]
    late = run(body, threads=96, shared=64, starve=(2,), trace=(0,))  # both have arrived, in the emulator
    failing = run(body, threads=96, shared=64, tests_fail=True, trace=(0,))
    taken = replay(Prepared(Text(entry, "sm_90a"), H100), late.traces, NEAR, failing.traces)
    return taken.clocks / H100.special_latency.value


def test_a_warp_that_asks_goes_the_way_that_it_finds_in_the_replay():
    assert asked(first=5, other=0) == pytest.approx(20 + 10, abs=12)
    assert asked(first=25, other=0) == pytest.approx(20 + 80, abs=12)
    assert asked(first=200, other=0) == pytest.approx(200, abs=12)


def test_a_warp_that_asks_for_two_in_turns_goes_with_the_first_of_them():
    assert asked(first=60, other=85, instead=INSTEAD) == pytest.approx(85, abs=12)  # the second warp is the last
    assert asked(first=85, other=60, instead=INSTEAD) == pytest.approx(60 + 80, abs=12)
    assert asked(first=5, other=60, instead=INSTEAD) == pytest.approx(60, abs=12)


KERNELS = (
    "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_full_nolse",
    "tsmla_decode_sm_90a_bf16_to_bf16_d512x64_nolse",
    "tsmla_prefill_sm_100a_e4m3_to_bf16_d192x128_full_nolse",
    "tsmla_decode_sm_100a_e4m3_to_bf16_d512x64_nolse",
)
"""Kernels that have every kind of instruction between them."""


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_instruction_of_shipped_kernels_has_a_cost(kernel):
    module = parse(BUILT(check.find(kernel)).ptx.read_text())
    machine = MACHINES[machines.OF_ARCH[module.target]]
    for entry in module.entries.values():
        costs = costs_of(Text(entry, module.target), machine)
        assert len(costs) == len(entry.instructions)
        assert {cost.kind for cost in costs} & {"wait", "named_sync", "plain"}


def test_an_instruction_without_a_cost_is_named():
    entry = parse(text_of("mov.b32 %r1, 0;\nld.global.b32 %r2, [%d100];\n", 1, "sm_90a", 32)).entries["k"]
    assert costs_of(Text(entry, "sm_90a"), H100)
    text_ = Text(entry, "sm_90a")
    entry.instructions[-2].opcode = "ld.frobnicated.b32"
    text_.encoded[-2] = dataclasses.replace(text_.encoded[-2], op=0)
    with pytest.raises(UnknownRate, match="ld.frobnicated.b32"):
        costs_of(text_, H100)


def test_every_number_of_every_machine_has_a_source():
    for machine in MACHINES.values():
        for field in dataclasses.fields(machine):
            value = getattr(machine, field.name)
            if isinstance(value, Value):
                assert value.source, (machine.name, field.name)
                if value.low is not None:
                    assert value.low <= value.value <= value.high, (machine.name, field.name)


def test_cta_s_follow_each_other_on_the_sm_that_is_free_first():
    assert problem.schedule([10, 10, 5, 5], processors=2, gap=1) == 16
    assert problem.schedule([3, 9, 3, 3], processors=2, gap=0) == 9


def test_shapes_are_read_and_refused_by_name():
    assert problem.Shape.parse("4x4x80Kx16") == problem.Shape(4, 4, 81920, 16)
    for wrong in ("4x4x80K", "4x4xx16", "0x4x8x16", "4x4x80Mx16"):
        with pytest.raises(ValueError, match="sequences x queries x keys x heads"):
            problem.Shape.parse(wrong)


def test_a_time_is_printed_with_its_band_waits_and_timeline(capsys):
    assert cli.main(["time", KERNELS[0], "--shape", "1x1Kx1Kx8", "--machine", "H200", "--clock", "1500"]) == 0
    said = capsys.readouterr().out
    assert "modelled on H200, 132 SMs at 1500 MHz; nothing here was measured" in said
    assert "band: " in said and "l2 30 instead of 65: +" in said
    assert "attend (x8): warpgroup.wait_group " in said and re.search(r"load \(x1\): .*k.acquire \d", said)
    assert "100.0% code: machine code, as it was executed" in said
    assert {"attend", "load", "matrix", "ex2"} <= {line.split()[0] for line in said.splitlines() if line.strip()}
    shares = [float(found) for found in re.findall(r"^ *([0-9.]+)% [a-z]+: ", said, re.MULTILINE)]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_what_cannot_be_modelled_is_said(capsys):
    assert cli.main(["time", KERNELS[0], "--shape", "1x1Kx1Kx8", "--machine", "A100"]) == 2
    assert "no machine 'A100'; there are H100, H200, B200" in capsys.readouterr().err
    assert cli.main(["time", "tsmla_pack_sm_100a_bf16", "--shape", "1x1x1x1"]) == 2
    assert "no variant 'tsmla_pack_sm_100a_bf16' can be built" in capsys.readouterr().err


def test_a_band_holds_the_time_and_moves_with_what_is_uncertain():
    class Linear:  # as many clocks as its machine's latency
        def model(self, machine: machines.Machine) -> problem.Modelled:
            clocks = machine.copy_latency.value
            return problem.Modelled(machine, clocks, 0.0, {}, None, None, [])  # type: ignore[arg-type]

    least, most = band.band(Linear(), H100)
    assert (least, most) == (H100.copy_latency.low, H100.copy_latency.high)


def test_a_trace_has_what_chosen_clusters_did_and_others_need_not_run():
    out = np.zeros(3, np.uint32)
    body = """
    mov.u32 %r1, %ctaid.x;
    add.s32 %r2, %r1, 7;
    mad.wide.u32 %d1, %r1, 4, %d100;
    setp.eq.s32 %p1, %r1000, 0;
    @%p1 st.global.b32 [%d1], %r2;
    """
    report = run(body, out, grid=3, trace=(1,), only_traced=True)
    assert out.tolist() == [0, 8, 0]
    (trace,) = report.traces
    assert (trace.entry, trace.launch, trace.cluster, trace.rank, trace.warp) == ("k", 0, 1, 0, 0)
    entry = parse(text_of(body, 1, "sm_90a", 32)).entries["k"]
    assert trace.instructions.tolist() == list(range(len(entry.instructions)))  # none jumps
    assert len(run(body, out, grid=3, trace=(0, 2)).traces) == 2 and out.tolist() == [7, 8, 9]


def test_a_file_in_the_place_of_a_symbol_is_told_its_option(capsys):
    assert cli.main(["run", "calls.npz"]) == 2
    assert "calls.npz is a file, and no symbol of a kernel; files go with --ptx" in capsys.readouterr().err
