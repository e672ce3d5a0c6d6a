"""Decode context parallelism over NCCL: under torchrun, a process for each GPU.

    torchrun --nproc-per-node 2 -m pytest tests/device/test_context_parallel.py

Every rank makes the same inputs, decodes all heads over its own keys, and merges with the others as engines do.
"""

from __future__ import annotations

import datetime
import math
import os
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import tsmla
from context_parallel import MERGES, gather_heads, local_length
from decode_reference import LATENT, ROPE, Problem, check, judge, make_problem, sharded
from tsmla.checks import TORCH_DTYPE_OF
from tsmla.support import DECODE_DTYPES
from tsmla.variant import Arch

pytestmark = pytest.mark.skipif(
    not dist.is_torchelastic_launched(),
    reason="needs torchrun: torchrun --nproc-per-node 2 -m pytest tests/device/test_context_parallel.py",
)
BASES = (2.0, math.e)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[dist.ProcessGroup]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=device)
    assert dist.group.WORLD is not None and dist.get_world_size() > 1, "one rank has nobody to share with"
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def same_inputs(ranks: dist.ProcessGroup) -> None:
    seed = torch.tensor([random.SystemRandom().randrange(2**31)], device="cuda")
    dist.broadcast(seed, 0)
    print(f"seed {int(seed)}")
    torch.manual_seed(int(seed))


@pytest.fixture(params=["bf16", "fp16", "e4m3"])
def dtype(request: pytest.FixtureRequest, arch: Arch) -> torch.dtype:
    if request.param not in DECODE_DTYPES.get(arch, ()):
        pytest.skip(f"decode for {arch} does not take {request.param}")
    return TORCH_DTYPE_OF[request.param]


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
    mine.query = gather_heads(whole.query.chunk(world, dim=-2)[rank], ranks)
    assert torch.equal(mine.query.view(torch.uint8), whole.query.view(torch.uint8))
    for base in BASES:
        out, lse = (part.flatten(0, -2 - axes) for part, axes in zip(decoded(mine, base), (1, 0), strict=True))
        for merge in MERGES.values():
            judge(whole, gather_heads(merge(out, lse, base, ranks), ranks).view(*whole.query.shape[:-1], LATENT), None)
            (other,) = set(BASES) - {base}
            wrong = gather_heads(merge(out, lse, other, ranks), ranks).view(*whole.query.shape[:-1], LATENT)
            with pytest.raises(AssertionError):
                judge(whole, wrong, None)
