"""The key is complete: every field changes the symbol, survives JSON, and is all that a kernel is built from."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from typing import Any

import pytest
from example_variants import DECODE, KEY_MASK, PACK, PREFILL, QUANTIZE_Q, READ_CACHE, WRITE_CACHE
from tsmla.errors import ArgumentError
from tsmla.identity.arch import Arch
from tsmla.identity.dtype import ScaleDtype
from tsmla.identity.row_format import ROWS, Piece, RowFormat, Scales
from tsmla.identity.support import why_unsupported
from tsmla.identity.variant import FAMILIES, DecodeVariant, Dtype, Variant, variant_from_dict
from tsmla.tools.variant_text import accepted, variant_of
from tsmla_kernels.registry import recipe

EXAMPLES = (PREFILL, DECODE, PACK, WRITE_CACHE, READ_CACHE, QUANTIZE_Q, KEY_MASK)


def other_values(value: object) -> list[object]:
    if isinstance(value, (Arch, Dtype)):
        return [other for other in type(value) if other != value]
    if isinstance(value, RowFormat):
        return other_rows(value)
    return [not value] if isinstance(value, bool) else [value + 1, value * 10 + 1]


def other_rows(row: RowFormat) -> list[object]:
    """The row with every field of every piece changed in turn, pieces swapped, dropped and added, and all scales."""
    changed: list[object] = []
    for i, piece in enumerate(row.pieces):
        others = [Piece("other", piece.dtype, piece.columns), Piece(piece.name, piece.dtype, piece.columns + 8)]
        others += [Piece(piece.name, dtype, piece.columns) for dtype in Dtype if dtype is not piece.dtype]
        changed += [RowFormat((*row.pieces[:i], other, *row.pieces[i + 1 :])) for other in others]
    changed += [RowFormat(row.pieces[::-1]), RowFormat(row.pieces[:1]), RowFormat(row.pieces[1:])]
    changed.append(RowFormat((*row.pieces, Piece("x", Dtype.BF16, 64))))
    for piece, columns, in_row, dtype in itertools.product(row.pieces, (32, 64), (True, False), ScaleDtype):
        changed.append(RowFormat(row.pieces, Scales(piece.name, columns, in_row, dtype=dtype)))
    for piece, in_row in itertools.product(row.pieces, (True, False)):
        changed.append(RowFormat(row.pieces, Scales(piece.name, piece.columns, in_row, whole_row=True)))
    return [other for other in changed if other != row]


def perturbed() -> list[tuple[Variant, str, object]]:
    return [
        (variant, field.name, other)
        for variant in EXAMPLES
        for field in dataclasses.fields(variant)
        for other in other_values(getattr(variant, field.name))
    ]


def every_combination(variant: Variant) -> list[Variant]:
    """The variant with every combination of enum and flag fields and a few sizes."""
    fields = dataclasses.fields(variant)
    choices = [[value := getattr(variant, f.name), *other_values(value)] for f in fields]
    return [type(variant)(*values) for values in itertools.product(*choices)]


def test_every_family_has_an_example() -> None:
    assert {type(variant) for variant in EXAMPLES} == set(FAMILIES.values())


@pytest.mark.parametrize(("variant", "field", "other"), perturbed())
def test_each_field_changes_symbol_and_identity(variant: Variant, field: str, other: object) -> None:
    changed = dataclasses.replace(variant, **{field: other})
    assert changed.symbol() != variant.symbol()
    assert changed != variant


@pytest.mark.parametrize("variant", EXAMPLES, ids=lambda v: v.family)
def test_symbols_are_unique_over_all_combinations(variant: Variant) -> None:
    variants = every_combination(variant)
    assert len({v.symbol() for v in variants}) == len(variants)


@pytest.mark.parametrize("variant", EXAMPLES, ids=str)
def test_symbol_is_a_c_identifier(variant: Variant) -> None:
    assert re.fullmatch(r"[a-z_][a-z0-9_]*", variant.symbol())
    assert str(variant) == variant.symbol()


@pytest.mark.parametrize("variant", EXAMPLES, ids=lambda v: v.family)
def test_json_values_come_back_as_the_same_variant(variant: Variant) -> None:
    for each in every_combination(variant):
        assert variant_from_dict(each.to_dict()) == each


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"family": "sparse"},
            "family is 'sparse'; known families: prefill, decode, pack, write_cache, read_cache, quantize_q, key_mask",
        ),
        ({"colour": 1}, "missing or unknown fields: colour"),
        ({"lse": 1}, "field lse is 1, not a bool"),
        ({"d_qk": "192"}, "field d_qk is '192', not a int"),
        ({"d_qk": True}, "field d_qk is True, not a int"),
        ({"row": None}, "missing or unknown fields: row"),
        ({"arch": "sm_80"}, "field arch is 'sm_80', not a Arch"),
    ],
)
def test_wrong_json_values_name_the_field(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        variant_from_dict({**PREFILL.to_dict(), **change})


@pytest.mark.parametrize("dtype", Dtype)
def test_a_decode_without_a_row_has_that_of_its_dtype(dtype: Dtype) -> None:
    variant = DecodeVariant(Arch.SM90A, dtype, Dtype.BF16, lse=True)
    assert variant.symbol() == f"tsmla_decode_sm_90a_{dtype}_to_bf16_d512x64_lse"
    plain = variant.to_dict()
    assert [piece["dtype"] for piece in plain.pop("row")["pieces"]] == [dtype, dtype]
    assert variant_from_dict(plain) == variant


def test_a_person_writes_a_row_by_its_name_or_not_at_all() -> None:
    assert "[,row=bf16|" in accepted("decode")
    words = "family=decode,arch=sm_90a,dtype=bf16,out_dtype=bf16,lse=true"
    assert variant_of(words) == DECODE
    assert variant_of("family=write_cache,arch=sm_90a,dtype=bf16,row=fp8_ds_mla") == WRITE_CACHE
    assert accepted("read_cache").endswith(f",row={'|'.join(ROWS)}")
    with pytest.raises(ArgumentError, match="decode variant field row is 'd512x64', not a RowFormat"):
        variant_of(f"{words},row=d512x64")


@pytest.mark.parametrize("value", [None, "d512x64", [], {}, {"pieces": [], "scales": None}])
def test_a_row_of_another_type_names_the_field(value: object) -> None:
    with pytest.raises(ValueError, match="decode variant field row is .*, not a RowFormat: "):
        variant_from_dict({**DECODE.to_dict(), "row": value})


def test_missing_json_value_is_named() -> None:
    plain = PREFILL.to_dict()
    del plain["causal"]
    with pytest.raises(ValueError, match="causal"):
        variant_from_dict(plain)


@pytest.mark.parametrize("variant", [v for v in EXAMPLES if why_unsupported(v) is None], ids=str)
def test_a_kernel_is_built_from_its_variant_alone(variant: Variant) -> None:
    """What the compiler gets is determined by the variant: there is no other way in."""
    made = recipe(variant)
    assert list(inspect.signature(type(made.entry)).parameters) == ["variant"]
    again = recipe(variant)
    assert [str(argument) for argument in made.arguments] == [str(argument) for argument in again.arguments]
    assert attributes(made.entry) == attributes(again.entry)


def attributes(value: Any) -> Any:
    """What an object consists of: attributes of objects that are equal only to themselves, and of those in dicts."""
    if isinstance(value, dict):
        return {name: attributes(x) for name, x in value.items()}
    alone = type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__") and not isinstance(value, type)
    return (type(value), attributes(vars(value))) if alone else value


@pytest.mark.parametrize("arch", Arch)
def test_architecture_of_a_compute_capability(arch: Arch) -> None:
    assert Arch.from_capability(*arch.capability) is arch
    assert arch.value == f"sm_{arch.capability[0]}{arch.capability[1]}a"


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (12, 0)])
def test_other_compute_capabilities_have_no_architecture(capability: tuple[int, int]) -> None:
    assert Arch.from_capability(*capability) is None
