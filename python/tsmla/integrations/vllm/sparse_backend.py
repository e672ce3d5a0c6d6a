"""The backend of MLA layers that choose their keys (sparse attention), as vLLM selects it."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from . import NAME, SPARSE, name_in, options, served
from .backend import TsmlaBackend
from .sparse import TsmlaSparseImpl
from .sparse_builder import TsmlaSparseMetadataBuilder


class TsmlaSparseBackend(TsmlaBackend):
    @staticmethod
    def get_name() -> str:
        return name_in(AttentionBackendEnum, SPARSE)

    @staticmethod
    def get_impl_cls() -> type[TsmlaSparseImpl]:  # type: ignore[override]
        return TsmlaSparseImpl

    @staticmethod
    def get_builder_cls() -> type[TsmlaSparseMetadataBuilder]:  # type: ignore[override]
        return TsmlaSparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return multiples of 16, so that a page of the kernel's is always one of vLLM's: rows of the cache are then
        equally far apart from page to page."""
        return [MultipleOf(served.PAGES[0])]

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Raise, which keeps each layer's cache together (vLLM 0.26): keys are found one by one in less than 32 GiB
        only, which all layers side by side may exceed."""
        raise NotImplementedError

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Let pages lie whole rows apart, so that rows can be numbered (asked by vLLM 0.33)."""
        from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows

        return align_blocks_to_rows(super().customize_spec(spec))

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        """False: the indexer scores no key behind its token."""
        return False

    @classmethod
    def _other_backend(cls) -> str:
        if cls.get_name() == SPARSE:
            named = NAME
        else:
            named = f"{cls.get_name()} without {options.SPARSE.name} in the environment"
        return f"this backend of tsmla's serves layers that choose their keys; for dense MLA, name {named}"
