"""What the command lines of the engine benchmarks ask vLLM for, and how rows of their records are named."""

from __future__ import annotations

import argparse

import pytest
from tsmla.integrations import vllm

from benchmarks import engine_tables
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


@pytest.mark.parametrize(
    "sparse, architecture, decode, call",
    [
        (False, "DeepseekV3ForCausalLM", "TSMLA", "vLLM 4 x 64 + 2, 16 heads, 24 layers, bf16 cache"),
        (
            True,
            "DeepseekV32ForCausalLM",
            "TSMLA_SPARSE",
            "vLLM 4 x 64 + 2, chosen keys, 16 heads, 24 layers, bf16 cache",
        ),
    ],
)
def test_a_sparse_model_chooses_its_keys(monkeypatch, sparse, architecture, decode, call):
    monkeypatch.setattr(vllm, "selected_names", lambda sparse: ("TSMLA_SPARSE" if sparse else "TSMLA", "TSMLA"))
    parser = argparse.ArgumentParser()
    model.add_arguments(parser)
    given = parser.parse_args(["auto", "TSMLA", *["--sparse"] * sparse])
    options = model.forwarded(given)
    shape, attention = model.shape(options), model.attention(given.backends[1], options)
    assert shape["architectures"] == [architecture] and ("index_topk" in shape) == sparse
    assert attention == {"backend": decode, "mla_prefill_backend": "TSMLA", "use_prefill_query_quantization": False}
    assert model.label(given) == "auto-16-heads" + "-sparse" * sparse
    record = {"options": options, "results": [{"case": "4x64+2", "seconds": {"auto": [2.0], "TSMLA": [1.0]}}]}
    assert [row[0] for row in engine_tables.rows(record)] == [call]
