"""The decode by tsmla."""

import torch
from tsmla import decode_workspace_size, tsmla_decode


def run(query, kv_cache, block_tables, seq_lens, softmax_scale):
    """Return the output and the LSE in base 2. The longest request is as long as the page table is wide."""
    batch, q_len, heads, _ = query.shape
    longest = block_tables.shape[1] * kv_cache.shape[1]
    size = decode_workspace_size(batch, q_len, heads, longest, query.device)
    workspace = torch.empty(size, dtype=torch.int8, device=query.device)
    return tsmla_decode(
        query, kv_cache, workspace, 512, 64, block_tables, seq_lens, longest, softmax_scale, return_lse=True
    )
