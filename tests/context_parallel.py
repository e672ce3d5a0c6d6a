"""Decode context parallelism as engines do it over torch.distributed: which keys a rank has, and both ways in which
ranks make one result of theirs (vLLM, v1/attention/ops/dcp.py: cp_lse_ag_out_rs and dcp_a2a_lse_reduce)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

Group = dist.ProcessGroup
Merge = Callable[[torch.Tensor, torch.Tensor, float, Group], torch.Tensor]


def local_length(seq_len: int, world: int, rank: int, interleave: int) -> int:
    """How many of a request's keys a rank has, when blocks of `interleave` keys are dealt in turn."""
    base = seq_len // interleave // world * interleave
    return base + min(max(seq_len - base * world - rank * interleave, 0), interleave)


def gather_heads(query: torch.Tensor, group: Group) -> torch.Tensor:
    """All ranks' heads of a query [.., heads of this rank, 576]. Bytes, since NCCL knows no 8-bit floats."""
    given = query.contiguous().view(torch.uint8)
    parts = [torch.empty_like(given) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, given, group)
    return torch.cat(parts, dim=-2).view(query.dtype)


def reduce_scatter_merge(out: torch.Tensor, lse: torch.Tensor, base: float, group: Group) -> torch.Tensor:
    """out: [tokens, heads, 512] of this rank's keys; lse: [tokens, heads], logarithms to `base`. Ranks exchange LSEs,
    weight their outputs and add them up in the outputs' dtype. Returns [tokens, heads of this rank, 512]."""
    world = dist.get_world_size(group)
    lses = [torch.empty_like(lse) for _ in range(world)]
    dist.all_gather(lses, lse.contiguous(), group)
    weight = _weights(torch.stack(lses), base)[dist.get_rank(group)]
    weighted = [part.contiguous() for part in (out * weight[..., None]).to(out.dtype).chunk(world, dim=1)]
    own = torch.empty_like(weighted[0])
    dist.reduce_scatter(own, weighted, group=group)
    return own


def all_to_all_merge(out: torch.Tensor, lse: torch.Tensor, base: float, group: Group) -> torch.Tensor:
    """Merge in one exchange: every rank gets its heads' outputs and LSEs from all, and adds them up in float32."""
    world = dist.get_world_size(group)
    packed = torch.cat([out.contiguous().view(torch.uint8), lse[..., None].contiguous().view(torch.uint8)], dim=-1)
    sent = torch.stack(packed.chunk(world, dim=1))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    width = out.shape[-1] * out.element_size()
    outs = received[..., :width].contiguous().view(out.dtype)
    lses = received[..., width:].contiguous().view(torch.float32)
    return (outs.float() * _weights(lses, base)).sum(0).to(out.dtype)


MERGES: dict[str, Merge] = {"reduce-scatter": reduce_scatter_merge, "all-to-all": all_to_all_merge}


def _weights(lses: torch.Tensor, base: float) -> torch.Tensor:
    """What share each rank's output has, of LSEs [ranks, ..]; 0 everywhere where no rank has a key."""
    return torch.softmax(lses * math.log(base), dim=0).nan_to_num(0.0)
