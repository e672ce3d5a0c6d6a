"""Engines' plug-ins without a GPU and, where the engine is not installed, without the engine (`stub_vllm`)."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

import pytest
import stub_vllm
import torch
from launches import processors
from stand_in_kernels import Kernels
from tsmla.identity.arch import Arch
from tsmla.loading import resolve
from tsmla.operators import checks

if not stub_vllm.REAL_VLLM:
    stub_vllm.install()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Operators take CPU tensors for those of an H200, and compute on the CPU."""
    kernels = Kernels()
    monkeypatch.setattr(resolve, "kernel", kernels)
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(checks, "arch_of", lambda device: Arch.SM90A)
    processors(monkeypatch)
    resolve.forget()
    torch.manual_seed(7)
    yield kernels
    resolve.forget()


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Tensors made without contents hold NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """vLLM's config while a layer is made: one GPU, no speculation, bfloat16."""
    from tsmla.integrations.vllm import decode, ready
    from vllm.model_executor.layers.attention import mla_attention

    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        attention_config=types.SimpleNamespace(mla_prefill_backend=None, use_prefill_query_quantization=False),
        speculative_config=None,
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
    )
    for module in (decode, mla_attention):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config, raising=False)

    def workspace(heads: int, longest_q: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(ready.workspace_bytes(heads, longest_q, torch.device("cuda")), dtype=torch.int8)

    monkeypatch.setattr(ready, "workspace", workspace)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: config.model_config.dtype)
    return config


@pytest.fixture
def make_impl(config: types.SimpleNamespace) -> Callable:
    """A layer's implementation; `weight` [heads * 256, 512] expands latents."""
    from tsmla.integrations.vllm.decode import TsmlaImpl

    def make(
        heads: int = 2, cache: str = "auto", window: int | None = None, weight: torch.Tensor | None = None, **dims
    ):
        sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, **dims}

        def project(x: torch.Tensor) -> tuple[torch.Tensor]:
            assert weight is not None
            return (torch.nn.functional.linear(x, weight),)

        return TsmlaImpl(
            num_heads=heads,
            head_size=576,
            scale=0.1,
            num_kv_heads=1,
            alibi_slopes=None,
            sliding_window=window,
            kv_cache_dtype=cache,
            logits_soft_cap=None,
            attn_type="decoder",
            kv_sharing_target_layer_name=None,
            q_lora_rank=None,
            qk_head_dim=192,
            kv_b_proj=project,
            indexer=None,
            **sizes,
        )

    return make


@pytest.fixture
def vllm_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own kernels, in torch."""
    from tsmla.integrations.vllm import mha, prefill

    def gather(
        *, src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts
    ) -> None:
        for key in range(num_tokens):
            request = int(token_to_seq[key])
            position = int(seq_starts[request]) + key - int(cu_seq_lens[request])
            page, slot = divmod(position, src_cache.shape[1])
            dst[key] = src_cache[int(block_table[request, page]), slot]

    def merge(*, output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse):
        assert output_lse.data_ptr() not in (prefix_lse.data_ptr(), suffix_lse.data_ptr())
        both = torch.logaddexp(prefix_lse, suffix_lse)
        parts = ((prefix_output, prefix_lse), (suffix_output, suffix_lse))
        output.copy_(sum(torch.exp(lse - both).T[..., None] * o.float() for o, lse in parts))
        output_lse.copy_(both)

    def quantised(x, scale):
        assert scale.tolist() == [1.0] and x.ndim == 2
        return x.float().clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(mha, "merge_attn_states", merge)
    monkeypatch.setattr(mha.ops, "gather_and_maybe_dequant_cache", gather)
    monkeypatch.setattr(prefill.ops, "scaled_fp8_quant", quantised)
