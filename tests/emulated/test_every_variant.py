"""Every kernel that ships runs through its operator, its exported function and its launch, and is right."""

from __future__ import annotations

import pytest
from tsmla_emulator.check import check, variants
from tsmla_emulator.host.compile import compile_all
from tsmla_emulator.pytest_plugin import SCHEDULES

from build_aot.matrix import shipped


@pytest.fixture(scope="module")
def compiled():
    return set(compile_all(shipped()))


@pytest.mark.parametrize("variant", shipped(), ids=str)
def test_variant(compiled, variant):
    assert variant in compiled
    assert check(variant, SCHEDULES["late"]).error is None


def test_the_emulators_list_holds_what_ships():
    assert set(shipped()) <= set(variants())
