"""What stands for kernels on a CPU: functions that compute in float64 what the contract says.

They are slow and see every argument, so that a plug-in's mistake in any of them shows in numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import torch
from tsmla.identity.call import OPERATORS
from tsmla.identity.variant import Variant
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems.rows import numbers_in


class Kernels:
    """Stands for `resolve.kernel`; `asked` lists the variants that were asked for."""

    def __init__(self) -> None:
        self.asked: list[Variant] = []

    def __call__(self, variant: Variant) -> Callable[..., None]:
        self.asked.append(variant)
        names = [argument.name for argument in OPERATORS[variant.family].arguments]
        compute = COMPUTE[variant.family]
        return lambda *given: compute(variant, SimpleNamespace(**dict(zip(names, given, strict=True))))


def rows(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the last dimension, -inf for what is hidden: (mean of values, natural LSE), or (0, -inf)."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    return weights @ values, lse


def decode(variant: Variant, given: SimpleNamespace) -> None:
    """The query joined or in pieces, a rectangle of tokens or packed; tables of pages, or of chosen keys, of which some
    are no slots of the cache."""
    query, out, lse = given.query, given.out.flatten(0, 1), given.lse
    spans, visible, sinks = map(torch.from_dlpack, (given.cum_seq_lens_q, given.visible, given.sinks))
    if given.q_pe is not None and torch.from_dlpack(given.q_pe).numel():
        query = torch.cat((query, torch.from_dlpack(given.q_pe)), -1)
    query = query.flatten(0, 1)
    assert not visible.numel() and not sinks.numel() and given.workers > 0
    given.workspace.fill_(-1)
    starts = spans.tolist() or range(0, len(query) + 1, given.q_len)
    for b, length in enumerate(given.seq_lens.tolist()):
        table, page_size = given.block_tables[b].long(), given.kv_cache.shape[1]
        if variant.gathers:
            entry, length = given.entry_keys, max(length, 0)
            assert entry in (1, page_size)
            slots = (table[: -(-length // entry), None] * entry + torch.arange(entry)).flatten()[:length]
            slots = slots[(slots >= 0) & (slots < len(given.kv_cache) * page_size)]
            found, length = given.kv_cache[slots // page_size, slots % page_size], len(slots)
        else:
            found = given.kv_cache[table[: -(-length // page_size)]].flatten(0, 1)
        keys = numbers_in(variant.row, found)[:length].double()
        index, interleave = torch.arange(length), given.cp_interleave
        position = index // interleave * interleave * given.cp_world + given.cp_rank * interleave + index % interleave
        bound = int(given.causal_seqs[b])
        assert starts[b + 1] - starts[b] <= given.q_len
        for t in range(starts[b], starts[b + 1]):
            own = bound - starts[b + 1] + t
            seen = position <= (own if given.causal else bound - 1)
            if given.window_left >= 0:
                seen &= position >= own - given.window_left
            scores = (given.softmax_scale * query[t].double() @ keys.T).masked_fill(~seen, -math.inf)
            result, natural = rows(scores, keys[:, :512])
            out[t] = (given.output_scale * result).to(out.dtype)
            if lse is not None:
                lse[divmod(t, lse.shape[1])] = natural / math.log(2) * given.lse_factor


def prefill(variant: Variant, given: SimpleNamespace) -> None:
    """Query and key joined or in pieces, a bit for each key that is seen, and an earlier result merged."""
    assert not torch.from_dlpack(given.sinks).numel()
    q, k = given.q, given.k
    if torch.from_dlpack(given.q_pe).numel():
        q = torch.cat((q, given.q_pe), -1)
    if torch.from_dlpack(given.k_pe).numel():
        k = torch.cat((k, given.k_pe.expand(-1, k.shape[1], -1)), -1)
    for b in range(len(given.cum_seq_lens_q) - 1):
        mine, theirs = (slice(int(s[b]), int(s[b + 1])) for s in (given.cum_seq_lens_q, given.cum_seq_lens_kv))
        n, m = mine.stop - mine.start, theirs.stop - theirs.start
        scores = given.softmax_scale * torch.einsum("qhd,khd->hqk", q[mine].double(), k[theirs].double())
        if variant.masked:
            bits = given.key_mask[mine, :, None] >> torch.arange(32) & 1
            hidden = torch.ones(n, m, dtype=torch.bool)  # keys without a word are not seen
            hidden[:, : bits[0].numel() if n else 0] = bits.flatten(1)[:, :m] == 0
            scores.masked_fill_(hidden, -math.inf)
        if given.causal if variant.masked else variant.causal:
            scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
        result, natural = (x.transpose(0, 1) for x in rows(scores, given.v[theirs].double().transpose(0, 1)))
        result = given.output_scale * result
        if given.merges:
            result, natural = merged(result, natural, given.out[mine].double(), given.lse[mine].double())
        given.out[mine] = result.to(given.out.dtype)
        if given.lse is not None:
            given.lse[mine] = natural.float() * given.lse_factor


def merged(
    out: torch.Tensor, lse: torch.Tensor, earlier: torch.Tensor, earlier_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.logaddexp(lse, earlier_lse)
    base = total.masked_fill(total.isinf(), 0.0)
    own, theirs = torch.exp(lse - base)[..., None], torch.exp(earlier_lse - base)[..., None]
    return own * out.masked_fill(own == 0, 0.0) + theirs * earlier.masked_fill(theirs == 0, 0.0), total


def read_cache(variant: Variant, given: SimpleNamespace) -> None:
    """A stand-in for the kernel that reads page tables."""
    starts = given.cum_seq_lens.tolist()
    first = torch.from_dlpack(given.seq_starts).tolist() or [0] * len(starts)  # left out, there are none
    for b, table in enumerate(given.block_tables.tolist()):
        for key in range(starts[b], starts[b + 1]):
            page, place = divmod(first[b] + key - starts[b], given.cache.shape[1])
            row = numbers_in(variant.row, given.cache[table[page], place])
            given.kv_c[key], given.k_pe[key] = row[:512], row[512:]


def key_mask(variant: Variant, given: SimpleNamespace) -> None:
    assert not torch.from_dlpack(given.lengths).numel()
    given.mask.zero_()
    for words, positions in zip(given.mask, given.indices.tolist(), strict=True):
        for position in {key for key in positions if 0 <= key < given.keys}:
            words[position // 32] |= torch.tensor(1 << position % 32).int()


def pack(variant: Variant, given: SimpleNamespace) -> None:
    largest = torch.finfo(TORCH_DTYPE_OF[variant.out_dtype]).max
    shared = given.k_pe[:, None].expand(*given.k_nope.shape[:2], given.k_pe.shape[-1])
    joined = torch.cat((given.k_nope, shared), -1)
    for out, x, factor in ((given.k_out, joined, given.k_scale_inv), (given.v_out, given.v, given.v_scale_inv)):
        out.copy_((x.float() * factor).clamp(-largest, largest).to(out.dtype))


COMPUTE: dict[str, Callable[..., None]] = {
    "decode": decode,
    "prefill": prefill,
    "pack": pack,
    "read_cache": read_cache,
    "key_mask": key_mask,
}


def scaled_fp8_quant(rows: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's operator of this name computes, of rows as it takes them."""
    assert rows.ndim == 2 and rows.stride(1) == 1
    return (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
