"""Kernels that move rows, in the timing model: what they must move, and what it takes."""

from __future__ import annotations

import dataclasses

import pytest
from shipped_kernels import BUILT
from tsmla.identity.variant import FAMILIES
from tsmla_emulator import cli
from tsmla_emulator.prove import check
from tsmla_emulator.time import problem, streams
from tsmla_emulator.time.machines import H200, MACHINES, OF_ARCH, Value

PACK = "tsmla_pack_sm_100a_bf16_to_e4m3_d128x64x128"
WRITE = "tsmla_write_cache_sm_90a_bf16_d512e4m3s128x64"
READ = "tsmla_read_cache_sm_90a_bf16_d512e4m3s512apartwholex64"
QUANTIZE = "tsmla_quantize_q_sm_90a_bf16_d512e4m3s512apartwholex64"


def found(symbol: str, shape: str) -> streams.StreamTraced:
    machine = MACHINES[OF_ARCH[problem.arch_of(symbol)]]
    return problem.traced(symbol, problem.Shape.parse(shape), machine, BUILT)


@pytest.mark.parametrize(
    ("symbol", "shape", "bytes"),
    [  # as benchmarks/results/current counts them, pack-... and cache-...
        (PACK, "2x1x4Kx128", 873463808),
        (PACK, "1x7x128x128", 13647872),
        (WRITE, "64x128x1Kx16", 14876672),
        (READ, "1x1x8Kx128", 14778368),
        (QUANTIZE, "4x2x1Kx128", 4 * 2 * 128 * (1152 + 644)),
    ],
)
def test_a_row_is_moved_once(symbol, shape, bytes):
    traced = found(symbol, shape)
    machine = MACHINES[OF_ARCH[traced.arch]]
    modelled = traced.model(machine)
    assert traced.bytes == bytes
    assert modelled.details["CTAs"] * traced.rows_per_cta >= traced.rows
    assert modelled.clocks >= bytes / (machine.hbm.value * 1e3 / machine.clock.value)
    assert sum(modelled.shown.coverage.values()) > 50 * modelled.details["CTAs of an SM at once"]


def test_a_long_call_takes_what_memory_takes_and_a_slow_sm_takes_longer():
    few, many = (found(WRITE, f"1x{tokens}x1x1") for tokens in (65536, 131072))
    per_clock = H200.hbm.value * 1e3 / H200.clock.value
    assert many.model(H200).clocks - few.model(H200).clocks == pytest.approx(65536 * (1152 + 656 + 8) / per_clock)
    slow = dataclasses.replace(H200, fma=Value(100, "test"), alu=Value(100, "test"))
    modelled = many.model(slow)
    sets = -(-131072 // many.rows_per_cta // (132 * 16))
    assert modelled.details["sets"] == sets and modelled.clocks > 1.5 * many.model(H200).clocks
    issued = sets * (modelled.shown.clocks + H200.cta_gap.value) - H200.cta_gap.value
    assert modelled.clocks == issued + modelled.details["code, once"]


def test_code_costs_once():
    modelled = found(WRITE, "1x65536x1x1").model(H200)
    lines = H200.line_ahead.value, H200.line_behind.value
    warm = dataclasses.replace(H200, line_ahead=Value(0, "test"), line_behind=Value(0, "test"))
    assert modelled.details["code, once"] > 2 * lines[0]
    assert found(WRITE, "1x65536x1x1").model(warm).details["code, once"] == 0


def test_a_row_more_is_a_cta_more():
    machine = MACHINES["B200"]
    one, two = (found(PACK, f"1x1x{rows}x1").model(machine) for rows in (64, 65))
    assert (one.details["CTAs"], two.details["CTAs"]) == (1, 2)


def test_every_operator_has_a_model():
    """But for the maker of key masks, whose warps wait for each other."""
    assert {*streams.KINDS, "prefill", "decode", "key_mask"} == set(FAMILIES)
    with pytest.raises(ValueError, match="tsmla_key_mask_sm_90a has no model: its warps wait for each other"):
        found("tsmla_key_mask_sm_90a", "1x1x8Kx1")
    assert {variant.family for variant in check.variants()} == set(FAMILIES)


def test_warps_that_wait_for_others_are_refused(monkeypatch):
    traced = found(PACK, "1x1x64x1")
    prepared = traced.prepared(traced.call, 0, MACHINES["B200"])
    prepared.costs[0].kind = "named_sync"
    monkeypatch.setattr(traced, "prepared", lambda *_: prepared)
    with pytest.raises(ValueError, match="its warps wait for others"):
        traced.model(MACHINES["B200"])


def test_a_time_is_printed_without_tiles_and_edges(capsys):
    assert cli.main(["time", PACK, "--shape", "1x1x8Kx128", "--no-band"]) == 0
    said = capsys.readouterr().out
    assert "bytes: 873,463,808" in said and "units busy over the " in said
    assert "timeline" not in said and "KV tile" not in said
