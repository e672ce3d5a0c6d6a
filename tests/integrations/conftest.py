"""Engines' plug-ins without a GPU and, where an engine is not installed, without the engine (`stub_vllm`,
`stub_sglang`)."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stub_sglang
import stub_vllm
import torch
from launches import processors
from stand_in_kernels import Kernels, scaled_fp8_quant
from tsmla.identity.arch import Arch
from tsmla.loading import resolve
from tsmla.operators import checks

if not stub_vllm.REAL_VLLM:
    stub_vllm.install()
if not stub_sglang.REAL_SGLANG:
    stub_sglang.install()


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
    """vLLM's config while a layer is made: one GPU, compiled, no speculation, bfloat16."""
    from tsmla.integrations.vllm import layer, ready
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.attention import mla_attention

    config = types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        attention_config=types.SimpleNamespace(mla_prefill_backend=None, use_prefill_query_quantization=False),
        speculative_config=None,
        compilation_config=types.SimpleNamespace(mode=CompilationMode.VLLM_COMPILE),
        model_config=types.SimpleNamespace(
            dtype=torch.bfloat16, hf_config=types.SimpleNamespace(model_type="deepseek_v3")
        ),
    )
    for module in (layer, mla_attention):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config, raising=False)

    def workspace(heads: int, longest_q: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(ready.workspace_bytes(heads, longest_q, torch.device("cuda")), dtype=torch.int8)

    monkeypatch.setattr(ready, "workspace", workspace)
    monkeypatch.setattr(torch, "get_default_dtype", lambda: config.model_config.dtype)
    return config


@pytest.fixture
def uncompiled(config: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """vLLM's config where it compiles nothing, and its quantiser on the CPU."""
    from tsmla.integrations.vllm import queries
    from vllm.config import CompilationMode

    config.compilation_config.mode = CompilationMode.NONE
    monkeypatch.setattr(queries.ops, "scaled_fp8_quant", scaled_fp8_quant)
    return config


@pytest.fixture
def make_impl(config: types.SimpleNamespace) -> Callable:
    """A layer's implementation; `weight` [heads * 256, 512] expands latents."""
    from tsmla.integrations.vllm.decode import TsmlaImpl

    return functools.partial(made, TsmlaImpl)


@pytest.fixture
def make_sparse(config: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """The implementation of a layer that chooses its keys: `chosen` [tokens, top_k], positions or -1."""
    from tsmla.integrations.vllm.sparse import TsmlaSparseImpl
    from vllm.model_executor.layers.attention import sparse_mla_attention
    from vllm.v1.attention.backends.mla import sparse_utils

    for module in (sparse_utils, sparse_mla_attention):
        for name in ("triton_filter_and_convert_dcp_index", "triton_convert_req_index_to_global_index"):
            monkeypatch.setattr(module, name, rows_of_chosen, raising=False)
    monkeypatch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)

    def make(chosen: torch.Tensor | None = None, **given) -> TsmlaSparseImpl:
        impl = made(TsmlaSparseImpl, **given)
        impl.topk_indices_buffer = chosen
        return impl

    return make


def made(
    kind: type,
    heads: int = 2,
    cache: str = "auto",
    window: int | None = None,
    weight: torch.Tensor | None = None,
    **dims,
) -> Any:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, **dims}

    def project(x: torch.Tensor) -> tuple[torch.Tensor]:
        assert weight is not None
        return (torch.nn.functional.linear(x, weight),)

    return kind(
        num_heads=heads,
        head_size=sizes["kv_lora_rank"] + sizes["qk_rope_head_dim"],
        scale=0.1,
        num_kv_heads=1,
        alibi_slopes=None,
        sliding_window=window,
        kv_cache_dtype=cache,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        q_lora_rank=None,
        qk_head_dim=sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"],
        kv_b_proj=project,
        indexer=None,
        **sizes,
    )


def rows_of_chosen(
    req_id: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    BLOCK_SIZE: int = 64,
    BLOCK_STRIDE_ROWS: int | None = None,
    NUM_TOPK_TOKENS: int = 2048,
    return_valid_counts: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's kernels that turn positions into rows of the cache, those of other ranks into none, and move what is left
    to the front."""
    assert return_valid_counts and NUM_TOPK_TOKENS == token_indices.shape[1]
    out = torch.full_like(token_indices, -1)
    counts = torch.zeros(len(out), dtype=torch.int32)
    for token, positions in enumerate(token_indices.tolist()):
        for position in positions:
            group, place = divmod(position, cp_kv_cache_interleave_size)
            if position < 0 or group % dcp_size != dcp_rank:
                continue
            page, row = divmod(group // dcp_size * cp_kv_cache_interleave_size + place, BLOCK_SIZE)
            first = int(block_table[req_id[token], page]) * (BLOCK_STRIDE_ROWS or BLOCK_SIZE)
            out[token, counts[token]] = first + row
            counts[token] += 1
    return out, counts


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


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What SGLang says while a backend is made on an H200: one rank, no speculation. `loaded` has the kernels that were
    loaded."""
    from tsmla.integrations.sglang import backend, ready
    from tsmla.integrations.shared import ready as shared_ready

    said = types.SimpleNamespace(
        parallel=types.SimpleNamespace(dcp_enabled=False, dcp_size=1, dcp_rank=0, attn_tp_size=1),
        spec=types.SimpleNamespace(
            speculative_algorithm=None, speculative_eagle_topk=None, speculative_num_draft_tokens=None
        ),
        capability=ready.Capability(9, 0),
        loaded=[],
    )

    def workspace(heads: int, device: torch.device) -> torch.Tensor:
        size = ready.workspace_bytes(heads, ready.MOST_ROWS, torch.device("cuda"))
        return torch.zeros(size, dtype=torch.int8)

    monkeypatch.setattr(backend, "get_parallel", lambda: said.parallel)
    monkeypatch.setattr(backend, "get_spec", lambda: said.spec)
    monkeypatch.setattr(ready, "capability", lambda: said.capability)
    monkeypatch.setattr(ready, "workspace", workspace)
    monkeypatch.setattr(shared_ready, "warmup", said.loaded.extend)
    monkeypatch.setattr(shared_ready, "_loaded", set())
    return said
