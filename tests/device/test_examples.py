"""The runnable examples on a GPU, as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def largest_error(*command: str) -> float:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return float(re.search(r"error ([\d.e+-]+)", done.stdout)[1])


@pytest.mark.parametrize("file", ["prefill_with_cached_prefix", "fp8_prefill", "decode_in_a_cuda_graph", "chosen_keys"])
def test_example(file):
    assert 0 < largest_error(sys.executable, str(EXAMPLES / f"{file}.py")) < 0.06


def test_context_parallel():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; torch sees {torch.cuda.device_count()}")
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert 0 < largest_error(*run, str(EXAMPLES / "context_parallel.py")) < 0.03
