"""tsmla_prefill without a GPU: queries and keys in pieces, LSEs that are given and earlier results that are wrong."""

from __future__ import annotations

import pytest
import torch
from prefill_calls import HEADS, TOKENS_Q, bf16, inputs
from tsmla.errors import ArgumentError
from tsmla.operators import prefill

WRONG = {
    "query in three": ({"query": (bf16(5, 4, 64),) * 3}, "query is a tuple of 3; it must be a tensor or a tuple of 2"),
    "key without a rope": ({"key": (bf16(7, 2, 128), None)}, "key is a tuple without the second piece; it must be a"),
    "query in a list": ({"query": [bf16(5, 4, 128), bf16(5, 4, 64)]}, "query is a list; it must be a"),
    "query piece of other columns": (
        {"query": (bf16(5, 4, 64), bf16(5, 4, 64))},
        r"query\[0\] has shape \[5, 4, 64\]; it must be \[tokens_q, heads_q, 128\] or \[tokens_q, heads_q, 192\]",
    ),
    "query rope of other tokens": (
        {"query": (bf16(5, 4, 128), bf16(6, 4, 64))},
        r"query\[1\] has shape \[6, 4, 64\]; it must be \[5, 4, 64\]",
    ),
    "query rope of one head": (
        {"query": (bf16(5, 4, 128), bf16(5, 1, 64))},
        r"query\[1\] has shape \[5, 1, 64\]; it must be \[5, 4, 64\]",
    ),
    "query rope of another dtype": (
        {"query": (bf16(5, 4, 128), bf16(5, 4, 64).half())},
        r"query\[1\] is torch.float16; accepted: torch.bfloat16",
    ),
    "key piece of all columns": (
        {"key": (bf16(7, 2, 192), bf16(7, 64))},
        r"key\[0\] has shape \[7, 2, 192\]; it must be \[7, 2, 128\]",
    ),
    "key of a piece": ({"key": bf16(7, 2, 128)}, r"key has shape \[7, 2, 128\]; it must be \[7, 2, 192\]"),
    "key rope of heads": (
        {"key": (bf16(7, 2, 128), bf16(7, 2, 64))},
        r"key\[1\] has shape \[7, 2, 64\]; it must be \[7, 1, 64\] or \[7, 64\]",
    ),
    "key rope of other tokens": ({"key": (bf16(7, 2, 128), bf16(6, 64))}, r"key\[1\] has shape \[6, 64\]; it must be"),
    "key rope of one dimension": ({"key": (bf16(7, 2, 128), bf16(64))}, r"key\[1\] has shape \[64\]; it must be"),
    "key rope elsewhere": (
        {"key": (bf16(7, 2, 128), bf16(7, 64).to("meta"))},
        r"key\[1\] is on meta but query is on cpu",
    ),
    "key rope with gaps": (
        {"key": (bf16(7, 2, 128), bf16(7, 128)[:, ::2])},
        r"key\[1\] has strides .* its last dimension must have stride 1",
    ),
    "key rope's address": (
        {"key": (bf16(7, 2, 128), bf16(7, 72)[:, 4:68])},
        r"key\[1\] starts at address 0x[0-9a-f]+; it must be aligned to 16 bytes",
    ),
    "pieces without a rope in the query": (
        {"query": bf16(5, 4, 128), "key": (bf16(7, 2, 128), bf16(7, 64))},
        "key has two pieces, together with a query of 192 or 256 columns; query has 128",
    ),
    "LSE of another shape": ({"lse": torch.zeros(HEADS, TOKENS_Q)}, r"lse has shape \[4, 5\]; it must be \[5, 4\]"),
    "LSE of another dtype": ({"lse": bf16(TOKENS_Q, HEADS)}, "lse is torch.bfloat16; accepted: torch.float32"),
    "LSE that shares memory": ({"lse": torch.zeros(1, HEADS).expand(TOKENS_Q, -1)}, "lse has shape .* share memory"),
    "merge into a tensor": ({"merge_into": bf16(5, 4, 128)}, r"merge_into is a Tensor; it must be \(out, lse\), two"),
    "merge into an output alone": (
        {"merge_into": (bf16(5, 4, 128), None)},
        r"merge_into is a tuple; it must be \(out, lse\), two tensors",
    ),
    "merge into and out": (
        {"merge_into": (bf16(5, 4, 128), torch.zeros(5, 4)), "out": bf16(5, 4, 128)},
        "out is given, and so is merge_into, whose tensors are written into; give one of them",
    ),
    "merge into and lse": (
        {"merge_into": (bf16(5, 4, 128), torch.zeros(5, 4)), "lse": torch.zeros(5, 4)},
        "lse is given, and so is merge_into, whose tensors are written into; give one of them",
    ),
    "merge into an LSE of another dtype": (
        {"merge_into": (bf16(5, 4, 128), bf16(5, 4))},
        r"merge_into\[1\] is torch.bfloat16; accepted: torch.float32",
    ),
    "merge into an output of another shape": (
        {"merge_into": (bf16(5, 4, 120), torch.zeros(5, 4))},
        r"merge_into\[0\] has shape \[5, 4, 120\]; it must be \[5, 4, 128\]",
    ),
    "merge into an output of another dtype": (
        {"merge_into": (torch.zeros(5, 4, 128), torch.zeros(5, 4))},
        r"merge_into\[0\] is torch.float32; accepted",
    ),
    "merge into an LSE elsewhere": (
        {"merge_into": (bf16(5, 4, 128), torch.zeros(5, 4, device="meta"))},
        r"merge_into\[1\] is on meta but query is on cpu",
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("change, message", WRONG.values(), ids=WRONG.keys())
def test_wrong_use_names_the_argument(recorder, change, message, seen):
    if seen:
        pieces = {"query": (bf16(5, 4, 128), bf16(5, 4, 64)), "key": (bf16(7, 2, 128), bf16(7, 64))}
        result = bf16(5, 4, 128), torch.zeros(5, 4)
        for right in ({}, pieces, {"key": pieces["key"]}, {"merge_into": result}, {"lse": result[1]}):
            prefill.tsmla_prefill(**inputs(**right))
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {message}"):
        prefill.tsmla_prefill(**inputs(**change))
    assert recorder.launches == []
