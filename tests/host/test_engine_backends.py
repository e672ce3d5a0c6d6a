"""How backends of the engine benchmarks are named on their command line."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.engines import model
from benchmarks.engines.model import Backend


@pytest.mark.parametrize(
    "text, backend",
    [
        ("FLASHMLA", Backend("FLASHMLA", "auto")),
        ("TSMLA", Backend("TSMLA", "TSMLA")),
        ("TSMLA+FLASH_ATTN", Backend("TSMLA", "FLASH_ATTN")),
        ("TSMLA,A=1,B=2=3", Backend("TSMLA", "TSMLA", ("A=1", "B=2=3"))),
    ],
)
def test_a_backend_is_what_its_name_says(text, backend):
    assert Backend.parse(text) == backend and str(backend) == text


@pytest.mark.parametrize("text", ["TSMLA,A", "TSMLA,=1", "TSMLA,"])
def test_variables_without_a_name_or_a_value_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=VALUE behind commas"):
        Backend.parse(text)


def test_speculation_is_a_method_and_a_number():
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    speculate = parser.parse_args(["auto", "--speculate", "mtp:3"]).speculate
    assert speculate == {"method": "mtp", "num_speculative_tokens": 3}
    for text in ("mtp", "mtp:", "mtp:x", "eagle:3"):
        with pytest.raises(SystemExit):
            parser.parse_args(["auto", "--speculate", text])
