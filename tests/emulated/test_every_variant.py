"""Every kernel that ships runs through its operator, exported function and launch, and is right.

The objects are those that the libraries are linked from.
"""

from __future__ import annotations

import os

import pytest
from build_wheel import ROOT
from tsmla_emulator.check import check, variants
from tsmla_emulator.host.compile import Compiled
from tsmla_emulator.host.link import link
from tsmla_emulator.pytest_plugin import SCHEDULES

from build_aot.build import build, store_of
from build_aot.matrix import shipped

BUILT = ROOT / "build" / "cmake" / "objs"
"""Where an editable installation leaves what it built; what is missing or out of date is built first."""


@pytest.fixture(scope="module")
def built():
    """Gives the object and PTX of a variant as the emulator takes them."""
    build(shipped(), BUILT, len(os.sched_getaffinity(0)), keep_ptx=True)
    store = store_of(BUILT)
    return lambda variant: Compiled(link(store.object(variant)), store.ptx(variant), variant.symbol())


@pytest.mark.parametrize("variant", shipped(), ids=str)
def test_variant(built, variant):
    assert check(variant, SCHEDULES["late"], compiled=built).error is None


def test_the_emulators_list_holds_what_ships():
    assert set(shipped()) <= set(variants())
