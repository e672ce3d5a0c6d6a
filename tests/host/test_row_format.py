"""Rows of a cache as data: sizes and places that follow from a description, and descriptions that are none."""

from __future__ import annotations

import random

import pytest
from cache_rows import WIDTHS
from tsmla.identity.dtype import Dtype, ScaleDtype, bytes_of
from tsmla.identity.row_format import ROWS, SCALE_BYTES, Piece, RowFormat, Scales, multiplied_row, uniform_row
from tsmla.identity.support import LATENT_DIM, ROPE_DIM

LATENT, ROPE = Piece("latent", Dtype.E4M3, 512), Piece("rope", Dtype.BF16, 64)


@pytest.mark.parametrize("dtype", Dtype)
def test_rows_that_kernels_exist_for(dtype: Dtype) -> None:
    row = uniform_row(dtype)
    assert row.text(dtype) == "d512x64"
    assert (row.columns, row.value_columns) == (LATENT_DIM + ROPE_DIM, LATENT_DIM) == (576, 512)
    assert (row.dtype, row.bytes) == (dtype, 576 * dtype.bits // 8)
    assert (row.first_column("rope"), row.offset("rope")) == (512, 512 * dtype.bits // 8)
    assert (row.scales_offset, row.scales_per_row) == (None, 0)


def test_deepseeks_row_of_656_bytes() -> None:
    row = RowFormat((LATENT, ROPE), Scales("latent", 128, in_row=True))
    assert (row.bytes, row.columns, row.value_columns) == (656, 576, 512)
    assert (row.offset("latent"), row.scales_offset, row.offset("rope")) == (0, 512, 528)
    assert (row.scales_per_row, row.first_column("rope")) == (4, 512)
    assert row.text(Dtype.BF16) == "d512e4m3s128x64"
    assert str(row) == "latent e4m3 512 (a float32 scale for every 128, in the row), rope bf16 64"
    with pytest.raises(ValueError, match="no single dtype"):
        row.dtype  # noqa: B018


def test_rows_whose_one_scale_per_key_lies_apart() -> None:
    row = RowFormat((LATENT, ROPE), Scales("latent", 512, in_row=False))
    assert (row.bytes, row.offset("rope"), row.scales_offset, row.scales_per_row) == (640, 512, None, 1)
    assert row.text(Dtype.E4M3) == "d512s512apartx64bf16"


def test_snapmlas_row_whose_scale_is_of_all_its_pieces() -> None:
    row = ROWS["snapmla"]
    assert row == RowFormat((LATENT, ROPE), Scales("latent", 512, in_row=False, whole_row=True))
    assert row.text(Dtype.BF16) == "d512e4m3s512apartwholex64" and row.apart
    assert str(row) == "latent e4m3 512 (a float32 scale for every 512, apart, of the whole row), rope bf16 64"


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
def test_rows_without_a_rope_piece(dtype: Dtype) -> None:
    row = ROWS[f"latent_{dtype}"]
    assert row == RowFormat((Piece("latent", dtype, 512),)) and (row.columns, row.value_columns) == (512, 512)
    assert (row.text(dtype), row.has("latent"), row.has("rope")) == ("d512", True, False)
    assert multiplied_row(row, dtype) == row


def test_products_read_uniform_rows_where_scales_are_of_parts_of_a_row() -> None:
    assert multiplied_row(ROWS["fp8_ds_mla"], Dtype.BF16) == uniform_row(Dtype.BF16)
    for name in ("fp16", "e4m3", "snapmla"):
        assert multiplied_row(ROWS[name], Dtype.E4M3) == ROWS[name]


def test_rows_by_name() -> None:
    widths = {name: row.bytes + row.apart * SCALE_BYTES * row.scales_per_row for name, row in ROWS.items()}
    assert widths == {name: sum(tensors.values()) for name, tensors in WIDTHS.items()}
    assert {name for name, row in ROWS.items() if row.apart} == {name for name, each in WIDTHS.items() if len(each) > 1}
    assert len({row.text(Dtype.BF16) for row in ROWS.values()}) == len(ROWS)


def test_one_scale_per_key_in_the_row() -> None:
    row = RowFormat((LATENT, ROPE), Scales("latent", 512, in_row=True))
    assert (row.bytes, row.scales_offset, row.offset("rope")) == (644, 512, 516)


def test_scales_of_8_bits() -> None:
    row = RowFormat((LATENT, ROPE), Scales("latent", 64, in_row=True, dtype=ScaleDtype.UE8M0))
    assert (row.bytes, row.scales_offset, row.scales_per_row, row.offset("rope")) == (648, 512, 8, 520)
    assert row.text(Dtype.BF16) == "d512e4m3s64ue8m0x64"
    assert str(row) == "latent e4m3 512 (a ue8m0 scale for every 64, in the row), rope bf16 64"


def test_elements_of_4_bits_fill_whole_bytes() -> None:
    assert (bytes_of(4, 512), bytes_of(16), bytes_of(8, 3)) == (256, 2, 3)
    with pytest.raises(ValueError, match="3 elements of 4 bits"):
        bytes_of(4, 3)


def test_random_rows_have_one_text_each_and_come_back_from_json() -> None:
    """Names and sizes are such that are easily taken for each other's ends."""
    chance = random.Random(0)
    texts: dict[str, RowFormat] = {}
    for _ in range(4000):
        names = chance.sample(["latent", "rope", "x", "s", "d", "bf", "apart", "sapart", "xs"], chance.randint(1, 3))
        columns = [1, 6, 8, 12, 16, 61, 64, 128, 512]
        pieces = tuple(Piece(name, chance.choice(list(Dtype)), chance.choice(columns)) for name in names)
        scaled = chance.choice(pieces)
        divisors = [size for size in columns if scaled.columns % size == 0]
        scales = None
        if chance.random() < 0.7:
            columns = chance.choice(divisors)
            whole = columns == scaled.columns and chance.random() < 0.5
            scales = Scales(scaled.name, columns, chance.random() < 0.5, whole, chance.choice(list(ScaleDtype)))
        row = RowFormat(pieces, scales)
        assert texts.setdefault(row.text(Dtype.BF16), row) == row
        assert RowFormat.from_dict(row.to_dict()) == row
        ends = [row.offset(piece.name) + piece.bytes for piece in pieces]
        in_row = scales.dtype.bits // 8 * row.scales_per_row if scales and scales.in_row else 0
        assert row.bytes == sum(piece.bytes for piece in pieces) + in_row
        assert row.bytes - ends[-1] == (in_row if scales and scales.piece == names[-1] else 0)
        assert row.scales_offset is None or row.scales_offset in ends
    assert len(texts) > 1000


@pytest.mark.parametrize(
    ("pieces", "scales", "words"),
    [
        ((), None, "pieces of different names"),
        ((ROPE, ROPE), None, "pieces of different names"),
        ((Piece("Latent", Dtype.BF16, 512),), None, "small letters"),
        ((Piece("d512x64", Dtype.BF16, 512),), None, "small letters"),
        ((Piece("latent", Dtype.BF16, 0),), None, "some columns"),
        ((LATENT,), Scales("rope", 64, True), "the scales are those of rope; pieces are latent"),
        ((LATENT,), Scales("latent", 96, True), "96 columns does not divide"),
        ((LATENT,), Scales("latent", 0, True), "0 columns does not divide"),
        ((LATENT,), Scales("latent", -128, True), "-128 columns does not divide"),
        ((LATENT,), Scales("latent", 128, True, True), "a whole row has one scale, not one for every 128 columns"),
    ],
)
def test_what_is_no_row(pieces: tuple[Piece, ...], scales: Scales | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RowFormat(pieces, scales)


def test_a_piece_that_a_row_does_not_have() -> None:
    with pytest.raises(KeyError, match="rope"):
        RowFormat((LATENT,)).offset("rope")
