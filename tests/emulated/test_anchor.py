"""The emulator gives what a real H200 gave for the same kernels and inputs."""

from __future__ import annotations

import anchor
import numpy as np
import pytest
import torch

pytestmark = pytest.mark.archs("sm_90a")

BIT_EQUAL = {torch.bfloat16: 0.995, torch.float16: 0.96}
"""Share of outputs that must agree in every bit: tensor cores add in an order that nobody documents. fp16 outputs have
eight times finer steps, so the same differences before rounding cross one eight times as often."""
LSE_ERROR = 2e-6


@pytest.mark.parametrize("case", [c for c in anchor.CASES if isinstance(c, anchor.PackCase)], ids=lambda c: c.name)
def test_pack_is_bit_for_bit(gpu, case):
    hardware = anchor.recorded(case)
    for name, value in case.run().items():
        assert np.array_equal(value, hardware[name]), name


@pytest.mark.parametrize("case", [c for c in anchor.CASES if isinstance(c, anchor.PrefillCase)], ids=lambda c: c.name)
def test_prefill_agrees(gpu, case):
    hardware, emulated = anchor.recorded(case), case.run()
    equal = (emulated["out"] == hardware["out"]).mean()
    error = np.nanmax(np.abs(emulated["lse"] - hardware["lse"]), where=np.isfinite(hardware["lse"]), initial=0)
    print(f"{case.name}: {equal:.4%} bit-equal, LSE within {error:.1e}")
    assert np.array_equal(np.isfinite(emulated["lse"]), np.isfinite(hardware["lse"]))
    assert equal >= BIT_EQUAL[case.dtype]
    assert error <= LSE_ERROR
