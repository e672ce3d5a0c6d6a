"""Whether the vLLM that is installed is the one that the plug-in was written for: its names and its functions."""

from __future__ import annotations

from tsmla.integrations.shared import contract as shared
from tsmla.integrations.shared.contract import Function, Names

KNOWN = ("0.26.0", "0.33.0")
"""Versions of vLLM whose code was read, and with which the contract tests have passed."""
_LAYER = "vllm.model_executor.layers.attention.mla_attention"
_BACKEND = "vllm.v1.attention.backend"
_SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
_ROWS = "vllm.v1.attention.backends.mla.sparse_utils"
_PREFILL = "vllm.v1.attention.backends.mla.prefill"

_CONVERTS = f"{_SPARSE}:SparseMLACommonMetadata"
"""What a vLLM has that turns positions of chosen keys into rows of the cache itself, and asks backends for masks."""
CONTRACT: tuple[Function | Names, ...] = (
    Function("vllm.v1.attention.backends.registry:register_backend", "backend class_path"),
    Function(f"{_PREFILL}.registry:register_mla_prefill_backend", "backend class_path"),
    Names("vllm.v1.attention.backends.registry:AttentionBackendEnum", "CUSTOM get_path is_overridden"),
    Names(f"{_PREFILL}.registry:MLAPrefillBackendEnum", "CUSTOM get_path is_overridden"),
    Function(
        f"{_LAYER}:MLACommonImpl.__init__",
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim kv_b_proj",
    ),
    Function(f"{_LAYER}:MLACommonImpl.forward_mqa", "self q kv_c_and_k_pe_cache attn_metadata layer", exactly=True),
    Function(
        f"{_LAYER}:MLACommonImpl.forward_mha",
        "self q kv_c_normed k_pe kv_c_and_k_pe_cache attn_metadata k_scale output output_scale",
        exactly=True,
    ),
    Function(f"{_LAYER}:MLACommonImpl._concat_k_nope_k_pe", "self k_nope k_pe"),
    Function(
        f"{_LAYER}:MLACommonImpl._context_parallel_compute_prefill_context",
        "self q kv_c_and_k_pe_cache attn_metadata k_scale dcp_world_size",
    ),
    Function(
        f"{_LAYER}:MLACommonMetadataBuilder.__init__",
        "self kv_cache_spec layer_names vllm_config device metadata_cls supports_dcp_with_varlen",
    ),
    Function(
        f"{_LAYER}:MLACommonMetadataBuilder._build_decode",
        "self block_table_tensor seq_lens_device query_start_loc_cpu num_decode_tokens dcp_tot_seq_lens_device",
    ),
    Function(f"{_LAYER}:MLACommonMetadataBuilder.determine_prefill_query_data_type", "vllm_config model_dtype"),
    Names(f"{_LAYER}:MLACommonDecodeMetadata", "block_table seq_lens dcp_tot_seq_lens"),
    Names(f"{_LAYER}:MLACommonMetadata", "max_seq_len num_decodes num_decode_tokens prefill decode"),
    Names(
        f"{_LAYER}:MLACommonPrefillMetadata",
        "block_table query_start_loc max_query_len chunked_context prefill_backend",
    ),
    Names(f"{_LAYER}:QueryLenSupport", "UNIFORM"),
    Names(f"{_BACKEND}:AttentionCGSupport", "UNIFORM_BATCH"),
    Names(f"{_BACKEND}:CommonAttentionMetadata", "seq_lens_cpu_upper_bound"),
    Names(
        f"{_BACKEND}:AttentionImplBase",
        "can_return_lse_for_decode lse_base_on_e supports_dcp need_to_return_lse_for_decode supports_quant_query_input "
        "supports_mtp_with_cp_non_trivial_interleave_size",
    ),
    Names(
        f"{_BACKEND}:AttentionBackend",
        "get_name get_impl_cls get_builder_cls get_supported_kernel_block_sizes get_preferred_block_size "
        "get_supported_head_sizes supports_compute_capability supports_sliding_window supports_non_causal "
        "supports_batch_invariance",
    ),
    Function(
        f"{_BACKEND}:AttentionBackend.supports_combination",
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix device_capability",
    ),
    Function(
        f"{_PREFILL}.base:MLAPrefillBackend.__init__",
        "self num_heads scale kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim vllm_config",
        exactly=True,
    ),
    Function(
        f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_new_tokens",
        "self q k v return_softmax_lse out output_scale",
        exactly=True,
    ),
    Function(
        f"{_PREFILL}.base:MLAPrefillBackend.run_prefill_context_chunk",
        "self q k v",
        exactly=True,
        also="chunk chunk_idx out",
    ),
    Function(f"{_PREFILL}.base:MLAPrefillBackend.validate_configuration", "device_capability selector_config"),
    Function(
        f"{_SPARSE}:SparseMLACommonImpl.__init__",
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim kv_b_proj "
        "topk_indices_buffer",
    ),
    Function(
        f"{_SPARSE}:SparseMLACommonImpl.forward_mha",
        "self q kv_c_normed k_pe kv_c_and_k_pe_cache attn_metadata k_scale output output_scale",
        exactly=True,
    ),
    Function(f"{_SPARSE}:SparseMLACommonImpl.forward_mqa", "self q kv_c_and_k_pe_cache attn_metadata layer"),
    Function(
        f"{_SPARSE}:SparseMLACommonImpl._forward_mqa_kernel",
        "self q kv_cache topk_indices valid_counts layer block_size is_decode",
        exactly=True,
        beside=_CONVERTS,
    ),
    Function(f"{_SPARSE}:SparseMLACommonMetadataBuilder.__init__", "self kv_cache_spec layer_names vllm_config device"),
    Function(
        f"{_SPARSE}:SparseMLACommonMetadataBuilder._init_reorder_batch_threshold",
        "self reorder_batch_threshold supports_spec_as_decode supports_dcp_with_varlen",
    ),
    Function(
        f"{_ROWS}:triton_filter_and_convert_dcp_index",
        "req_id block_table token_indices dcp_size dcp_rank cp_kv_cache_interleave_size BLOCK_SIZE NUM_TOPK_TOKENS "
        "return_valid_counts",
    ),
    Names(_LAYER, "_MASKED_MHA_THRESHOLDS", beside=_CONVERTS),
    Names(_CONVERTS, "prefill_max_seq_len topk_tokens num_decode_tokens", beside=_CONVERTS),
    Names(f"{_LAYER}:MLACommonPrefillMetadata", "query_lens_cpu", beside=_CONVERTS),
    Names(f"{_LAYER}:MLACommonPrefillMetadata.ChunkedContextMetadata", "chunks context_lens", beside=_CONVERTS),
    Names(f"{_LAYER}:MLACommonPrefillMetadata.ContextChunk", "starts max_seq_len", beside=_CONVERTS),
    Function(
        f"{_LAYER}:_use_masked_mha",
        "backend_name tensor_parallel_size qk_head_dim v_head_dim query_len seq_len has_context",
        beside=_CONVERTS,
    ),
    Function(f"{_LAYER}:MLAAttention._use_sparse_mha", "self attn_metadata", beside=_CONVERTS),
    Function(f"{_SPARSE}:SparseMLACommonImpl.masked_mha_workspace_fits", "prefill", exactly=True, beside=_CONVERTS),
    Function(f"{_ROWS}:flat_kv_row_view", "kv_cache block_size", beside=_CONVERTS),
    Function(f"{_ROWS}:align_blocks_to_rows", "spec", beside=_CONVERTS),
    Names(f"{_BACKEND}:MultipleOf", "base"),
    Function(
        "vllm._custom_ops:gather_and_maybe_dequant_cache",
        "src_cache dst block_table cu_seq_lens token_to_seq num_tokens kv_cache_dtype scale seq_starts",
    ),
    Function("vllm._custom_ops:scaled_fp8_quant", "input scale"),
    Function(
        "vllm.v1.attention.ops.merge_attn_states:merge_attn_states",
        "output output_lse prefix_output prefix_lse suffix_output suffix_lse",
    ),
    Function("vllm.v1.worker.workspace:WorkspaceManager.get_simultaneous", "self"),
    Names("vllm.v1.worker.workspace", "current_workspace_manager"),
    Names("vllm.envs", "VLLM_BATCH_INVARIANT"),
    Names("vllm.config:CompilationMode", "NONE"),
    Names("vllm.config.attention:AttentionConfig", "backend mla_prefill_backend use_prefill_query_quantization"),
    Names("vllm.config.parallel:ParallelConfig", "decode_context_parallel_size cp_kv_cache_interleave_size"),
)


def version() -> str | None:
    """Return the version of the vLLM that is installed; None without one."""
    return shared.version_of("vllm")


def broken() -> list[str]:
    """Return a sentence for each part of the contract that does not hold. None: the plug-in and vLLM go together."""
    return shared.broken(CONTRACT)
