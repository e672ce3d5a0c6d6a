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
    """The requests of a batch that are decoded: vLLM's fields, and where each one's query tokens are.

    block_table, seq_lens, dcp_tot_seq_lens (vLLM's): a row for each request.
    q_len: query tokens of each request, or, with `starts`, the most that one has.
    starts: [requests + 1] int32 on the device, where each request's tokens start; None where all have q_len.
    leaves_out: whether there may be tokens that `starts` gives to no request.
    workspace: what the step's layers use one after the other, from the first one on that asked vLLM for it.
    """

    q_len: int = 1
    starts: torch.Tensor | None = None
    leaves_out: bool = False
    workspace: torch.Tensor | None = None


@dataclasses.dataclass
class TsmlaMetadata(MLACommonMetadata[TsmlaDecodeMetadata]):
    pass


class TsmlaMetadataBuilder(MLACommonMetadataBuilder[TsmlaMetadata]):
    """Builds the metadata of a batch. Requests with any number of query tokens up to the threshold are decoded
    together."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True
    reorder_batch_threshold: int = options.decode_threshold()
    _host_knows_lengths: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, TsmlaMetadata, supports_dcp_with_varlen=True)
        self._host_knows_lengths = not verifies_adaptively(vllm_config)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the most query tokens of a request in replayed graphs of decodes whose requests differ in them; None
        for no such graphs (asked by vLLM 0.33)."""
        return cls.reorder_batch_threshold if verifies_adaptively(vllm_config) else None

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        max_query_len: int = 1,
        **_: Any,
    ) -> TsmlaDecodeMetadata:
        lengths = query_start_loc_cpu.diff().tolist()
        starts = None
        if not self._host_knows_lengths:
            requests, q_len, starts = len(lengths), max(max_query_len, 1), query_start_loc_device[: len(lengths) + 1]
        elif sum(lengths) == num_decode_tokens and not alike(lengths):
            requests, q_len, starts = len(lengths), max(lengths), query_start_loc_device[: len(lengths) + 1]
        else:
            requests, q_len = uniform(lengths[0], num_decode_tokens, len(lengths))
        return TsmlaDecodeMetadata(
            block_table=block_table_tensor[:requests],
            seq_lens=seq_lens_device[:requests],
            dcp_tot_seq_lens=None if dcp_tot_seq_lens_device is None else dcp_tot_seq_lens_device[:requests],
            q_len=q_len,
            starts=starts,
            leaves_out=not self._host_knows_lengths,
        )


def verifies_adaptively(config: Any) -> bool:
    """Whether draft tokens are left out on the GPU, so that only it knows how many a request has (vLLM 0.33)."""
    return bool(getattr(config.speculative_config, "enable_adaptive_verification", False))


def alike(lengths: list[int]) -> bool:
    """Whether requests have equally many query tokens, except those at the end that have none, from padding."""
    having = [n for n in lengths if n]
    return having == lengths[: len(having)] and len(set(having)) <= 1


def uniform(first: int, tokens: int, requests: int) -> tuple[int, int]:
    """Return (requests that have query tokens, tokens of each) for a batch whose first request has `first` tokens.

    Behind the requests with tokens there may be some without, from padding. In a batch that vLLM makes up to capture a
    graph, the first request may be said to have fewer tokens than its share.
    """
    q_len = max(first, 1)
    if tokens > q_len * requests and tokens % requests == 0:
        return requests, tokens // requests
    if tokens % q_len or tokens > q_len * requests:
        raise ValueError(
            f"vLLM gives {tokens} tokens of {requests} requests to decode, the first with {first}, and does not say "
            "how many the others have"
        )
    return tokens // q_len, q_len
