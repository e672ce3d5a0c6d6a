"""tsmla_decode on a GPU against float64 where keys are copied one by one: chosen keys (sparse attention), caches of two
tensors, and pages of fewer than 16 keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import tsmla
from chosen_reference import check_chosen, in_two_tensors, make_chosen
from decode_reference import Sight, check, judge, make_problem
from decode_rows import check_scaled, make_scaled
from tsmla.identity.arch import Arch

FORMATS = {
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "e4m3": {"dtype": torch.float8_e4m3fn},
    "e5m2": {"dtype": torch.float8_e5m2},
    "fp8_ds_mla": {"dtype": torch.bfloat16, "row": "fp8_ds_mla"},
    "snapmla": {"row": "snapmla", "power_of_two": False},
    "latent_bf16": {"dtype": torch.bfloat16, "rope": 0},
    "latent_fp16": {"dtype": torch.float16, "rope": 0},
    "latent_e4m3": {"dtype": torch.float8_e4m3fn, "rope": 0},
}
APART = [format for format in FORMATS if "row" not in FORMATS[format] and "rope" not in FORMATS[format]]
"""Formats whose rope pieces may lie in a tensor of their own."""
CASES = {
    "a list that ends in a tile": ((2, 1), 16, 150, {}),
    "one key": ((3,), 8, 1, {"outside": 0.0}),
    "lists of their own lengths": ((5,), 16, 130, {"lengths": [0, 1, 63, 64, 130]}),
    "several tokens of a request": ((2, 3), 24, 96, {"lengths": [5, 96, 0, 33, 64, 65]}),
    "a row tile and a row": ((1, 1), 65, 128, {}),
    "128 heads": ((4,), 128, 2048, {"pages": 300}),
    "pages of 69 keys": ((64,), 16, 2048, {"pages": 500, "page_size": 69}),
    "one token": ((1,), 16, 1500, {}),
    "nearly all outside": ((7,), 16, 192, {"outside": 0.97}),
    "more tokens than SMs": ((140,), 128, 300, {}),
    "more than 65,535 query rows": ((520,), 128, 4, {}),
}


@pytest.fixture(autouse=True)
def gathers(arch: Arch, seed: int) -> None:
    if not arch.facts.gathered_dtypes:
        pytest.skip(f"decode for {arch} gathers no keys yet")


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(case, format):
    shape, heads, top_k, more = case
    check_chosen(make_chosen(shape, heads, top_k, **format, output_scale=0.5, **more))


@pytest.mark.parametrize("format", APART)
@pytest.mark.parametrize("case", [((5,), 16, 130, 64), ((4,), 128, 2048, 69), ((2, 3), 24, 700, 1)], ids=str)
def test_rope_pieces_in_a_tensor_of_their_own(case, format):
    shape, heads, top_k, page_size = case
    chosen = make_chosen(shape, heads, top_k, **FORMATS[format], pages=300, page_size=page_size)
    check_chosen(chosen, kv_cache=in_two_tensors(chosen.kv_cache))


@pytest.mark.parametrize("format", APART)
@pytest.mark.parametrize("case", [([300, 0, 65], 3, 16), ([4000, 700], 2, 128), ([90, 1, 300], [2, 0, 5], 12)], ids=str)
def test_page_tables_of_a_cache_of_two_tensors(case, format):
    for page_size in (64, 16):
        problem = make_problem(*case, **FORMATS[format], page_size=page_size)
        check(problem, kv_cache=in_two_tensors(problem.kv_cache))


@pytest.mark.parametrize("format", [format for format in FORMATS if "row" not in FORMATS[format]])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_pages_of_fewer_than_16_keys(page_size, format):
    check(make_problem([300, 0, 65], 3, 16, **FORMATS[format], page_size=page_size))
    check(make_problem([2000, 70], 2, 128, **FORMATS[format], page_size=page_size, sight=Sight(window_left=900)))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_pages_of_fewer_than_16_keys_with_a_scale_each(page_size):
    check_scaled(make_scaled([300, 0, 65], 1, 16, page_size, power_of_two=False))
    check_scaled(make_scaled([300, 0, 65], 3, 16, page_size))
    check_scaled(make_scaled([2000, 70], 2, 128, page_size, sight=Sight(window_left=900)))


@pytest.mark.parametrize("form", ["pages of 4", "two tensors"])
def test_visible_lengths_of_each_query_token(form):
    visible = torch.randint(0, 400, (5, 3), dtype=torch.int32, device="cuda")
    page_size = 4 if form == "pages of 4" else 64
    problem = make_problem([1, 64, 390, 0, 200], 3, 16, page_size=page_size, visible=visible, sight=Sight(causal=False))
    check(problem, **({"kv_cache": in_two_tensors(problem.kv_cache)} if form == "two tensors" else {}))


@dataclasses.dataclass
class Captured:
    """One call in a CUDA graph, and the tensors that its replays read."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def of(cls, arguments: dict) -> Captured:
        tsmla.tsmla_decode(**arguments)  # loads the kernel before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = tsmla.tsmla_decode(**arguments)
        return cls(graph, read_by(arguments), out, lse)

    def replay(self, arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the graph computes from what other arguments hold."""
        for name, given in read_by(arguments).items():
            self.inputs[name].copy_(given)
        for result in (self.out, self.lse):
            result.fill_(torch.nan)
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out, self.lse


def read_by(arguments: dict) -> dict[str, torch.Tensor]:
    """The tensors that a call reads, by name."""
    names = ("query", "kv_cache", "indices", "topk_length", "block_tables", "seq_lens")
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    each = {name: x if isinstance(x, tuple) else (x,) for name, x in given.items()}
    return {f"{name}[{i}]": piece for name, pieces in each.items() for i, piece in enumerate(pieces)}


@pytest.mark.parametrize("apart, format", [(False, name) for name in FORMATS] + [(True, name) for name in APART])
def test_replays_read_other_lists_lengths_and_keys(apart, format):
    captured = None
    for lengths in ([300, 5, 64], [0, 300, 1], [65, 64, 0], [299, 3, 130]):
        chosen = make_chosen((3,), 16, 300, **FORMATS[format], lengths=lengths)
        arguments = chosen.arguments(**({"kv_cache": in_two_tensors(chosen.kv_cache)} if apart else {}))
        captured = captured or Captured.of(arguments)
        chosen.judge(*captured.replay(arguments))


@pytest.mark.parametrize("form", ["pages of 2", "two tensors"])
def test_replays_read_other_page_tables_lengths_and_keys(form):
    captured = None
    for lengths in ([600, 64], [63, 599], [64, 600], [599, 63]):  # as many pages in all, and in the longest request
        problem = make_problem(lengths, 2, 16, page_size=2 if form == "pages of 2" else 64)
        cache = problem.kv_cache if form == "pages of 2" else in_two_tensors(problem.kv_cache)
        arguments = problem.arguments(kv_cache=cache)
        captured = captured or Captured.of(arguments)
        judge(problem, *captured.replay(arguments))
