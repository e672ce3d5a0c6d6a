"""A model runner of SGLang's as a backend sees it: requests whose keys have slots in a pool, and batches of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from typing import Any

import torch

HEADS, SCALE, CONTEXT = 2, 0.07, 96
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GARBAGE = 10**6
"""What slots of keys that a request does not have yet hold."""


class Pool:
    """The pool of one rank: it writes keys where their slots say, and leaves out those of other ranks."""

    def __init__(self, rows: int, dtype: torch.dtype, world: int, rank: int, columns: int = 576) -> None:
        self.buffer = torch.full((rows, 1, columns), math.nan).to(dtype)
        self._world, self._rank = world, rank

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        assert layer_id == 3
        return self.buffer

    def set_mla_kv_buffer(self, layer: Any, loc_info: Any, cache_k_nope: torch.Tensor, cache_k_rope: Any) -> None:
        keys, loc = torch.cat((cache_k_nope.flatten(1), cache_k_rope.flatten(1)), -1), _slots(loc_info)
        own = loc % self._world == self._rank
        self.buffer[loc[own] // self._world, 0] = keys[own].to(self.buffer.dtype)

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        assert self._world == 1
        self.buffer[_slots(loc_info)] = cache_k.to(self.buffer.dtype)


def _slots(loc_info: Any) -> torch.Tensor:
    """Where a pool writes: slots alone, as releases before 0.5.23 have them, or with what else is known."""
    return getattr(loc_info, "loc", loc_info)


class Server:
    """Requests of so many keys each, on every rank of context parallelism.

    lengths: keys of each request that have slots. page: keys of a page on one rank.
    """

    def __init__(
        self, lengths: list[int], *, page: int = 64, dtype: torch.dtype = BF16, world: int = 1, columns: int = 576
    ) -> None:
        self.page, self.dtype, self.world, self.columns = page, dtype, world, columns
        span = page * world
        counts = [-(-n // span) for n in lengths]
        order = (torch.randperm(sum(counts)) + 1).tolist()
        self.slots = torch.full((len(lengths) + 2, CONTEXT + 4), GARBAGE, dtype=torch.int32)
        for row, (count, n) in enumerate(zip(counts, lengths, strict=True)):
            pages = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
            own = (pages[:, None] * span + torch.arange(span, dtype=torch.int32)).flatten()[:n]
            self.slots[row + 1, :n] = own
        self.keys = [torch.randn(n, columns).to(BF16) for n in lengths]
        rows = (sum(counts) + 1) * page
        self.pools = [Pool(rows, dtype, world, rank, columns) for rank in range(world)]

    def kept(self, request: int) -> torch.Tensor:
        """A request's keys as the cache has them, in float64."""
        return self.keys[request].to(self.dtype).double()

    def write(self, request: int, first: int, last: int) -> None:
        """Have the pools hold the keys at positions first to last - 1 of a request."""
        loc = types.SimpleNamespace(loc=self.slots[request + 1, first:last].long())
        own = self.keys[request][first:last]
        for pool in self.pools:
            pool.set_mla_kv_buffer(None, loc, own[:, :512], own[:, 512:])

    def runner(self, rank: int = 0, **changes: Any) -> types.SimpleNamespace:
        given: dict[str, Any] = {
            "model_config": types.SimpleNamespace(
                num_attention_heads=HEADS,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=self.columns - 512,
                v_head_dim=128,
                context_len=CONTEXT,
                hf_text_config=types.SimpleNamespace(),
            ),
            "dtype": BF16,
            "kv_cache_dtype": self.dtype,
            "page_size": self.page,
            "use_mla_backend": True,
            "device": "cpu",
            "req_to_token_pool": types.SimpleNamespace(req_to_token=self.slots),
            "token_to_kv_pool": self.pools[rank],
            "kv_index_translator": object(),
            "is_draft_worker": False,
            "prefill_attention_backend_str": "tsmla",
        }
        return types.SimpleNamespace(**{**given, **changes})

    def batch(self, mode: Any, totals: list[int], requests: list[int] | None = None, **more: Any) -> Any:
        """A batch in which requests have so many keys, as SGLang counts them."""
        requests = list(range(len(totals))) if requests is None else requests
        return types.SimpleNamespace(
            forward_mode=mode,
            batch_size=len(totals),
            req_pool_indices=torch.tensor([r + 1 for r in requests]),
            seq_lens=torch.tensor(totals),
            seq_lens_cpu=None,
            out_cache_loc=None,
            out_cache_loc_is_physical=True,
            extend_seq_lens=None,
            extend_seq_lens_cpu=None,
            attn_attend_prefix_cache=None,
            mha_return_lse=None,
            mha_one_shot=None,
            prefix_chunk_idx=None,
            prefix_chunk_cu_seq_lens=None,
            **more,
        )

    def new(self, first: list[int], counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots and keys of each request's `counts` new tokens from positions `first` on."""
        spans = [slice(f, f + n) for f, n in zip(first, counts, strict=True)]
        loc = torch.cat([self.slots[r + 1, span] for r, span in enumerate(spans)]).long()
        return loc, torch.cat([self.keys[r][span] for r, span in enumerate(spans)])


@dataclasses.dataclass
class Layer:
    """A layer's attention: absorbed, or with keys of every head."""

    head_dim: int = 576
    v_head_dim: int = 512
    tp_k_head_num: int = 1
    tp_q_head_num: int = HEADS
    scaling: float = SCALE
    layer_id: int = 3
    logit_cap: float = 0.0
    sliding_window_size: int = -1
    is_cross_attention: bool = False
    xai_temperature_len: int = -1
    k_scale_float: float | None = None
    attn_type: Any = dataclasses.field(default_factory=lambda: types.SimpleNamespace(value="decoder"))

    @property
    def qk_head_dim(self) -> int:
        return self.head_dim

    @property
    def tp_v_head_num(self) -> int:
        return self.tp_k_head_num


def expanded_layer() -> Layer:
    return Layer(head_dim=192, v_head_dim=128, tp_k_head_num=HEADS)


def attention(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Absorbed attention of one request in float64: the query tokens [n, heads, 576] are the last of its keys."""
    n, m = len(q), len(keys)
    scores = SCALE * torch.einsum("qhd,kd->hqk", q.double(), keys)
    scores.masked_fill_(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
    return (scores.softmax(-1) @ keys[:, :512]).transpose(0, 1)


def expected(q: torch.Tensor, keys: list[torch.Tensor], counts: list[int]) -> torch.Tensor:
    """Attention of each request's `counts` query tokens, which follow each other in q."""
    ends = list(itertools.accumulate(counts, initial=0))
    parts = [attention(q[a:b], own) for a, b, own in zip(ends[:-1], ends[1:], keys, strict=True) if b > a]
    return torch.cat(parts)


def close(got: torch.Tensor, want: torch.Tensor, atol: float = 4e-3) -> None:
    torch.testing.assert_close(got.double().view(want.shape), want, rtol=1.5e-2, atol=atol)
