"""A row of the decode's cache as data: what is stored of one key, piece by piece. Standard library only.

The latent piece is key and value, the rope piece, if there is one, is key only. `ROWS` are the formats that kernels
exist for, by the names that operators have for them: `mla_write_cache` and `mla_read_cache` take all, decode takes
`uniform_row`s, both pieces of the query's dtype, without scales, and those of `Facts.decode_rows`.
docs/reference/cache-formats.md has their pictures and errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from .dtype import Dtype, ScaleDtype, bytes_of

NAMES = ("latent", "rope")
"""What the first and the second piece are called where a symbol does not say otherwise."""
SCALE_BYTES = bytes_of(ScaleDtype.FP32.bits)
"""Bytes of a scale in the rows that kernels exist for."""
LARGEST_E4M3 = 448.0
LEAST_SCALE = 2.0**-126
"""Smallest scale where a row has several, as vLLM has it: the smallest normal float32."""
LEAST_AMAX = 1e-26
"""Smallest magnitude that a whole row's scale is made from (SnapMLA's), so that its other pieces stay finite."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A named part of a row: `columns` elements of one dtype, without gaps."""

    name: str
    dtype: Dtype
    columns: int

    @property
    def bytes(self) -> int:
        return bytes_of(self.dtype.bits, self.columns)


@dataclasses.dataclass(frozen=True)
class Scales:
    """Factors of a piece's elements, one of `dtype` for every `columns` of them: one per key where that is the whole
    piece. They lie in the row, right behind their piece, or (`in_row` False) in tensors of their own, and then every
    piece does. whole_row: the one scale of a key is the other pieces' factor, too, though they do not decide it."""

    piece: str
    columns: int
    in_row: bool
    whole_row: bool = False
    dtype: ScaleDtype = ScaleDtype.FP32


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How one key lies in the cache: its pieces in their order, without gaps, and the scales of one of them."""

    pieces: tuple[Piece, ...]
    scales: Scales | None = None

    def __post_init__(self) -> None:
        names = [piece.name for piece in self.pieces]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a row needs pieces of different names, not {names}")
        for piece in self.pieces:
            if not re.fullmatch("[a-z]{1,20}", piece.name) or not 0 < piece.columns < 1 << 16:
                raise ValueError(f"a piece has a name of small letters and some columns, not {piece}")
        if (scales := self.scales) is not None:
            if scales.piece not in names:
                raise ValueError(f"the scales are those of {scales.piece}; pieces are {', '.join(names)}")
            if scales.columns <= 0 or self.piece(scales.piece).columns % scales.columns:
                raise ValueError(f"a scale of {scales.columns} columns does not divide {self.piece(scales.piece)}")
            if scales.whole_row and scales.columns != self.piece(scales.piece).columns:
                raise ValueError(f"a whole row has one scale, not one for every {scales.columns} columns")

    def piece(self, name: str) -> Piece:
        """The piece of this name; KeyError where the row has none."""
        return {piece.name: piece for piece in self.pieces}[name]

    @property
    def columns(self) -> int:
        """Elements of a row: what a query row has, too."""
        return sum(piece.columns for piece in self.pieces)

    @property
    def value_columns(self) -> int:
        """Elements that are also the value, and so columns of the output."""
        return self.piece(NAMES[0]).columns

    @property
    def dtype(self) -> Dtype:
        """The dtype of all elements; ValueError where pieces differ."""
        (dtype, *others) = {piece.dtype for piece in self.pieces}
        if others:
            raise ValueError(f"a row of {self} has no single dtype")
        return dtype

    @property
    def bytes(self) -> int:
        """Bytes from one row to the next where rows lie without gaps."""
        return sum(piece.bytes + self._scale_bytes(piece) for piece in self.pieces)

    def has(self, name: str) -> bool:
        """Whether the row has a piece of this name."""
        return any(piece.name == name for piece in self.pieces)

    def first_column(self, name: str) -> int:
        """Elements of a row before a piece."""
        return sum(piece.columns for piece in self._before(name))

    def offset(self, name: str) -> int:
        """The byte of a row that a piece begins with."""
        return sum(piece.bytes + self._scale_bytes(piece) for piece in self._before(name))

    @property
    def scales_offset(self) -> int | None:
        """The byte of a row that its scales begin with; None where rows hold none."""
        if self.scales is None or not self.scales.in_row:
            return None
        return self.offset(self.scales.piece) + self.piece(self.scales.piece).bytes

    @property
    def scales_per_row(self) -> int:
        return self.piece(self.scales.piece).columns // self.scales.columns if self.scales else 0

    @property
    def apart(self) -> bool:
        """Whether pieces and scales lie in tensors of their own."""
        return self.scales is not None and not self.scales.in_row

    def text(self, dtype: Dtype) -> str:
        """This row's part of a symbol, different for every row: columns of the pieces, with what is not usual: names
        other than NAMES, dtypes other than the variant's `dtype`, and scales (s, the columns of one, and a dtype other
        than float32)."""
        return "d" + "x".join(self._text_of(i, piece, dtype) for i, piece in enumerate(self.pieces))

    def __str__(self) -> str:
        """This row in the words of errors."""
        return ", ".join(f"{piece.name} {piece.dtype} {piece.columns}{self._spelled(piece)}" for piece in self.pieces)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        pieces = [{"name": p.name, "dtype": p.dtype.value, "columns": p.columns} for p in self.pieces]
        scales = {**vars(self.scales), "dtype": self.scales.dtype.value} if self.scales else None
        return {"pieces": pieces, "scales": scales}

    @classmethod
    def from_dict(cls, plain: Any) -> RowFormat:
        """The row that `to_dict` described. Raises ValueError for every other value."""
        if type(plain) is not dict or plain.keys() != {"pieces", "scales"} or type(plain["pieces"]) is not list:
            raise ValueError(f"a row is described by its pieces and scales, not by {plain!r:.200}")
        pieces = tuple(Piece(**_typed(piece, _PIECE)) for piece in plain["pieces"])
        scales = plain["scales"]
        return cls(pieces, None if scales is None else Scales(**_typed(scales, _SCALES)))

    def _before(self, name: str) -> tuple[Piece, ...]:
        return self.pieces[: self.pieces.index(self.piece(name))]

    def _scales_of(self, piece: Piece) -> Scales | None:
        return self.scales if self.scales and self.scales.piece == piece.name else None

    def _scale_bytes(self, piece: Piece) -> int:
        scales = self._scales_of(piece)
        return bytes_of(scales.dtype.bits, piece.columns // scales.columns) if scales and scales.in_row else 0

    def _text_of(self, position: int, piece: Piece, dtype: Dtype) -> str:
        name = "" if NAMES[position : position + 1] == (piece.name,) else piece.name
        scales = self._scales_of(piece)
        factors = ""
        if scales:
            unusual = "" if scales.dtype is ScaleDtype.FP32 else scales.dtype
            factors = f"s{scales.columns}{unusual}{'apart' * (not scales.in_row)}{'whole' * scales.whole_row}"
        return f"{name}{piece.columns}{'' if piece.dtype is dtype else piece.dtype}{factors}"

    def _spelled(self, piece: Piece) -> str:
        scales = self._scales_of(piece)
        if scales is None:
            return ""
        place = "in the row" if scales.in_row else "apart"
        return f" (a {scales.dtype} scale for every {scales.columns}, {place}{', of the whole row' * scales.whole_row})"


_PIECE = {"name": str, "dtype": Dtype, "columns": int}
_SCALES = {"piece": str, "columns": int, "in_row": bool, "whole_row": bool, "dtype": ScaleDtype}


def _typed(plain: Any, types: dict[str, type]) -> dict[str, Any]:
    """The values of a JSON object that has these fields of these types."""
    if type(plain) is not dict or plain.keys() != types.keys():
        raise ValueError(f"{plain!r:.200} does not have the fields {', '.join(types)}")
    for name, expected in types.items():
        if type(plain[name]) is not (str if issubclass(expected, str) else expected):
            raise ValueError(f"{name} is {plain[name]!r:.80}, not a {expected.__name__}")
    return {name: expected(plain[name]) for name, expected in types.items()}


def uniform_row(dtype: Dtype) -> RowFormat:
    """512 latent and 64 rope elements of one dtype."""
    return RowFormat((Piece("latent", dtype, 512), Piece("rope", dtype, 64)))


def latent_row(dtype: Dtype) -> RowFormat:
    """512 latent elements of one dtype: a row of a model whose keys do not depend on their position."""
    return RowFormat(uniform_row(dtype).pieces[:1])


def multiplied_row(row: RowFormat, dtype: Dtype) -> RowFormat:
    """The row that products read where the cache has `row`s, and the row of a query, whose latent piece is of `dtype`.
    Scales in a row are of parts of it, which products cannot take out of their sums: such rows become uniform ones."""
    return uniform_row(dtype) if row.scales and row.scales.in_row else row


_E4M3_AND_BF16 = (Piece("latent", Dtype.E4M3, 512), Piece("rope", Dtype.BF16, 64))
ROWS = {
    "bf16": uniform_row(Dtype.BF16),
    "fp16": uniform_row(Dtype.FP16),
    "e4m3": uniform_row(Dtype.E4M3),
    "fp8_ds_mla": RowFormat(_E4M3_AND_BF16, Scales("latent", 128, in_row=True)),
    "snapmla": RowFormat(_E4M3_AND_BF16, Scales("latent", 512, in_row=False, whole_row=True)),
    "latent_bf16": latent_row(Dtype.BF16),
    "latent_fp16": latent_row(Dtype.FP16),
    "latent_e4m3": latent_row(Dtype.E4M3),
}
"""Rows by name. e4m3, latent_e4m3: one scale for the whole cache, which the call has. fp8_ds_mla: DeepSeek's 656 bytes,
under vLLM's name. snapmla: SnapMLA's, one scale for each key, pieces and scales in three tensors. latent_...: without a
rope piece."""


def format_of(row: RowFormat) -> str:
    """The name that a row has in ROWS."""
    return next(name for name, known in ROWS.items() if known == row)
