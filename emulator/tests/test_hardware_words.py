"""Instructions by themselves: the words that an H200 gave (hardware_words), from the very kernels that ran there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tsmla.identity.arch import Arch
from tsmla.problems.sums import summed, sums_of
from tsmla_emulator.prove import opcodes, products

WORDS = Path(__file__).with_name("hardware_words")
OTHERS = ("FCHK",)
"""FCHK says more often that a quotient takes the slow way."""


def test_each_form_of_instruction_gives_the_words_of_the_gpu():
    differing = opcodes.compare(WORDS / "opcodes.npz")
    assert [text for text in differing if not text.startswith(OTHERS)] == []


def test_products_and_matrix_moves_give_the_words_of_the_gpu():
    assert products.compare(WORDS) == []


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("product", [x for x in products.PRODUCTS if x.a == x.b], ids=lambda x: x.name)
def test_sums_that_kernels_are_judged_by_are_those_words(product):
    dtype = DTYPES[product.a]
    a, b = (torch.from_numpy(x).view(dtype) for x in products.factors(product)[:2])
    totals = torch.from_numpy(products.factors(product)[2].view(np.float32)).double()
    words = torch.from_numpy(np.load(WORDS / "products.npz")[product.name].view(np.float32))
    for case in range(products.CASES):
        if case % 6 == 4:  # any bits: infinities and NaN
            continue
        total = totals[case]
        for step in range(product.steps):
            total = summed(a[case, step], b[case, step], sums_of(Arch.SM90A, dtype), total)
        assert torch.equal(total, words[case].double())
