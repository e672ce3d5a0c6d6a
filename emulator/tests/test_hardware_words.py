"""Instructions by themselves: the words that an H200 gave (hardware_words), from the very kernels that ran there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sass_kernels import run_lines
from tsmla.identity.arch import Arch
from tsmla.problems.sums import summed, sums_of
from tsmla_emulator.prove.hardware import opcodes, products

WORDS = Path(__file__).with_name("hardware_words")


def test_each_form_of_instruction_gives_the_words_of_the_gpu():
    assert opcodes.compare(WORDS / "opcodes.npz") == []


@pytest.mark.parametrize("number", range(7))
def test_quotients_of_all_exponents_are_as_hard_as_on_the_gpu(number):
    """FCHK of 256 x 256 pairs of exponents, with fractions of their own."""
    recorded = np.load(WORDS / "fchk.npz")
    fractions = recorded["fractions"][number].astype(np.uint32)
    exponents = np.mgrid[:256, :256].astype(np.uint32).reshape(2, 64, 1024)
    lines = [
        "S2R R0, SR_TID.X", "LDC.64 R2, c[0x0][0x210]", "IMAD.WIDE.U32 R2, R0, 0x4, R2",
        "LDG.E R10, desc[UR4][R2.64]", "LDG.E R11, desc[UR4][R2.64+0x1000]", "FCHK P0, R10, R11",
        "SEL R20, R2, RZ, P0", "STG.E desc[UR4][R2.64], R20", "EXIT",
    ]  # fmt: skip
    found = []
    for pairs in exponents.swapaxes(0, 1):
        memory = pairs << 23 | fractions[:, None]
        run_lines(lines, memory, threads=1024)
        found.append(memory[0] != 0)
    assert np.array_equal(np.packbits(np.concatenate(found)), recorded["hard"][number].reshape(-1))


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
