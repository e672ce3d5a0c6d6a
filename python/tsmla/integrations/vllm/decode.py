"""The implementation of an MLA layer for vLLM: it decodes here, and prefills in `mha`."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from tsmla.identity.support import DECODE_OUT_DTYPES, LATENT_DIM, ROPE_DIM
from tsmla.integrations.shared.ready import decode_kernels
from tsmla.operators.checks import TORCH_DTYPE_OF, TORCH_DTYPES
from tsmla.operators.decode import tsmla_decode

from . import PREFILL, mha, ready, served
from .builder import TsmlaMetadata, TsmlaMetadataBuilder

_RESERVES_WHEN_PROFILED = hasattr(MLAAttentionImpl, "reserve_workspace")


class TsmlaImpl(MLACommonImpl[TsmlaMetadata]):
    """Computes an MLA layer of vLLM. LSEs of its decodes have base 2; rows without keys give 0 and -inf, which vLLM's
    merges take."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = False
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        config = get_current_vllm_config()
        self._refuse(alibi_slopes, logits_soft_cap, attn_type, sliding_window, config)
        self._parallel = config.parallel_config
        """Read at each call: some KV connectors set the interleaving after the model is built."""
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        self._fp8 = kv_cache_dtype in served.FP8_CACHES
        if kv_cache_dtype in served.ROWS_CACHES:
            self.supports_quant_query_input = False  # vLLM would quantise queries as for any cache that it calls fp8
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._decoded_heads = num_heads * config.parallel_config.decode_context_parallel_size
        self._longest_q = ready.longest_decode(config, TsmlaMetadataBuilder.reorder_batch_threshold)
        dtypes = served.decode_dtypes(torch.get_default_dtype(), kv_cache_dtype)
        if (arch := ready.arch()) is not None:
            decode_kernels(arch, *dtypes, lse=self.need_to_return_lse_for_decode)
        if not _RESERVES_WHEN_PROFILED:
            self.reserve_workspace()

    def _refuse(
        self, alibi_slopes: Any, logits_soft_cap: Any, attn_type: str, sliding_window: int | None, config: Any
    ) -> None:
        if alibi_slopes or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "tsmla's vLLM plug-in serves decoder attention without alibi_slopes and logits_soft_cap; got "
                f"attn_type {attn_type}, alibi_slopes {alibi_slopes}, logits_soft_cap {logits_soft_cap}"
            )
        if (self.kv_lora_rank, self.qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM):
            raise NotImplementedError(
                f"tsmla decodes kv_lora_rank {LATENT_DIM} and qk_rope_head_dim {ROPE_DIM}, not {self.kv_lora_rank} and "
                f"{self.qk_rope_head_dim}"
            )
        prefill = config.attention_config.mla_prefill_backend
        if sliding_window is not None and prefill is not None and prefill.get_path() == PREFILL:
            raise NotImplementedError(
                "tsmla decodes with a sliding window, but its prefill has none: choose an mla_prefill_backend that has"
            )

    def reserve_workspace(self) -> None:
        if ready.arch() is not None:
            self._workspace(self._decoded_heads, torch.device("cuda", torch.cuda.current_device()))

    def _workspace(self, heads: int, device: torch.device) -> torch.Tensor:
        return ready.workspace(heads, self._longest_q, device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TsmlaMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode: return the output [tokens, heads, 512] and, under context parallelism, the LSE [tokens, heads].

        q: [tokens, heads, 576], or its parts of 512 and 64; e4m3 for an FP8 cache whose rows have no scales. Tokens of
        no request give 0 and -inf, as those that see no key.
        """
        decode = attn_metadata.decode
        query: Any = q if decode.starts is not None else in_requests(q, decode.q_len)
        first = q[0] if isinstance(q, tuple) else q
        heads = first.shape[1]
        out, lse = without_keys(first, self.need_to_return_lse_for_decode) if decode.leaves_out else (None, None)
        softmax_scale, output_scale = self._factors(layer)
        parallel = self.dcp_world_size > 1
        result = tsmla_decode(
            query,
            kv_c_and_k_pe_cache,
            self._workspace(heads, kv_c_and_k_pe_cache.device),
            LATENT_DIM,
            ROPE_DIM,
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

    def _factors(self, layer: Any) -> tuple[float, float]:
        """Return the factors of the scores and of the output. An FP8 cache's scales may be set after the first call."""
        if not self._fp8:
            return self.scale, 1.0
        return self.scale * layer._q_scale_float * layer._k_scale_float, layer._k_scale_float

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: TsmlaMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        prefill = mha.of(self, attn_metadata, output_scale)
        if prefill is None:
            super().forward_mha(
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=output_scale
            )
        else:
            prefill.run(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, k_scale, output)


def without_keys(q: torch.Tensor, wants_lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the output, and the LSE if wanted, of tokens q [tokens, heads, ...] that see no key.

    The launch that follows overwrites the rows of requests, and leaves those of no request as they are.
    """
    dtype = TORCH_DTYPE_OF[DECODE_OUT_DTYPES[TORCH_DTYPES[q.dtype]]]
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32) if wants_lse else None
    return q.new_zeros(*q.shape[:2], LATENT_DIM, dtype=dtype), lse


def in_requests(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], q_len: int
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """View [tokens, heads, 576], or its parts, as [requests, q_len, heads, 576]."""
    if isinstance(q, tuple):
        return tuple(part.unflatten(0, (-1, q_len)) for part in q)
    return q.unflatten(0, (-1, q_len))
