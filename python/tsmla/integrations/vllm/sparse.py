"""The implementation of an MLA layer that chooses its keys (sparse attention) for vLLM.

The layer's indexer writes lists of positions for each query token. vLLM turns them into rows of the cache, without
those of other ranks, and `tsmla_decode` takes such lists. Prompts of no more keys than a list names are prefilled as
those of dense layers, longer ones with a mask of what their tokens chose as far as that pays (`masked`). All other
tokens, of prompts too, are decoded, each with its own list, from keys in bf16 where that is faster (`prompts`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SparseMLACommonImpl
from vllm.v1.attention.backends.mla import sparse_utils

from tsmla.identity.dtype import Dtype
from tsmla.integrations.shared.decodes import kinds_of
from tsmla.integrations.shared.queries import latent_of
from tsmla.integrations.shared.ready import decode_kernels
from tsmla.integrations.shared.rows import plain_row
from tsmla.operators.decode import tsmla_decode

from . import masked, ready, served
from .layer import TsmlaLayer
from .masked import Chosen
from .prompts import MOST_HEADS_THAT_DECODE, Prompts
from .sparse_builder import TsmlaSparseMetadata

_VLLM_CONVERTS = hasattr(SparseMLACommonImpl, "_forward_mqa_kernel")
"""vLLM 0.33 turns positions into rows of the cache itself. vLLM 0.26 leaves it to the backend."""


class TsmlaSparseImpl(TsmlaLayer, SparseMLACommonImpl[TsmlaSparseMetadata]):
    """Decodes the keys that each query token chose."""

    gathers: bool = True
    group_conversion_decode_only: bool = True
    """Layers that share an indexer share its lists of rows in decodes; a single layer has no use for vLLM's second
    stream (asked by vLLM 0.33)."""
    masked_mha_available: bool = False
    """Whether prompts may be prefilled with masks (asked by vLLM 0.33)."""

    def _prepared(self, config: Any, sliding_window: int | None) -> int:
        if sliding_window is not None:
            raise NotImplementedError("tsmla decodes chosen keys without a sliding window")
        dims = self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim
        self.masked_mha_available = masked.offer(config, self.num_heads, dims)
        self._reads_prompts = self._may_read_prompts(config)
        if self._reads_prompts and (arch := ready.arch()) is not None:
            kinds = kinds_of(Dtype.BF16, plain_row(Dtype.BF16, self.kv_lora_rank + self.qk_rope_head_dim))
            assert kinds is not None
            decode_kernels(arch, kinds, lse=True, gathers=True)
        return 1

    def _may_read_prompts(self, config: Any) -> bool:
        """Whether tokens of prompts are decoded from keys that are made bf16 first. Which prompts are depends on the
        batch."""
        return (
            self.kv_cache_dtype in served.ROWS_CACHES
            and self.num_heads > MOST_HEADS_THAT_DECODE
            and config.parallel_config.decode_context_parallel_size == 1
            and getattr(config.attention_config, "hisparse_config", None) is None
            and not self._batch_invariant
        )

    def reserve_workspace(self) -> None:
        """Make vLLM's profile run count the memory of masks, or of a batch's keys in bf16, which torch's allocator then
        has for them."""
        super().reserve_workspace()
        if self.masked_mha_available or (self._reads_prompts and ready.arch() is not None):
            torch.empty(masked.MOST_BYTES, dtype=torch.int8, device="cuda")

    def masked_mha_workspace_fits(self, prefill: Any) -> bool:  # type: ignore[override]
        """Whether a batch's masks fit in the memory that is counted for them (asked by vLLM 0.33)."""
        assert self.topk_indices_buffer is not None
        return masked.fits(prefill, self.topk_indices_buffer.shape[1])

    def _chosen(self, attn_metadata: TsmlaSparseMetadata, tokens: int) -> Chosen | None:
        if attn_metadata.prefill_max_seq_len <= attn_metadata.topk_tokens:
            return None
        if not self.masked_mha_available:
            raise NotImplementedError(
                "vLLM asks tsmla for a masked prefill that was not offered; "
                "sparse_mla_force_mqa in vLLM's attention config decodes all tokens of prompts instead"
            )
        first = attn_metadata.num_decode_tokens
        assert self.topk_indices_buffer is not None
        return Chosen(self.topk_indices_buffer[first : first + tokens])

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TsmlaSparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode: return the output [tokens, heads, 512] and, under context parallelism, the LSE [tokens, heads].

        q: [tokens, heads, 576], or its parts of 512 and 64 (512 and 0 without rope); joined, it is e4m3 for an FP8
        cache whose rows have no scales.
        """
        tokens = latent_of(q).shape[0]
        if self._reads_prompts and tokens > attn_metadata.num_decode_tokens and attn_metadata.prompts is not None:
            return self._with_prompts(q, kv_c_and_k_pe_cache, attn_metadata, attn_metadata.prompts, layer), None
        if _VLLM_CONVERTS:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        slots, counts = self._slots(attn_metadata, slice(tokens), attn_metadata.block_table)
        return self._attend(q, kv_c_and_k_pe_cache, slots, counts, layer)

    def _with_prompts(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        attn_metadata: TsmlaSparseMetadata,
        prompts: Prompts,
        layer: Any,
    ) -> torch.Tensor:
        """Decode tokens of decodes from the cache, and those of prompts, behind them, from their keys in bf16."""
        latent = latent_of(q)
        tokens, heads, _ = latent.shape
        out = latent.new_empty((tokens, heads, self.kv_lora_rank))
        first, table = attn_metadata.num_decode_tokens, attn_metadata.block_table
        keys = prompts.read(kv_cache, table).unsqueeze(1)
        for own, cache, pages in ((slice(first), kv_cache, table), (slice(first, tokens), keys, prompts.pages)):
            if own.stop:  # there may be prompts alone
                slots, counts = self._slots(attn_metadata, own, pages)
                query: Any = tuple(part[own] for part in q) if isinstance(q, tuple) else q[own]
                self._attend(query, cache, slots, counts, layer, out[own])
        return out

    def _slots(
        self, attn_metadata: TsmlaSparseMetadata, tokens: slice, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn what `tokens` chose into slots of a cache whose requests have these `pages`; and return how many."""
        assert self.topk_indices_buffer is not None
        positions = self.topk_indices_buffer[tokens]
        slots: tuple[torch.Tensor, torch.Tensor] = sparse_utils.triton_filter_and_convert_dcp_index(
            attn_metadata.req_id_per_token[tokens],
            pages,
            positions,
            dcp_size=self.dcp_world_size,
            dcp_rank=self.dcp_rank,
            cp_kv_cache_interleave_size=attn_metadata.cp_kv_cache_interleave_size,
            BLOCK_SIZE=attn_metadata.block_size,
            NUM_TOPK_TOKENS=positions.shape[1],
            return_valid_counts=True,
        )
        return slots

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode a batch whose indices count rows of memory: pages may lie further apart than their rows are long, and
        what lies between them counts, too."""
        rows, _ = sparse_utils.flat_kv_row_view(kv_cache, block_size)
        return self._attend(q, rows.unsqueeze(1), topk_indices, valid_counts, layer)

    def _attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
        layer: Any,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode each token's list of slots, page x page_size + row of `kv_cache`, as far as its count says; into `out`
        if it is given."""
        query = self._query(q, layer)
        heads = latent_of(query).shape[1]
        softmax_scale, output_scale = self._factors(layer)
        result = tsmla_decode(
            query,
            kv_cache,
            self._workspace(heads, kv_cache.device),
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            None,
            None,
            None,
            softmax_scale,
            output_scale,
            out=out,
            return_lse=self.need_to_return_lse_for_decode,
            batch_invariant=self._batch_invariant,
            indices=slots,
            topk_length=counts,
        )
        return result if isinstance(result, tuple) else (result, None)
