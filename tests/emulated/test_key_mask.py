"""tsmla_key_mask in emulation: every word as PyTorch computes it, and a prefill that takes the mask."""

from __future__ import annotations

import math

import pytest
import torch
import tsmla
from emulated_archs import KERNELS
from tsmla import tsmla_key_mask
from tsmla.identity.key_mask import MASK_BITS
from tsmla.problems.lists import NOWHERE
from tsmla.problems.prefill import mask_words
from tsmla_kernels.key_mask.kernel import READ_AT_ONCE, THREADS, WORDS

pytestmark = pytest.mark.archs(*KERNELS)
POISON = 0x5A5A5A5A


def bits_of(lists: torch.Tensor, keys: int, lengths: list[int] | None = None) -> torch.Tensor:
    """Whether each key is in each list, [tokens, keys]."""
    seen = torch.zeros(len(lists), keys, dtype=torch.bool)
    for token, own in enumerate(lists.tolist()):
        counted = len(own) if lengths is None else max(0, lengths[token])
        seen[token, [key for key in own[:counted] if 0 <= key < keys]] = True
    return seen


def words_of(seen: torch.Tensor) -> torch.Tensor:
    tokens, keys = seen.shape
    bits = torch.zeros(tokens, -(-keys // MASK_BITS) * MASK_BITS, dtype=torch.bool)
    bits[:, :keys] = seen
    return mask_words(bits)


def check(lists: torch.Tensor, keys: int, lengths: list[int] | None = None, **options) -> None:
    """Call the operator with rows of lists and of words that lie apart, and compare."""
    tokens, top_k = lists.shape
    given = torch.full((tokens, top_k + 3), 0, dtype=torch.int32)  # key 0, where anybody reads it
    given[:, :top_k] = lists
    count = -(-keys // MASK_BITS)
    memory = torch.full((tokens, count + 2), POISON, dtype=torch.int32, device="cuda")
    out = tsmla_key_mask(
        given.to("cuda")[:, :top_k], keys, out=memory[:, 1 : 1 + count],
        topk_length=None if lengths is None else torch.tensor(lengths, device="cuda"), **options,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), words_of(bits_of(lists, keys, lengths)))
    assert (memory[:, [0, -1]] == POISON).all(), "words beside a token's own"


@pytest.mark.parametrize("keys", [1, 31, 32, 33, 64, 1000, THREADS * MASK_BITS, THREADS * MASK_BITS + 1])
def test_numbers_of_keys(gpu, keys):
    check(torch.randint(-5, keys + 40, (3, 100)), keys)


@pytest.mark.parametrize("top_k", [0, 1, THREADS, THREADS + 1, THREADS * READ_AT_ONCE, THREADS * READ_AT_ONCE + 1])
def test_lengths_of_lists(gpu, top_k):
    check(torch.randint(1, 4000, (4, top_k)), 3999, [top_k, 0, -1, top_k // 2], enable_pdl=True)


def test_rows_of_several_passes(gpu):
    """Keys at both ends of every pass."""
    keys = 2 * WORDS * MASK_BITS + 70
    edges = torch.tensor(
        [0, WORDS * MASK_BITS - 1, WORDS * MASK_BITS, 2 * WORDS * MASK_BITS - 1, 2 * WORDS * MASK_BITS, keys - 1, keys]
    )
    check(torch.stack([edges, torch.randint(keys, (7,))]), keys)


def test_every_key_and_none(gpu):
    check(torch.stack([torch.randperm(777), torch.full((777,), -1)]), 777)


def test_a_key_chosen_many_times(gpu):
    """Bits are set together, not added."""
    check(torch.full((2, 700), 77), 80)


def test_indices_of_no_key(gpu):
    check(torch.tensor([[*NOWHERE, 32, 33, 31, 5]]), 32)


def test_a_result_that_is_made(gpu):
    lists = torch.randint(400, (5, 60)).int()
    out = tsmla_key_mask(lists.to("cuda"), 400)
    assert out.is_contiguous() and torch.equal(out.cpu(), words_of(bits_of(lists, 400)))


@pytest.mark.archs("sm_90a")
def test_a_prefill_takes_the_mask(gpu):
    """Lists of positions in a token's own sequence, beside causality; words for the longest sequence."""
    lengths, heads = [70, 40], 2
    ends = torch.tensor([0, 70, 110], dtype=torch.int32, device="cuda")
    query, key = (torch.randn(110, heads, 192, device="cuda").bfloat16() for _ in range(2))
    value = torch.randn(110, heads, 128, device="cuda").bfloat16()
    lists = torch.randint(-3, 80, (110, 20)).int()
    mask = tsmla_key_mask(lists.to("cuda"), max(lengths))
    out = tsmla.tsmla_prefill(query, key, value, None, ends, 70, 2, 0.07, key_mask=mask)
    seen, first = bits_of(lists, max(lengths)), 0
    for length in lengths:
        own = slice(first, first + length)
        hidden = ~(seen[own, :length] & torch.ones(length, length, dtype=torch.bool).tril())
        scores = torch.einsum("qhd,khd->hqk", query[own].double().cpu(), key[own].double().cpu()) * 0.07
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
        want = torch.einsum("hqk,khd->qhd", weights, value[own].double().cpu())
        assert (out[own].cpu().double() - want).abs().max() < 0.02
        first += length
