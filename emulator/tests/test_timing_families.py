"""The timing model of decodes whose kernels are unlike others: pairs of CTAs, products of single warps, lanes' copies.
(A case takes a minute; kernels that move rows are in test_timing_streams.py.)"""

from __future__ import annotations

import pytest
from shipped_kernels import BUILT
from tsmla_emulator.prove import check
from tsmla_emulator.time.machines import MACHINES, OF_ARCH
from tsmla_emulator.time.problem import DecodeTraced, Shape

PROCESSORS = 16
"""SMs of the GPU for which decodes are dealt out: some have no work, and others more of it."""
ROWS = {"few rows": Shape(3, 1, 700, 16), "many rows": Shape(3, 1, 700, 128)}
"""Decodes whose CTAs have one row tile and two, which Hopper's pairs and Blackwell's take together."""


@pytest.mark.parametrize(
    ("symbol", "rows"),
    [
        ("tsmla_decode_sm_90a_bf16_to_bf16_d512e4m3s128x64_nolse", "many rows"),
        ("tsmla_decode_sm_90a_bf16_to_bf16_d512e4m3s128x64_gathers_lse", "few rows"),
    ],
)
def test_a_decode_takes_what_memory_takes_and_not_much_more(symbol, rows):
    variant = check.find(symbol)
    shape, machine = ROWS[rows], MACHINES[OF_ARCH[variant.arch.value]]
    found = DecodeTraced(variant, shape, PROCESSORS, BUILT)
    modelled = found.model(machine)
    assert {trace.cluster for trace in found.call.report.traces if trace.launch == 0} == {*found.chosen}
    assert modelled.details["KV tiles of the longest CTA"] == max(own[0] for own in found.workers)
    of_tile = found.tile_kv * variant.row.bytes / found.reuse
    least = modelled.details["KV tiles of the longest CTA"] * of_tile / found.sms / machine.l2.value
    assert least < modelled.details["attention"] < 30_000 + 8 * least
