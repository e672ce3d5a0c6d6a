"""References of emulated calls that compute with ordinary tensors."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

Reference = TypeVar("Reference", bound=Callable[..., Any])


def in_plain_tensors(reference: Reference) -> Reference:
    """A reference that computes with ordinary tensors what it is asked of emulated ones, each of whose results would
    have guarded memory of its own. Its results are emulated, as those that they are compared with."""

    @functools.wraps(reference)
    def computed(*arguments: Any, **named: Any) -> Any:
        emulated = sys.modules.get("tsmla_emulator.run.host.tensor")
        if emulated is None:
            return reference(*arguments, **named)
        found = []

        def plain(value: Any) -> Any:
            if isinstance(value, emulated.EmulatedTensor):
                found.append(value)
                return emulated.plain(value)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
                return dataclasses.replace(value, **tree_map(plain, fields))
            return value

        results = reference(*tree_map(plain, arguments), **tree_map(plain, named))
        if not found:
            return results
        return tree_map(lambda x: emulated.to_device(x) if isinstance(x, torch.Tensor) else x, results)

    return computed  # type: ignore[return-value]
