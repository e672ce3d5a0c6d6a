"""Definitions for flashinfer-bench: a data set that can be read, and references that compute what they say."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math

import pytest
import torch

from benchmarks.definitions import write

DEFINITIONS = list(write.definitions())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    out = tmp_path_factory.mktemp("set")
    write.run(argparse.Namespace(out=out))
    return out


def functions(text: str) -> dict[str, list[str]]:
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: [argument.arg for argument in node.args.args] for node in found}


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_a_definition_says_all(dataset, definition):
    """Its reference and its solution take the inputs in their order, and every axis of a tensor is defined."""
    own = f"{definition.kind}/{definition.name}.json"
    plain = json.loads((dataset / "definitions" / own).read_text())
    solution = json.loads((dataset / "solutions" / own).read_text())
    taken = list(plain["inputs"])
    assert functions(plain["reference"])["run"] == functions(solution["sources"][0]["content"])["run"] == taken
    assert not {"tsmla", "benchmarks"} & {name.partition(".")[0] for name in imported(plain["reference"])}
    tensors = [*plain["inputs"].values(), *plain["outputs"].values()]
    assert {axis for tensor in tensors for axis in tensor["shape"] or ()} == plain["axes"].keys()
    assert solution["definition"] == plain["name"] and plain["description"]


def imported(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(text)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_workloads_have_sizes_and_what_is_not_random(dataset, definition):
    plain = json.loads((dataset / "definitions" / definition.kind / f"{definition.name}.json").read_text())
    lines = (dataset / "workloads" / definition.kind / f"{definition.name}.jsonl").read_text().splitlines()
    variable = {name for name, axis in plain["axes"].items() if axis["type"] == "var"}
    constant = {name: axis["value"] for name, axis in plain["axes"].items() if axis["type"] == "const"}
    assert len({line["workload"]["uuid"] for line in map(json.loads, lines)}) == len(lines) >= 2
    for line in map(json.loads, lines):
        sizes, inputs = line["workload"]["axes"], line["workload"]["inputs"]
        assert sizes.keys() == variable and inputs.keys() == plain["inputs"].keys()
        for name, tensor in plain["inputs"].items():
            stored = inputs[name]["type"] == "safetensors"
            assert stored == (tensor["dtype"] == "int32"), name  # random whole numbers would be no table and no length
            if stored:
                blob = (dataset / inputs[name]["path"]).read_bytes()
                header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])[name]
                assert header["shape"] == [(sizes | constant)[axis] for axis in tensor["shape"]]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.name)
def test_outputs_can_be_looked_at(definition):
    """flashinfer-bench 0.1.2 asks torch whether an output has infinities, which torch does not know of every dtype."""
    for _, dtype in definition.outputs.values():
        assert not torch.isinf(torch.zeros(1).to(getattr(torch, dtype))).any()


def test_flashinfer_bench_reads_it(dataset):
    data = pytest.importorskip("flashinfer_bench.data")
    read = data.TraceSet.from_path(str(dataset))
    assert read.definitions.keys() == {definition.name for definition in DEFINITIONS}
    assert all(len(read.solutions[name]) == 1 and read.workloads[name] for name in read.definitions)


def reference(module: str):
    return importlib.import_module(f"benchmarks.definitions.reference.{module}").run


def test_the_decode_sees_keys_up_to_each_token():
    """Weights are equal where all keys are, so that values count: token t of two sees all but the last 1 - t keys."""
    cache = torch.zeros(2, 64, 576).bfloat16()
    cache[1, :3, 0] = torch.tensor([3.0, 6.0, 12.0])
    query = torch.zeros(1, 2, 4, 576).bfloat16()
    table, length = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    out, lse = reference("decode")(query, cache, table, length, 1.0)
    assert out[0, :, :, 0].tolist() == [[4.5] * 4, [7.0] * 4]
    torch.testing.assert_close(lse, torch.tensor([1.0, math.log2(3)]).view(1, 2, 1).expand(1, 2, 4))
    out, lse = reference("decode")(query, cache, table, length * 0, 1.0)
    assert not out.any() and lse.isneginf().all()


def test_chosen_keys_are_those_of_the_list():
    cache = torch.zeros(2, 64, 576).bfloat16()
    cache[1, 5, 7], cache[0, 2, 7] = 4.0, 2.0
    indices = torch.tensor([[69, -1], [69, 2]], dtype=torch.int32)
    out, lse = reference("chosen")(torch.zeros(2, 3, 576).bfloat16(), cache, indices, 1.0)
    assert out[:, :, 7].tolist() == [[4.0] * 3, [3.0] * 3] and lse.tolist() == [[0.0] * 3, [1.0] * 3]


def test_the_prefill_is_causal_from_the_end():
    """The second sequence has three keys for two query tokens, the first more query tokens than keys."""
    q, k = torch.zeros(5, 1, 192).bfloat16(), torch.zeros(4, 1, 192).bfloat16()
    v = torch.tensor([8.0, 3.0, 6.0, 12.0]).view(4, 1, 1).expand(4, 1, 128).bfloat16()
    ends = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 1, 4]).int()
    out, lse = reference("prefill")(q, k, v, *ends, 1.0)
    assert out[:, 0, 0].tolist() == [0.0, 0.0, 8.0, 4.5, 7.0]
    torch.testing.assert_close(lse[:, 0], torch.tensor([-math.inf, -math.inf, 0.0, math.log(2), math.log(3)]))
