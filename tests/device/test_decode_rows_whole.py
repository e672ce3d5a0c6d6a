"""tsmla_decode of DeepSeek's rows of 656 bytes, on a GPU: against float64, and against bf16 rows in the same pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_reference import Problem, Sight, check, run
from decode_rows import LENGTHS, OUTLIERS, as_plain, keys_with_outliers, make_whole, rounds
from tsmla.identity.arch import Arch


@pytest.fixture(autouse=True)
def decodes(arch: Arch, seed: int) -> None:
    if "fp8_ds_mla" not in arch.facts.decode_rows:
        pytest.skip(f"decode for {arch} does not read such rows")


def whole(arch: Arch, lengths: list[int], q_len: int, heads: int, *page_size: int, **fields: Any) -> Problem:
    """`make_whole`, with keys as the kernel of so many query rows has them."""
    return make_whole(lengths, q_len, heads, *page_size, rounded=rounds(arch, q_len * heads), **fields)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("q_len, heads", [(1, 16), (4, 16), (1, 128), (2, 128)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(arch, lengths, q_len, heads, power_of_two):
    check(whole(arch, lengths, q_len, heads, power_of_two=power_of_two, output_scale=0.5))


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_pages(arch, page_size, q_len):
    check(whole(arch, [300, 1, 0, 129, 2000], q_len, 16, page_size))


@pytest.mark.parametrize("heads, q_len", [(1, 1), (6, 3), (12, 8), (24, 1), (96, 2), (128, 3)])
@pytest.mark.parametrize("sight", [Sight(causal=False), Sight(window_left=100)], ids=str)
def test_heads_and_what_hides_keys(arch, heads, q_len, sight):
    check(whole(arch, [700, 65, 3], q_len, heads, sight=sight))


def test_a_packed_batch():
    check(make_whole([1100, 0, 300, 70], [1, 2, 0, 65], 16))


def test_visible_lengths_of_a_rank():
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check(make_whole([190, 66], 3, 16, 32, visible=visible, causal_seqs=[380, 130], sight=sight))


@pytest.mark.parametrize("case", OUTLIERS)
@pytest.mark.parametrize("heads", [16, 128])
def test_on_hopper_the_bits_of_bf16_rows(arch, case, heads):
    lengths = [4096, 300, 70]
    keys = keys_with_outliers(lengths, case)
    largest = max(float(own.norm(dim=-1).max()) for own in keys)
    problem = make_whole(lengths, 2, heads, keys=keys, softmax_scale=8 / largest)
    out, lse = check(problem)
    if arch is Arch.SM90A:
        got, got_lse = run(problem, kv_cache=as_plain(problem))
        assert torch.equal(got, out) and torch.equal(got_lse, lse)
