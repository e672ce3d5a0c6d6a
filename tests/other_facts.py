"""An architecture with other facts than its own, for one test."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tsmla.identity.arch import Arch


def change(monkeypatch: pytest.MonkeyPatch, arch: Arch, **facts: Any) -> None:
    monkeypatch.setattr(arch, "facts", dataclasses.replace(arch.facts, **facts))
