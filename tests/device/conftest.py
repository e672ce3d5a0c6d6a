"""Tests that run kernels: each is skipped, with the reason, where there is no GPU that tsmla has kernels for."""

from __future__ import annotations

import random

import pytest
import torch
from tsmla import TsmlaError
from tsmla.identity.arch import Arch
from tsmla.operators import checks


def _why_skipped() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA GPU; torch sees none"
    try:
        checks.arch_of(torch.device("cuda", torch.cuda.current_device()))
    except TsmlaError as error:
        return str(error)
    return None


@pytest.fixture(scope="package", autouse=True)
def arch() -> Arch:
    """The architecture of the GPU under test."""
    if reason := _why_skipped():
        pytest.skip(reason)
    return checks.arch_of(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def seed() -> int:
    """A new seed for torch's generators each time; a failing test shows it among its captured output."""
    value = random.SystemRandom().randrange(2**32)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
