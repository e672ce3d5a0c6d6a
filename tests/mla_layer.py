"""A prefill of an MLA layer as vLLM asks for it, and what must come out: requests, paged contexts, chunks."""

from __future__ import annotations

import itertools
import math
import types

import torch
from stand_in_kernels import rows
from tsmla.problems.pages import page_tables, put_keys

HEADS, SCALE = 2, 0.07
BF16 = torch.bfloat16


def expected(q, k, v, causal=True, seen=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one request: q [n, heads, 192] against k [m, heads, 192]; ([n, heads, 128], [heads, n]).

    seen: [n, m], which keys a query sees; all when None.
    """
    scores = SCALE * torch.einsum("qhd,khd->hqk", q.double(), k.double())
    if causal:
        n, m = scores.shape[1:]
        scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
    if seen is not None:
        scores.masked_fill_(~seen, -math.inf)
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


DECODED = 3
"""Tokens of decodes, in front of a prefill's in the lists of chosen keys."""


class Problem:
    """Requests with context in a paged cache and new tokens behind it; the context in chunks of up to `chunk` keys.

    chosen: [tokens, top_k], the keys that each token sees, -1 for none; all that it may when None.
    """

    chosen: torch.Tensor | None = None

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

    def choose(self, top_k: int) -> torch.Tensor:
        """Let each token choose up to `top_k` of the keys that it may see, in any order, with gaps; one in five
        chooses none. Return the lists behind those of decodes and in front of unused ones."""
        self.chosen = torch.full((len(self.q), top_k), -1, dtype=torch.int32)
        for r, keys in enumerate(self.keys):
            for t in range(self.new[r]):
                last = self.contexts[r] + t
                order = torch.randperm(max(last + 1, top_k))[:top_k]
                keep = (order <= last) & (torch.rand(1) > 0.2)
                self.chosen[self.starts[r] + t] = torch.where(keep, order, -1)
            assert len(keys) == self.contexts[r] + self.new[r]
        unused = torch.zeros(DECODED, top_k, dtype=torch.int32)
        return torch.cat((unused, self.chosen, unused))

    def seen(self, tokens: slice, keys: int) -> torch.Tensor | None:
        if self.chosen is None:
            return None
        seen = torch.zeros(tokens.stop - tokens.start, keys + 1, dtype=torch.bool)  # the last stands for -1
        return seen.scatter_(1, self.chosen[tokens].long() % (keys + 1), True)[:, :keys]

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
            max_seq_lens=[max(n for _, n in part) for part in parts],
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
                max_seq_len=n,
                token_to_seq=torch.zeros(n, dtype=torch.int32),
                starts=ints(first),
            )
            for part in self.parts(chunk)
            for r, (first, n) in enumerate(part)
            if n
        ]
        return self._as_new(made)

    def packed(self, chunk: int) -> types.SimpleNamespace:
        """Chunks of up to `chunk` keys in all, of requests one behind the other, as vLLM 0.33 cuts: a chunk may begin
        in the middle of a context and have others behind it."""
        made: list[types.SimpleNamespace] = []
        runs: list[list[tuple[int, int, int]]] = [[]]
        for r, context in enumerate(self.contexts):
            first = 0
            while first < context:
                room = chunk - sum(n for _, _, n in runs[-1])
                if not room or (runs[-1] and runs[-1][-1][0] < r - 1):
                    runs.append([])
                    room = chunk
                n = min(room, context - first)
                runs[-1].append((r, first, n))
                first += n
        for run in runs:
            requests = slice(run[0][0], run[-1][0] + 1)
            tokens = slice(self.starts[requests.start], self.starts[requests.stop])
            lengths = [n for _, _, n in run]
            made.append(
                types.SimpleNamespace(
                    request_slice=requests,
                    token_slice=tokens,
                    query_start_loc=ints(*self.starts[requests.start : requests.stop + 1]) - tokens.start,
                    cu_seq_lens=ints(*itertools.accumulate(lengths, initial=0)),
                    num_context_tokens=sum(lengths),
                    max_seq_len=max(lengths),
                    token_to_seq=ints(*(i for i, n in enumerate(lengths) for _ in range(n))),
                    starts=ints(*(first for _, first, _ in run)),
                )
            )
        return self._as_new(made)

    def _as_new(self, chunks: list[types.SimpleNamespace]) -> types.SimpleNamespace:
        rows = torch.full((200, 576), math.nan, dtype=BF16)
        return types.SimpleNamespace(workspace=rows, chunks=chunks, context_lens=ints(*self.contexts))

    def run(self, impl, backend, context) -> torch.Tensor:
        new = torch.cat([k[c:] for k, c in zip(self.keys, self.contexts, strict=True)])
        metadata = types.SimpleNamespace(
            prefill=types.SimpleNamespace(
                prefill_backend=backend,
                chunked_context=context,
                query_start_loc=ints(*self.starts),
                block_table=self.table,
                q_data_type=BF16,
                max_query_len=max(self.new),
            ),
            prefill_max_seq_len=max(map(len, self.keys)),
            topk_tokens=2048 if self.chosen is None else self.chosen.shape[1],
            num_decode_tokens=DECODED,
        )
        output = torch.full((len(self.q), HEADS * 128), math.nan, dtype=BF16)
        impl.forward_mha(self.q, new[:, :512], new[:, None, 512:], self.cache, metadata, torch.ones(1), output)
        return output.view(-1, HEADS, 128)

    def check(self, out: torch.Tensor, **tolerance: float) -> None:
        for r, keys in enumerate(self.keys):
            mine = slice(self.starts[r], self.starts[r + 1])
            want, _ = expected(self.q[mine], *self.expanded(keys), seen=self.seen(mine, len(keys)))
            close(out[mine], want, **tolerance)
