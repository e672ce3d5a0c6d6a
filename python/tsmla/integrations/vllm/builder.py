"""What vLLM tells a decode about its batch, once a step: which requests, and how many query tokens each has."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from . import options


@dataclasses.dataclass
class TsmlaDecodeMetadata(MLACommonDecodeMetadata):
    """block_table, seq_lens and dcp_tot_seq_lens have a row for each of the requests, which have q_len tokens each."""

    q_len: int = 1


@dataclasses.dataclass
class TsmlaMetadata(MLACommonMetadata[TsmlaDecodeMetadata]):
    pass


class TsmlaMetadataBuilder(MLACommonMetadataBuilder[TsmlaMetadata]):
    """Requests of one batch that are decoded have equally many query tokens."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True
    reorder_batch_threshold: int = options.decode_threshold()

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, TsmlaMetadata, supports_dcp_with_varlen=True)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> TsmlaDecodeMetadata:
        first = int(query_start_loc_cpu[1]) - int(query_start_loc_cpu[0])
        requests, q_len = uniform(first, num_decode_tokens, len(query_start_loc_cpu) - 1)
        return TsmlaDecodeMetadata(
            block_table=block_table_tensor[:requests],
            seq_lens=seq_lens_device[:requests],
            dcp_tot_seq_lens=None if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device[:requests],
            q_len=q_len,
        )


def uniform(first: int, tokens: int, requests: int) -> tuple[int, int]:
    """(requests that have query tokens, tokens of each) of a batch whose first request has `first` tokens.

    Behind the requests that have tokens there may be some without, from padding. Of a batch that vLLM makes up to
    capture a graph, the first request may be said to have fewer tokens than its share.
    """
    q_len = max(first, 1)
    if tokens > q_len * requests and tokens % requests == 0:
        return requests, tokens // requests
    if tokens % q_len or tokens > q_len * requests:
        raise ValueError(
            f"vLLM gives {tokens} tokens of {requests} requests to decode, the first with {first}; tsmla's vLLM "
            "plug-in decodes requests of equally many query tokens"
        )
    return tokens // q_len, q_len
