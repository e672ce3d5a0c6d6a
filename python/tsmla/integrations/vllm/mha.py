"""A prefill under both of tsmla's backends: what vLLM's `forward_mha` does, without copies.

New tokens are computed into the layer's output. Each chunk of their context is then gathered from the cache, expanded,
and attended to by a launch that merges it into that output. Keys stay in the two parts that they are computed in. Where
tokens chose keys, each launch has a mask of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from tsmla.operators.read_cache import mla_read_cache

from . import context, served
from .masked import Chosen
from .prefill import Keys, TsmlaPrefill


def of(impl: Any, attn_metadata: Any, output_scale: Any, chosen: Chosen | None = None) -> Prefill | None:
    """Return the prefill of a batch, or None when vLLM's own must do it: another backend prefills, or outputs are
    quantised. chosen: what its tokens see; all that causality lets them when None."""
    prefill = attn_metadata.prefill
    if not isinstance(prefill.prefill_backend, TsmlaPrefill) or output_scale is not None:
        return None
    return Prefill(impl, prefill.prefill_backend, attn_metadata, chosen)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Prefills one batch of a layer.

    impl: the layer's implementation, which projects and, under context parallelism, gathers the context.
    """

    impl: Any
    backend: TsmlaPrefill
    metadata: Any
    chosen: Chosen | None = None

    def run(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_pe: torch.Tensor,
        cache: torch.Tensor,
        k_scale: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Write the attention of the batch's new tokens into `output`.

        q: [tokens, heads, nope + rope]. latent, k_pe: the same tokens' keys, [tokens, 512] and [tokens, 1, 64].
        """
        prefill = self.metadata.prefill
        out = output.view(-1, self.impl.num_heads, self.impl.v_head_dim)
        has_context = prefill.chunked_context is not None
        queries, starts = self.backend.prepared(q), prefill.query_start_loc
        first = prefill.chunked_context.context_lens if has_context and self.chosen else None
        mask = self._mask(slice(None), starts, first, prefill.max_query_len)
        expanded = self._expanded(latent, k_pe)
        _, lse = self.backend.attend(queries, *expanded, starts, starts, True, has_context, out, mask=mask)
        if lse is None:
            return
        if self.impl.dcp_world_size > 1:
            merge(out, lse, *self._context_of_all_ranks(q, cache, k_scale))
            return
        for chunk in context.chunks(prefill):
            keys, values = self._expanded(*self._gathered(chunk, cache, k_scale))
            earlier = out[chunk.tokens], lse[:, chunk.tokens]
            mask = self._mask(chunk.tokens, chunk.starts_q, chunk.first, chunk.longest)
            given = queries[chunk.tokens], keys, values, chunk.starts_q, chunk.starts_kv
            self.backend.attend(*given, False, True, earlier=earlier, mask=mask)

    def _mask(
        self, tokens: slice, starts_q: torch.Tensor, first: torch.Tensor | None, keys: int
    ) -> torch.Tensor | None:
        return None if self.chosen is None else self.chosen.mask(tokens, starts_q, first, keys)

    def _expanded(self, latent: torch.Tensor, k_pe: torch.Tensor) -> tuple[Keys, torch.Tensor]:
        """Return keys and values of every head, from latent and rope parts."""
        impl = self.impl
        dims = impl.qk_nope_head_dim, impl.v_head_dim
        k_nope, values = impl.kv_b_proj(latent)[0].view(-1, impl.num_heads, sum(dims)).split(dims, dim=-1)
        if self.backend.takes_keys_in_parts:
            return (k_nope, k_pe), values
        return impl._concat_k_nope_k_pe(k_nope, k_pe), values

    def _gathered(
        self, chunk: context.Chunk, cache: torch.Tensor, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return latent and rope parts of a chunk's keys, in the model's dtype."""
        prefill = self.metadata.prefill
        rows = prefill.chunked_context.workspace
        rank = self.impl.kv_lora_rank
        latent, rope = rows[: chunk.keys, :rank], rows[: chunk.keys, None, rank:]
        if self.impl.kv_cache_dtype in served.ROWS_CACHES:
            mla_read_cache(
                cache,
                latent,
                rope,
                block_tables=prefill.block_table[chunk.requests],
                cum_seq_lens=chunk.starts_kv,
                seq_starts=chunk.first,
                format=self.impl.kv_cache_dtype,
            )
            return latent, rope
        ops.gather_and_maybe_dequant_cache(
            src_cache=cache,
            dst=rows,
            block_table=prefill.block_table[chunk.requests],
            cu_seq_lens=chunk.starts_kv,
            token_to_seq=chunk.request_of,
            num_tokens=chunk.keys,
            kv_cache_dtype=self.impl.kv_cache_dtype,
            scale=k_scale,
            seq_starts=chunk.first,
        )
        return latent, rope

    def _context_of_all_ranks(
        self, q: torch.Tensor, cache: torch.Tensor, k_scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        impl = self.impl
        return impl._context_parallel_compute_prefill_context(
            q, cache, self.metadata, k_scale=k_scale, dcp_world_size=impl.dcp_world_size
        )


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Merge attention over more keys into `out` [tokens, heads, d] and `lse` [heads, tokens], in place."""
    before = lse.clone()  # the kernel may write an LSE before all who need it have read it
    merge_attn_states(
        output=out, output_lse=lse, prefix_output=more, prefix_lse=more_lse, suffix_output=out, suffix_lse=before
    )
