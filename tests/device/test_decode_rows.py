"""tsmla_decode of rows with a scale each, on a GPU, against float64 from rows as they are stored."""

from __future__ import annotations

import pytest
import torch
from decode_reference import Sight
from decode_rows import (
    LENGTHS,
    MOST_OFF,
    OUTLIERS,
    attend_stored,
    check_scaled,
    make_scaled,
    outlier_call,
    relative,
)
from tsmla.identity.arch import Arch


@pytest.fixture(autouse=True)
def decodes(arch: Arch, seed: int) -> None:
    if "snapmla" not in arch.facts.decode_rows:
        pytest.skip(f"decode for {arch} does not read such rows")


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("q_len, heads", [(1, 16), (4, 16), (1, 128), (2, 128)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(lengths, q_len, heads, power_of_two):
    check_scaled(make_scaled(lengths, q_len, heads, power_of_two=power_of_two, output_scale=0.5))


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages_and_strides(page_size, side_by_side):
    check_scaled(make_scaled([300, 1, 0, 129, 2000], 3, 16, page_size, side_by_side=side_by_side))


@pytest.mark.parametrize("heads, q_len", [(1, 1), (6, 3), (12, 8), (24, 1), (96, 2), (128, 3)])
@pytest.mark.parametrize("sight", [Sight(causal=False), Sight(window_left=100)], ids=str)
def test_heads_and_what_hides_keys(heads, q_len, sight):
    check_scaled(make_scaled([700, 65, 3], q_len, heads, sight=sight, power_of_two=False))


def test_a_packed_batch():
    check_scaled(make_scaled([1100, 0, 300, 70], [1, 2, 0, 65], 16))


def test_visible_lengths_of_a_rank():
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check_scaled(make_scaled([190, 66], 3, 16, 32, visible=visible, causal_seqs=[380, 130], sight=sight))


@pytest.mark.parametrize("case", OUTLIERS)
def test_accuracy_on_rows_as_models_have_them(case):
    scaled = outlier_call(case, [4096, 300, 70], 16, power_of_two=case != OUTLIERS[0])
    out, _ = check_scaled(scaled)
    assert relative(out, attend_stored(scaled, "exact")[0]) <= MOST_OFF


@pytest.mark.parametrize("key_factor, query_factor", [(1e-36, 1e36), (1e30, 1e-30)])
def test_scales_of_any_magnitude(key_factor, query_factor):
    check_scaled(make_scaled([1300, 3], 1, 16, key_factor=key_factor, query_factor=query_factor, power_of_two=False))


def test_sinks_pdl_and_one_request_alone():
    sinks = torch.randn(16, device="cuda")
    scaled = make_scaled([7000, 64, 5], 2, 16, sinks=sinks, lse_includes_sink=True)
    check_scaled(scaled, batch_invariant=True, enable_pdl=True)
    check_scaled(scaled, return_lse=False)
