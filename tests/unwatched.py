"""Emulated calls that only have to give a result."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tsmla_emulator.pytest_plugin import Gpu


@contextlib.contextmanager
def unwatched(gpu: Gpu) -> Iterator[None]:
    """A context whose calls are not searched for races, which takes half of their time. They are there for
    others to be compared with, and other tests make such calls under watch."""
    emulation = gpu.emulation
    if emulation is None:
        yield
        return
    watched, emulation.options = emulation.options, dataclasses.replace(emulation.options, happens_before=False)
    try:
        yield
    finally:
        emulation.options = watched
