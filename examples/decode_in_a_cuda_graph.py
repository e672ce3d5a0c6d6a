"""Decode under a CUDA graph: captured once, replayed while the context grows into new pages of the cache.

python examples/decode_in_a_cuda_graph.py
"""

from __future__ import annotations

import torch
import tsmla
from tsmla import Arch, DecodeVariant, Dtype

SCALE, LONGEST = 192**-0.5, 4096


def main(batch: int = 4, heads: int = 16, keys: int = 1020, steps: int = 6, capture: bool = True) -> float:
    """Return the largest difference from float64 over all steps. capture: use a graph; else call for each step."""
    torch.manual_seed(0)
    pages = batch * LONGEST // 64
    cache = torch.randn(pages, 64, 576, device="cuda").bfloat16()
    tables = torch.randperm(pages, device="cuda").int().view(batch, -1)
    seq_lens = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    q = torch.empty(batch, 1, heads, 576, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(batch, 1, heads, 512, dtype=torch.bfloat16, device="cuda")
    workspace = torch.empty(tsmla.decode_workspace_size(batch, 1, heads), dtype=torch.int8, device="cuda")

    def decode() -> None:
        tsmla.tsmla_decode(q, cache, workspace, 512, 64, tables, seq_lens, LONGEST, SCALE, out=out)

    replay = decode
    if capture:
        arch = Arch.from_capability(*torch.cuda.get_device_capability())
        assert arch is not None, "no kernels exist for this GPU"
        tsmla.warmup([DecodeVariant(arch, Dtype.BF16, Dtype.BF16, lse=False)])  # a capture can neither load nor compile
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
        replay = graph.replay

    worst = 0.0
    for _ in range(steps):
        q.copy_(torch.randn(batch, 1, heads, 576, device="cuda"))
        seq_lens.add_(1)  # the GPU deals the work by these lengths: the same graph serves every step
        replay()
        for request, length in enumerate(seq_lens.tolist()):
            k = cache[tables[request].long()].flatten(0, 1)[:length].double()
            weights = (q[request, 0].double() @ k.T * SCALE).softmax(-1)
            worst = max(worst, float((out[request, 0].double() - weights @ k[:, :512]).abs().max()))
    how = "replays of one graph" if capture else "calls"
    print(f"{steps} {how}, {batch} requests of up to {keys + steps} keys: largest error {worst:.1e}")
    return worst


if __name__ == "__main__":
    main()
