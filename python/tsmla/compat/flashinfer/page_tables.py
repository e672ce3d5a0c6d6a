"""Page tables and lengths for `tsmla_decode`, made from what FlashInfer's `plan` is given: page lists or page
tables."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import ArgumentError
from ...operators import checks
from .. import translate

_INTEGERS = (torch.int32, torch.int64)


class Pages(NamedTuple):
    """The requests that a plan describes: how many query tokens each has, and which pages hold its keys.

    block_tables: [batch, width] int32, pages of each request in order.
    keys: [batch] int32, how many keys each request has.
    longest: at least the largest of `keys`.
    tokens: query tokens of all requests together.
    most: the most query tokens of one request.
    q_ends: [batch + 1] int32, where each request's query tokens start; None where all requests have equally many.
    """

    block_tables: torch.Tensor
    keys: torch.Tensor
    longest: int
    tokens: int
    most: int
    q_ends: torch.Tensor | None

    @property
    def batch(self) -> int:
        return self.keys.numel()

    def said(self) -> str:
        each = f"{self.most} query tokens each" if self.q_ends is None else f"{self.tokens} query tokens in all"
        return f"{self.batch} requests with {each}"

    def spelled_out(self) -> Pages:
        """Return these requests with `q_ends` also where all have equally many query tokens."""
        if self.q_ends is not None:
            return self
        ends = torch.arange(self.batch + 1, dtype=torch.int32, device=self.keys.device) * self.most
        return self._replace(q_ends=ends)

    def widened(self, width: int, page_size: int) -> Pages:
        """Return a copy of these requests in tensors of its own, with room for `width` pages each.

        Where numbers of query tokens differ, there is also room for all of them in one request.
        """
        tables = self.block_tables.new_zeros(self.batch, width)
        tables[:, : self.block_tables.shape[1]] = self.block_tables
        longest = min(max(width * page_size, 1), translate.LARGEST_INT)
        if self.q_ends is None:
            return Pages(tables, self.keys.clone(), longest, self.tokens, self.most, None)
        return Pages(tables, self.keys.clone(), longest, self.tokens, self.tokens, self.q_ends.clone())

    def overwritten(self, pages: Pages) -> Pages:
        """Write the requests of `pages` into these tensors, and return these. They may have been made in inference
        mode."""
        with torch.inference_mode():  # where both kinds of tensors may be written
            self._overwrite(pages)
        return self

    def _overwrite(self, pages: Pages) -> None:
        self.block_tables[:, : pages.block_tables.shape[1]] = pages.block_tables
        self.keys.copy_(pages.keys)
        if self.q_ends is not None and pages.q_ends is not None:
            self.q_ends.copy_(pages.q_ends)


def csr_pages(
    face: str,
    device: torch.device,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    *,
    page_size: int,
) -> Pages:
    """Make page tables from FlashInfer's page lists: kv_indices has the pages of all requests, one request behind the
    other."""
    keys = _numbers(face, "kv_len_arr", kv_len_arr)
    first = _ends(face, "kv_indptr", kv_indptr, keys.numel(), longer=True)
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
            f"{int(first.diff()[request])} pages of {page_size} keys in kv_indptr"
        )
    width = max(1, int(needed.max())) if keys.numel() else 1
    if kv_indices.numel():
        entry = (first[:-1, None] + torch.arange(width, device="cpu")).clamp(max=kv_indices.numel() - 1)
        tables = kv_indices.to(device)[entry.to(device)].to(torch.int32)
    else:
        tables = torch.zeros(keys.numel(), width, dtype=torch.int32, device=device)
    return _pages(device, _ends(face, "qo_indptr", qo_indptr, keys.numel()), tables, keys)


def dense_pages(
    face: str,
    device: torch.device,
    cum_seq_lens_q: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    page_size: int,
) -> Pages:
    """Make Pages from page tables, [batch, width], and the keys of each request."""
    keys = _numbers(face, "seq_lens", seq_lens)
    checks.stored(face, "block_tables", block_tables)
    width = checks.shape(face, "block_tables", block_tables, (keys.numel(), "width"))["width"]
    checks.dtype_in(face, "block_tables", block_tables, _INTEGERS)
    if keys.numel() and int(keys.max()) > width * page_size:
        raise ArgumentError(
            f"{face}: seq_lens has {int(keys.max())} keys for a request, and block_tables {width} pages of {page_size}"
        )
    tables = block_tables.to(device, torch.int32)
    return _pages(device, _ends(face, "cum_seq_lens_q", cum_seq_lens_q, keys.numel()), tables, keys)


def _pages(device: torch.device, q_ends: torch.Tensor, tables: torch.Tensor, keys: torch.Tensor) -> Pages:
    longest = max(1, int(keys.max())) if keys.numel() else 1
    q_lens = q_ends.diff()
    most = int(q_lens.max()) if keys.numel() else 0
    ends = q_ends.to(device, torch.int32) if bool((q_lens != most).any()) else None
    return Pages(tables, keys.to(device, torch.int32), longest, int(q_ends[-1]), most, ends)


def _numbers(face: str, name: str, tensor: torch.Tensor, first: int | None = None) -> torch.Tensor:
    """Return lengths [batch] as int64 on the CPU, after checking that they are from 0 to 2^31 - 1. first: read only so
    many."""
    checks.stored(face, name, tensor)
    checks.shape(face, name, tensor, ("batch",))
    checks.dtype_in(face, name, tensor, _INTEGERS)
    numbers = tensor[:first].cpu().to(torch.int64)
    if bool((numbers < 0).any()) or bool((numbers > translate.LARGEST_INT).any()):
        raise ArgumentError(f"{face}: {name} has numbers below 0 or beyond 32 bits")
    return numbers


def _ends(face: str, name: str, tensor: torch.Tensor, batch: int, longer: bool = False) -> torch.Tensor:
    """Return ends [batch + 1] as int64 on the CPU, after checking that they start at 0 and never fall. longer: entries
    that FlashInfer does not read may follow."""
    numbers = _numbers(face, name, tensor, batch + 1 if longer else None)
    if numbers.numel() != batch + 1:
        many = f"{batch + 1} or more" if longer else str(batch + 1)
        raise ArgumentError(f"{face}: {name} has {tensor.numel()} entries; it must have {many}, for {batch} requests")
    if int(numbers[0]):
        raise ArgumentError(f"{face}: {name} starts at {int(numbers[0])}; it must start at 0")
    if bool((falls := numbers.diff() < 0).any()):
        at = int(falls.nonzero()[0])
        raise ArgumentError(
            f"{face}: {name} falls from {int(numbers[at])} to {int(numbers[at + 1])} at entry {at + 1}; it must never "
            "fall"
        )
    return numbers
