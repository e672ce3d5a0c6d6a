"""Random calls of every operator on every architecture that has kernels of its own for it, for a minute and a half in
all, other ones in each run."""

from __future__ import annotations

import pytest
from emulated_archs import KERNELS, PREFILLS
from tsmla.identity.variant import PrefillVariant

from .places import Place
from .properties import PROPERTIES
from .search import Found, kernels_of, search

SECONDS = 90.0
LEAST = 5
SEARCHES = [
    (name, arch)
    for name, part in PROPERTIES.items()
    for arch in (PREFILLS if part.family is PrefillVariant and "refused" not in name else KERNELS)
    if kernels_of(name, arch)
]
_WEIGHTS = sum(PROPERTIES[name].weight for name, _ in SEARCHES)


@pytest.mark.parametrize("name, arch", SEARCHES)
def test_random_calls(name, arch, seed, counted):
    found = Found()
    search(name, Place(arch), SECONDS * PROPERTIES[name].weight / _WEIGHTS, seed, found, least=LEAST)
    counted.cases.update(found.cases)
    assert not found.failures, "\n".join(map(str, found.failures.values()))
    assert found.cases[name, arch] >= LEAST
