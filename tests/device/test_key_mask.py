"""tsmla_key_mask on a GPU: every word as PyTorch computes it, the same bits in every run, and graphs."""

from __future__ import annotations

import pytest
import torch
from tsmla import tsmla_key_mask
from tsmla.problems.prefill import mask_words


@pytest.fixture(autouse=True)
def seeded(seed: int) -> None:
    """Each test has another seed, which it prints."""


def words_of(lists: torch.Tensor, keys: int) -> torch.Tensor:
    """The words of whole lists, on the GPU."""
    count = -(-keys // 32) * 32
    place = torch.where((lists >= 0) & (lists < keys), lists, count).long()
    bits = torch.zeros(len(lists), count + 1, dtype=torch.bool, device="cuda").scatter_(1, place, True)
    return mask_words(bits[:, :count])


def random(tokens: int, top_k: int, keys: int) -> torch.Tensor:
    return torch.randint(-keys // 20, keys + keys // 20, (tokens, top_k), dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("keys", [1, 4097, 65536, 131072, 131073, 1 << 20])
@pytest.mark.parametrize("tokens, top_k", [(1, 2048), (700, 512), (3, 5000)])
def test_every_word_is_torch_s(arch, tokens, top_k, keys):
    lists = random(tokens, top_k, keys)
    assert torch.equal(tsmla_key_mask(lists, keys), words_of(lists, keys))


def test_the_same_bits_in_every_run(arch):
    lists = random(4096, 2048, 8192)
    first = tsmla_key_mask(lists, 8192)
    for _ in range(20):
        assert torch.equal(tsmla_key_mask(lists, 8192, enable_pdl=True), first)


def test_a_graph_s_replays_have_other_lists_and_lengths(arch):
    lists, lengths = random(300, 2048, 8192), torch.full((300,), 2048, dtype=torch.int32, device="cuda")
    tsmla_key_mask(lists, 8192, topk_length=lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tsmla_key_mask(lists, 8192, topk_length=lengths)
    for _ in range(3):
        lists.copy_(random(300, 2048, 8192))
        lengths.copy_(torch.randint(-5, 2100, (300,)))
        out.fill_(-1)
        graph.replay()
        counted = torch.arange(2048, device="cuda") < lengths[:, None]
        assert torch.equal(out, words_of(lists.where(counted, -1), 8192))
