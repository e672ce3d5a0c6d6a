"""The fuzzer's random calls on the machine's GPU, and every case that failed once."""

from __future__ import annotations

import pytest
import tsmla
from fuzz.places import Place
from fuzz.properties import PROPERTIES, check
from fuzz.search import Found, kernels_of, search
from fuzz.test_found import FOUND

SECONDS = 5.0
LEAST = 20


@pytest.mark.parametrize("name", PROPERTIES)
def test_random_calls(name, seed, arch):
    found = Found()
    search(name, Place(str(arch), device=True), SECONDS, seed, found, least=LEAST)
    assert not found.failures, "\n".join(map(str, found.failures.values()))
    assert found.cases[name, str(arch)] >= LEAST or not kernels_of(name, str(arch))


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND.keys())
def test_found_case(case, arch):
    if tsmla.why_unsupported(case.variant(str(arch))) is None:
        check(case, Place(str(arch), device=True))
