"""Every kernel that ships runs through its operator, exported function and launch, and is right."""

from __future__ import annotations

import dataclasses
import os

import pytest
from emulated_archs import has_a_text_of_its_own, text_of
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla_emulator.prove.check import check, variants
from tsmla_emulator.pytest_plugin import SCHEDULES

from build_aot.build import build
from build_aot.matrix import shipped


@pytest.fixture(scope="module")
def up_to_date(built_objects):
    """What an editable installation built is brought up to date."""
    build(shipped(), built_objects, len(os.sched_getaffinity(0)), keep_ptx=True)


@pytest.mark.parametrize("variant", [v for v in shipped() if has_a_text_of_its_own(v)], ids=str)
def test_variant(up_to_date, compiled_kernels, variant):
    assert check(variant, SCHEDULES["late"], compiled=compiled_kernels).error is None


@pytest.mark.parametrize("variant", [v for v in shipped() if not has_a_text_of_its_own(v)], ids=str)
def test_kernels_that_no_emulated_test_runs_are_those_of_sm_100a(up_to_date, compiled_kernels, variant):
    both = (variant, dataclasses.replace(variant, arch=Arch.SM100A))
    own, other = (text_of(compiled_kernels(each).ptx.read_text("utf-8")) for each in both)
    assert own == other


def test_the_emulators_list_holds_what_ships():
    assert set(shipped()) <= set(variants())


@pytest.mark.parametrize("dtype", Dtype)
def test_the_emulators_list_is_in_the_same_order_in_each_process(dtype):
    """Processes divide the list by number; a set of rows has another order in each."""
    rows = [uniform_row(dtype), *ROWS.values()]
    for arch in SHIPPED_ARCHS:
        decodes = [x for x in variants([arch]) if isinstance(x, DecodeVariant) and x.dtype == dtype and not x.lse]
        found = [rows.index(x.row) for x in decodes]
        assert found == sorted(found)
