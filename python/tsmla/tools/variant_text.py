"""Variants as people write them: FIELD=VALUE,... for `tsmla warmup --variant` and `tsmla probe --variant`.

Standard library only.
"""

from __future__ import annotations

import dataclasses

from ..errors import ArgumentError
from ..identity.arch import Arch
from ..identity.row_format import ROWS
from ..identity.variant import FAMILIES, Dtype, Variant, variant_from_dict

METAVAR = "FIELD=VALUE,..."
_ACCEPTED = {
    "Arch": "|".join(Arch),
    "Dtype": "|".join(Dtype),
    "RowFormat": "|".join(ROWS),
    "int": "NUMBER",
    "bool": "true|false",
}
"""Type of a field -> what its value may be."""


def variant_of(text: str) -> Variant:
    """Return the variant that a text such as family=pack,arch=sm_90a,dtype=bf16,... describes.

    pdl=true and pdl=false are accepted and name the same kernel: it serves launches with and without programmatic
    dependent launch. Raises ArgumentError with the fields and values that are accepted.
    """
    values: dict[str, object] = {}
    for part in text.split(","):
        name, equals, word = part.partition("=")
        if not equals:
            raise _refused(text, f"{part!r} is not FIELD=VALUE", values)
        if name in values:
            raise _refused(text, f"{name} is given twice", values)
        values[name] = ROWS[word].to_dict() if name == "row" and word in ROWS else _value(word)
    if type(values.get("pdl", False)) is not bool:
        raise _refused(text, f"field pdl is {values['pdl']!r}, not a bool", values)
    values.pop("pdl", None)
    try:
        return variant_from_dict(values)
    except ValueError as error:
        raise _refused(text, str(error), values) from None


def accepted(family: str) -> str:
    """Return what describes a variant of a family: fields that have a default in brackets."""
    words = f"family={family}"
    for field in dataclasses.fields(FAMILIES[family]):
        word = f",{field.name}={_ACCEPTED[str(field.type).removesuffix(' | None')]}"
        words += word if field.default is dataclasses.MISSING else f"[{word}]"
    return words


def _value(word: str) -> object:
    if word.isascii() and word.isdigit() and len(word) < 10:
        return int(word)
    return {"true": True, "false": False}.get(word, word)


def _refused(text: str, why: str, values: dict[str, object]) -> ArgumentError:
    family = values.get("family")
    families = [family] if isinstance(family, str) and family in FAMILIES else [*FAMILIES]
    shown = "\n  ".join(accepted(name) for name in families)
    return ArgumentError(f"--variant {text}: {why}; accepted:\n  {shown}")
