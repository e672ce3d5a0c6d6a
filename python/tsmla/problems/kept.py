"""What cases need, made once: inputs, and what results must be, are kept for the other variants that ask for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from .cases import cases_of

_Asked = ParamSpec("_Asked")
_Made = TypeVar("_Made")
_KEPT: list[Any] = []
"""The functions whose results are kept."""


def kept(*kinds: str) -> Callable[[Callable[_Asked, _Made]], Callable[_Asked, _Made]]:
    """Keep what a function makes for cases of these KINDS, until `forget`.

    It keeps as many results as one of them has cases: fewer would be dropped before they are asked for again.
    """
    most = max(len(cases_of(kind, full=True)) for kind in kinds)

    def keep(make: Callable[_Asked, _Made]) -> Callable[_Asked, _Made]:
        _KEPT.append(functools.lru_cache(most)(make))
        return _KEPT[-1]  # type: ignore[no-any-return]

    return keep


def forget() -> None:
    """Forget everything that is kept: what a case needs is drawn anew, in memory of its own."""
    for made in _KEPT:
        made.cache_clear()
