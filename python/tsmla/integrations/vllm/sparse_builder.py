"""What vLLM tells about a batch of a layer that chooses its keys, once a step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention import sparse_mla_attention
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata

from . import options, prompts
from .builder import verifies_adaptively


@dataclasses.dataclass(kw_only=True)
class _Fields(AttentionMetadata):
    """The fields that vLLM 0.26 fills; vLLM 0.33 has a class of them."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    topk_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    prefill_max_seq_len: int
    prefill: Any
    cp_kv_cache_interleave_size: int


_Common: Any = getattr(sparse_mla_attention, "SparseMLACommonMetadata", _Fields)


class TsmlaSparseMetadata(_Common):
    """What vLLM tells, and `lengths`: keys of each request, on the host, at most; of prompts exactly."""

    lengths: torch.Tensor | None = None

    @functools.cached_property
    def prompts(self) -> prompts.Prompts | None:
        """The batch's prompts, found out once for all layers that ask."""
        return prompts.of(self)


class TsmlaSparseMetadataBuilder(sparse_mla_attention.SparseMLACommonMetadataBuilder[TsmlaSparseMetadata]):
    """Builds the metadata of a batch. Each token has its own list of keys, so that it does not matter to a decode which
    tokens are of one request, or who knows."""

    metadata_cls: ClassVar[type] = TsmlaSparseMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.topk_mask_workspace = None  # vLLM's, of 128 MiB, for its own masks (vLLM 0.33 on Blackwell)
        self._init_reorder_batch_threshold(
            options.decode_threshold(), supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TsmlaSparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        return metadata

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the most query tokens of a request in replayed graphs of decodes whose requests differ in them; None
        for no such graphs (asked by vLLM 0.33)."""
        return options.decode_threshold() if verifies_adaptively(vllm_config) else None
