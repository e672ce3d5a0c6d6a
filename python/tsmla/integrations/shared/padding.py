"""Padded batches as ragged packs: which rows of [batch, heads, length, dim] tensors are sequences of a prefill.

Nothing here waits for the GPU, and shapes do not depend on how much is padding. Each row of a batch becomes three
sequences of one pack: its tokens with its keys; its padded tokens without keys, whose outputs are 0; its padded keys,
which no token sees. Padding therefore costs no attention, and may lie anywhere.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of a batch, as `tsmla_prefill` takes them.

    ends_q, ends_kv: the operator's cum_seq_lens_q and cum_seq_lens, [count + 1] int32.
    order_q, order_kv: [batch, length], the positions of each batch row with the padded ones moved to the end; None
        where they are there already.
    """

    ends_q: torch.Tensor
    ends_kv: torch.Tensor
    causal: bool
    order_q: torch.Tensor | None = None
    order_kv: torch.Tensor | None = None

    @property
    def count(self) -> int:
        return self.ends_q.shape[0] - 1

    def to(self, device: torch.device) -> Sequences:
        """Return these sequences on a device: layers of a model may lie on several."""
        order_q, order_kv = (None if x is None else x.to(device) for x in (self.order_q, self.order_kv))
        return Sequences(self.ends_q.to(device), self.ends_kv.to(device), self.causal, order_q, order_kv)


def whole(batch: int, length_q: int, length_kv: int, causal: bool, device: torch.device | str) -> Sequences:
    """Make the sequences of a batch without padding: one for each row."""
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Sequences(rows * length_q, rows * length_kv, causal)


def padded(
    tokens: torch.Tensor | None, keys: torch.Tensor, length_q: int, causal: bool, *, in_order: bool = False
) -> Sequences:
    """Make the sequences of a batch with padding; `tokens` [batch, length_q] and `keys` [batch, length_kv] are True
    where there is none.

    tokens: None where no token is padding.
    causal: a token sees the keys up to its own, so the last of a row's keys belong to its tokens.
    in_order: padding is at the end of each row already.
    """
    batch, length_kv = keys.shape
    rows = torch.arange(batch, device=keys.device)
    count_kv = keys.sum(1)
    count_q = torch.full_like(count_kv, length_q) if tokens is None else tokens.sum(1)
    end_q, end_kv = (rows + 1) * length_q, (rows + 1) * length_kv
    ends_q = torch.stack([rows * length_q + count_q, end_q, end_q], 1)
    ends_kv = torch.stack([rows * length_kv + count_kv] * 2 + [end_kv], 1)
    order_q, order_kv = (None if in_order or valid is None else _order(valid) for valid in (tokens, keys))
    return Sequences(_with_start(ends_q), _with_start(ends_kv), causal, order_q, order_kv)


def packed(tensor: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return [batch, heads, length, dim] as [batch * length, heads, dim], each batch row's positions in the given
    order."""
    tensor = tensor.transpose(1, 2)
    if order is None:
        return tensor.flatten(0, 1)
    return tensor[_batch_rows(order), order].flatten(0, 1)


def unpacked(tensor: torch.Tensor, batch: int, order: torch.Tensor | None) -> torch.Tensor:
    """Return [batch * length, heads, dim] as [batch, length, heads, dim], with the order of `packed` undone."""
    tensor = tensor.unflatten(0, (batch, -1))
    if order is None:
        return tensor
    return tensor[_batch_rows(order), order.argsort(1)]


def _order(valid: torch.Tensor) -> torch.Tensor:
    return valid.logical_not().to(torch.int8).argsort(dim=1, stable=True)


def _batch_rows(order: torch.Tensor) -> torch.Tensor:
    return torch.arange(order.shape[0], device=order.device)[:, None]


def _with_start(ends: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(ends.flatten(), (1, 0)).to(torch.int32)
