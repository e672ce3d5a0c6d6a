"""tsmla_decode without a GPU: a query in two pieces, what is launched and what is refused.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import re

import pytest
import torch
from decode_calls import BATCH, HEADS, Q_LEN, bf16, inputs
from launches import processors
from refusing import Recorder
from tsmla import ArgumentError
from tsmla.loading import resolve
from tsmla.operators.decode import tsmla_decode


@pytest.fixture
def recorder(monkeypatch, recorder: Recorder) -> Recorder:
    processors(monkeypatch)
    return recorder


PIECES = {
    "whole": (bf16(BATCH, Q_LEN, HEADS, 512), bf16(BATCH, Q_LEN, HEADS, 64)),
    "transposed, and a slice": (
        bf16(HEADS, BATCH * Q_LEN, 512).transpose(0, 1).unflatten(0, (BATCH, Q_LEN)),
        bf16(BATCH, Q_LEN, HEADS, 192)[..., 128:],
    ),
    "of one tensor": bf16(BATCH, Q_LEN, HEADS, 576).split((512, 64), -1),
    "expanded": tuple(bf16(1, 1, 1, columns).expand(BATCH, Q_LEN, HEADS, columns) for columns in (512, 64)),
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
def test_pieces_of_the_query_are_launched_as_they_are(recorder, pieces):
    for _ in range(2):
        out = tsmla_decode(**inputs(query=pieces))
        assert out.shape == (BATCH, Q_LEN, HEADS, 512)
        (arguments,) = recorder.launches
        assert arguments[0] is pieces[0] and arguments[1] is pieces[1]
        tsmla_decode(**inputs())
        assert torch.from_dlpack(recorder.launches[-1][1]).numel() == 0
        recorder.launches.clear()


def test_a_joined_query_may_be_a_slice(recorder):
    query = bf16(Q_LEN, BATCH, HEADS + 1, 640).transpose(0, 1)[:, :, 1:, 64:]
    tsmla_decode(**inputs(query=query))
    assert recorder.launches[0][0] is query


def test_what_is_no_pair_of_cuda_tensors_is_refused():
    for pieces, message in (
        ([1.0], "query is a list; it must be a CUDA tensor"),
        ((1.0, 2.0, 3.0, 4.0), "query is a tuple of 4; it must be a tensor or a tuple of 2 or 3"),
        (
            (bf16(3, 2, 4, 512), None),
            "query is a tuple without the second piece; it must be a tensor or a tuple of 2 or 3",
        ),
        ((None, bf16(3, 2, 4, 64)), "query[0] is a NoneType; it must be a CUDA tensor"),
        ((bf16(3, 2, 4, 512), bf16(3, 2, 4, 64)), "query[0] is on cpu; it must be a CUDA tensor"),
    ):
        with pytest.raises(ArgumentError, match=f"^tsmla_decode: {re.escape(message)}"):
            tsmla_decode(**inputs(query=pieces))


WRONG = {
    "latent width": (
        {"query": (bf16(3, 2, 4, 576), bf16(3, 2, 4, 64))},
        "query[0] has shape [3, 2, 4, 576]; it must be [batch, q_len, heads, 512]",
    ),
    "rope width": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 4, 128))},
        "query[1] has shape [3, 2, 4, 128]; it must be [3, 2, 4, 64]",
    ),
    "pieces of other tokens": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 1, 4, 64))},
        "query[1] has shape [3, 1, 4, 64]; it must be [3, 2, 4, 64]",
    ),
    "pieces of other heads": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 1, 64))},
        "query[1] has shape [3, 2, 1, 64]; it must be [3, 2, 4, 64]",
    ),
    "one rope piece for all heads": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 64))},
        "query[1] has shape [3, 2, 64]; it must be [3, 2, 4, 64]",
    ),
    "rope dtype": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 4, 64).half())},
        "query[1] is torch.float16; accepted: torch.bfloat16",
    ),
    "rope elsewhere": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 4, 64).to("meta"))},
        "query[1] is on meta but query[0] is on cpu",
    ),
    "rope with gaps": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 4, 128)[..., ::2])},
        "query[1] has strides (1024, 512, 128, 2); its last dimension must have stride 1",
    ),
    "rope strides": (
        {"query": (bf16(3, 2, 4, 512), bf16(3, 2, 4, 68)[..., :64])},
        "query[1] has strides (544, 272, 68, 1) of 2-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "rope address": ({"query": (bf16(3, 2, 4, 512), bf16(3, 2, 4, 72)[..., 4:68])}, "query[1] starts at address"),
    "query address": (
        {"query": torch.zeros(BATCH * Q_LEN * HEADS * 576 + 1, dtype=torch.bfloat16)[1:].view(3, 2, 4, 576)},
        "query starts at address",
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "after a right one"])
@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_pieces_are_named(recorder, change, message, seen):
    resolve.forget()
    if seen:
        tsmla_decode(**inputs(query=(bf16(3, 2, 4, 512), bf16(3, 2, 4, 64))))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_decode: {re.escape(message)}"):
        tsmla_decode(**inputs(**change))
    assert recorder.launches == []
