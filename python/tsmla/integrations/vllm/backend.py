"""The decode backend as vLLM selects it: what it is called, what it serves, and its builder and implementation.

`sparse_backend` has the one for layers that choose their keys."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tsmla.identity.row_format import ROWS
from tsmla.integrations.shared.gpus import arch_of

from . import SPARSE, name_in, options, served
from .builder import TsmlaMetadataBuilder
from .decode import TsmlaImpl

_METADATA_SAYS_CAUSAL = "causal" in {field.name for field in dataclasses.fields(MLACommonMetadata)}
"""vLLM 0.26 does not tell an MLA layer that a batch is not causal."""


class TsmlaBackend(MLACommonBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = served.DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = served.CACHES

    @staticmethod
    def get_name() -> str:
        return name_in(AttentionBackendEnum)

    @staticmethod
    def get_impl_cls() -> type[TsmlaImpl]:
        return TsmlaImpl

    @staticmethod
    def get_builder_cls() -> type[TsmlaMetadataBuilder]:
        return TsmlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return list(served.PAGES)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return served.PREFERRED_PAGE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return sorted(served.SHAPES)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the cache's dimensions as they lie in memory: pages may have any stride, so layers may share them
        (vLLM 0.26)."""
        return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the cache's shape: rows of elements, or of bytes where they have scales (vLLM 0.26)."""
        row = ROWS[cache_dtype_str].bytes if cache_dtype_str in served.ROWS_CACHES else head_size
        return num_blocks, block_size, row

    @classmethod
    def is_sparse(cls) -> bool:
        return False

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return arch_of(capability) is not None

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return _METADATA_SAYS_CAUSAL

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """True: decodes can leave a request's keys unsplit, and prefills never split them."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """True: where only the GPU knows query lengths, kernels read them there (asked by vLLM 0.33)."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
        *_: Any,
        **__: Any,
    ) -> str | None:
        if use_sparse != cls.is_sparse():
            return cls._other_backend()
        unserved = {
            "attention that is not MLA": not use_mla,
            "attention sinks": has_sink,
            "full attention to multimodal prefixes": use_mm_prefix,
        }
        return served.why_not_decoded(
            head_size, dtype, kv_cache_dtype, block_size, device_capability, unserved, cls.is_sparse()
        )

    @classmethod
    def _other_backend(cls) -> str:
        """Say what to name instead for the layers that this backend is not for."""
        if name_in(AttentionBackendEnum, SPARSE) == SPARSE:
            named = SPARSE
        else:
            named = f"{cls.get_name()} with {options.SPARSE.name}=1 in the environment"
        return f"this backend of tsmla's serves dense MLA; for sparse attention, name {named}"
