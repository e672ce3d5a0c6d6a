"""The implementation of a dense MLA layer for vLLM: it decodes here, and prefills in `mha`."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl, MLACommonMetadataBuilder

from tsmla.identity.support import DECODE_OUT_DTYPES, LATENT_DIM
from tsmla.integrations.shared.queries import in_requests, latent_of
from tsmla.operators.checks import TORCH_DTYPE_OF, TORCH_DTYPES
from tsmla.operators.decode import tsmla_decode

from . import PREFILL, ready
from .builder import TsmlaMetadata, TsmlaMetadataBuilder
from .layer import TsmlaLayer

KIMI_K3 = "kimi_k3"
"""The type of a model whose layers quantise what they write into an fp8 cache together with its query."""


class TsmlaImpl(TsmlaLayer, MLACommonImpl[TsmlaMetadata]):
    """Decodes the whole context of each request."""

    def _prepared(self, config: Any, sliding_window: int | None) -> int:
        self._parallel = config.parallel_config
        """Read at each call: some KV connectors set the interleaving after the model is built."""
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        if self._fp8 and config.model_config.hf_config.model_type == KIMI_K3:
            _refuse_queries_of_16_bits(config)
        prefill = config.attention_config.mla_prefill_backend
        if sliding_window is not None and prefill is not None and prefill.get_path() == PREFILL:
            raise NotImplementedError(
                "tsmla decodes with a sliding window, but its prefill has none: choose an mla_prefill_backend that has"
            )
        return ready.longest_decode(config, TsmlaMetadataBuilder.reorder_batch_threshold)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TsmlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode: return the output [tokens, heads, 512] and, under context parallelism, the LSE [tokens, heads].

        q: [tokens, heads, 576], or its parts of 512 and 64 (512 and 0 without rope); joined, it is e4m3 for an FP8
        cache whose rows have no scales. Tokens of no request give 0 and -inf, as those that see no key.
        """
        decode = attn_metadata.decode
        q = self._query(q, layer)
        query: Any = q if decode.starts is not None else in_requests(q, decode.q_len)
        first = latent_of(q)
        if decode.workspace is None:
            decode.workspace = self._workspace(first.shape[1], kv_c_and_k_pe_cache.device)
        out, lse = without_keys(first, self.need_to_return_lse_for_decode) if decode.leaves_out else (None, None)
        softmax_scale, output_scale = self._factors(layer)
        parallel = self.dcp_world_size > 1
        result = tsmla_decode(
            query,
            kv_c_and_k_pe_cache,
            decode.workspace,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            decode.block_table,
            decode.seq_lens,
            max(attn_metadata.max_seq_len, 1),
            softmax_scale,
            output_scale,
            causal_mask=getattr(attn_metadata, "causal", True),
            window_left=self._window_left,
            return_lse=self.need_to_return_lse_for_decode,
            causal_seqs=decode.dcp_tot_seq_lens if parallel else None,
            cp_world=self.dcp_world_size if parallel else 1,
            cp_rank=self.dcp_rank if parallel else 0,
            cp_interleave_size=self._parallel.cp_kv_cache_interleave_size if parallel else 1,
            cum_seq_lens_q=decode.starts,
            max_q_len=None if decode.starts is None else decode.q_len,
            batch_invariant=self._batch_invariant,
            out=out,
            lse=lse,
        )
        out, lse = result if isinstance(result, tuple) else (result, None)
        if decode.starts is not None:
            return out, lse
        return out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)


def _refuse_queries_of_16_bits(config: Any) -> None:
    dtype = config.model_config.dtype
    if MLACommonMetadataBuilder.determine_prefill_query_data_type(config, dtype) == dtype:
        raise NotImplementedError(
            "vLLM's Kimi K3 fills fp8 caches only from prefills whose queries vLLM itself makes FP8, which it does on "
            "compute capability 10 and for its own prefill backends; --kv-cache-dtype fp8_ds_mla has 8 bits, too, and "
            "takes prefills in bfloat16"
        )


def without_keys(q: torch.Tensor, wants_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the output, and the LSE if wanted, of tokens q [tokens, heads, ...] that see no key.

    The launch that follows overwrites the rows of requests, and leaves those of no request as they are.
    """
    dtype = TORCH_DTYPE_OF[DECODE_OUT_DTYPES[TORCH_DTYPES[q.dtype]]]
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32) if wants_lse else None
    return q.new_zeros(*q.shape[:2], LATENT_DIM, dtype=dtype), lse
