"""An SGLang of a few lines, for environments without the real one: the names that the plug-in imports, and of its
classes what the plug-in inherits or calls."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import sys
import types
from typing import Any

REAL_SGLANG = "sglang" not in sys.modules and importlib.util.find_spec("sglang") is not None
"""Whether it is installed; asked before this one takes its name."""


class AttentionBackend:
    prefill_attention_backend_str = decode_attention_backend_str = None
    forward_metadata = None
    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None: ...

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None: ...

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if mode.is_decode() else self.forward_extend  # type: ignore[attr-defined]
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5
    DRAFT_EXTEND_V2 = 6
    DLLM_EXTEND = 9

    def is_idle(self) -> bool:
        return self is ForwardMode.IDLE

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_decode_or_idle(self) -> bool:
        return self.is_decode() or self.is_idle()

    def is_target_verify(self) -> bool:
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self) -> bool:
        return self is ForwardMode.DRAFT_EXTEND_V2

    def is_dllm_extend(self) -> bool:
        return self is ForwardMode.DLLM_EXTEND

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED


class AttentionType(enum.Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclasses.dataclass
class KVWriteLoc:
    loc: Any
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch: Any) -> KVWriteLoc:
        return cls(forward_batch.out_cache_loc, forward_batch.out_cache_loc_is_physical)


@dataclasses.dataclass
class VerifyMask:
    max_bs: int
    is_read: bool


def maybe_create_verify_mask(
    *,
    is_draft_runner: bool,
    skip_prefill: bool,
    max_bs: int,
    max_context_len: int,
    num_draft_tokens: int | None,
    device: Any,
    is_read: bool,
) -> VerifyMask | None:
    return None if is_draft_runner or not num_draft_tokens else VerifyMask(max_bs, is_read)


class AttentionBackendRegistry:
    _handlers: dict[str, Any] = {"trtllm_mla": lambda attn, forward_batch: "chunks", "triton": lambda *_: "other"}

    @classmethod
    def register(cls, backend_name: str, handler_func: Any) -> None:
        cls._handlers[backend_name] = handler_func

    @classmethod
    def get_handler(cls, backend_name: str) -> Any:
        return cls._handlers.get(backend_name, cls._handlers.get("triton"))


def install() -> None:
    """Put the stub where `import sglang` finds it."""
    backends: dict[str, Any] = {}
    names, prefix_names = ["triton"], ["flashinfer"]

    def register_attention_backend(name: str) -> Any:
        return lambda make: backends.setdefault(name, make)

    srt, attention = "sglang.srt", "sglang.srt.layers.attention"
    deepseek = f"{srt}.models.deepseek_common"
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        srt: {},
        f"{srt}.arg_groups": {},
        f"{srt}.arg_groups.choices": {
            "ATTENTION_BACKEND_CHOICES": names,
            "add_attention_backend_choices": names.extend,
            "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": prefix_names,
            "add_chunked_prefix_cache_attention_backend": prefix_names.append,
        },
        f"{srt}.layers": {},
        attention: {},
        f"{attention}.attention_registry": {
            "ATTENTION_BACKENDS": backends,
            "register_attention_backend": register_attention_backend,
        },
        f"{attention}.base_attn_backend": {"AttentionBackend": AttentionBackend},
        f"{attention}.verify_mask": {"VerifyMask": VerifyMask, "maybe_create_verify_mask": maybe_create_verify_mask},
        f"{srt}.layers.radix_attention": {"AttentionType": AttentionType},
        f"{srt}.mem_cache": {},
        f"{srt}.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
        f"{srt}.model_executor": {},
        f"{srt}.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
        f"{srt}.models": {},
        deepseek: {},
        f"{deepseek}.attention_backend_handler": {"AttentionBackendRegistry": AttentionBackendRegistry},
        f"{deepseek}.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["fa3"]},
        f"{srt}.runtime_context": {"get_parallel": None, "get_spec": None},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
