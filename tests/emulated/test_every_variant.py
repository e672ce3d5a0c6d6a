"""Every kernel that ships runs through its operator, exported function and launch, and is right."""

from __future__ import annotations

import os

import pytest
from tsmla_emulator.check import check, variants
from tsmla_emulator.pytest_plugin import SCHEDULES

from build_aot.build import build
from build_aot.matrix import shipped


@pytest.fixture(scope="module")
def up_to_date(built_objects):
    """What an editable installation built is brought up to date."""
    build(shipped(), built_objects, len(os.sched_getaffinity(0)), keep_ptx=True)


@pytest.mark.parametrize("variant", shipped(), ids=str)
def test_variant(up_to_date, compiled_kernels, variant):
    assert check(variant, SCHEDULES["late"], compiled=compiled_kernels).error is None


def test_the_emulators_list_holds_what_ships():
    assert set(shipped()) <= set(variants())
