"""The identity of a compiled kernel: one frozen dataclass per operator, and the symbol it is exported under.

Everything that changes the machine code is a field here; nothing else is. Batch size, lengths, head counts,
strides and scales are run-time values. The builder, the manifest, the loader, the JIT cache, log lines and test
ids all print `variant.symbol()`; no other place spells a name. Standard library only.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, ClassVar

from .arch import Arch
from .dtype import Dtype
from .row_format import RowFormat, uniform_row


@dataclasses.dataclass(frozen=True)
class _Variant:
    """What every operator's variant can do; `family` names the operator."""

    family: ClassVar[str]
    arch: Arch

    def symbol(self) -> str:
        """The exported function's name, unique to this variant and a valid C identifier."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, with the family, as the manifest stores them; `variant_from_dict` reads them back."""
        return {"family": self.family, **{f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}}

    def __str__(self) -> str:
        return self.symbol()


def _plain(value: Any) -> Any:
    if isinstance(value, RowFormat):
        return value.to_dict()
    return value.value if isinstance(value, enum.Enum) else value


def _flag(on: bool, yes: str, no: str) -> str:
    return yes if on else no


@dataclasses.dataclass(frozen=True)
class PrefillVariant(_Variant):
    """One compiled ragged attention forward: q, k, v of `dtype` in, `out_dtype` out, optional natural-log LSE.

    masked: a bit mask says which keys a query sees. Such a kernel is told at run time whether it is causal, too
    (`causal` is False), and always writes an LSE."""

    family: ClassVar[str] = "prefill"
    arch: Arch
    dtype: Dtype
    out_dtype: Dtype
    d_qk: int
    d_v: int
    causal: bool
    lse: bool
    masked: bool = False

    def symbol(self) -> str:
        name = f"tsmla_prefill_{self.arch}_{self.dtype}_to_{self.out_dtype}_d{self.d_qk}x{self.d_v}"
        kind = _flag(self.causal, "causal", "full"), _flag(self.lse, "lse", "nolse")
        if self.masked:  # all of them are of one kind
            kind = ("masked", *(() if kind == ("full", "lse") else kind))
        return "_".join((name, *kind))


@dataclasses.dataclass(frozen=True)
class PackVariant(_Variant):
    """One compiled K/V pack: cat(k_nope, broadcast k_pe) and v of `dtype`, scaled and cast to `out_dtype`."""

    family: ClassVar[str] = "pack"
    arch: Arch
    dtype: Dtype
    out_dtype: Dtype
    d_nope: int
    d_rope: int
    d_v: int

    def symbol(self) -> str:
        return f"tsmla_pack_{self.arch}_{self.dtype}_to_{self.out_dtype}_d{self.d_nope}x{self.d_rope}x{self.d_v}"


class _OfRows:
    """What variants that read or write a cache of `row`s know of its tensors."""

    row: RowFormat

    @property
    def apart(self) -> bool:
        """Whether rows lie in several tensors."""
        return self.row.apart

    @property
    def cache_dtype(self) -> Dtype:
        """Dtype of the cache's first tensor; where its rows hold pieces of two dtypes, that of the first piece."""
        return self.row.pieces[0].dtype

    @property
    def rope_dtype(self) -> Dtype:
        return self.row.piece("rope").dtype

    @property
    def row_width(self) -> int:
        """Elements of `cache_dtype` in a row of the cache's first tensor."""
        bytes = self.row.pieces[0].bytes if self.apart else self.row.bytes
        return bytes * 8 // self.cache_dtype.bits


@dataclasses.dataclass(frozen=True)
class DecodeVariant(_OfRows, _Variant):
    """One compiled absorbed decode over a paged latent cache: a query and a cache of `row`s in, `out_dtype` out,
    optional base-2 LSE. The query is of `dtype`; its rope piece has the dtype of the row's. Without a row given, it is
    the `uniform_row` of `dtype`. gathers: keys are copied row by row, so that a table may list single keys; without it,
    runs of at least 16 keys of one page."""

    family: ClassVar[str] = "decode"
    arch: Arch
    dtype: Dtype
    out_dtype: Dtype
    lse: bool
    row: RowFormat = None  # type: ignore[assignment]
    gathers: bool = False

    def __post_init__(self) -> None:
        if self.row is None:
            object.__setattr__(self, "row", uniform_row(self.dtype))

    @property
    def rope_may_be_apart(self) -> bool:
        """Whether the cache's rope pieces may lie in a tensor of their own: where calls say whether they do, and where
        they always do."""
        return self.apart or self.rope_at is not None

    @property
    def rope_at(self) -> int | None:
        """The byte of a row that its rope piece begins with, where that is copied by itself."""
        apart = self.gathers and self.row.scales is None and self.row.has("rope")
        return self.row.offset("rope") if apart else None

    def symbol(self) -> str:
        return "_".join(
            (
                f"tsmla_decode_{self.arch}_{self.dtype}_to_{self.out_dtype}_{self.row.text(self.dtype)}",
                *(("gathers",) if self.gathers else ()),
                _flag(self.lse, "lse", "nolse"),
            )
        )


@dataclasses.dataclass(frozen=True)
class _CacheVariant(_OfRows, _Variant):
    """Rows of `dtype`, as projections produce and take them, on one side and a cache of `row`s on the other."""

    dtype: Dtype
    row: RowFormat

    def symbol(self) -> str:
        return f"tsmla_{self.family}_{self.arch}_{self.dtype}_{self.row.text(self.dtype)}"


@dataclasses.dataclass(frozen=True)
class WriteCacheVariant(_CacheVariant):
    """One compiled writer of cache rows: quantises and scatters."""

    family: ClassVar[str] = "write_cache"


@dataclasses.dataclass(frozen=True)
class ReadCacheVariant(_CacheVariant):
    """One compiled reader of cache rows: gathers and dequantises."""

    family: ClassVar[str] = "read_cache"


@dataclasses.dataclass(frozen=True)
class QuantizeQVariant(_CacheVariant):
    """One compiled quantiser of query rows, which become rows of the cache's format."""

    family: ClassVar[str] = "quantize_q"


@dataclasses.dataclass(frozen=True)
class KeyMaskVariant(_Variant):
    """One compiled maker of key masks: lists of chosen keys in, a bit for each key of a query token out."""

    family: ClassVar[str] = "key_mask"

    def symbol(self) -> str:
        return f"tsmla_key_mask_{self.arch}"


_CLASSES = (
    PrefillVariant, DecodeVariant, PackVariant, WriteCacheVariant, ReadCacheVariant, QuantizeQVariant, KeyMaskVariant,
)  # fmt: skip
Variant = (
    PrefillVariant
    | DecodeVariant
    | PackVariant
    | WriteCacheVariant
    | ReadCacheVariant
    | QuantizeQVariant
    | KeyMaskVariant
)

FAMILIES: dict[str, type[Variant]] = {cls.family: cls for cls in _CLASSES}


_TYPES = {"arch": Arch, "dtype": Dtype, "out_dtype": Dtype, "row": RowFormat}
_FLAGS = ("causal", "lse", "gathers", "masked")
_FIELDS: dict[str, dict[str, type]] = {
    family: {f.name: _TYPES.get(f.name) or (bool if f.name in _FLAGS else int) for f in dataclasses.fields(cls)}
    for family, cls in FAMILIES.items()
}
_OPTIONAL = {
    family: {f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING}
    for family, cls in FAMILIES.items()
}


def variant_from_dict(plain: dict[str, Any]) -> Variant:
    """The variant that `to_dict` described; a field that has a default may be left out. Raises ValueError naming the
    field that is missing, unknown or wrong."""
    values = dict(plain)
    family = values.pop("family", None)
    if family not in FAMILIES:
        raise ValueError(f"family is {family!r}; known families: {', '.join(FAMILIES)}")
    fields = _FIELDS[family]
    if unknown := sorted((values.keys() ^ fields.keys()) - (_OPTIONAL[family] - values.keys())):
        raise ValueError(f"{family} variant has missing or unknown fields: {', '.join(unknown)}")
    for name, value in values.items():
        expected = fields[name]
        try:
            values[name] = _read(value, expected)
        except ValueError as error:
            why = f": {error}" if expected is RowFormat else ""
            raise ValueError(f"{family} variant field {name} is {value!r}, not a {expected.__name__}{why}") from None
    return FAMILIES[family](**values)


def _read(value: Any, expected: type) -> Any:
    """The field that `_plain` wrote. Raises ValueError where it is of another type."""
    if expected is RowFormat:
        return RowFormat.from_dict(value)
    if expected in (bool, int) and type(value) is not expected:
        raise ValueError
    return expected(value)
