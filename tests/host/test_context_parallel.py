"""Context parallelism without a GPU: who has which key, and both merges over gloo of results made in plain torch."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from context_parallel import MERGES, gather_heads, local_length
from decode_reference import Sight

WORLD, HEADS, WIDTH = 4, 8, 16
LENGTHS = (1, 3, 4, 63, 64, 65, 130)


@pytest.mark.parametrize("world, interleave", [*itertools.product(range(1, 9), (1, 4, 64))])
def test_every_key_has_one_rank_and_ranks_know_how_many_they_have(world, interleave):
    for seq_len in (*range(70), 299, 4097):
        sights = [Sight(cp_world=world, cp_rank=rank, cp_interleave=interleave) for rank in range(world)]
        held = [[s.position(key) for key in range(local_length(seq_len, world, s.cp_rank, interleave))] for s in sights]
        assert sorted(itertools.chain(*held)) == list(range(seq_len))


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output in bf16, natural LSE) of scores [heads, keys], as a kernel gives them: 0 and -inf without keys."""
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ values
    return out.bfloat16(), scores.logsumexp(-1).float()


def rank_of_several(rank: int, file: str) -> None:
    torch.set_num_threads(1)  # others' threads are not in a process that was forked
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    half = [dist.new_group([2 * i, 2 * i + 1]) for i in range(WORLD // 2)][rank // 2]
    torch.manual_seed(0)
    for group, interleave in itertools.product((dist.group.WORLD, half), (1, 4, 64)):
        assert group is not None
        world, own = dist.get_world_size(group), dist.get_rank(group)
        wholes, outs, lses = [], [], []
        for seq_len in LENGTHS:
            owner = torch.arange(seq_len) // interleave % world
            scores, values = torch.randn(HEADS, seq_len) + owner, torch.randn(seq_len, WIDTH) + 4 * owner[:, None]
            sight = Sight(cp_world=world, cp_rank=own, cp_interleave=interleave)
            mine = [sight.position(key) for key in range(local_length(seq_len, world, own, interleave))]
            wholes.append(attend(scores, values)[0].float())
            out, lse = attend(scores[:, mine], values[mine])
            outs.append(out)
            lses.append(lse)
        whole, out, lse = torch.stack(wholes), torch.stack(outs), torch.stack(lses)
        # Roundings to bf16: of the result without ranks, of a rank's own, of its share of the sum, of each addition.
        bound = (world + 2) * 2**-8 * whole.abs().max()
        heads = slice(own * HEADS // world, (own + 1) * HEADS // world)
        for merge in MERGES.values():
            for base, given in ((math.e, lse), (2.0, lse / math.log(2))):
                got = merge(out, given, base, group).float()
                assert (got - whole[:, heads]).abs().max() < bound
            wrong = merge(out, lse, 2.0, group).float()
            assert (wrong - whole[:, heads]).abs().max() > 2 * bound, "another base would not be seen"
        query = torch.randn(3, HEADS, WIDTH).to(torch.float8_e4m3fn)
        gathered = gather_heads(query[:, heads], group)
        assert torch.equal(gathered.view(torch.uint8), query.view(torch.uint8))
    dist.destroy_process_group()


def test_merges_of_two_and_of_four_ranks(tmp_path: Path):
    torch.multiprocessing.start_processes(
        rank_of_several, (str(tmp_path / "meeting"),), nprocs=WORLD, start_method="fork"
    )
