"""A vLLM of a few lines, for environments without the real one: the names that the plug-in imports, and no behaviour
but what its classes inherit. Registries take new names, as vLLM 0.33's do, or only CUSTOM, as 0.26's.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import sys
import types
from typing import Any, Generic, TypeVar

M = TypeVar("M")
REAL_VLLM = "vllm" not in sys.modules and importlib.util.find_spec("vllm") is not None
"""Whether it is installed; asked before this one takes its name."""


def registry(takes_names: bool) -> type[enum.Enum]:
    class Registry(enum.Enum):
        OTHER = "other.Class"
        CUSTOM = None

        def get_path(self) -> Any:
            return OVERRIDES.get(self.name, self.value)

        def is_overridden(self) -> bool:
            return self.name in OVERRIDES

    OVERRIDES: dict[str, str] = {}
    if takes_names:

        def register(cls, name: str, value: str) -> None:
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            setattr(cls, name, member)
            cls._member_map_[name] = member

        Registry.register = classmethod(register)  # type: ignore[attr-defined]
    Registry.overrides = OVERRIDES  # type: ignore[attr-defined]
    return Registry


def add_to(registry: Any):
    def add(backend: Any, class_path: str) -> None:
        if isinstance(backend, str):
            assert backend not in registry.__members__
            registry.register(backend, class_path)
            backend = registry[backend]
        registry.overrides[backend.name] = class_path

    return add


class DeviceCapability:
    def __init__(self, major: int, minor: int):
        self.major, self.minor = major, minor


class QueryLenSupport(enum.Enum):
    UNIFORM = "uniform"
    VARLEN = "varlen"


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2
    ALWAYS = 3


class CompilationMode(enum.IntEnum):
    NONE = 0
    VLLM_COMPILE = 3


class AttentionMetadata: ...


class AttentionType:
    DECODER = "decoder"


class AttentionImplBase:
    can_return_lse_for_decode = False
    lse_base_on_e = True
    supports_dcp = False
    supports_mtp_with_cp_non_trivial_interleave_size = False
    need_to_return_lse_for_decode = False
    dcp_world_size, dcp_rank = 1, 0


class MLAAttentionImpl(AttentionImplBase):
    def reserve_workspace(self) -> None: ...


class MLACommonBaseImpl(MLAAttentionImpl, Generic[M]):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: Any,
        kv_cache_dtype: str,
        logits_soft_cap: Any,
        attn_type: str,
        kv_sharing_target_layer_name: Any,
        *,
        q_lora_rank: Any,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: Any = None,
    ) -> None:
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.kv_lora_rank, self.kv_b_proj = kv_lora_rank, kv_b_proj
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim, self.supports_quant_query_input = v_head_dim, True

    def _concat_k_nope_k_pe(self, k_nope: Any, k_pe: Any) -> Any:
        import torch

        return torch.cat((k_nope, k_pe.expand(*k_nope.shape[:-1], k_pe.shape[-1])), -1)

    def forward_mha(self, *given: Any, output_scale: Any = None) -> None:
        raise AssertionError("vLLM's own prefill")


class MLACommonImpl(MLACommonBaseImpl[M], Generic[M]): ...


class SparseMLACommonImpl(MLACommonBaseImpl[M], Generic[M]):
    """Turns positions into rows of memory, as vLLM 0.33 does; vLLM 0.26 leaves it to the backend."""

    is_sparse = True

    def __init__(self, *given: Any, topk_indices_buffer: Any = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.topk_indices_buffer = topk_indices_buffer
        self.masked_mha_available = False

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any) -> Any:
        from vllm.v1.attention.backends.mla import sparse_utils

        tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        _, rows_of_page = sparse_utils.flat_kv_row_view(kv_c_and_k_pe_cache, attn_metadata.block_size)
        indices, counts = sparse_utils.triton_filter_and_convert_dcp_index(
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            self.topk_indices_buffer[:tokens],
            dcp_size=self.dcp_world_size,
            dcp_rank=self.dcp_rank,
            cp_kv_cache_interleave_size=attn_metadata.cp_kv_cache_interleave_size,
            BLOCK_SIZE=attn_metadata.block_size,
            BLOCK_STRIDE_ROWS=rows_of_page,
            NUM_TOPK_TOKENS=self.topk_indices_buffer.shape[1],
            return_valid_counts=True,
        )
        return self._forward_mqa_kernel(  # type: ignore[attr-defined]
            q, kv_c_and_k_pe_cache, indices, counts, layer=layer, block_size=attn_metadata.block_size, is_decode=True
        )

    def _forward_mqa_kernel(self, *given: Any, **named: Any) -> None:
        raise NotImplementedError


@dataclasses.dataclass(kw_only=True)
class SparseMLACommonMetadata:
    block_table: Any
    req_id_per_token: Any
    block_size: int
    cp_kv_cache_interleave_size: int = 1


class SparseMLACommonMetadataBuilder(Generic[M]):
    def __init__(self, *given: Any) -> None: ...


def flat_kv_row_view(kv_cache: Any, block_size: int) -> tuple[Any, int]:
    """vLLM's view of a cache: every row of memory from the first page's first to the last page's last, those between
    pages included; and the rows from one page to the next."""
    pages, _, width = kv_cache.shape
    stride = kv_cache.stride(0) // width
    return kv_cache.as_strided(((pages - 1) * stride + block_size, width), (width, 1)), stride


class MultipleOf:
    def __init__(self, base: int):
        self.base = base


@dataclasses.dataclass
class MLACommonDecodeMetadata:
    block_table: Any
    seq_lens: Any
    dcp_tot_seq_lens: Any


@dataclasses.dataclass
class MLACommonMetadata(Generic[M]):
    max_seq_len: int = 0
    causal: bool = True
    prefill: Any = None
    decode: Any = None


class MLACommonMetadataBuilder(Generic[M]):
    def __init__(self, *given: Any, supports_dcp_with_varlen: bool = False) -> None: ...

    @staticmethod
    def determine_prefill_query_data_type(vllm_config: Any, model_dtype: Any) -> Any:
        return model_dtype


class MLACommonBackend:
    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLADimensions:
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class MLAPrefillBackend:
    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        return [] if cls.supports_compute_capability(device_capability) else ["not supported"]  # type: ignore[attr-defined]

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        self._prefill_metadata = prefill_metadata


def install(takes_names: bool = True) -> None:
    """Put the stub where `import vllm` finds it."""
    decode, prefill = registry(takes_names), registry(takes_names)
    ops = types.SimpleNamespace(gather_and_maybe_dequant_cache=None, scaled_fp8_quant=None)
    platform = types.SimpleNamespace(is_cuda=lambda: False, get_device_capability=lambda: None)
    manager = types.SimpleNamespace(get_simultaneous=None)
    layers, attention = "vllm.model_executor.layers", "vllm.v1.attention"
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"_custom_ops": ops},
        "vllm._custom_ops": vars(ops),
        "vllm.config": {"get_current_vllm_config": None, "CompilationMode": CompilationMode},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.platforms": {"current_platform": platform},
        "vllm.platforms.interface": {"DeviceCapability": DeviceCapability},
        "vllm.model_executor": {},
        layers: {},
        f"{layers}.attention": {},
        f"{layers}.attention.mla_attention": {
            c.__name__: c
            for c in (
                MLACommonBackend,
                MLACommonBaseImpl,
                MLACommonDecodeMetadata,
                MLACommonImpl,
                MLACommonMetadata,
                MLACommonMetadataBuilder,
                QueryLenSupport,
            )
        }
        | {"_MASKED_MHA_THRESHOLDS": {}},
        f"{layers}.attention.sparse_mla_attention": {
            c.__name__: c for c in (SparseMLACommonImpl, SparseMLACommonMetadata, SparseMLACommonMetadataBuilder)
        },
        "vllm.v1": {},
        attention: {},
        f"{attention}.backend": {
            c.__name__: c
            for c in (
                AttentionCGSupport,
                AttentionImplBase,
                AttentionMetadata,
                AttentionType,
                MLAAttentionImpl,
                MultipleOf,
            )
        },
        f"{attention}.backends": {},
        f"{attention}.backends.registry": {"AttentionBackendEnum": decode, "register_backend": add_to(decode)},
        f"{attention}.backends.mla": {},
        f"{attention}.backends.mla.sparse_utils": {
            "align_blocks_to_rows": None,
            "flat_kv_row_view": flat_kv_row_view,
            "triton_filter_and_convert_dcp_index": None,
        },
        f"{attention}.backends.mla.prefill": {},
        f"{attention}.backends.mla.prefill.base": {
            "MLADimensions": MLADimensions,
            "MLAPrefillBackend": MLAPrefillBackend,
        },
        f"{attention}.backends.mla.prefill.registry": {
            "MLAPrefillBackendEnum": prefill,
            "register_mla_prefill_backend": add_to(prefill),
        },
        f"{attention}.ops": {},
        f"{attention}.ops.merge_attn_states": {"merge_attn_states": None},
        "vllm.v1.worker": {},
        "vllm.v1.worker.workspace": {"current_workspace_manager": lambda: manager},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents, __path__=[])
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent and own != "_custom_ops":
            setattr(sys.modules[parent], own, module)
