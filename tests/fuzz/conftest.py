"""What the fuzzer's own tests share."""

from __future__ import annotations

import random

import pytest

from .pack_case import PackCase
from .places import Place
from .properties import check


@pytest.fixture(scope="session")
def seed() -> int:
    """A new one in each run. Builds the emulator, so that no test's time is spent on that."""
    check(PackCase(), Place("sm_90a"))
    return random.SystemRandom().randrange(2**32)
