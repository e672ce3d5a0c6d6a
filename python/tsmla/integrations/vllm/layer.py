"""What tsmla's implementations of MLA layers have in common in vLLM: what they are made of, and prefills."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl

from tsmla.integrations.shared.ready import decode_kernels

from . import mha, queries, ready, served
from .masked import Chosen

_RESERVES_WHEN_PROFILED = hasattr(MLAAttentionImpl, "reserve_workspace")


class TsmlaLayer(MLACommonBaseImpl[Any]):
    """Stands in front of vLLM's implementation of a kind of layers, in the bases of the class that decodes it.

    LSEs of its decodes have base 2; rows without keys give 0 and -inf, which vLLM's merges take.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = False
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    gathers: bool = False
    """Whether the layer's decodes are of chosen keys."""

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
        if alibi_slopes or logits_soft_cap or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "tsmla's vLLM plug-in serves decoder attention without alibi_slopes and logits_soft_cap; got "
                f"attn_type {attn_type}, alibi_slopes {alibi_slopes}, logits_soft_cap {logits_soft_cap}"
            )
        config = get_current_vllm_config()
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._fp8 = kv_cache_dtype in served.FP8_CACHES
        self._quantises = self._fp8 and queries.are_quantised_here(config)
        if self._quantises or kv_cache_dtype in served.ROWS_CACHES:
            self.supports_quant_query_input = False  # vLLM would quantise queries as for any cache that it calls fp8
        self._decoded_heads = num_heads * config.parallel_config.decode_context_parallel_size
        self._longest_q = self._prepared(config, sliding_window)
        kinds = served.decode_kinds(torch.get_default_dtype(), kv_cache_dtype, self._row())
        if (arch := ready.arch()) is not None and kinds is not None:
            decode_kernels(arch, kinds, lse=self.need_to_return_lse_for_decode, gathers=self.gathers)
        if not _RESERVES_WHEN_PROFILED:
            self.reserve_workspace()

    def _row(self) -> int:
        """Return the elements of a cache row that tsmla has, or raise what says which it has."""
        row = served.SHAPES.get(self.kv_lora_rank + self.qk_rope_head_dim)
        if row is None or row.value_columns != self.kv_lora_rank:
            has = " or ".join(f"{r.value_columns} and {r.columns - r.value_columns}" for r in served.SHAPES.values())
            raise NotImplementedError(
                f"tsmla decodes kv_lora_rank and qk_rope_head_dim {has}, not {self.kv_lora_rank} and "
                f"{self.qk_rope_head_dim}"
            )
        return row.columns

    def _prepared(self, config: Any, sliding_window: int | None) -> int:
        """Keep or refuse what only this kind of layer has; return the most query tokens of a request in a decode."""
        raise NotImplementedError

    def reserve_workspace(self) -> None:
        if ready.arch() is not None:
            self._workspace(self._decoded_heads, torch.device("cuda", torch.cuda.current_device()))

    def _workspace(self, heads: int, device: torch.device) -> torch.Tensor:
        return ready.workspace(heads, self._longest_q, device)

    def _query(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], layer: Any) -> Any:
        """Return a query as `tsmla_decode` takes it: without the part that models without rope leave empty, and in the
        dtype of the cache."""
        if not isinstance(q, tuple):
            return q
        if self._quantises:
            parts = tuple(queries.quantised(part, layer._q_scale) for part in q if part.shape[-1])
            return parts if self.qk_rope_head_dim else parts[0]
        return q if self.qk_rope_head_dim else q[0]

    def _factors(self, layer: Any) -> tuple[float, float]:
        """Return the factors of the scores and of the output. An FP8 cache's scales may be set after the first call."""
        if not self._fp8:
            return self.scale, 1.0
        return self.scale * layer._q_scale_float * layer._k_scale_float, layer._k_scale_float

    def _chosen(self, attn_metadata: Any, tokens: int) -> Chosen | None:
        """Return what a prefill's tokens chose; None where they see all that they may."""
        return None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        prefill = mha.of(self, attn_metadata, output_scale, self._chosen(attn_metadata, len(q)))
        if prefill is None:
            super().forward_mha(
                q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=output_scale
            )
        else:
            prefill.run(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, k_scale, output)
