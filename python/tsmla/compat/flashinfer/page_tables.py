"""What a plan makes of page lists or page tables: the tensors that a decode reads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import checks
from ...errors import ArgumentError
from .. import translate

_INTEGERS = (torch.int32, torch.int64)


class Pages(NamedTuple):
    """Requests of q_len query tokens each, or one row for every query token where lengths differ.

    block_tables: [rows, width] int32. keys, seen: [rows] int32, keys of a row and those that its last query token may
    see. longest: at least the largest of `keys`.
    """

    block_tables: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor
    q_len: int
    longest: int

    def widened(self, width: int, page_size: int) -> Pages:
        """A copy with room for `width` pages a row, none of whose tensors are shared."""
        rows = self.block_tables.shape[0]
        tables = self.block_tables.new_zeros(rows, width)
        tables[:, : self.block_tables.shape[1]] = self.block_tables
        longest = min(width * page_size, translate.LARGEST_INT)
        return Pages(tables, self.keys.clone(), self.seen.clone(), self.q_len, longest)

    def overwritten(self, pages: Pages) -> Pages:
        """These tensors, with what `pages` has in theirs."""
        self.block_tables[:, : pages.block_tables.shape[1]] = pages.block_tables
        self.keys.copy_(pages.keys)
        self.seen.copy_(pages.seen)
        return self


def csr_pages(
    face: str,
    device: torch.device,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    *,
    page_size: int,
    causal: bool,
) -> Pages:
    """From lists of pages, one behind the other."""
    keys = _numbers(face, "kv_len_arr", kv_len_arr)
    first = _ends(face, "kv_indptr", kv_indptr, keys.numel())
    checks.stored(face, "kv_indices", kv_indices)
    checks.shape(face, "kv_indices", kv_indices, ("entries",))
    checks.dtype_in(face, "kv_indices", kv_indices, _INTEGERS)
    if int(first[-1]) > kv_indices.numel():
        raise ArgumentError(f"{face}: kv_indptr ends at {int(first[-1])}; kv_indices has {kv_indices.numel()} entries")
    needed = (keys + page_size - 1) // page_size
    if bool((needed > first.diff()).any()):
        request = int((needed > first.diff()).nonzero()[0])
        raise ArgumentError(
            f"{face}: kv_len_arr has {int(keys[request])} keys for request {request}, which has "
            f"{int(first.diff()[request])} pages of {page_size} in kv_indptr"
        )
    width = max(1, int(needed.max())) if keys.numel() else 1
    if kv_indices.numel():
        entry = (first[:-1, None] + torch.arange(width)).clamp(max=kv_indices.numel() - 1)
        tables = kv_indices.to(device)[entry.to(device)].to(torch.int32)
    else:
        tables = torch.zeros(keys.numel(), width, dtype=torch.int32, device=device)
    return _pages(device, _ends(face, "qo_indptr", qo_indptr, keys.numel()), tables, keys, causal)


def dense_pages(
    face: str,
    device: torch.device,
    cum_seq_lens_q: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
    causal: bool,
) -> Pages:
    """From page tables."""
    keys = _numbers(face, "seq_lens", seq_lens)
    checks.stored(face, "block_tables", block_tables)
    width = checks.shape(face, "block_tables", block_tables, (keys.numel(), "width"))["width"]
    checks.dtype_in(face, "block_tables", block_tables, _INTEGERS)
    if keys.numel() and int(keys.max()) > width * page_size:
        raise ArgumentError(
            f"{face}: seq_lens has {int(keys.max())} keys for a request, and block_tables {width} pages of {page_size}"
        )
    tables = block_tables.to(device, torch.int32)
    return _pages(device, _ends(face, "cum_seq_lens_q", cum_seq_lens_q, keys.numel()), tables, keys, causal)


def _pages(device: torch.device, q_ends: torch.Tensor, tables: torch.Tensor, keys: torch.Tensor, causal: bool) -> Pages:
    q_lens = q_ends.diff()
    longest = max(1, int(keys.max())) if keys.numel() else 1
    if q_lens.unique().numel() <= 1:
        on_device = keys.to(torch.int32).to(device)
        return Pages(tables, on_device, on_device, int(q_lens[0]) if keys.numel() else 1, longest)
    request, own, seen = translate.one_row_per_token(q_ends, int(q_ends[-1]), keys, keys, causal)
    return Pages(tables[request.to(device)], own.to(device), seen.to(device), 1, longest)


def _numbers(face: str, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[batch] lengths, on the CPU, int64, none below 0."""
    checks.stored(face, name, tensor)
    checks.shape(face, name, tensor, ("batch",))
    checks.dtype_in(face, name, tensor, _INTEGERS)
    numbers = tensor.cpu().to(torch.int64)
    if bool((numbers < 0).any()) or bool((numbers > translate.LARGEST_INT).any()):
        raise ArgumentError(f"{face}: {name} has numbers below 0 or beyond 32 bits")
    return numbers


def _ends(face: str, name: str, tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """[batch + 1] ends, on the CPU, int64, from 0 on and never less than one before."""
    numbers = _numbers(face, name, tensor)
    if numbers.numel() != batch + 1 or int(numbers[0]) or bool((numbers.diff() < 0).any()):
        raise ArgumentError(
            f"{face}: {name} has {numbers.numel()} entries; it must have {batch + 1}, start at 0 and never fall"
        )
    return numbers
