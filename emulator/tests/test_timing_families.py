"""The timing model: a decode and a prefill of every row format, by every form of their kernels. Kernels that move rows
are in test_timing_streams.py."""

from __future__ import annotations

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.variant import DecodeVariant, Dtype, PrefillVariant
from tsmla_emulator.prove import check
from tsmla_emulator.time.machines import MACHINES, OF_ARCH
from tsmla_emulator.time.problem import DecodeTraced, PrefillTraced, Shape

PROCESSORS = 16
"""SMs of the GPU for which decodes are dealt out: some have no work, and others more of it."""
ROWS = {"few rows": Shape(3, 1, 700, 16), "many rows": Shape(3, 1, 700, 128)}
"""Decodes whose CTAs have one row tile and two, which Hopper's pairs and Blackwell's take together."""


def of_each_row_format(kind: type) -> list[pytest.param]:
    """A variant of each row format and width of numbers on each architecture, of one kind of operator."""
    found = {}
    for variant in check.variants((Arch.SM90A, Arch.SM100A)):
        if isinstance(variant, kind) and variant.dtype in (Dtype.BF16, Dtype.E4M3):
            what = getattr(variant, "row", None), getattr(variant, "gathers", None), getattr(variant, "masked", None)
            found.setdefault((variant.family, variant.arch, variant.dtype, what), variant)
    return [pytest.param(variant, id=variant.symbol()) for variant in found.values()]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("variant", of_each_row_format(DecodeVariant))
def test_a_decode_takes_what_memory_takes_and_not_much_more(variant, rows):
    shape, machine = ROWS[rows], MACHINES[OF_ARCH[variant.arch.value]]
    found = DecodeTraced(variant, shape, PROCESSORS)
    found.machine_code = False  # the search for its ways takes a minute
    modelled = found.model(machine)
    assert {trace.cluster for trace in found.call.report.traces if trace.launch == 0} == {*found.chosen}
    assert modelled.details["KV tiles of the longest CTA"] == max(part[0] for part in found.parts)
    of_tile = found.tile_kv * variant.row.bytes / found.reuse
    least = modelled.details["KV tiles of the longest CTA"] * of_tile / found.sms / machine.l2.value
    assert least < modelled.details["attention"] < 30_000 + 8 * least


@pytest.mark.parametrize("variant", of_each_row_format(PrefillVariant))
def test_a_prefill_is_modelled(variant):
    machine = MACHINES[OF_ARCH[variant.arch.value]]
    found = PrefillTraced(variant, Shape(1, 1024, 1024, 2), machine.processors)
    found.machine_code = False
    modelled = found.model(machine)
    products = (variant.d_qk + variant.d_v) * variant.dtype.bits / 16 / 8
    assert modelled.per_tile > products  # 4096 FLOP a clock, on Hopper, in 16 bits
