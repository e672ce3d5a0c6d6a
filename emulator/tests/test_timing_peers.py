"""Other packages' kernels in the timing model: stand-ins of a few lines whose time can be worked out by hand."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import numpy as np
import pytest
from small_kernels import run, text_of
from tsmla_emulator import cli
from tsmla_emulator.prove.controls.control import Package, Peer
from tsmla_emulator.run.machine import Launch, Trace, parse
from tsmla_emulator.time import machines, peers, problem
from tsmla_emulator.time.costs import Text
from tsmla_emulator.time.machines import B200, H100, MACHINES
from tsmla_emulator.time.peers import PeerDecode, PeerPrefill, Seen, Shape
from tsmla_emulator.time.replay import STORE, Prepared

PREFILL = Peer(Package("other", "1.0"), "prefill", "sm_90a", "bf16", (192, 128), print, causal=False, rows=128)
DECODE = dataclasses.replace(PREFILL, family="decode", arch="sm_100a", dims=(512, 64))
PER_TILE, START, TURN = 3, 10, 5
"""Exponentials in a row: of a KV tile, of a kernel's start, and of each row tile."""
COPIED = 16384


def seen(body: str, *arguments: np.ndarray, grid: tuple[int, int, int] = (1, 1, 1), arch: str = "sm_90a", **options):
    report = run(body, *arguments, arch=arch, trace=(0,), **options)
    launch = Launch("k", grid, (32, 1, 1), (1, 1, 1), 0, b"")
    text = text_of(body, len(arguments), arch, 32, options.get("static", ""))
    return Seen(text, (launch,), tuple(report.traces))


def prefill_calls(row_tiles: int = 1) -> list[Seen]:
    """Calls such as `seen_prefill` gives, of a kernel that keeps its SM when there are two row tiles."""
    chain = "ex2.approx.ftz.f32 %r1, %r1;\n"
    few, many = problem.TILES_TRACED
    works = [[few], [many]] + [[few, few]] * (row_tiles - 1)
    return [
        seen("mov.b32 %r1, 0f3F800000;\n" + chain * (START + sum(TURN + PER_TILE * tiles for tiles in work)))
        for work in works
    ]


LATENCY = H100.special_latency.value


def test_a_prefill_is_a_line_through_two_numbers_of_tiles():
    shape = Shape(1, 256, 4096, 132)  # two row tiles for each SM
    modelled = PeerPrefill(PREFILL, shape, prefill_calls()).model(H100)
    assert modelled.per_tile == pytest.approx(PER_TILE * LATENCY, rel=0.01)
    one = (START + TURN + PER_TILE * 32) * LATENCY
    assert modelled.clocks == pytest.approx(2 * one + H100.cta_gap.value, rel=0.02)
    assert modelled.launch == H100.launch.value


def test_a_kernel_that_stays_for_many_row_tiles_starts_once():
    staying = dataclasses.replace(PREFILL, persistent=True)
    modelled = PeerPrefill(staying, Shape(1, 3 * 128, 4096, 132), prefill_calls(row_tiles=2)).model(H100)
    assert modelled.clocks == pytest.approx((START + 3 * (TURN + PER_TILE * 32)) * LATENCY, rel=0.02)
    assert modelled.details["beside tiles, a row tile"] == pytest.approx(TURN * LATENCY, rel=0.05)


def test_another_shape_needs_no_other_replay(monkeypatch):
    found = PeerPrefill(PREFILL, Shape(1, 128, 128, 1), prefill_calls())
    before = found.model(H100)
    monkeypatch.setattr(peers, "replay", None)
    longer = found.at(Shape(1, 128, 256, 1)).model(H100)
    assert longer.clocks - before.clocks == pytest.approx(before.per_tile)


@pytest.mark.parametrize("section", [0, 2 * 300 * 320 * 2])
def test_row_tiles_see_the_keys_that_a_causal_mask_leaves(section):
    peer = dataclasses.replace(PREFILL, causal=True, section=section)
    tiles = PeerPrefill(peer, Shape(2, 200, 300, 3), prefill_calls()).tiles()
    assert sorted(tiles) == sorted([2, 3] * 6)  # rows to 127 see 228 keys, those to 199 all 300
    if section:  # two heads' keys: their long row tiles, then their short ones
        assert tiles == [3, 3, 2, 2] * 3
    else:
        assert tiles == [2, 3] * 6


def test_a_call_of_other_clusters_than_assumed_is_refused():
    calls = prefill_calls()
    wide = dataclasses.replace(calls[0], launches=(dataclasses.replace(calls[0].launches[0], grid=(2, 1, 1)),))
    with pytest.raises(ValueError, match="2 clusters for 128 query rows, not one"):
        PeerPrefill(PREFILL, Shape(1, 128, 128, 1), [wide, calls[1]])


COPY = f"""
mov.b32 %r1, smem;
setp.ne.s32 %p1, %r1000, 0;
@%p1 bra DONE;
mbarrier.init.shared.b64 [%r1], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {4 * COPIED};
add.s32 %r2, %r1, 1024;
{
    "".join(
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2+{i * COPIED}], [%d100], {COPIED}, "
        "[%r1];"
        for i in range(4)
    )
}
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra WAIT;
DONE:
"""


@pytest.mark.parametrize(("clusters", "busy"), [(148, [148]), (200, [148, 52])])
def test_a_decode_goes_in_waves_that_share_memory(clusters, busy):
    call = seen(COPY, np.zeros(COPIED, np.uint8), grid=(clusters, 1, 1), arch="sm_100a", shared=1024 + 4 * COPIED)
    keys = 4 * COPIED // (576 * 2)
    modelled = PeerDecode(DECODE, Shape(clusters, 1, keys, 16), call).model(B200)
    chip = B200.hbm.value * 1e3 / B200.clock.value
    waves = [B200.copy_latency_hbm.value + 4 * COPIED / min(chip / n, B200.l2.value) for n in busy]
    assert modelled.clocks == pytest.approx(sum(waves) + (len(busy) - 1) * B200.cta_gap.value, rel=0.04)
    assert modelled.details["clusters"] == clusters and modelled.details["splits"] == 1


def test_tokens_that_choose_keys_find_some_of_them_in_l2():
    call = seen(COPY, np.zeros(COPIED, np.uint8), grid=(74, 1, 1), arch="sm_100a", shared=1024 + 4 * COPIED)
    keys = 4 * COPIED // (576 * 2)
    peer = dataclasses.replace(DECODE, gathers=True)
    assert peer.name.endswith("_d512x64_gathers")
    shape = Shape(37, 2, keys, 128)
    modelled, dense = PeerDecode(peer, shape, call).model(B200), PeerDecode(DECODE, Shape(74, 1, keys, 128), call)
    new = problem.new_of(74, keys, 576 * 2, B200)
    share = B200.hbm.value * 1e3 / B200.clock.value / 74 / new
    assert 0.9 < new < 0.99 and share < B200.l2.value
    assert modelled.clocks == pytest.approx(B200.copy_latency_hbm.value + 4 * COPIED / share, rel=0.04)
    assert modelled.clocks < dense.model(B200).clocks and modelled.details["splits"] == 1


def test_rows_that_others_chose_are_in_l2():
    first = problem.new_of(1, 2048, 1152, B200)
    few, many = (problem.new_of(requests, 2048, 1152, B200) for requests in (8, 128))
    assert first == 1 > few > many
    distinct = problem.CHOSEN_OF * (1 - (1 - 2048 / problem.CHOSEN_OF) ** 128) / (128 * 2048)
    roomy = dataclasses.replace(B200, l2_bytes=dataclasses.replace(B200.l2_bytes, value=1152 * problem.CHOSEN_OF))
    assert problem.new_of(128, 2048, 1152, roomy) == pytest.approx(distinct, rel=0.02)


def test_splits_are_counted_and_joined():
    call = seen(COPY, np.zeros(COPIED, np.uint8), grid=(1, 4, 36), arch="sm_100a", shared=1024 + 4 * COPIED)
    (trace,) = {t.warp: t for t in call.traces}.values()
    joined = dataclasses.replace(call, launches=call.launches * 2, traces=(trace, dataclasses.replace(trace, launch=1)))
    alone, both = (PeerDecode(DECODE, Shape(4, 4, 81920, 16), one).model(B200) for one in (call, joined))
    assert both.details["splits"] == 36
    partial = 36 * 4 * 4 * 16 * peers.PARTIAL_ROW_BYTES / 148 / B200.l2_own.value
    assert both.details["combine"] > partial
    assert both.clocks == alone.clocks + both.details["combine"]
    assert both.launch == 2 * alone.launch
    first, last = joined.launches
    dependent = dataclasses.replace(joined, launches=(first, dataclasses.replace(last, pdl=True)))
    told = PeerDecode(DECODE, Shape(4, 4, 81920, 16), dependent).model(B200)
    assert told.launch == alone.launch + B200.launch_dependent.value < both.launch and told.clocks == both.clocks


@pytest.mark.parametrize(
    ("store", "left"),
    [
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d100, {%r1, %r2}], [%r3];", 2),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d100], [%r3], 16;", 33),
    ],
)
def test_lanes_that_store_the_same_box_store_it_once(store, left):
    entry = parse(text_of(f"{store}\n{store}", 1, "sm_90a", 32)).entries["k"]
    at = [i for i, one in enumerate(entry.instructions) if one.opcode.startswith("cp.async.bulk")]
    notes = np.array([[0, STORE, 0, 16, 0, 0]] * 32 + [[1, STORE, 0, 16, 0, 0]], np.uint32)
    trace = Trace("k", 0, 0, 0, 0, np.array(at, np.uint32), notes)
    _, kept = Prepared(Text(entry, "sm_90a"), H100).clean(trace)
    assert len(kept) == left


def test_names_are_symbols_that_the_model_finds():
    known = peers.peers()
    for name, peer in known.items():
        assert problem.arch_of(name) == peer.arch in machines.OF_ARCH
        assert name.startswith(f"{peer.package.name}_{peer.family}_{peer.arch}_{peer.dtype}_d")
        assert peer.family == "decode" or peer.rows % 128 == 0
    assert {peer.package.name for peer in known.values()} == {"tokenspeed-mla", "flash-attn-4", "nvidia-cudnn-frontend"}


def test_the_command_lists_peers_and_says_what_is_missing(capsys, monkeypatch):
    assert cli.main(["time", "--peers"]) == 0
    assert capsys.readouterr().out.split() == list(peers.peers())
    assert cli.main(["time"]) == 2
    assert "time takes symbols of kernels and --shape, or --peers" in capsys.readouterr().err
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    assert cli.main(["time", "flash-attn-4_prefill_sm_90a_bf16_d128x128_full", "--shape", "1x1Kx1Kx8"]) == 2
    assert "flash-attn-4: 0.1; pip install --no-deps flash-attn-4==" in capsys.readouterr().err


def test_a_package_s_kernel_is_traced_and_modelled():
    from tsmla_emulator.prove.controls.__main__ import lacking

    peer = peers.peers()["flash-attn-4_prefill_sm_90a_bf16_d128x128_full"]
    if missing := lacking({peer.package}):
        pytest.skip(f"needs another package: {missing[0]}")
    modelled = problem.traced(peer.name, Shape(4, 8192, 8192, 16), MACHINES["H100"]).model(H100)
    assert modelled.clocks == pytest.approx(4_847_247, rel=0.05)  # clocks-flash-attn-4-..-20261124T121429.json
