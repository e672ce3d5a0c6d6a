"""What faces must give, from the operators' references: the same problems, in other libraries' layouts and bases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import decode_reference
import prefill_reference
import torch
from chosen_reference import Chosen
from decode_reference import LATENT, Problem, make_problem
from tsmla.compat import flash_mla, flashinfer, tokenspeed_mla

LN2 = math.log(2.0)


def by_flash_mla(problem: Problem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of FlashMLA's face as tsmla_decode would give them. A row without keys has an LSE of +inf there."""
    metadata, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        problem.query,
        problem.kv_cache.unsqueeze(2),
        problem.block_tables,
        torch.tensor(problem.seq_lens, dtype=torch.int32, device="cuda"),
        LATENT,
        metadata,
        splits,
        **{"softmax_scale": problem.softmax_scale, "causal": problem.sight.causal, **changes},
    )
    torch.cuda.synchronize()
    batch, q_len, heads, _ = problem.query.shape
    assert lse.shape == (batch, heads, q_len) and lse.is_contiguous()
    assert not (lse == -math.inf).any(), "an empty row has +inf"
    return out, lse.where(lse != math.inf, -math.inf).transpose(1, 2) / LN2


def chosen_by_flash_mla(chosen: Chosen) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of FlashMLA's face for chosen keys, as tsmla_decode would give them; tables and lengths are None."""
    metadata, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        chosen.query, chosen.kv_cache.unsqueeze(2), None, None, LATENT, metadata, splits,
        softmax_scale=chosen.alone.softmax_scale, indices=chosen.indices, topk_length=chosen.topk_length,
        attn_sink=chosen.alone.sinks,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert lse.is_contiguous() and not (lse == -math.inf).any(), "an empty row has +inf"
    return out, lse.where(lse != math.inf, -math.inf).transpose(1, 2) / LN2


def prefill_by_flash_mla(chosen: Chosen) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of flash_mla_sparse_fwd, as tsmla_decode would give them, for lists of rows: pages of one key."""
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(
        chosen.query, chosen.kv_cache, chosen.indices.unsqueeze(1), chosen.alone.softmax_scale,
        attn_sink=chosen.alone.sinks, topk_length=chosen.topk_length,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert largest is None and lse.is_contiguous() and not (lse == -math.inf).any(), "an empty row has +inf"
    return out, lse.where(lse != math.inf, -math.inf) / LN2


def chosen_by_flashinfer(chosen: Chosen) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, base-2 LSE) of trtllm_batch_decode_with_kv_cache_mla for chosen keys, with a length for each list."""
    given = chosen.arguments()
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        **{name: given[name] for name in ("query", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim", "out")},
        kv_cache=chosen.kv_cache.unsqueeze(1), qk_nope_head_dim=128, block_tables=chosen.indices, seq_lens=None,
        max_seq_len=0, sparse_mla_top_k=chosen.indices.shape[-1], bmm1_scale=chosen.alone.softmax_scale,
        bmm2_scale=chosen.alone.output_scale, return_lse=True,
        sparse_mla_top_k_lens=None if chosen.topk_length is None else chosen.topk_length.flatten(),
    )  # fmt: skip
    torch.cuda.synchronize()
    return out, lse.view(chosen.query.shape[:-1])


def by_flashinfer(problem: Problem, natural: bool, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, base-2 LSE) of trtllm_batch_decode_with_kv_cache_mla, into a NaN-filled output."""
    given = problem.arguments(workspace_buffer=decode_reference.callers_workspace(problem.query.shape[2], 8))
    taken = ("query", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len")
    out, lse = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        **{
            **{name: given[name] for name in taken},
            "kv_cache": problem.kv_cache.unsqueeze(1),
            "qk_nope_head_dim": 128,
            "out": given["out"],
            "bmm1_scale": problem.softmax_scale,
            "bmm2_scale": problem.output_scale,
            "return_lse": True,
            "return_lse_base": "basee" if natural else "base2",
            **changes,
        },
    )
    torch.cuda.synchronize()
    assert lse.shape == (math.prod(problem.query.shape[:2]), problem.query.shape[2])
    return out, (lse / LN2 if natural else lse).view(problem.query.shape[:3])


@dataclasses.dataclass
class Ragged:
    """Requests of different query lengths over the cache of one problem."""

    problem: Problem
    q_lens: list[int]
    query: torch.Tensor

    @property
    def cum_seq_lens_q(self) -> torch.Tensor:
        return torch.tensor([0, *self.q_lens]).cumsum(0).to("cuda", torch.int32)

    def judge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Request by request. lse: base 2, [tokens, heads]."""
        start = 0
        for request, q_len in enumerate(self.q_lens):
            own = slice(start, start + q_len)
            start += q_len
            if q_len:
                rows, lengths = self.problem.rows[request], self.problem.seq_lens[request]
                part = dataclasses.replace(self.problem, query=self.query[own][None], rows=[rows], seq_lens=[lengths])
                decode_reference.judge(part, out[own][None], lse[own][None])


def make_ragged(q_lens: list[int], seq_lens: list[int], heads: int, **options: Any) -> Ragged:
    problem = make_problem(seq_lens, 1, heads, **options)
    query = torch.randn(sum(q_lens), heads, problem.query.shape[-1], device="cuda").to(problem.query.dtype)
    return Ragged(problem, q_lens, query)


def planned(ragged: Ragged, **options: Any) -> flashinfer.BatchMLAPagedAttentionWrapper:
    """FlashInfer's wrapper with a plan of page lists."""
    problem = ragged.problem
    page_size = problem.kv_cache.shape[1]
    needed = [-(-length // page_size) for length in problem.seq_lens]
    pages = [problem.block_tables[request, :count] for request, count in enumerate(needed)]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(
        decode_reference.callers_workspace(ragged.query.shape[1], 8), backend="fa3"
    )
    ends = torch.tensor([0, *needed]).cumsum(0).to("cuda", torch.int32)
    wrapper.plan(
        qo_indptr=ragged.cum_seq_lens_q,
        kv_indptr=ends,
        kv_indices=torch.cat(pages),
        kv_len_arr=torch.tensor(problem.seq_lens, dtype=torch.int32, device="cuda"),
        **{
            "num_heads": ragged.query.shape[1],
            "head_dim_ckv": LATENT,
            "head_dim_kpe": 64,
            "page_size": page_size,
            "causal": problem.sight.causal,
            "sm_scale": problem.softmax_scale,
            "q_data_type": ragged.query.dtype,
            "kv_data_type": ragged.query.dtype,
            **options,
        },
    )
    return wrapper


def by_wrapper(ragged: Ragged, natural: bool, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, base-2 LSE) of the wrapper, from query and cache in parts, into NaN-filled results."""
    query, cache = ragged.query, ragged.problem.kv_cache
    tokens, heads, _ = query.shape
    given = torch.full((tokens, heads, LATENT), math.nan, dtype=ragged.problem.out_dtype, device="cuda")
    out, lse = planned(ragged, **options).run(
        q_nope=query[..., :LATENT].clone(),
        q_pe=query[..., LATENT:].clone(),
        ckv_cache=cache[..., :LATENT],
        kpe_cache=cache[..., LATENT:],
        out=given,
        lse=torch.full((tokens, heads), math.nan, device="cuda"),
        return_lse=True,
        return_lse_base_on_e=natural,
    )
    torch.cuda.synchronize()
    assert out is given
    return out, lse / LN2 if natural else lse


def by_ragged_prefill(
    problem: prefill_reference.Problem, causal: bool, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, natural LSE) of trtllm_ragged_attention_deepseek, which gives base 2, into NaN-filled results."""
    tokens, heads, _ = problem.query.shape
    out, lse = flashinfer.trtllm_ragged_attention_deepseek(
        problem.query,
        problem.key,
        problem.value,
        None,
        None,
        max(problem.lengths_q),
        max(problem.lengths_kv),
        problem.softmax_scale,
        1.0,
        1.0,
        len(problem.lengths_q),
        -1,
        problem.cum_seq_lens_q,
        problem.cum_seq_lens_kv,
        None,
        causal,
        True,
        **{
            "out": _poisoned(problem),
            "lse": torch.full((tokens, heads), math.nan, device="cuda"),
            **changes,
        },
    )
    torch.cuda.synchronize()
    return out, lse * LN2


def by_tokenspeed_prefill(
    problem: prefill_reference.Problem, causal: bool, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, natural LSE) of tokenspeed_mla_prefill, into a NaN-filled output, with 64-bit lengths from the CPU."""
    out, lse = tokenspeed_mla.tokenspeed_mla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv.cpu().long(),
        max(problem.lengths_kv),
        len(problem.lengths_q),
        problem.softmax_scale,
        causal,
        True,
        problem.cum_seq_lens_q.cpu().long(),
        max(problem.lengths_q),
        **{"out": _poisoned(problem), **changes},
    )
    torch.cuda.synchronize()
    return out, lse


def _poisoned(problem: prefill_reference.Problem) -> torch.Tensor:
    shape = (*problem.query.shape[:2], problem.value.shape[2])
    return torch.full(shape, math.nan, dtype=prefill_reference.out_dtype(problem.query.dtype), device="cuda")
