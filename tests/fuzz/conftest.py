"""What the fuzzer's own tests share: a seed, and the count of cases, which are told at the end of a run."""

from __future__ import annotations

import random

import pytest

from .pack_case import PackCase
from .places import Place
from .properties import check
from .search import Found

_SEED, _FOUND = pytest.StashKey[int](), pytest.StashKey[Found]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_SEED], config.stash[_FOUND] = random.SystemRandom().randrange(2**32), Found()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = config.stash[_FOUND].cases
    if counts:
        terminalreporter.write_line(f"fuzz: seed {config.stash[_SEED]}, {counts.total()} random cases")


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """A new one in each run. Builds the emulator, so that no test's time is spent on that."""
    check(PackCase(), Place("sm_90a"))
    return pytestconfig.stash[_SEED]


@pytest.fixture(scope="session")
def counted(pytestconfig: pytest.Config) -> Found:
    """Where random cases are counted."""
    return pytestconfig.stash[_FOUND]
