"""Decode context parallelism: under torchrun, over NCCL with a GPU for each process.

    torchrun --nproc-per-node 2 -m pytest tests/device/test_context_parallel.py

Every rank makes the same inputs, decodes all heads over its own keys, and merges with the others as engines do. Where
there are fewer GPUs than processes, these share them and exchange over gloo, by way of the host: NCCL refuses that.
"""

from __future__ import annotations

import datetime
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import tsmla
from context_parallel import MERGES, gather_heads, local_length
from decode_reference import LATENT, ROPE, Problem, check, judge, make_problem, sharded
from tsmla.identity.arch import Arch
from tsmla.operators.checks import TORCH_DTYPE_OF

pytestmark = pytest.mark.skipif(
    not dist.is_torchelastic_launched(),
    reason="needs torchrun: torchrun --nproc-per-node 2 -m pytest tests/device/test_context_parallel.py",
)
BASES = (2.0, math.e)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[dist.ProcessGroup]:
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=60)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > gpus:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    assert dist.group.WORLD is not None and dist.get_world_size() > 1, "one rank has nobody to share with"
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def same_inputs(ranks: dist.ProcessGroup) -> None:
    seed = torch.tensor([random.SystemRandom().randrange(2**31)], device="cuda")
    dist.broadcast(seed, 0)  # gloo takes this one of a GPU's tensors, too
    print(f"seed {int(seed)}")
    torch.manual_seed(int(seed))


@pytest.fixture(params=["bf16", "fp16", "e4m3"])
def dtype(request: pytest.FixtureRequest, arch: Arch) -> torch.dtype:
    if request.param not in arch.facts.decode:
        pytest.skip(f"decode for {arch} does not take {request.param}")
    return TORCH_DTYPE_OF[request.param]


def exchanged(exchange: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
    """What an exchange between ranks makes of tensors of theirs: over gloo, of copies on the host."""
    if dist.get_backend() == "nccl":
        return exchange(*given)
    return exchange(*(each.cpu() if isinstance(each, torch.Tensor) else each for each in given)).cuda()


def skewed_rows(lengths: list[int], world: int, interleave: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Keys whose scores spread the more the higher their rank, so that ranks' shares are far from equal."""
    rows = []
    for length in lengths:
        rank = torch.arange(length, device="cuda") // interleave % world
        rows.append((torch.randn(length, LATENT + ROPE, device="cuda") * (1 + 1.5 * rank[:, None] / world)).to(dtype))
    return rows


def decoded(problem: Problem, lse_base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of a replayed graph, which are those of a call."""
    given = problem.arguments(lse_base=lse_base)
    out, lse = tsmla.tsmla_decode(**given)
    eager = out.clone(), lse.clone()
    held = {**given, "lse": torch.full_like(lse, math.nan)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tsmla.tsmla_decode(**held)
    held["out"].fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    for got, expected in zip((held["out"], held["lse"]), eager, strict=True):
        assert torch.equal(got.nan_to_num(1.0, posinf=1e9, neginf=-1e9), expected.nan_to_num(1.0, 1e9, -1e9))
    return held["out"], held["lse"]


@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("q_len", [1, 4, [1, 4, 2, 0, 3, 1, 4]], ids=str)
def test_ranks_give_what_one_gpu_gives(ranks, dtype, q_len, heads, interleave):
    world, rank = dist.get_world_size(ranks), dist.get_rank(ranks)
    lengths = [1, world - 1, world, 63, 64, 65, 4097]
    whole = make_problem(lengths, q_len, heads, dtype, rows=skewed_rows(lengths, world, interleave, dtype))
    check(whole)
    mine = sharded(whole, world, interleave)[rank]
    mine.cum_q = whole.cum_q
    assert mine.seq_lens == [local_length(length, world, rank, interleave) for length in lengths]
    mine.query = exchanged(gather_heads, whole.query.chunk(world, dim=-2)[rank], ranks)
    assert torch.equal(mine.query.view(torch.uint8), whole.query.view(torch.uint8))
    for base in BASES:
        out, lse = (part.flatten(0, -2 - axes) for part, axes in zip(decoded(mine, base), (1, 0), strict=True))
        for merge in MERGES.values():
            for said in BASES:
                own = exchanged(merge, out, lse, said, ranks)
                result = exchanged(gather_heads, own, ranks).view(*whole.query.shape[:-1], LATENT)
                if said == base:
                    judge(whole, result, None)
                else:
                    with pytest.raises(AssertionError):
                        judge(whole, result, None)
