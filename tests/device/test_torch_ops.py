"""Traced calls on a GPU: the bits of eager, also when a CUDA graph replays them into outputs full of NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import tsmla.torch_ops  # noqa: F401
from traced_calls import arguments, attention

SIZES = [(300, 16, 3), (301, 16, 4), (77, 6, 2)]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_function_gives_the_bits_of_eager(seed, mode) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, mode=mode)
    for sizes in SIZES:
        given = arguments(*sizes, "cuda")
        want = attention(given)
        for _ in range(3):  # torch's own CUDA graphs warm up, capture and replay
            given["workspace"].random_()
            got = [result.clone() for result in compiled(given)]
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def operators(given: dict[str, Any], results: dict[str, torch.Tensor]) -> None:
    """Prefill, pack and decode as torch.ops have them."""
    k_nope, value = given["kv"].split(128, -1)
    key = torch.cat([k_nope, given["k_pe"].expand(-1, k_nope.shape[1], -1)], -1)
    torch.ops.tsmla.prefill(
        given["query"], key, value, given["ends"], given["batch"], 0.125, results["out"], lse=results["lse"]
    )
    torch.ops.tsmla.pack(
        k_nope, given["k_pe"], value, results["k_fp8"], results["v_fp8"], torch.float8_e4m3fn, k_scale_inv=0.5
    )
    torch.ops.tsmla.decode(
        given["absorbed"],
        given["cache"],
        given["workspace"],
        512,
        64,
        given["tables"],
        given["seq_lens"],
        given["longest"],
        0.1,
        results["decoded"],
        lse=results["decoded_lse"],
        lse_base=math.e,
    )


def poisoned(given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Results full of NaN; FP8 ones of its NaN, 0x7f."""
    (tokens, heads, _), (batch, q_len, *_) = given["query"].shape, given["absorbed"].shape
    shapes = {
        "out": ((tokens, heads, 128), torch.bfloat16),
        "lse": ((tokens, heads), torch.float32),
        "k_fp8": ((tokens, heads, 192), torch.float8_e4m3fn),
        "v_fp8": ((tokens, heads, 128), torch.float8_e4m3fn),
        "decoded": ((batch, q_len, heads, 512), torch.bfloat16),
        "decoded_lse": ((batch, q_len, heads), torch.float32),
    }
    return {name: poison(torch.empty(shape, dtype=dtype, device="cuda")) for name, (shape, dtype) in shapes.items()}


def poison(result: torch.Tensor) -> torch.Tensor:
    if result.dtype == torch.float8_e4m3fn:
        result.view(torch.uint8).fill_(0x7F)
    else:
        result.fill_(math.nan)
    return result


def test_replays_of_a_graph_give_the_bits_of_eager(seed) -> None:
    given = arguments(300, 16, 3, "cuda")
    eager, replayed = poisoned(given), poisoned(given)
    operators(given, eager)
    assert not any(result.float().isnan().any() for result in eager.values())
    operators(given, replayed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operators(given, replayed)
    for _ in range(3):
        for result in replayed.values():
            poison(result)
        graph.replay()
        torch.cuda.synchronize()
        for name, result in replayed.items():
            assert torch.equal(result.view(torch.uint8), eager[name].view(torch.uint8)), name


def test_opcheck(seed) -> None:
    given = arguments(40, 4, 2, "cuda")
    results = poisoned(given)
    key, value = torch.randn(2, 40, 4, 192, dtype=torch.bfloat16, device="cuda")
    call = (given["query"], key, value[..., :128], given["ends"], 2, 0.125, results["out"])
    for options in ({}, {"lse": results["lse"], "sinks": given["sinks"]}):
        torch.library.opcheck(torch.ops.tsmla.prefill.default, call, options)
    call = (
        given["absorbed"], given["cache"], torch.zeros_like(given["workspace"]), 512, 64, given["tables"],
        given["seq_lens"].int(), given["longest"], 0.1, results["decoded"],
    )  # fmt: skip
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # a workspace is compared in the last
    torch.library.opcheck(torch.ops.tsmla.decode.default, call, {"lse": results["decoded_lse"]}, test_utils=tests)
