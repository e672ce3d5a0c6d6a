"""A prefill of an MLA layer as vLLM asks for it, and what must come out: requests, paged contexts, chunks."""

from __future__ import annotations

import math
import types

import torch
from stand_in_kernels import rows
from tsmla.problems.pages import page_tables, put_keys

HEADS, SCALE = 2, 0.07
BF16 = torch.bfloat16


def expected(q, k, v, causal=True) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request: q [n, heads, 192] against k [m, heads, 192]; ([n, heads, 128], [heads, n])."""
    scores = SCALE * torch.einsum("qhd,khd->hqk", q.double(), k.double())
    if causal:
        n, m = scores.shape[1:]
        scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
    out, lse = rows(scores, v.double().transpose(0, 1))
    return out.transpose(0, 1), lse


def close(got: torch.Tensor, want: torch.Tensor, rtol: float = 1.5e-2, atol: float = 4e-3) -> None:
    torch.testing.assert_close(got.double(), want, rtol=rtol, atol=atol)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(n: int, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, joined keys whose rope part is one for all heads, and values as a slice of the projection's result."""
    expanded = torch.randn(m, HEADS, 256).to(BF16)
    rope = torch.randn(m, 1, 64).to(BF16).expand(m, HEADS, 64)
    return torch.randn(n, HEADS, 192).to(BF16), torch.cat((expanded[..., :128], rope), -1), expanded[..., 128:]


class Problem:
    """Requests with context in a paged cache and new tokens behind it; the context in chunks of up to `chunk` keys."""

    def __init__(self, contexts: list[int], new: list[int], page: int = 4):
        self.contexts, self.new, self.page = contexts, new, page
        self.weight = torch.randn(HEADS * 256, 512).mul_(512**-0.5).to(BF16)
        self.keys = [torch.randn(c + n, 576).to(BF16) for c, n in zip(contexts, new, strict=True)]
        self.starts = [0]
        for n in new:
            self.starts.append(self.starts[-1] + n)
        self.q = torch.randn(self.starts[-1], HEADS, 192).to(BF16)
        self.table, pages = page_tables(contexts, page, spare_pages=1, spare_columns=1, unused=0)
        self.cache = torch.full((pages, page, 576), math.nan, dtype=BF16)
        put_keys(self.cache, self.table, [own[:context] for own, context in zip(self.keys, contexts, strict=True)])

    def expanded(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = (rows[:, :512] @ self.weight.T).view(-1, HEADS, 256)
        rope = rows[:, None, 512:].expand(-1, HEADS, -1)
        return torch.cat((kv[..., :128], rope), -1), kv[..., 128:]

    def parts(self, chunk: int) -> list[list[tuple[int, int]]]:
        """(first, keys) of each request in each chunk, as vLLM 0.26 cuts."""
        count = -(-max(self.contexts) // chunk)
        return [[(i * chunk, max(0, min(chunk, c - i * chunk))) for c in self.contexts] for i in range(count)]

    def old(self, chunk: int) -> types.SimpleNamespace:
        parts = self.parts(chunk)
        cumulative = [[sum(n for _, n in part[:r]) for r in range(len(part) + 1)] for part in parts]
        return types.SimpleNamespace(
            workspace=torch.full((200, 576), math.nan, dtype=BF16),
            cu_seq_lens=torch.tensor(cumulative, dtype=torch.int32),
            starts=torch.tensor([[first for first, _ in part] for part in parts], dtype=torch.int32),
            seq_tot=[sum(n for _, n in part) for part in parts],
            token_to_seq=[ints(*(r for r, (_, n) in enumerate(part) for _ in range(n))) for part in parts],
        )

    def new_style(self, chunk: int) -> types.SimpleNamespace:
        """One request a chunk, which leaves out those without context."""
        made = [
            types.SimpleNamespace(
                request_slice=slice(r, r + 1),
                token_slice=slice(self.starts[r], self.starts[r + 1]),
                query_start_loc=ints(0, self.new[r]),
                cu_seq_lens=ints(0, n),
                num_context_tokens=n,
                token_to_seq=torch.zeros(n, dtype=torch.int32),
                starts=ints(first),
            )
            for part in self.parts(chunk)
            for r, (first, n) in enumerate(part)
            if n
        ]
        return types.SimpleNamespace(workspace=torch.full((200, 576), math.nan, dtype=BF16), chunks=made)

    def run(self, impl, backend, context) -> torch.Tensor:
        new = torch.cat([k[c:] for k, c in zip(self.keys, self.contexts, strict=True)])
        metadata = types.SimpleNamespace(
            prefill=types.SimpleNamespace(
                prefill_backend=backend,
                chunked_context=context,
                query_start_loc=ints(*self.starts),
                block_table=self.table,
                q_data_type=BF16,
            )
        )
        output = torch.full((len(self.q), HEADS * 128), math.nan, dtype=BF16)
        impl.forward_mha(self.q, new[:, :512], new[:, None, 512:], self.cache, metadata, torch.ones(1), output)
        return output.view(-1, HEADS, 128)

    def check(self, out: torch.Tensor, **tolerance: float) -> None:
        for r, keys in enumerate(self.keys):
            mine = slice(self.starts[r], self.starts[r + 1])
            close(out[mine], expected(self.q[mine], *self.expanded(keys))[0], **tolerance)
