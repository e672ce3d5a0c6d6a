"""tsmla_decode of chosen keys (sparse attention) on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from chosen_reference import check_chosen, make_chosen
from tsmla.identity.arch import Arch

FORMATS = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "e4m3": {"dtype": torch.float8_e4m3fn},
    "e5m2": {"dtype": torch.float8_e5m2},
    "fp8_ds_mla": {"dtype": torch.bfloat16, "row": "fp8_ds_mla"},
    "latent_bf16": {"dtype": torch.bfloat16, "rope": 0},
    "latent_e4m3": {"dtype": torch.float8_e4m3fn, "rope": 0},
}
CASES = {
    "a list that ends in a tile": ((2, 1), 16, 150, {}),
    "one key": ((3,), 8, 1, {"outside": 0.0}),
    "lists of their own lengths": ((5,), 16, 130, {"lengths": [0, 1, 63, 64, 130]}),
    "several tokens of a request": ((2, 3), 24, 96, {"lengths": [5, 96, 0, 33, 64, 65]}),
    "a row tile and a row": ((1, 1), 65, 128, {}),
    "128 heads": ((4,), 128, 2048, {"pages": 300}),
    "pages of 69 keys": ((64,), 16, 2048, {"pages": 500, "page_size": 69}),
    "one token": ((1,), 16, 1500, {}),
    "nearly all outside": ((7,), 16, 192, {"outside": 0.97}),
    "more tokens than SMs": ((140,), 128, 300, {}),
}


@pytest.fixture(autouse=True)
def gathers(arch: Arch, seed: int) -> None:
    if not arch.facts.gathered_dtypes:
        pytest.skip(f"decode for {arch} gathers no keys yet")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(case, format):
    shape, heads, top_k, more = case
    check_chosen(make_chosen(shape, heads, top_k, **format, output_scale=0.5, **more))
