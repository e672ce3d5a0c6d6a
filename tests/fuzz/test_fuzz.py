"""Random calls of every operator on every architecture for two minutes in all, other ones in each run."""

from __future__ import annotations

import pytest

from .places import ARCHS, Place
from .properties import PROPERTIES
from .search import Found, search

SECONDS = 120.0
LEAST = 5
_WEIGHTS = sum(part.weight for part in PROPERTIES.values()) * len(ARCHS)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", PROPERTIES)
def test_random_calls(name, arch, seed, counted):
    found = Found()
    search(name, Place(arch), SECONDS * PROPERTIES[name].weight / _WEIGHTS, seed, found, least=LEAST)
    counted.cases.update(found.cases)
    assert not found.failures, "\n".join(map(str, found.failures.values()))
    assert found.cases[name, arch] >= LEAST
