"""Decode context parallelism: every rank holds a part of each request's keys, and results are merged by their LSEs.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import tsmla

SCALE, INTERLEAVE = 192**-0.5, 64  # keys 0 to 63 of a request are rank 0's, 64 to 127 rank 1's, and so on


def decode_own_keys(q: torch.Tensor, keys: torch.Tensor, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's output and base-2 LSE over this rank's keys. q: [heads, 576]; keys: [all keys, 576]."""
    own = keys[torch.arange(len(keys), device=keys.device) // INTERLEAVE % world == rank]
    cache = keys.new_zeros(len(own) // 64 + 1, 64, 576)
    cache.view(-1, 576)[: len(own)] = own
    workspace = torch.empty(tsmla.decode_workspace_size(1, 1, len(q)), dtype=torch.int8, device="cuda")
    out, lse = tsmla.tsmla_decode(
        q[None, None],
        cache,
        workspace,
        512,
        64,
        block_tables=torch.arange(len(cache), dtype=torch.int32, device="cuda")[None],
        seq_lens=torch.tensor([len(own)], dtype=torch.int32, device="cuda"),
        max_seq_len=64 * len(cache),
        softmax_scale=SCALE,
        return_lse=True,
        cp_world=world,
        cp_rank=rank,
        cp_interleave_size=INTERLEAVE,
        causal_seqs=torch.tensor([len(keys)], dtype=torch.int32, device="cuda"),
    )
    return out[0, 0], lse[0, 0]


def merged(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """One output [heads, 512] of those of all ranks [world, heads, 512], weighted by 2 ** LSE. A rank without keys has
    LSE -inf, and so no weight."""
    weights = torch.exp2(lses - lses.max(0).values)
    return torch.einsum("rh,rhd->hd", weights / weights.sum(0), outs.float())


def inputs(heads: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, keys = (torch.randn(rows, 576, device="cuda").bfloat16() for rows in (heads, count))
    return q, keys


def error_of(out: torch.Tensor, q: torch.Tensor, keys: torch.Tensor) -> float:
    """The largest difference from float64."""
    weights = (q.double() @ keys.double().T * SCALE).softmax(-1)
    return float((out.double() - weights @ keys[:, :512].double()).abs().max())


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    q, keys = inputs(heads=16, count=5000)
    out, lse = decode_own_keys(q, keys, rank, world)
    outs, lses = out.new_empty(world, *out.shape), lse.new_empty(world, *lse.shape)
    dist.all_gather_into_tensor(outs, out)
    dist.all_gather_into_tensor(lses, lse)
    if rank == 0:
        print(f"{world} ranks, {len(keys)} keys: largest error {error_of(merged(outs, lses), q, keys):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
