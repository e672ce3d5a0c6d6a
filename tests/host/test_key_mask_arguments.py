"""tsmla_key_mask without a GPU: what it accepts, what it says about the rest, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import pytest
import torch
from decode_calls import ints
from launches import launched
from tsmla import ArgumentError, KeyMaskVariant, tsmla_key_mask
from tsmla.identity.arch import Arch

TOKENS, TOP_K, KEYS = 5, 7, 70
LISTS = torch.arange(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize("keys, words", [(1, 1), (31, 1), (32, 1), (33, 2), (70, 3), (9000, 282)])
def test_a_word_for_every_32_keys(recorder, keys, words):
    out, launch, variant = launched(recorder, lambda: tsmla_key_mask(LISTS, keys))
    assert variant == KeyMaskVariant(Arch.SM90A) and launch["keys"] == keys and launch["pdl"] == 0
    assert launch["indices"] is LISTS and launch["mask"] is out and launch["lengths"].shape == (0,)
    assert out.shape == (TOKENS, words) and out.dtype == torch.int32 and out.is_contiguous()


def test_lengths_and_a_result_that_is_given(recorder):
    out, lists = zeros(TOKENS, 5)[:, 1:4], torch.arange(100, dtype=torch.int32).view(TOKENS, -1)[:, 3 : 3 + TOP_K]
    lengths = torch.tensor([1, 2**40, -(2**40), 4, 5])
    call = {"topk_length": lengths, "out": out, "enable_pdl": True}
    got, launch, _ = launched(recorder, lambda: tsmla_key_mask(lists, KEYS, **call))
    assert got is out and launch["mask"] is out and launch["indices"] is lists and launch["pdl"] == 1
    assert launch["lengths"].dtype == torch.int32 and launch["lengths"].tolist() == [1, 2**31 - 1, 0, 4, 5]
    tsmla_key_mask(lists, KEYS, topk_length=ints(1, 2, 3, 4, 5))
    assert recorder.launches[-1][1].tolist() == [1, 2, 3, 4, 5]


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    for tokens, keys in ((5, 70), (3, 70), (4, 9000)):
        tsmla_key_mask(LISTS[:tokens], keys)
    assert len(recorder.variants) == 1 and len(recorder.launches) == 3


@pytest.mark.parametrize("tokens, keys, launches", [(0, KEYS, 0), (TOKENS, 0, 0)])
def test_nothing_to_do_launches_nothing(recorder, tokens, keys, launches):
    assert tsmla_key_mask(LISTS[:tokens], keys).shape == (tokens, (keys + 31) // 32)
    assert len(recorder.launches) == launches
    with pytest.raises(ArgumentError, match="indices is torch.int64"):
        tsmla_key_mask(LISTS[:tokens].long(), keys)


def test_lists_without_indices_are_words_without_bits(recorder):
    assert tsmla_key_mask(LISTS[:, :0], KEYS).shape == (TOKENS, 3) and len(recorder.launches) == 1


WRONG = {
    "64-bit lists": ({"indices": LISTS.long()}, "indices is torch.int64; accepted: torch.int32"),
    "a dimension of heads": (
        {"indices": LISTS[:, None]},
        r"indices has shape \[5, 1, 7\]; it must be \[tokens, top_k\]",
    ),
    "one list": ({"indices": LISTS[0]}, r"indices has shape \[7\]"),
    "no lists": ({"indices": None}, "indices is a NoneType; it must be a"),
    "lists with gaps": ({"indices": zeros(TOKENS, 14)[:, ::2]}, "indices has strides"),
    "fewer than no keys": ({"keys": -1}, "keys is -1"),
    "too many keys": ({"keys": 2**31}, "keys is 2147483648"),
    "keys in words": ({"keys": "70"}, "keys is a str"),
    "lengths of fewer tokens": ({"topk_length": ints(1, 2)}, r"topk_length has shape \[2\]; it must be \[5\]"),
    "real lengths": ({"topk_length": torch.zeros(TOKENS)}, "topk_length is torch.float32"),
    "a number for lengths": ({"topk_length": 3}, "topk_length is a int; it must be a tensor"),
    "too few words": ({"out": zeros(TOKENS, 2)}, r"out has shape \[5, 2\]; it must be \[5, 3\]"),
    "too many words": ({"out": zeros(TOKENS, 4)}, r"out has shape \[5, 4\]; it must be \[5, 3\]"),
    "words of fewer tokens": ({"out": zeros(4, 3)}, r"out has shape \[4, 3\]; it must be \[5, 3\]"),
    "words that share memory": ({"out": zeros(1, 3).expand(TOKENS, 3)}, "out has shape .* share memory"),
    "words with gaps": ({"out": zeros(TOKENS, 6)[:, ::2]}, "out has strides"),
    "bytes": ({"out": zeros(TOKENS, 3).to(torch.uint8)}, "out is torch.uint8; accepted: torch.int32"),
    "a number": ({"out": 7}, "out is a int; it must be a tensor"),
    "a flag in words": ({"enable_pdl": "no"}, "enable_pdl is 'no'; it must be True or False"),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(recorder, case, seen):
    change, message = WRONG[case]
    right = {"indices": LISTS, "keys": KEYS, "topk_length": ints(1, 2, 3, 4, 5), "out": zeros(TOKENS, 3)}
    if seen:
        tsmla_key_mask(**right)
        tsmla_key_mask(LISTS, KEYS)
        recorder.launches.clear()
    for without in ((), ("topk_length", "out")):
        call = {name: value for name, value in {**right, **change}.items() if name in change or name not in without}
        with pytest.raises(ArgumentError, match=f"^tsmla_key_mask: {message}"):
            tsmla_key_mask(**call)
    assert recorder.launches == []


def test_cpu_tensors_are_refused():
    with pytest.raises(ArgumentError, match="tsmla_key_mask: indices is on cpu; it must be a CUDA tensor"):
        tsmla_key_mask(LISTS, KEYS)


def test_a_traced_call_makes_its_result(recorder):
    traced = torch.compile(tsmla_key_mask, fullgraph=True, backend="aot_eager")
    for tokens, keys in ((5, 70), (3, 640)):
        assert traced(LISTS[:tokens], keys).shape == (tokens, (keys + 31) // 32)
    out = zeros(TOKENS, 3)
    assert traced(LISTS, KEYS, out=out) is out and len(recorder.launches) == 3
