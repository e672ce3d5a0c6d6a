"""A kernel that casts weight times scale to 8 bits as it is, which decodes of rows with scales must not do, fails the
gate that kernels as they are pass: against float64 on the same stored rows. (Hopper's casts to float16, which loses
little of either.)"""

from __future__ import annotations

import re

import pytest
from decode_reference import run
from decode_rows import MOST_OFF, attend_stored, make_scaled, relative
from emulated_archs import KERNELS
from tsmla_emulator.run import machine
from tsmla_emulator.run.emulate import Options, emulated

SHRUNK = 2.0**-13
"""What a kernel's probability is times, where it is cast as weight times scale: the bias of its exponent is undone, and
the scales of normal numbers (amax near 448 x 2^-7) are the unit that it left out."""
DOWN, UP = "0f39000000", "0f46000000"
"""SHRUNK and its inverse."""
CAST = re.compile(r"^\s*cvt\.rn\.satfinite\.e4m3x2\.f32\s+%\w+, (%\w+), (%\w+);$", re.MULTILINE)


def shrinking(module: machine.Module) -> machine.Module:
    """The kernel with probabilities shrunk before they are cast, which nothing else in it casts to."""

    def around(cast: re.Match[str]) -> str:
        scaled = [[f"mul.f32 {x}, {x}, {factor};" for x in {*cast.groups()}] for factor in (DOWN, UP)]
        return "\n".join([*scaled[0], cast.group(), *scaled[1]])

    text, count = CAST.subn(around, module.text)
    assert count
    return machine.parse(text)


@pytest.mark.parametrize("arch", [arch for arch in KERNELS if arch != "sm_90a"])
def test_a_cast_of_weight_times_scale_fails_the_gate(arch, compiled_kernels):
    off = {}
    for name, rewrite, output_scale in (("right", None, 1.0), ("cast", shrinking, 1 / SHRUNK)):
        with emulated(arch, Options(), compiled=compiled_kernels, rewrite=rewrite):
            scaled = make_scaled([300, 70], 1, 17)
            out, _ = run(scaled.problem, **scaled.arguments(output_scale=output_scale))
            exact, _ = attend_stored(scaled, "exact")
            off[name] = relative(out, exact)
    assert off["right"] <= MOST_OFF < 3 * MOST_OFF < off["cast"], off
