"""Padded batches as ragged ones: which rows of [batch, heads, length, dim] tensors are sequences of a prefill.

Nothing here waits for the GPU, and shapes do not depend on how much is padding. Each row of a batch becomes three
sequences of one pack: its tokens with its keys; its padded tokens without keys, whose outputs are 0; its padded keys,
which no token sees. So padding costs no attention, and may lie anywhere.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The sequences of a batch, for `tsmla_prefill`.

    ends_q, ends_kv: the operator's cum_seq_lens_q and cum_seq_lens, [count + 1] int32. order_q, order_kv: [batch,
    length], the rows of each batch row with those that are padding behind the others; None where they stand so already.
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
        """The same on a device: layers of a model may lie on several."""
        order_q, order_kv = (None if x is None else x.to(device) for x in (self.order_q, self.order_kv))
        return Sequences(self.ends_q.to(device), self.ends_kv.to(device), self.causal, order_q, order_kv)


def whole(batch: int, length_q: int, length_kv: int, causal: bool, device: torch.device | str) -> Sequences:
    """A batch without padding: a sequence for each row."""
    rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Sequences(rows * length_q, rows * length_kv, causal)


def padded(
    tokens: torch.Tensor | None, keys: torch.Tensor, length_q: int, causal: bool, *, in_order: bool = False
) -> Sequences:
    """A batch of which `tokens` [batch, length_q] and `keys` [batch, length_kv] say what is no padding (True).

    tokens: None for all. A causal token sees the keys up to its own, so that the last of a row's keys are its tokens'.
    in_order: padding is behind the rest already.
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
    """[batch, heads, length, dim] as [batch * length, heads, dim], the rows of each batch row in an order."""
    tensor = tensor.transpose(1, 2)
    if order is None:
        return tensor.flatten(0, 1)
    return tensor[_batch_rows(order), order].flatten(0, 1)


def unpacked(tensor: torch.Tensor, batch: int, order: torch.Tensor | None) -> torch.Tensor:
    """[batch * length, heads, dim] as [batch, length, heads, dim], an order of `packed` undone."""
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
