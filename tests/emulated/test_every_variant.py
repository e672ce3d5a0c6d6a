"""The kernels that ship run through their operators, exported functions and launches, and are right.

Of the Blackwell prefill, whose 160 variants take too long to compile here, every dtype, head dimension, mask and
architecture, and every flag once: a flag (LSE, PDL) adds the same few instructions to each.
"""

from __future__ import annotations

import pytest
from tsmla.variant import Arch, Dtype, PrefillVariant, Variant
from tsmla_emulator.check import check, variants
from tsmla_emulator.host.compile import compile_all
from tsmla_emulator.pytest_plugin import SCHEDULES

from build_aot.matrix import shipped


def _is_run(variant: Variant) -> bool:
    if not isinstance(variant, PrefillVariant) or variant.arch is Arch.SM90A:
        return True
    return (variant.lse and not variant.pdl) or (variant.dtype, variant.arch) == (Dtype.E4M3, Arch.SM100A)


RUN = tuple(variant for variant in shipped() if _is_run(variant))


@pytest.fixture(scope="module")
def compiled():
    return set(compile_all(RUN))


@pytest.mark.parametrize("variant", RUN, ids=str)
def test_variant(compiled, variant):
    assert variant in compiled
    assert check(variant, SCHEDULES["late"]).error is None


def test_the_emulators_list_holds_what_ships():
    assert set(shipped()) <= set(variants())
