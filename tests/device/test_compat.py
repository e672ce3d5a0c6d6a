"""Faces on a GPU against float64: what tests/emulated has of them on larger calls, graphs, and scales on the device."""

from __future__ import annotations

import dataclasses
import math

import prefill_reference
import pytest
import torch
import tsmla
from chosen_reference import make_chosen
from compat_reference import (
    by_flash_mla,
    by_flashinfer,
    by_ragged_prefill,
    by_tokenspeed_prefill,
    by_wrapper,
    make_ragged,
    planned,
    prefill_by_flash_mla,
)
from decode_reference import LATENT, Sight, callers_workspace, judge, make_problem
from tsmla import UnsupportedError
from tsmla.compat import flash_mla, flashinfer, tokenspeed_mla
from tsmla.identity.arch import Arch

LENGTHS = [0, 1, 700, 4096, 65]
DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    """Each test has another seed, which it prints."""


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len, heads", [(1, 128), (2, 16), (4, 24)])
def test_flash_mla(dtype, q_len, heads, causal):
    problem = make_problem(LENGTHS, q_len, heads, dtype, sight=Sight(causal=causal))
    judge(problem, *by_flash_mla(problem))


@pytest.mark.parametrize("heads, rope", [(128, 64), (64, 64), (16, 64), (16, 0)])
def test_flash_mla_s_sparse_prefill(arch, heads, rope):
    lengths = [token * 17 % 2100 for token in range(150)]
    chosen = make_chosen((150,), heads, 2048, page_size=1, page_gap=0, pages=3000, lengths=lengths, rope=rope)
    out, lse = prefill_by_flash_mla(chosen)
    judge(chosen.alone, out[:, None], lse[:, None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_largest_logits_of_a_sparse_prefill(arch, dtype):
    lengths = [token * 17 % 2100 for token in range(150)]
    chosen = make_chosen((150,), 16, 2048, dtype, page_size=1, page_gap=0, pages=3000, lengths=lengths)
    out, largest = tsmla.tsmla_sparse_prefill(
        chosen.query, chosen.kv_cache, chosen.indices, 0.125, topk_length=chosen.topk_length, return_max_logits=True
    )
    for token, keys in enumerate(chosen.alone.rows):
        scores = chosen.query[token].double() @ keys.double().T * 0.125
        expected = scores.amax(-1) if len(keys) else scores.new_full((16,), -torch.inf)
        assert torch.allclose(largest[token].double(), expected, rtol=1e-4, atol=1e-4), token


def test_flash_mla_with_sinks(arch):
    problem = make_problem(LENGTHS, 2, 16, sinks=torch.randn(16, device="cuda"))
    judge(problem, *by_flash_mla(problem, attn_sink=problem.sinks))


def test_scales_on_the_gpu_are_read_outside_of_a_capture_only(arch):
    problem = make_problem(LENGTHS, 1, 16, torch.float8_e4m3fn, output_scale=0.5)
    scale = torch.tensor([0.5], device="cuda")
    judge(problem, *by_flash_mla(problem, softmax_scale=problem.softmax_scale / 0.5, descale_k=scale))
    lengths = torch.tensor(problem.seq_lens, dtype=torch.int32, device="cuda")
    arguments = problem.query, problem.kv_cache.unsqueeze(2), problem.block_tables, lengths, LATENT, None
    with pytest.raises(UnsupportedError, match="descale_k is a CUDA tensor, and a CUDA graph is being captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            flash_mla.flash_mla_with_kvcache(*arguments, descale_k=scale)
    torch.cuda.synchronize()


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_len, heads", [(1, 128), (3, 12)])
def test_flashinfer_decode(dtype, q_len, heads, natural):
    problem = make_problem(LENGTHS, q_len, heads, dtype, 32, output_scale=0.5)
    judge(problem, *by_flashinfer(problem, natural))


@pytest.mark.parametrize("q_lens", [[3, 0, 1, 2, 8], [1, 1, 1, 64, 5], [70, 1, 0, 0, 3]], ids=str)
def test_flashinfer_decode_of_different_query_lengths(arch, q_lens):
    ragged = make_ragged(q_lens, [5, 9, 0, 1300, 70], 16)
    tokens = dataclasses.replace(ragged.problem, query=ragged.query[:, None])
    ends = ragged.cum_seq_lens_q
    out, lse = by_flashinfer(tokens, True, query=ragged.query, cum_seq_lens_q=ends, max_q_len=70, out=None)
    ragged.judge(out, lse.squeeze(1))


def test_variable_lengths_follow_the_device_in_a_graph(arch):
    """cum_seq_lens_q is read when the graph is replayed."""
    ragged = make_ragged([3, 1, 2], [50, 700, 130], 16)
    tokens = dataclasses.replace(ragged.problem, query=ragged.query[:, None])
    given = tokens.arguments(workspace_buffer=callers_workspace(16, 8))
    ends = ragged.cum_seq_lens_q
    arguments = {
        **{name: given[name] for name in ("kv_cache", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim")},
        **{name: given[name] for name in ("block_tables", "seq_lens", "max_seq_len")},
        "query": ragged.query,
        "qk_nope_head_dim": 128,
        "bmm1_scale": tokens.softmax_scale,
        "return_lse": True,
        "cum_seq_lens_q": ends,
        "max_q_len": 6,
        "return_lse_base": "base2",
    }
    flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    for q_lens in ([3, 1, 2], [1, 1, 4], [0, 6, 0]):
        ends.copy_(torch.tensor([0, *q_lens]).cumsum(0))
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        dataclasses.replace(ragged, q_lens=q_lens).judge(out, lse)


@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [2, 2, 2, 2], [3, 1, 0, 9]], ids=str)
def test_flashinfer_wrapper(dtype, q_lens, natural):
    ragged = make_ragged(q_lens, [5, 0, 4000, 130], 16, dtype=dtype)
    ragged.judge(*by_wrapper(ragged, natural))


def test_flashinfer_wrapper_replayed_with_another_plan(arch):
    first = make_ragged([1, 1, 1], [500, 3, 130], 16)
    page_size = first.problem.kv_cache.shape[1]
    wrapper = planned(first)
    graphed = flashinfer.BatchMLAPagedAttentionWrapper(
        wrapper._workspace, use_cuda_graph=True, kv_indices=torch.zeros(64, dtype=torch.int32, device="cuda")
    )
    options = {
        "num_heads": 16,
        "head_dim_ckv": LATENT,
        "head_dim_kpe": 64,
        "page_size": page_size,
        "causal": True,
        "sm_scale": first.problem.softmax_scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
    }

    def plan(lengths: list[int]) -> None:
        tables = first.problem.block_tables.clone()
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        graphed.plan(cum_seq_lens_q=first.cum_seq_lens_q, block_tables=tables, seq_lens=lens, **options)

    plan(first.problem.seq_lens)
    run = {"query": first.query, "kv_cache": first.problem.kv_cache, "return_lse": True}
    graphed.run(**run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = graphed.run(**run)
    for lengths in ([500, 3, 130], [64, 0, 2]):
        plan(lengths)
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        rows = [own[:length] for own, length in zip(first.problem.rows, lengths, strict=True)]
        cut = dataclasses.replace(first.problem, rows=rows, seq_lens=lengths)
        dataclasses.replace(first, problem=cut).judge(out, lse)


def test_tokenspeed_decode(arch):
    visible = torch.randint(0, 4200, (len(LENGTHS), 2), dtype=torch.int32, device="cuda")
    problem = make_problem(LENGTHS, 2, 16, visible=visible, sight=Sight(causal=False))
    given = problem.arguments(causal_mask=True)
    for name in ("sinks", "lse_includes_sink"):
        del given[name]
    judge(problem, *tokenspeed_mla.tokenspeed_mla_decode(**given, min_split_kv=4))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("face", [by_ragged_prefill, by_tokenspeed_prefill])
def test_prefill(arch, face, causal):
    problem = prefill_reference.make_problem(
        [300, 5, 0, 130], [77, 600, 3, 0], 8, 4, 192, 128, torch.bfloat16, "cuda", strided=True
    )
    prefill_reference.judge(problem, causal, *face(problem, causal))


def test_warmup_of_tokenspeed(arch):
    tokenspeed_mla.warmup_compile_prefill(torch.bfloat16)
    warmed = [v for v in tsmla.served() if v.family == "prefill" and v.lse and v.d_qk == 192]
    assert {v.causal for v in warmed} == {True, False} and all(v.arch in Arch for v in warmed)
    device = torch.device("cuda", torch.cuda.current_device())
    assert tokenspeed_mla.get_num_sm(device) == torch.cuda.get_device_properties(device).multi_processor_count


def test_flash_mla_in_a_graph(arch):
    """Its workspace is allocated in the capture."""
    problem = make_problem(LENGTHS, 1, 16)
    by_flash_mla(problem)
    lengths = torch.tensor(problem.seq_lens, dtype=torch.int32, device="cuda")
    metadata, _ = flash_mla.get_mla_metadata(lengths, 16, 1)
    arguments = problem.query, problem.kv_cache.unsqueeze(2), problem.block_tables, lengths, LATENT, metadata
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla.flash_mla_with_kvcache(*arguments, softmax_scale=problem.softmax_scale, causal=True)
    for _ in range(3):
        out.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        judge(problem, out, (lse / math.log(2)).where(lse != math.inf, -math.inf).transpose(1, 2))
