"""Prompts of layers that choose their keys, over a cache of 656-byte rows: keys are made bf16 once for all tokens.

A decode makes a row bf16 for each token that chose it, which takes 1.15 (128 heads) to 1.5 times (64 heads) as long as
lists of rows that are bf16. Up to 16 heads have a kernel that is faster with 656 bytes (record chosen-prefill-*). To
read a key into bf16 once is less work than a hundredth of a list.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tsmla.identity.row_format import ROWS
from tsmla.identity.support import LATENT_DIM
from tsmla.operators.read_cache import mla_read_cache

from .masked import MOST_BYTES

MOST_HEADS_THAT_DECODE = 16
"""The most heads of a rank whose prompts are decoded from the cache as it is."""
KEYS_OF_A_TOKEN = 256
"""Keys to read for each token of the prompts, at most. A token gains 0.17 us or more (record chosen-prefill-*); a key
takes 1.8 KB of memory traffic, 0.5 ns."""
_FORMAT = "fp8_ds_mla"
_COLUMNS, _BF16_BYTES = ROWS[_FORMAT].columns, 2


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Where the keys of a batch's prompts go in a tensor of `rows` rows: each prompt's to whole pages, behind those of
    the one before.

    requests: the prompts among the batch's requests. starts: [prompts + 1] int32, each one's first row. pages:
    [requests, most pages of one] int32, the tensor's pages of every request of the batch; those before the prompts have
    none.
    """

    requests: slice
    starts: torch.Tensor
    pages: torch.Tensor
    rows: int

    def read(self, cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        """Return the prompts' keys, [rows, 576] bf16; rows behind a prompt's last key hold anything. block_table: of
        all requests."""
        rows = cache.new_empty((self.rows, _COLUMNS), dtype=torch.bfloat16)
        mla_read_cache(
            cache,
            rows[:, :LATENT_DIM],
            rows[:, None, LATENT_DIM:],
            block_tables=block_table[self.requests],
            cum_seq_lens=self.starts,
            format=_FORMAT,
        )
        return rows


def of(metadata: Any) -> Prompts | None:
    """Return the prompts of a batch; None where there are none, or their keys are too many to read.

    metadata: vLLM's, with the requests' `lengths` on the host.
    """
    first, count, lengths = metadata.num_decodes, metadata.num_prefills, metadata.lengths
    if not count or lengths is None:
        return None
    pages = -(-lengths[first : first + count].long() // metadata.block_size)
    ends = pages.cumsum(0)
    rows = int(ends[-1]) * metadata.block_size
    tokens = metadata.num_actual_tokens - metadata.num_decode_tokens
    if rows > KEYS_OF_A_TOKEN * tokens or rows * _COLUMNS * _BF16_BYTES > MOST_BYTES:
        return None
    numbers = torch.zeros(first + count, int(pages.max()), dtype=torch.int32, device=pages.device)
    numbers[first:] = (ends - pages)[:, None] + torch.arange(numbers.shape[1], device=pages.device)
    starts = torch.cat((ends.new_zeros(1), ends)) * metadata.block_size
    device = metadata.block_table.device
    return Prompts(slice(first, first + count), starts.int().to(device), numbers.to(device), rows)
