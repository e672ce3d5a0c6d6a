"""Whether the SGLang that is installed is the one that the plug-in was written for: its names and its functions."""

from __future__ import annotations

import importlib

from tsmla.integrations.shared import contract as shared
from tsmla.integrations.shared.contract import Function, Names

KNOWN = ("0.5.17", "0.5.23")
"""Versions of SGLang whose code was read, and with which the contract tests have passed."""
_BACKEND = "sglang.srt.layers.attention.base_attn_backend:AttentionBackend"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_DEEPSEEK = "sglang.srt.models.deepseek_common"
_MLA = f"{_DEEPSEEK}.attention_forward_methods.forward_mla"
_POOL = "sglang.srt.mem_cache.memory_pool"
_LAYER = "self q k v layer forward_batch save_kv_cache"
_CHOICES = (
    "ATTENTION_BACKEND_CHOICES add_attention_backend_choices CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS "
    "add_chunked_prefix_cache_attention_backend"
)
CONTRACT: tuple[Function | Names, ...] = (
    Function("sglang.srt.layers.attention.attention_registry:register_attention_backend", "name"),
    Names(
        _BACKEND,
        "forward needs_cpu_seq_lens supports_ragged_verify_graph init_forward_metadata_in_graph verify_mask",
    ),
    Function(f"{_BACKEND}.init_forward_metadata", "self forward_batch", exactly=True),
    Function(f"{_BACKEND}.init_forward_metadata_out_graph", "self forward_batch in_capture", exactly=True),
    Function(f"{_BACKEND}.init_cuda_graph_state", "self max_bs max_num_tokens", exactly=True),
    Function(f"{_BACKEND}.get_cuda_graph_seq_len_fill_value", "self", exactly=True),
    Function(f"{_BACKEND}.update_verify_buffers_to_fill_after_draft", "self spec_info cuda_graph_bs", exactly=True),
    Function(f"{_BACKEND}.forward_decode", _LAYER, exactly=True, also="kwargs"),
    Function(f"{_BACKEND}.forward_extend", _LAYER, exactly=True, also="kwargs"),
    Names(
        f"{_BATCH}:ForwardMode",
        "is_idle is_decode is_decode_or_idle is_target_verify is_draft_extend_v2 is_dllm_extend",
    ),
    Names(
        f"{_BATCH}:ForwardBatch",
        "forward_mode batch_size req_pool_indices seq_lens seq_lens_cpu out_cache_loc extend_seq_lens "
        "extend_seq_lens_cpu attn_attend_prefix_cache mha_return_lse mha_one_shot prefix_chunk_idx "
        "prefix_chunk_cu_seq_lens",
    ),
    Function(f"{_POOL}:MLATokenToKVPool.set_kv_buffer", "self layer loc_info cache_k cache_v"),
    Function(f"{_POOL}:MLATokenToKVPool.get_key_buffer", "self layer_id"),
    Function(
        "sglang.srt.layers.attention.verify_mask:maybe_create_verify_mask",
        "is_draft_runner skip_prefill max_bs max_context_len num_draft_tokens device is_read",
    ),
    Names("sglang.srt.runtime_context", "get_parallel get_spec"),
    Names("sglang.srt.model_executor.forward_context", "get_req_to_token_pool get_token_to_kv_pool"),
    Function(f"{_DEEPSEEK}.attention_backend_handler:AttentionBackendRegistry.register", "backend_name handler_func"),
    Function(f"{_DEEPSEEK}.attention_backend_handler:AttentionBackendRegistry.get_handler", "backend_name"),
    Names(f"{_DEEPSEEK}.utils", "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"),
)
FORMER: tuple[Function | Names, ...] = (
    Names("sglang.srt.server_args", _CHOICES),
    Names("sglang.srt.server_args:ServerArgs", "get_attention_backends"),
    Function(f"{_POOL}:MLATokenToKVPool.set_mla_kv_buffer", "self layer loc cache_k_nope cache_k_rope"),
    Function(f"{_MLA}:_is_mla_dcp_lse_base_on_e", "attention_backend"),
)
"""What holds besides in releases that write keys by their slots alone, such as 0.5.17."""
LATTER: tuple[Function | Names, ...] = (
    Names("sglang.srt.arg_groups.choices", _CHOICES),
    Names(_BACKEND, "forward_metadata data_type kv_cache_dtype kv_index_translator glue_target_verify_metadata"),
    Names(f"{_BATCH}:ForwardBatch", "out_cache_loc_is_physical"),
    Function(f"{_POOL}:KVWriteLoc.for_batch", "forward_batch"),
    Function(f"{_POOL}:MLATokenToKVPool.set_mla_kv_buffer", "self layer loc_info cache_k_nope cache_k_rope"),
    Function(f"{_MLA}:is_mla_dcp_lse_base_on_e", "attention_backend"),
)
"""What holds besides in others, such as 0.5.23."""


def version() -> str | None:
    """Return the version of the SGLang that is installed; None without one."""
    return shared.version_of("sglang")


def broken() -> list[str]:
    """Return a sentence for each part of the contract that does not hold. None: the plug-in and SGLang go together."""
    return shared.broken((*CONTRACT, *(FORMER if _is_former() else LATTER)))


def _is_former() -> bool:
    try:
        return not hasattr(importlib.import_module(_POOL).KVWriteLoc, "for_batch")
    except Exception:  # importing SGLang runs its code; what is missing is said by clauses
        return False
