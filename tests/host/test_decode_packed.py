"""tsmla_decode without a GPU where requests have query tokens of their own: what it accepts, refuses and launches."""

from __future__ import annotations

import pytest
import torch
from decode_calls import BATCH, HEADS, PAGE, inputs, ints
from launches import SMS, processors
from refusing import Recorder
from tsmla import ArgumentError
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla.loading import resolve
from tsmla.operators.decode import tsmla_decode
from tsmla.operators.workspace import decode_workspace_size

TOKENS = 7


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


def packed(**changes) -> dict:
    query = torch.zeros(TOKENS, HEADS, 576, dtype=torch.bfloat16)
    return inputs(**{"query": query, "cum_seq_lens_q": ints(0, 1, 1, 6), "max_q_len": 5, **changes})


def test_the_kernel_gets_one_request_of_all_tokens(recorder):
    visible = ints(*range(TOKENS))
    given = packed(local_visible_lens=visible)
    out, lse = tsmla_decode(**given, return_lse=True)
    (arguments,) = recorder.launches
    assert arguments[0].shape == (1, TOKENS, HEADS, 576) and arguments[0].data_ptr() == given["query"].data_ptr()
    assert arguments[6] is given["cum_seq_lens_q"]
    assert arguments[7].shape == (BATCH, TOKENS) and arguments[7].stride() == (0, 1)
    assert arguments[9].data_ptr() == out.data_ptr() and arguments[10].data_ptr() == lse.data_ptr()
    assert arguments[-4:] == (5, PAGE, plan_decode(Arch.SM90A, SMS, BATCH, 5, HEADS, 300, True).workers, 0)
    assert out.shape == (TOKENS, HEADS, 512) and lse.shape == (TOKENS, HEADS)


def test_a_kind_of_call_is_of_any_number_of_tokens(recorder):
    """Batches change with every step of an engine; only the result's size follows."""
    for tokens in (7, 9, 1):
        out = tsmla_decode(**packed(query=torch.zeros(tokens, HEADS, 576, dtype=torch.bfloat16)))
        assert out.shape == (tokens, HEADS, 512)
    assert len(resolve.calls) == 1


def test_cumulative_lengths_of_64_bits_are_narrowed(recorder):
    tsmla_decode(**packed(cum_seq_lens_q=torch.tensor([-(2**40), 1, 2**40, 6])))
    assert recorder.launches[-1][6].tolist() == [0, 1, 2**31 - 1, 6]


@pytest.mark.parametrize("tokens, requests, heads", [(0, BATCH, HEADS), (7, 0, HEADS), (7, BATCH, 0)])
def test_nothing_is_launched_where_there_is_nothing(recorder, tokens, requests, heads):
    query = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    given = packed(
        query=query,
        cum_seq_lens_q=ints(*[0] * (requests + 1)),
        seq_lens=ints(*[1] * requests),
        block_tables=torch.zeros(requests, 6, dtype=torch.int32),
    )
    out, lse = tsmla_decode(**given, return_lse=True)
    assert out.shape == (tokens, heads, 512) and lse.shape == (tokens, heads) and recorder.launches == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_q_len": None}, "cum_seq_lens_q is given but max_q_len is not"),
        ({"cum_seq_lens_q": None}, "max_q_len is given but cum_seq_lens_q is not"),
        ({"cum_seq_lens_q": None, "max_q_len": None}, r"query has shape \[7, 4, 576\]; it must be \[batch, q_len"),
        ({"max_q_len": 0}, "max_q_len is 0; it must be"),
        ({"max_q_len": 2**31}, "max_q_len is 2147483648; it must be"),
        ({"max_q_len": 2**31 - 1}, "max_q_len is 2147483647 and query has 4 heads; a request may have 2147483520 rows"),
        ({"max_q_len": 2**29 - 31}, "max_q_len is 536870881 and query has 4 heads"),
        ({"max_q_len": 1.5}, "max_q_len is"),
        ({"max_q_len": "5"}, "max_q_len is"),
        ({"cum_seq_lens_q": ints(0, 1, 6)}, r"cum_seq_lens_q has shape \[3\]; it must be \[4\]"),
        ({"cum_seq_lens_q": ints(0, 1, 1, 6)[None]}, r"cum_seq_lens_q has shape \[1, 4\]; it must be \[4\]"),
        ({"cum_seq_lens_q": torch.zeros(4)}, "cum_seq_lens_q is torch.float32; accepted"),
        ({"cum_seq_lens_q": torch.zeros(8, dtype=torch.int32)[::2]}, "cum_seq_lens_q has shape .* contiguous"),
        ({"cum_seq_lens_q": [0, 1, 1, 6]}, "cum_seq_lens_q is a list; it must be"),
        ({"query": torch.zeros(3, 2, HEADS, 576, dtype=torch.bfloat16)}, r"query has shape .*; it must be \[tokens"),
        ({"out": torch.zeros(6, HEADS, 512, dtype=torch.bfloat16)}, r"out has shape \[6, 4, 512\]; it must be \[7"),
        ({"out": torch.zeros(1, 7, HEADS, 512, dtype=torch.bfloat16)}, r"out has shape .*; it must be \[7, 4, 512\]"),
        ({"local_visible_lens": torch.zeros(3, 2, dtype=torch.int32)}, r"local_visible_lens has shape \[3, 2\]"),
        ({"local_visible_lens": ints(1, 2, 3)}, r"local_visible_lens has shape \[3\]; it must be \[7\]"),
        ({"seq_lens": ints(1, 2)}, r"seq_lens has shape \[2\]; it must be \[3\]"),
        ({"workspace_buffer": torch.zeros(64, dtype=torch.int8)}, "workspace_buffer has 64 bytes; this call needs"),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_wrong_arguments_are_named(recorder, seen, changes, message):
    if seen:
        tsmla_decode(**packed())
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {message}"):
        tsmla_decode(**packed(**changes))
    assert recorder.launches == []


def test_a_request_may_have_all_rows_that_its_row_tiles_can_count(recorder):
    """No more: kernels would divide by no row tiles, or count them down from 0."""
    tsmla_decode(**packed(max_q_len=2**29 - 32, workspace_buffer=torch.empty(2**26, dtype=torch.int8)))
    (arguments,) = recorder.launches
    assert arguments[-4] == 2**29 - 32


def test_results_of_a_pack_are_refused_without_one(recorder):
    with pytest.raises(ArgumentError, match=r"out has shape \[6, 4, 512\]; it must be \[3, 2, 4, 512\]"):
        tsmla_decode(**inputs(out=torch.zeros(6, HEADS, 512, dtype=torch.bfloat16)))


def test_requests_must_be_as_many_as_lengths(recorder):
    with pytest.raises(ArgumentError, match=r"block_tables has shape \[4, 6\]; it must be \[3, width\]"):
        tsmla_decode(**inputs(block_tables=torch.zeros(4, 6, dtype=torch.int32)))


def test_the_workspace_of_a_pack_has_a_record_for_every_part(monkeypatch):
    monkeypatch.setattr("tsmla.operators.workspace._gpu_of", lambda operator, device: (Arch.SM90A, SMS))
    alike, varied = (decode_workspace_size(1, 130, 16, 64, 0, varies=varies) for varies in (False, True))
    assert varied >= SMS * 32 or varied > alike
    with pytest.raises(ArgumentError, match="varies is 'no'; it must be True or False"):
        decode_workspace_size(1, 130, 16, 64, 0, varies="no")
