"""The cost model: work per unit from counted executions, roles, polling apart, rates, bounds, the command."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tsmla
from small_kernels import run, text_of
from tsmla_emulator import cli, cost, profile, profile_text, rates
from tsmla_emulator.machine import Count, Report, parse
from tsmla_emulator.run import emulated

PREFILL = "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_{}"
DECODE = "tsmla_decode_sm_90a_bf16_to_bf16_d512x64_lse"
BLACKWELL_DECODE = "tsmla_decode_sm_100a_e4m3_to_bf16_d512x64_lse"
PACK = "tsmla_pack_sm_100a_bf16_to_e4m3_d128x64x128"

LOOP = """
shr.u32 %r1, %r1000, 5;
shl.b32 %r2, %r1001, 4;
mov.b32 %r3, smem;
add.s32 %r3, %r3, %r2;
mad.wide.u32 %d1, %r1000, 4, %d100;
mov.b32 %r4, 0f3F000000;
st.shared.v4.b32 [%r3], {{%r4, %r4, %r4, %r4}};
bar.sync 0;
mov.b32 %r5, {times};
setp.ne.s32 %p1, %r1, 0;
setp.lt.u32 %p3, %r1001, 8;
setp.gt.u32 %p4, %r1001, 31;
@%p1 bra OTHER;
LOOP:
fma.rn.f32 %r6, %r4, %r4, %r4;
max.f32 %r6, %r6, %r4;
ex2.approx.ftz.f32 %r7, %r6;
ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r3];
@%p3 st.global.b32 [%d1], %r7;
@%p4 st.global.b32 [%d1+4096], %r7;
bar.sync 1, 64;
sub.s32 %r5, %r5, 1;
setp.ne.s32 %p2, %r5, 0;
@%p2 bra LOOP;
bra DONE;
OTHER:
bar.sync 1, 64;
sub.s32 %r5, %r5, 1;
setp.ne.s32 %p2, %r5, 0;
@%p2 bra OTHER;
DONE:
"""


def difference(body: str, small: int, large: int, threads: int, grid: int = 1, **options) -> profile.Profile:
    out = np.zeros(threads * grid, np.uint32)
    module = parse(text_of(body.format(times=large), 1, "sm_90a", threads))
    reports = [
        run(body.format(times=times), out, threads=threads, grid=grid, shared=8192, count=True, **options)
        for times in (small, large)
    ]
    return profile.difference("k", module, *reports, (large - small) * grid)


def test_work_of_a_loop():
    found = difference(LOOP, 3, 7, 64, grid=3)
    first, second = found.roles
    assert (first.name, second.name) == ("warp 0", "warp 1")
    assert first.work == {
        "fp32": 1, "fp32 min/max": 1, "special function": 1, "exponentials": 32, "shared memory": 1,
        "shared bytes": 512, "global memory": 2, "global bytes read": 0, "global bytes written": 32, "synchronise": 1,
        "named barrier waits": 1, "integer": 1, "compare, select": 1, "branch": 1, "polling": 0,
    }  # fmt: skip
    assert second.work["named barrier waits"] == 1 and second.work["integer"] == 1 and not second.work["fp32"]
    clocks = {bound.resource: bound.clocks for bound in found.bounds}
    assert clocks["exponentials"] == 2 and clocks["shared memory"] == 4 and clocks["fp32"] == 32 / 128
    assert clocks["issue"] == (10 + 4) / 4
    assert cost.tightest(found.bounds).resource == "shared memory"


WAITING = """
mov.b32 %r3, smem;
shr.u32 %r1, %r1000, 5;
setp.ne.s32 %p1, %r1, 0;
setp.eq.s32 %p2, %r1001, 0;
setp.eq.s32 %p4, %r1000, 0;
@%p4 mbarrier.init.shared.b64 [%r3], 1;
bar.sync 0;
mov.b32 %r5, {times};
mov.b32 %r6, 0;
@%p1 bra WAIT;
WORK:
mov.b32 %r7, 100;
SLOW:
sub.s32 %r7, %r7, 1;
setp.ne.s32 %p3, %r7, 0;
@%p3 bra SLOW;
@%p2 mbarrier.arrive.shared.b64 _, [%r3];
bar.sync 1, 64;
sub.s32 %r5, %r5, 1;
setp.ne.s32 %p3, %r5, 0;
@%p3 bra WORK;
bra DONE;
WAIT:
mbarrier.try_wait.parity.shared.b64 %p5, [%r3], %r6;
@%p5 bra GO;
bra WAIT;
GO:
xor.b32 %r6, %r6, 1;
bar.sync 1, 64;
sub.s32 %r5, %r5, 1;
setp.ne.s32 %p3, %r5, 0;
@%p3 bra WAIT;
DONE:
"""


@pytest.mark.parametrize("quantum", [3, 64, 1000])
def test_polling_is_not_work(quantum):
    found = difference(WAITING, 2, 10, 64, quantum=quantum)
    worker, waiter = found.roles
    assert waiter.work["mbarrier waits"] == 1 and waiter.work["synchronise"] == 2
    assert sum(waiter.work[name] for name in cost.CLASSES) == 7
    assert sum(worker.work[name] for name in cost.CLASSES) == 306
    assert waiter.work["polling"] % 3 == 0 and (quantum == 1000 or waiter.work["polling"] > 0)


def test_polling_loop_is_the_way_back_that_does_nothing_else():
    text = text_of(WAITING.format(times=1), 1, "sm_90a", 64)
    entry = parse(text).entries["k"]
    opcodes = [instruction.opcode for instruction in entry.instructions]
    tried = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("mbarrier.try_wait"))
    assert cost.polling_loop(entry, tried) == (tried, tried + 1, tried + 2)
    once = parse(text.replace("bra WAIT;\nGO:", "fma.rn.f32 %r8, %r8, %r8, %r8; bra WAIT;\nGO:")).entries["k"]
    assert cost.polling_loop(once, tried) == ()


ASYNC = {
    "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %d1, %d2, %r2, {%r3, %r3, %r3, %r3}, %p1;": (1, 64, 8192),
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r4], %d2, %r2, {%r3, %r3, %r3, %r3}, %p1;": (1, 64, 4096),
    "tcgen05.mma.cta_group::2.kind::f16 [%r1], %d1, %d2, %r2, {%r3, %r3, %r3, %r3, %r3, %r3, %r3, %r3}, %p1;": (
        2, 2 * 32, 8192,
    ),
}  # fmt: skip


@pytest.mark.parametrize("instruction", ASYNC, ids=["ss", "ts", "pair"])
def test_matrix_instructions_cost_what_their_descriptor_says(instruction):
    ctas, clocks, operands = ASYNC[instruction]
    entry = parse(text_of(instruction, 0, "sm_100a", 32)).entries["k"]
    index = next(i for i, found in enumerate(entry.instructions) if found.opcode.startswith("tcgen05.mma"))
    descriptor = 1 << 4 | 128 // 8 << 17 | 128 // 16 << 24
    work = cost.work_of(entry, {index: Count(5, 3, 0, {(descriptor, ctas): 3})})
    assert work == {"matrix": 5, "polling": 0, "MMAs": 3, "tensor clk": 3 * clocks, "shared bytes": 3 * operands}


def test_unknown_rates_are_refused():
    instruction = "tcgen05.mma.cta_group::1.kind::tf32 [%r1], %d1, %d2, %r2, {%r3, %r3, %r3, %r3}, %p1;"
    entry = parse(text_of(instruction, 0, "sm_100a", 32)).entries["k"]
    index = next(i for i, found in enumerate(entry.instructions) if found.opcode.startswith("tcgen05.mma"))
    with pytest.raises(rates.UnknownRate, match=r"no rate is known for tcgen05\.mma\S*tf32\S* at line \d+"):
        cost.work_of(entry, {index: Count(1, 1, 0, {(0, 1): 1})})


MEASURED = [
    (64, 128, False, True, 64.6), (64, 256, False, True, 128.6), (128, 64, False, True, 48.6),
    (128, 128, False, True, 64.6), (128, 256, False, True, 128.6), (128, 64, False, False, 32.5),
    (256, 128, True, True, 64.8), (256, 256, True, True, 128.7), (128, 128, True, True, 32.7),
    (128, 256, True, True, 64.4), (256, 64, True, True, 43.4),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "pair", "a_shared", "clocks"), MEASURED)
def test_matrix_rates_are_a_bound_close_to_what_a_b200_was_measured_to_take(rows, columns, pair, a_shared, clocks):
    bound = rates.blackwell_mma(rows, columns, pair, a_shared)
    assert 0.92 * clocks < bound <= clocks


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("fma.rn.f32x2", "fp32x2"), ("mad.lo.s32", "integer"), ("setp.lt.s32", "compare, select"),
        ("not.pred", "compare, select"),
        ("ld.param.b64", "move"), ("ld.global.v4.b32", "global memory"), ("st.shared::cluster.b32", "shared memory"),
        ("ld.b32", "other"), ("cp.async.cg.shared.global", "shared memory"), ("cp.async.wait_group", "synchronise"),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", "synchronise"), ("cp.async.bulk.commit_group", "synchronise"),
        ("cp.async.bulk.tensor.3d.shared::cta.global.tile.mbarrier::complete_tx::bytes", "bulk copy"),
        ("wgmma.wait_group.sync.aligned", "synchronise"), ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor memory"),
        ("max.NaN.f32", "fp32 min/max"), ("max.s32", "integer"), ("bar.warp.sync", "synchronise"),
    ],
)  # fmt: skip
def test_classes(opcode, kind):
    assert cost.class_of(opcode) == kind


@pytest.fixture(scope="module", params=["full_nolse", "causal_lse"])
def prefill(request):
    return profile.profile_symbol(PREFILL.format(request.param))


def test_prefill_of_hopper_per_tile(prefill):
    load, idle, attend = prefill.roles
    assert [role.name for role in prefill.roles] == ["warp 0", "warps 1-3", "warps 4-11"]
    assert (load.registers, attend.registers) == (24, 240)
    assert not any(idle.work[name] for name in (*cost.CLASSES, *cost.QUANTITIES))
    assert attend.work["MMAs"] == 2 * 20 and attend.work["matrix"] == 4 * 2 * 20
    assert attend.work["tensor clk"] == 2 * 20 * 64
    assert attend.work["exponentials"] == 128 * 128 + 2 * 4 * 2 * 32  # each thread rescales its two rows
    tile = 128 * (192 + 128) * 2
    assert load.work["global bytes read"] == load.work["shared bytes copied"] == tile == 81920
    scores, values = 12 * (64 + 128) * 32, 8 * 128 * 32  # Q and K come from shared memory, P from registers
    assert attend.work["shared bytes"] == 2 * (scores + values)
    least = cost.tightest(prefill.bounds)
    assert (least.resource, least.clocks) == ("tensor cores", 2560)


def test_decode_of_hopper_per_tile():
    found = profile.profile_symbol(DECODE)
    load, _, other_load, first, second, _ = found.roles
    names = [role.name for role in (load, other_load, first, second)]
    assert names == ["warp 0", "warp 3", "warps 4-7", "warps 8-11"]
    for attend in (first, second):  # every other tile's scores, half of the output of every tile
        assert attend.work["MMAs"] == 36 / 2 + 2 * 4
        assert attend.work["tensor clk"] == 36 / 2 * 32 + 2 * 4 * 64
    assert load.work["shared bytes copied"] == 64 * 256 * 2
    assert other_load.work["shared bytes copied"] == 64 * (256 + 64) * 2
    least = cost.tightest(found.bounds)
    assert (least.resource, least.clocks) == ("tensor cores", 2176)


def test_work_does_not_depend_on_the_schedule(prefill, monkeypatch):
    monkeypatch.setattr(profile, "OPTIONS", profile.Options(count=True, async_mode="late", seed=5, quantum=7))
    again = profile.profile_symbol(prefill.name)
    for role, other in zip(prefill.roles, again.roles, strict=True):
        assert role.work | {"polling": 0} == other.work | {"polling": 0}


@pytest.mark.parametrize(
    ("heads", "keys", "mmas", "clocks", "read"), [(128, 128, 26, 2 * 1088, 576 + 512), (64, 64, 22, 896, 576)]
)
def test_decode_of_blackwell_per_tile(heads, keys, mmas, clocks, read):
    """A pair takes N / 4 clocks an MMA on both of its SMs and reads values once more; a CTA of 64 rows does not."""
    found = profile.profile_symbol(BLACKWELL_DECODE, heads)
    assert found.unit == f"{heads} query rows x {keys} keys"
    assert (found.work["MMAs"], found.work["tensor clk"]) == (mmas, clocks)
    # Both threads of a row compute a factor in every tile, whether it rescales or not: that waits for nothing.
    assert found.work["exponentials"] == heads * keys + 2 * heads
    assert found.work["shared bytes copied"] == keys * read
    assert keys * read <= found.work["global bytes read"] < 1.01 * keys * read


def pack(tokens):
    k_nope, v = (torch.randn(tokens, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    k_pe = torch.randn(tokens, 1, 64, dtype=torch.bfloat16, device="cuda")
    tsmla.mla_kv_pack_quantize_fp8(k_nope, k_pe, v, fp8_dtype=torch.float8_e4m3fn)


def test_other_kernels_are_profiled_from_records(tmp_path, capsys):
    with emulated("sm_100a", record_to=tmp_path):
        pack(512)
        pack(1536)
    ptx, (small, large) = next(tmp_path.glob("000*.ptx")), sorted(tmp_path.glob("*.npz"))
    other = profile.profile_records(ptx, small, large, 32)
    own = profile.profile_symbol(PACK)
    assert other.roles == own.roles
    rows = 128 * (128 + 64 / 4 + 128) * 2  # k_pe is shared by four heads, and read once at best
    assert rows <= own.work["global bytes read"] <= 128 * (128 + 64 + 128) * 2
    assert own.work["global bytes written"] == 128 * (128 + 64 + 128)
    assert cost.tightest(own.bounds).resource == "HBM"
    assert cli.main(["profile", PACK, "--against", str(ptx), str(small), str(large), "16", "--tiles", "1e6"]) == 0
    text = capsys.readouterr().out
    assert f"{PACK} (sm_100a), per 128 tokens of a head" in text and "[1] warps 0-9" in text
    assert f"{'global bytes written':32}{'40,960':>12}{'81,920':>12}" in text
    assert "1,000,000 of them on 148 SMs at 1965 MHz: about" in text
    assert text.endswith(profile_text.CANNOT_KNOW + "\n")


def test_runs_that_cannot_be_told_apart_are_refused(capsys):
    module = parse(text_of("", 0, "sm_90a", 32))
    with pytest.raises(profile.ProfileError, match="5 warp instructions in the larger run, 9 in the smaller one"):
        profile.difference("k", module, Report(9), Report(5), 4)
    with pytest.raises(profile.ProfileError, match="k is for sm_80; rates are known for sm_90a, sm_100a, sm_103a"):
        profile.difference("k", parse(text_of("", 0, "sm_80", 32)), Report(1), Report(2), 4)
    assert cli.main(["profile"]) == 2
    assert "profile takes symbols of tsmla kernels, --against, or both" in capsys.readouterr().err
