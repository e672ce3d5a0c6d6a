"""tsmla_prefill on a GPU against float64, at every edge that its contract names."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
import tsmla
from prefill_reference import Problem, judge, make_problem, out_dtype
from tsmla.identity.support import PREFILL_DIMS, prefill_dims
from tsmla.operators.checks import dtype_of

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
DIMS = PREFILL_DIMS
LENGTHS = {
    "one tile": ([128], [128]),
    "shorter than a tile": ([64], [100]),
    "around a tile": ([127, 128, 129], [128, 129, 127]),
    "empty sequences": ([1, 0, 130, 5], [1, 77, 0, 300]),
    "more queries than keys": ([300, 257], [77, 1]),
    "several tiles": ([513, 1000], [1513, 999]),
    "many sequences": ([37] * 70, [200] * 70),
    "no keys at all": ([3, 200], [0, 0]),
}


def prefill(problem: Problem, causal: bool, lse: bool, **options):
    """Call the operator into NaN-filled outputs; the LSE is allocated by the operator, so only `out` is poisoned."""
    out = options.pop("out", None)
    if out is None:
        shape = (*problem.query.shape[:2], problem.value.shape[2])
        out = torch.full(shape, math.nan, dtype=out_dtype(problem.query.dtype), device=problem.query.device)
    result = tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        max(problem.lengths_kv),
        problem.cum_seq_lens_kv.numel() - 1,
        problem.softmax_scale,
        is_causal=causal,
        return_lse=lse,
        cum_seq_lens_q=problem.cum_seq_lens_q,
        max_seq_len_q=max(problem.lengths_q),
        out=out,
        sinks=problem.sinks,
        lse_includes_sink=problem.lse_includes_sink,
        **options,
    )
    torch.cuda.synchronize()
    return result if lse else (result, None)


def check(problem: Problem, causal: bool, lse: bool = True, **options) -> None:
    out, got_lse = prefill(problem, causal, lse, **options)
    if got_lse is not None:
        got_lse = got_lse.clone()
        got_lse[problem.tokens :] = math.nan  # allocated by the operator: nothing can be known of these rows
    judge(problem, causal, out, got_lse)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks(dtype, causal, counted):
    problem = make_problem(*LENGTHS["empty sequences"], 4, 2, 192, 128, dtype, "cuda", slack=3)
    problem.sinks = torch.tensor([0.5, -math.inf, math.inf, 3.0], device="cuda")
    problem.lse_includes_sink = counted
    check(problem, causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_against_float64(lengths, dtype, dims, causal, arch):
    skip_without(arch, dtype, dims)
    check(make_problem(*lengths, 4, 2, *dims, dtype, "cuda", slack=3, padded_entries=2, strided=True), causal)


@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1), (12, 3), (128, 128)], ids=str)
def test_head_counts(heads):
    check(make_problem([200, 90], [300, 90], *heads, 192, 128, torch.bfloat16, "cuda"), True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_force_rescaling(dtype, dims, causal, arch):
    skip_without(arch, dtype, dims)
    check(make_problem([300], [900], 2, 2, *dims, dtype, "cuda", magnitude=6.0), causal)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_contexts(dtype, dims, arch):
    """Sums over many keys: 8-bit products keep about 14 bits in the tensor cores."""
    skip_without(arch, dtype, dims)
    check(make_problem([130], [20000], 2, 2, *dims, dtype, "cuda"), True)


def skip_without(arch, dtype: torch.dtype, dims: tuple[int, int] = (192, 128)) -> None:
    if dims not in prefill_dims(arch, dtype_of(dtype)):
        pytest.skip(f"prefill for {arch} has no {dtype} kernel of head dims {dims}")


@pytest.mark.parametrize("factor", [-0.5, 0.0], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales(dtype, factor, arch):
    skip_without(arch, dtype)
    problem = make_problem([40, 2], [700, 0], 2, 1, 192, 128, dtype, "cuda")
    scale, problem.softmax_scale = problem.softmax_scale, problem.softmax_scale / 0.375
    out, lse = prefill(problem, True, True, k_scale=0.375, v_scale=4.0, output_scale=factor / 4.0)
    problem.softmax_scale = scale
    if factor == 0.0:
        assert (out == 0).all()
    else:
        judge(problem, True, out / factor, lse)  # a power of two: nothing is rounded anew


def test_without_lse_and_with_pdl_give_the_same_bits():
    problem = make_problem([257, 64], [900, 64], 4, 4, 192, 128, torch.bfloat16, "cuda")
    for causal in (True, False):
        reference, lse = prefill(problem, causal, True)
        for options in ({}, {"enable_pdl": True}):
            out, _ = prefill(problem, causal, False, **options)
            assert torch.equal(out, reference)
        out, again = prefill(problem, causal, True, enable_pdl=True)
        assert torch.equal(out, reference) and torch.equal(lse, again)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_calls_give_the_same_bits(dtype, dims, arch):
    skip_without(arch, dtype, dims)
    problem = make_problem([1000], [2000], 8, 8, *dims, dtype, "cuda")
    first, first_lse = prefill(problem, True, True)
    for _ in range(5):
        out, lse = prefill(problem, True, True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


def test_uniform_scores_have_a_closed_form_lse():
    problem = make_problem([200], [333], 2, 2, 192, 128, torch.bfloat16, "cuda")
    problem.query.zero_()
    out, lse = prefill(problem, True, True)
    visible = torch.arange(133 + 1, 333 + 1, device="cuda", dtype=torch.float64)
    assert torch.allclose(lse.double(), visible.log()[:, None].expand(-1, 2), rtol=0, atol=1e-5)
    mean = problem.value[:134].double().mean(0)
    assert torch.allclose(out[0].double(), mean, rtol=0, atol=4e-3)


def test_one_pack_serves_query_and_key_when_no_query_lengths_are_given():
    problem = make_problem([100, 29], [100, 29], 2, 2, 192, 128, torch.bfloat16, "cuda")
    out, lse = tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        100,
        2,
        problem.softmax_scale,
        return_lse=True,
    )
    judge(problem, True, out, lse)


def test_strided_query_and_output_leave_their_neighbours_alone():
    problem = make_problem([150], [150], 3, 3, 192, 128, torch.bfloat16, "cuda")
    wide = torch.full((150, 3, 256), math.nan, dtype=torch.bfloat16, device="cuda")
    wide[..., :192] = problem.query
    problem.query = wide[..., :192]
    target = torch.full((150, 5, 136), 123.0, dtype=torch.bfloat16, device="cuda")
    out, lse = prefill(problem, True, True, out=target[:, 1:4, :128])
    judge(problem, True, out, lse)
    assert (target[:, 0] == 123).all() and (target[:, 4] == 123).all() and (target[..., 128:] == 123).all()


def test_cuda_graph_replay():
    problem = make_problem([257, 1], [700, 300], 4, 4, 192, 128, torch.bfloat16, "cuda")
    out = torch.empty(258, 4, 128, dtype=torch.bfloat16, device="cuda")
    reference, _ = prefill(problem, True, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_in_graph(problem, out)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, reference)


def prefill_in_graph(problem: Problem, out: torch.Tensor) -> None:
    tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        700,
        2,
        problem.softmax_scale,
        return_lse=True,
        cum_seq_lens_q=problem.cum_seq_lens_q,
        out=out,
    )


def test_other_streams():
    problem = make_problem([257], [700], 4, 4, 192, 128, torch.bfloat16, "cuda")
    reference, _ = prefill(problem, True, True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out, _ = prefill(problem, True, True)
    stream.synchronize()
    assert torch.equal(out, reference)


def test_nothing_to_do():
    problem = make_problem([0, 0], [10, 0], 4, 4, 192, 128, torch.bfloat16, "cuda")
    out, lse = prefill(problem, True, True)
    assert out.shape == (0, 4, 128) and lse.shape == (0, 4)


BAD = {
    "on the CPU": (dict(query=lambda t: t.cpu()), "query is on cpu"),
    "another dtype": (dict(query=lambda t: t.float()), "torch.float32"),
    "mixed dtypes": (dict(key=lambda t: t.half()), "key is torch.float16; accepted: torch.bfloat16"),
    "key shape": (dict(key=lambda t: t[:-1]), r"key has shape \[149, 2, 192\]; it must be \[150, 2, 192\]"),
    "head dims": (dict(value=lambda t: t[..., :64]), r"\(192, 64\)"),
    "head ratio": (dict(query=lambda t: t[:, :3]), "query has 3 heads and key 2"),
    "last stride": (dict(value=lambda t: t.repeat_interleave(2, -1)[..., ::2]), "value has strides"),
    "alignment": (dict(key=lambda t: torch.cat([t, t], -1)[..., 1:193]), "key starts at address"),
    "int64 lengths": (dict(cum_seq_lens=lambda t: t.long()), "cum_seq_lens is torch.int64; accepted: torch.int32"),
    "batch size": (dict(batch_size=lambda n: n + 1), r"cum_seq_lens has shape \[2\]; it must be \[3\]"),
    "scale": (dict(softmax_scale=lambda s: -s), "softmax_scale is -"),
    "value scale": (dict(v_scale=lambda _: math.inf), "v_scale is inf"),
    "out shape": (dict(out=lambda _: torch.empty(149, 4, 128, dtype=torch.bfloat16, device="cuda")), "out has shape"),
    "out dtype": (dict(out=lambda _: torch.empty(150, 4, 128, device="cuda")), "out is torch.float32"),
    "other out dtype": (dict(out_dtype=lambda _: torch.float16), "of bf16 for sm_90a writes bf16, not fp16"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD.keys())
def test_wrong_use_names_the_argument(change, message):
    problem = make_problem([150], [150], 4, 2, 192, 128, torch.bfloat16, "cuda")
    arguments = dict(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        seq_lens=None,
        cum_seq_lens=problem.cum_seq_lens_kv,
        max_seq_len=150,
        batch_size=1,
        softmax_scale=problem.softmax_scale,
        out=None,
        out_dtype=None,
        v_scale=1.0,
    )
    (name, wrong), *_ = change.items()
    arguments[name] = wrong(arguments[name])
    with pytest.raises(tsmla.ArgumentError, match=f"^tsmla_prefill: .*{message}"):
        tsmla.tsmla_prefill(**arguments)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="compiles the shipped kernel anew: no cutlass")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_compiled_now_equals_compiled_ahead(dtype, causal, monkeypatch, tmp_path, arch):
    from tsmla.loading import resolve

    skip_without(arch, dtype)
    problem = make_problem([513, 90], [700, 1000], 4, 2, 192, 128, dtype, "cuda")
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path))
    results = {}
    for backend in ("binary", "jit"):
        monkeypatch.setenv("TSMLA_BACKEND", backend)
        resolve.forget()
        results[backend] = prefill(problem, causal, True)
    resolve.forget()
    for ahead, now in zip(results["binary"], results["jit"], strict=True):
        assert torch.equal(ahead, now)


@pytest.mark.parametrize("allocator", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_memory_of_other_allocators(allocator):
    """Theirs begins at low addresses, and the maps of outputs and values begin before their tensors."""
    selected = [__file__, "-k", "test_against_float64 and around"]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *selected], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
