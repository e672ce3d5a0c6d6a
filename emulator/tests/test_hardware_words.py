"""Instructions by themselves: the words that an H200 gave (hardware_words), from the very kernels that ran there."""

from __future__ import annotations

from pathlib import Path

from tsmla_emulator.prove import opcodes, products

WORDS = Path(__file__).with_name("hardware_words")
OTHERS = ("MUFU.LG2", "FCHK")
"""Logarithms have other last bits here; FCHK says more often that a quotient takes the slow way."""


def test_each_form_of_instruction_gives_the_words_of_the_gpu():
    differing = opcodes.compare(WORDS / "opcodes.npz")
    assert [text for text in differing if not text.startswith(OTHERS)] == []


def test_products_and_matrix_moves_give_the_words_of_the_gpu():
    assert products.compare(WORDS) == []
