"""References of emulated calls that compute with ordinary tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Reference = TypeVar("Reference", bound=Callable[..., Any])


def in_plain_tensors(reference: Reference) -> Reference:
    """Have a reference compute with ordinary tensors where it is asked of emulated ones, each of whose results would
    have guarded memory of its own."""

    @functools.wraps(reference)
    def computed(*arguments: Any, **named: Any) -> Any:
        emulated = sys.modules.get("tsmla_emulator.run.host.tensor")
        compute = emulated.in_plain_tensors(reference) if emulated else reference
        return compute(*arguments, **named)

    return computed  # type: ignore[return-value]
