"""mla_quantize_q without a GPU: what it accepts, what it says about the rest, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import pytest
import torch
from tsmla import ArgumentError, mla_quantize_q
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import Dtype, QuantizeQVariant

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
OUTS = {"nope_out": (512, E4M3), "rope_out": (64, BF16), "scale_out": (None, torch.float32)}


def outs(*outer: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(*outer, *([] if width is None else [width]), dtype=dtype)
        for name, (width, dtype) in OUTS.items()
    }


@pytest.mark.parametrize("outer", [(2, 3, 4), (5, 4)], ids=["requests", "packed"])
@pytest.mark.parametrize("pieces", [False, True])
def test_results_that_are_made(recorder, outer, pieces):
    query = torch.zeros(*outer, 576, dtype=BF16)
    results = mla_quantize_q(query.split((512, 64), -1) if pieces else query)
    assert recorder.variants == [QuantizeQVariant(Arch.SM90A, Dtype.BF16, ROWS["snapmla"])]
    for got, (name, wanted) in zip(results, outs(*outer).items(), strict=True):
        assert got.shape == wanted.shape and got.dtype == wanted.dtype and got.is_contiguous(), name
    first, rope, *written, power_of_two, pdl = recorder.launches[-1]
    assert first.data_ptr() == query.data_ptr() and first.shape[:-1] == (1,) * (4 - len(outer) - 1) + outer
    assert first.shape[3] == (512 if pieces else 576) and (rope.numel() > 0) == pieces
    assert (power_of_two, pdl) == (1, 0)
    assert [x.data_ptr() for x in written] == [x.data_ptr() for x in results]


@pytest.mark.parametrize("outer", [(2, 3, 4), (5, 4)], ids=["requests", "packed"])
def test_results_that_are_given_are_returned(recorder, outer):
    given = outs(*outer)
    for count in (3, 1):
        chosen = dict(list(given.items())[:count])
        results = mla_quantize_q(
            torch.zeros(*outer, 576, dtype=BF16), **chosen, power_of_two_scales=False, enable_pdl=True
        )
        assert all(got is wanted for got, wanted in zip(results, chosen.values(), strict=False))
        assert recorder.launches[-1][-2:] == (0, 1)


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    for outer in ((2, 3, 4), (7, 1, 4), (5, 1), (2, 2, 128)):
        mla_quantize_q(torch.zeros(*outer, 576, dtype=BF16))
    assert len(recorder.variants) == 1 and len(recorder.launches) == 4


@pytest.mark.parametrize("outer", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 5), (5, 0)])
def test_nothing_to_do_launches_nothing(recorder, outer):
    results = mla_quantize_q(torch.zeros(*outer, 576, dtype=BF16))
    assert [x.shape for x in results] == [x.shape for x in outs(*outer).values()] and recorder.launches == []
    with pytest.raises(ArgumentError, match="query has shape"):
        mla_quantize_q(torch.zeros(*outer, 575, dtype=BF16))


WRONG = {
    "a query of float16": ({"query": torch.zeros(2, 3, 4, 576).half()}, "query is torch.float16; accepted: torch.bfl"),
    "a query of five dimensions": ({"query": torch.zeros(1, 2, 3, 4, 576, dtype=BF16)}, "query has shape"),
    "a row": (
        {"query": torch.zeros(4, 576, dtype=BF16)},
        r"query has shape \[4, 576\]; it must be \[batch, q_len, heads, 576\] or \[tokens, heads, 576\]",
    ),
    "a piece of a row": (
        {"query": (torch.zeros(512, dtype=BF16), torch.zeros(64, dtype=BF16))},
        r"query\[0\] has shape \[512\]; it must be .* or \[tokens, heads, 512\]",
    ),
    "a narrow query": ({"query": torch.zeros(2, 3, 4, 512, dtype=BF16)}, r"query has shape \[2, 3, 4, 512\]; it must"),
    "one piece": ({"query": (torch.zeros(2, 3, 4, 512, dtype=BF16),)}, "query is a tuple of 1; it must be"),
    "a piece of other heads": (
        {"query": (torch.zeros(2, 3, 4, 512, dtype=BF16), torch.zeros(2, 3, 5, 64, dtype=BF16))},
        r"query\[1\] has shape \[2, 3, 5, 64\]; it must be \[2, 3, 4, 64\]",
    ),
    "results of packed tokens": (outs(6, 4), r"nope_out has shape \[6, 4, 512\]; it must be \[2, 3, 4, 512\]"),
    "a result of bytes": (
        {"nope_out": torch.zeros(2, 3, 4, 512, dtype=torch.uint8)},
        "nope_out is torch.uint8; accepted: torch.float8",
    ),
    "results that share memory": (
        {"scale_out": torch.zeros(1, 1, 1).expand(2, 3, 4)},
        "scale_out has shape .* share memory",
    ),
    "a flag in words": ({"power_of_two_scales": "no"}, "power_of_two_scales is 'no'; it must be True or False"),
    "no flag": ({"enable_pdl": None}, "enable_pdl is a NoneType; it must be True or False"),
    "too many rows": (
        {"query": torch.zeros(1, 1, 1, 576, dtype=BF16).expand(2**15, 2**10, 2**6, 576), **dict.fromkeys(OUTS)},
        "query has 33554432 tokens x 64 heads; at most 1073741824 rows fit one call",
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(recorder, case, seen):
    change, message = WRONG[case]
    right = {"query": torch.zeros(2, 3, 4, 576, dtype=BF16), **outs(2, 3, 4)}
    if seen:
        mla_quantize_q(**right)
        mla_quantize_q(right["query"])
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^mla_quantize_q: {message}"):
        mla_quantize_q(**{**right, **change})
    assert recorder.launches == []


def test_cpu_tensors_are_refused():
    with pytest.raises(ArgumentError, match="mla_quantize_q: query is on cpu; it must be a CUDA tensor"):
        mla_quantize_q(torch.zeros(1, 1, 1, 576, dtype=BF16))
