"""Dataclasses that print what differs from their defaults, and can be pasted back."""

from __future__ import annotations

import dataclasses


class Plain:
    """Gives a dataclass declared with repr=False its short repr."""

    def __repr__(self) -> str:
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        told = [f"{field.name}={value!r}" for field, value in fields if repr(value) != repr(field.default)]
        return f"{type(self).__name__}({', '.join(told)})"
