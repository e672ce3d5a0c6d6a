"""Faces in emulation against float64: each once per operator, LSE bases and rows without keys included."""

from __future__ import annotations

import dataclasses

import prefill_reference
import pytest
import torch
from chosen_reference import make_chosen
from compat_reference import (
    by_flash_mla,
    by_flashinfer,
    by_ragged_prefill,
    by_tokenspeed_prefill,
    by_wrapper,
    chosen_by_flash_mla,
    chosen_by_flashinfer,
    make_ragged,
    prefill_by_flash_mla,
)
from decode_reference import Sight, judge, make_problem
from emulated_archs import SMS
from tsmla.compat.tokenspeed_mla import tokenspeed_mla_decode

pytestmark = [pytest.mark.archs("sm_90a"), pytest.mark.processors(SMS)]
HEADS = 6


@pytest.mark.parametrize("causal", [True, False])
def test_flash_mla(gpu, causal):
    """FlashMLA's rows without keys have an LSE of +inf."""
    problem = make_problem([0, 1, 130], 2, HEADS, sight=Sight(causal=causal))
    judge(problem, *by_flash_mla(problem))


def test_flash_mla_of_8_bits(gpu):
    """Scores are those of the dequantised query and cache, and so are values."""
    problem = make_problem([70, 0], 2, HEADS, torch.float8_e4m3fn, output_scale=0.5)
    descale_q, descale_k = (torch.tensor([value], device="cuda") for value in (0.25, 0.5))
    scale = problem.softmax_scale / 0.25 / 0.5
    judge(problem, *by_flash_mla(problem, softmax_scale=scale, descale_q=descale_q, descale_k=descale_k))


@pytest.mark.parametrize("face", [chosen_by_flash_mla, chosen_by_flashinfer])
def test_chosen_keys(gpu, face):
    """Lists of tokens of one request; one that counts none of its keys, and one whose keys are all outside."""
    indices = torch.randint(-20, 12 * 61 + 20, (6, 130))
    indices[5] = -1
    sinks = torch.randn(HEADS, device="cuda") if face is chosen_by_flash_mla else None
    chosen = make_chosen(
        (3, 2), HEADS, 130, page_size=61, lengths=[130, 0, 1, 64, 200, 130], indices=indices, sinks=sinks,
        output_scale=1.0 if face is chosen_by_flash_mla else 0.5,
    )  # fmt: skip
    out, lse = face(chosen)
    judge(chosen.alone, out.flatten(0, 1)[:, None], lse.flatten(0, 1)[:, None])


def test_sparse_prefill(gpu):
    """Rows that no token chose are NaN; one token counts none of its keys, and one has chosen what is not there."""
    indices = torch.randint(-20, 300, (5, 130))
    indices[4] = -1
    chosen = make_chosen(
        (5,), HEADS, 130, page_size=1, page_gap=0, pages=280, lengths=[130, 0, 1, 64, 130], indices=indices,
        sinks=torch.randn(HEADS, device="cuda"),
    )  # fmt: skip
    out, lse = prefill_by_flash_mla(chosen)
    judge(chosen.alone, out[:, None], lse[:, None])


@pytest.mark.parametrize("natural", [True, False])
def test_flashinfer_decode(gpu, natural):
    problem = make_problem([0, 1, 130], 2, HEADS, output_scale=0.5)
    judge(problem, *by_flashinfer(problem, natural))


def test_flashinfer_decode_of_different_query_lengths(gpu):
    """3 and 0 query tokens, one that sees nothing among them; the last row belongs to no request."""
    ragged = make_ragged([3, 0, 1, 2], [2, 9, 0, 130], HEADS)
    tokens = dataclasses.replace(ragged.problem, query=torch.cat([ragged.query, ragged.query[:1]])[:, None])
    query, ends = tokens.query.squeeze(1), ragged.cum_seq_lens_q
    out, lse = by_flashinfer(tokens, False, query=query, cum_seq_lens_q=ends, max_q_len=3, out=None)
    assert out.shape == (7, HEADS, 512)
    ragged.judge(out, lse.squeeze(1))


@pytest.mark.parametrize("q_lens, natural", [([2, 2, 2], True), ([3, 1, 2], False)], ids=str)
def test_flashinfer_wrapper(gpu, q_lens, natural):
    ragged = make_ragged(q_lens, [2, 0, 130], HEADS)
    ragged.judge(*by_wrapper(ragged, natural))


def test_tokenspeed_decode(gpu):
    """Visible lengths take the place of the causal bound."""
    visible = torch.tensor([[0, 0], [1, 2], [130, 7]], dtype=torch.int32, device="cuda")
    problem = make_problem([0, 2, 130], 2, HEADS, visible=visible, sight=Sight(causal=False))
    given = problem.arguments(causal_mask=True)
    for name in ("sinks", "lse_includes_sink"):
        del given[name]
    judge(problem, *tokenspeed_mla_decode(**given, is_var_seq=False, min_split_kv=4))


@pytest.mark.parametrize("face", [by_ragged_prefill, by_tokenspeed_prefill])
def test_prefill(gpu, face):
    """More queries than keys, so that the first see none; keys and values are slices of one tensor."""
    problem = prefill_reference.make_problem([40, 5], [33, 60], 2, 2, 192, 128, torch.bfloat16, "cuda", strided=True)
    prefill_reference.judge(problem, True, *face(problem, True))
