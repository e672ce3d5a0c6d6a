"""The vLLM plug-in against the vLLM that is installed: its own registries, config, metadata and base classes, on a CPU.

Without vLLM these tests skip. A wheel of it with `--no-deps`, a CPU torch and what `import vllm` asks for are enough;
docs/start/vllm.md says how.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import inspect
import math
import types
from pathlib import Path

import pytest
import torch
from mla_layer import BF16, DECODED, HEADS, SCALE, Problem, close
from stand_in_kernels import rows
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.integrations import vllm as plugin
from tsmla.integrations.vllm import contract

if contract.version() is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm.model_executor.layers.attention.mla_attention as layer  # noqa: E402
from tsmla.integrations.vllm import decode, masked, ready, sparse  # noqa: E402
from tsmla.integrations.vllm import layer as plugin_layer  # noqa: E402
from tsmla.integrations.vllm.backend import TsmlaBackend  # noqa: E402
from tsmla.integrations.vllm.builder import TsmlaMetadata, TsmlaMetadataBuilder  # noqa: E402
from tsmla.integrations.vllm.decode import TsmlaImpl  # noqa: E402
from tsmla.integrations.vllm.layer import TsmlaLayer  # noqa: E402
from tsmla.integrations.vllm.prefill import TsmlaPrefill  # noqa: E402
from tsmla.integrations.vllm.sparse import TsmlaSparseImpl  # noqa: E402
from tsmla.integrations.vllm.sparse_backend import TsmlaSparseBackend  # noqa: E402
from tsmla.integrations.vllm.sparse_builder import TsmlaSparseMetadata, TsmlaSparseMetadataBuilder  # noqa: E402
from tsmla.problems.rows import numbers_in, stored_as  # noqa: E402
from vllm.config.attention import AttentionConfig  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402


def test_the_contract_holds():
    assert contract.broken() == []


def test_users_may_name_the_backends():
    plugin.register()
    plugin.register()
    decode, prefill = plugin.selected_names()
    chosen = AttentionConfig(backend=decode.lower(), mla_prefill_backend=prefill)
    assert chosen.backend.get_class() is TsmlaBackend and chosen.mla_prefill_backend.get_class() is TsmlaPrefill
    assert TsmlaBackend.get_name() == decode and TsmlaPrefill.get_name() == prefill


def test_users_may_name_the_sparse_backend(monkeypatch):
    monkeypatch.setenv("TSMLA_VLLM_SPARSE", "1")
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    if not hasattr(registry.AttentionBackendEnum, "register"):
        registry.AttentionBackendEnum.CUSTOM.clear_override()
    try:
        plugin.register()
        name, _ = plugin.selected_names(sparse=True)
        assert AttentionConfig(backend=name.lower()).backend.get_class() is TsmlaSparseBackend
        assert TsmlaSparseBackend.get_name() == name
    finally:
        if name == plugin.CUSTOM:
            registry.AttentionBackendEnum.CUSTOM.clear_override()


def validate(capability: DeviceCapability, backend: type[TsmlaBackend] = TsmlaBackend, **changes) -> list[str]:
    given = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": capability, "attn_type": "decoder", **changes,
    }  # fmt: skip
    return backend.validate_configuration(**given)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_what_vllm_finds_valid(capability):
    place = DeviceCapability(*capability)
    assert validate(place) == []
    assert validate(place, kv_cache_dtype="fp8_ds_mla") == []
    assert validate(place, **known(has_sliding_window=True, **WIDE)) == []


WIDE = dict.fromkeys(("use_batch_invariant", "use_kv_connector", "use_dcp", "use_adaptive_verification"), True)


def known(**features: bool) -> dict[str, bool]:
    """Those features that this vLLM has."""
    parameters = inspect.signature(TsmlaBackend.validate_configuration).parameters
    return {name: value for name, value in features.items() if name in parameters}


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_ds_mla"])
def test_what_vllm_finds_valid_of_sparse_attention(cache):
    given = {"backend": TsmlaSparseBackend, "use_sparse": True, "kv_cache_dtype": cache}
    assert validate(DeviceCapability(9, 0), **given, **known(**WIDE)) == []
    assert "sparse not supported" in validate(DeviceCapability(9, 0), use_sparse=True)
    assert "non-sparse not supported" in validate(DeviceCapability(9, 0), TsmlaSparseBackend)
    assert "attention sinks not supported" in validate(DeviceCapability(9, 0), **given, has_sink=True)


def test_pages_lie_whole_rows_apart():
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    if not hasattr(interface.MLAAttentionSpec, "state_content_size_bytes"):
        pytest.skip("this vLLM asks for no such thing")
    spec = interface.MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )  # fmt: skip
    assert TsmlaSparseBackend.customize_spec(spec).block_stride_alignment == 656


@pytest.fixture
def masking(monkeypatch, config, make_sparse) -> TsmlaSparseImpl:
    """An implementation of 16 heads that may be given masked prefills, on an H200 whose kernels need no loading."""
    if not sparse._VLLM_CONVERTS:
        pytest.skip("this vLLM masks no prompts")
    monkeypatch.setattr(layer, "_MASKED_MHA_THRESHOLDS", copy.deepcopy(layer._MASKED_MHA_THRESHOLDS))
    monkeypatch.setattr(masked, "masked_kernels", lambda *variants: None)
    monkeypatch.setattr(plugin_layer, "decode_kernels", lambda *given, **named: None)
    config.attention_config.mla_prefill_backend = types.SimpleNamespace(get_path=lambda: plugin.PREFILL)
    config.parallel_config.tensor_parallel_size = 8
    config.model_config.hf_text_config = types.SimpleNamespace(index_topk=2048)
    with monkeypatch.context() as patch:
        patch.setattr(ready, "arch", lambda: Arch.SM90A)
        return make_sparse(torch.zeros(1, 2048, dtype=torch.int32), heads=16)


def asked(impl: TsmlaSparseImpl, keys: int, tokens: int, context: int = 0, **changes) -> bool:
    """Whether vLLM's layer prefills a request of this many tokens, instead of decoding them."""
    chunks = types.SimpleNamespace(chunks=[types.SimpleNamespace(max_seq_len=context)]) if context else None
    prefill = types.SimpleNamespace(
        max_query_len=tokens, query_lens_cpu=torch.tensor([tokens]), chunked_context=chunks, use_dense_mha=keys <= 2048
    )
    parallel = types.SimpleNamespace(tensor_parallel_size=8)
    attention = types.SimpleNamespace(sparse_mla_force_mqa=False)
    given = {
        "impl": impl, "hisparse_cache": None, "prefill_backend": object(), "attn_backend": TsmlaSparseBackend,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "_vllm_config": types.SimpleNamespace(parallel_config=parallel, attention_config=attention), **changes,
    }  # fmt: skip
    metadata = types.SimpleNamespace(prefill=prefill, prefill_max_seq_len=keys)
    return layer.MLAAttention._use_sparse_mha(types.SimpleNamespace(**given), metadata)


def test_vllm_asks_for_masks_where_they_pay(masking):
    """16 heads at a tensor parallel size of 8; vLLM has no rows for other sizes."""
    assert asked(masking, 2000, 2000) and asked(masking, 2049, 2049) and asked(masking, 46_000, 2500)
    assert not asked(masking, 47_000, 47_000)
    assert asked(masking, 10_000, 500, 9_500) and not asked(masking, 10_000, 400, 9_600)
    assert asked(masking, 20_000, 8_192, 11_808) and not asked(masking, 40_000, 8_192, 31_808)
    assert not asked(masking, 46_000, 46_000, v_head_dim=256)


def test_vllm_asks_for_no_masks_under_context_parallelism(masking):
    """All ranks decode the keys that they own; prompts of no more keys than a list has are prefilled."""
    masking.dcp_world_size = 2
    assert not asked(masking, 4096, 4096) and asked(masking, 2048, 2048)


def test_vllm_asks_for_no_masks_where_none_were_offered(masking):
    masking.masked_mha_available = False
    assert not asked(masking, 4096, 4096)


def test_what_vllm_refuses():
    assert any("this GPU's is 12.0" in reason for reason in validate(DeviceCapability(12, 0)))
    non_causal = validate(DeviceCapability(9, 0), use_non_causal=True)
    says_causal = "causal" in {field.name for field in dataclasses.fields(layer.MLACommonMetadata)}
    assert non_causal == ([] if says_causal else ["non-causal attention not supported"])


def test_vllms_kimi_k3_still_asks_for_queries_in_fp8():
    config = importlib.util.find_spec("vllm.transformers_utils.configs.kimi_k3")
    if config is None:
        pytest.skip("this vLLM has no Kimi K3")
    assert importlib.import_module(config.name).KimiK3Config.model_type == decode.KIMI_K3
    source = Path(importlib.util.find_spec("vllm").origin).parent / "models/kimi_k3/nvidia/mla.py"
    assert "Kimi-K3 fp8 KV cache requires an fp8 prefill query" in source.read_text("utf-8")


OURS = [
    TsmlaBackend, TsmlaMetadataBuilder, TsmlaLayer, TsmlaImpl, TsmlaPrefill,
    TsmlaSparseBackend, TsmlaSparseMetadataBuilder, TsmlaSparseImpl,
]  # fmt: skip


@pytest.mark.parametrize("ours", [ours for ours in OURS if ours is not TsmlaLayer])
def test_nothing_is_left_abstract(ours):
    assert not ours.__abstractmethods__


@pytest.mark.parametrize("ours", OURS)
def test_overrides_take_what_they_are_given(ours):
    """Every parameter of a method of vLLM's that the plug-in overrides, but for those that a builder passes itself."""
    for name, method in vars(ours).items():
        theirs = next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)
        theirs, mine = (getattr(m, "__func__", m) for m in (theirs, method))
        if not inspect.isfunction(mine) or not inspect.isfunction(theirs):
            continue
        parameters = inspect.signature(mine).parameters
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
            given = set(inspect.signature(theirs).parameters) - {"metadata_cls", "supports_dcp_with_varlen"}
            assert given <= set(parameters), f"{ours.__name__}.{name}"


def common(starts: list[int], lengths: list[int], table: torch.Tensor) -> CommonAttentionMetadata:
    """A batch as the model runner tells it."""
    q = torch.tensor(starts, dtype=torch.int32)
    n = torch.tensor(lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=q,
        query_start_loc_cpu=q,
        seq_lens=n,
        num_reqs=len(lengths),
        num_actual_tokens=starts[-1],
        max_query_len=int((q[1:] - q[:-1]).max()),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        seq_lens_cpu_upper_bound=n,
    )


@pytest.fixture
def builder(monkeypatch, config) -> TsmlaMetadataBuilder:
    """Made without a model; `build` is vLLM's."""
    for name in ("empty", "zeros", "tensor"):  # vLLM 0.26 pins memory, which needs a GPU
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=made, pin_memory=False, **named: make(*a, **named))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    builder = object.__new__(TsmlaMetadataBuilder)
    builder.__dict__.update(**common_fields(config), page_size=4, metadata_cls=TsmlaMetadata, q_data_type=BF16)
    builder.__dict__.update(non_causal_multi_token_decode=False)
    return builder


@pytest.fixture
def sparse_builder(monkeypatch, builder, config) -> TsmlaSparseMetadataBuilder:
    """A builder for layers that choose 12 keys for each token, made without a model."""

    def requests_of_tokens(starts: torch.Tensor, out: torch.Tensor, mapped: int, tokens: int) -> torch.Tensor:
        assert mapped == tokens == starts[-1]
        out[:tokens] = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        return out

    if importlib.util.find_spec("vllm.v1.attention.ops.metadata"):  # vLLM 0.33 has a kernel for it
        monkeypatch.setattr("vllm.v1.attention.ops.metadata.compute_token_to_req_indices", requests_of_tokens)
    config.attention_config.hisparse_config, config.attention_config.sparse_mla_force_mqa = None, False
    sparse = object.__new__(TsmlaSparseMetadataBuilder)
    sparse.__dict__.update(
        **common_fields(config),
        topk_tokens=12,
        topk_mask_workspace=None,
        req_id_per_token_buffer=torch.zeros(400, dtype=torch.int32),
        kv_cache_spec=types.SimpleNamespace(block_size=4),
        _context_lens_cpu=torch.zeros(8, dtype=torch.int32),
    )
    sparse._init_reorder_batch_threshold(2, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
    return sparse


def common_fields(config: types.SimpleNamespace) -> dict:
    return dict(
        device=torch.device("cpu"),
        use_pcp=False,
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
        cp_kv_cache_interleave_size=1,
        dcp_manager=None,
        chunked_prefill_workspace=torch.zeros(32, 576, dtype=BF16),
        chunked_prefill_workspace_size=32,
        model_config=types.SimpleNamespace(get_head_size=lambda: 576, dtype=BF16),
        vllm_config=config,
        _prefill_backend=TsmlaPrefill(
            num_heads=HEADS,
            scale=SCALE,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            vllm_config=config,
        ),
    )


def test_vllms_metadata_of_decodes(builder):
    """Two requests of three tokens each, a padded one, and the page tables of all."""
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    built = builder.build(0, common([0, 3, 6, 6], [9, 5, 0], table))
    assert isinstance(built, TsmlaMetadata) and built.num_prefills == 0 and built.prefill is None
    assert built.decode.q_len == 3 and built.decode.seq_lens.tolist() == [9, 5] and built.max_seq_len == 9
    assert built.decode.block_table.equal(table[:2]) and built.decode.dcp_tot_seq_lens is None


def test_vllms_metadata_of_decodes_whose_lengths_only_the_gpu_knows(builder):
    """Drafts are left out on the GPU: it has other lengths than the host, and a padded request."""
    if not hasattr(TsmlaMetadataBuilder.__base__, "get_varlen_cudagraph_max_query_len"):
        pytest.skip("this vLLM has no adaptive verification")
    builder._host_knows_lengths = False
    given = common([0, 3, 6, 6], [9, 5, 0], torch.arange(12, dtype=torch.int32).view(3, 4))
    given.query_start_loc = torch.tensor([0, 1, 6, 6], dtype=torch.int32)
    given.max_query_len = 5
    decode = builder.build(0, given).decode
    assert decode.leaves_out
    assert decode.starts.tolist() == [0, 1, 6, 6] and decode.q_len == 5 and decode.seq_lens.tolist() == [9, 5, 0]


@pytest.mark.usefixtures("kernels", "vllm_ops")
def test_vllms_metadata_of_prefills(builder, make_impl):
    """A decode and prefills with and without context, more of it than vLLM gathers at once."""
    problem = Problem([45, 9, 0], [200, 150, 3])
    starts, lengths = [0, 1], [7]
    for context, new in zip(problem.contexts, problem.new, strict=True):
        starts.append(starts[-1] + new)
        lengths.append(context + new)
    table = torch.cat((torch.zeros_like(problem.table[:1]), problem.table))
    built = builder.build(0, common(starts, lengths, table))
    assert (built.num_decodes, built.num_prefills) == (1, 3)
    context = built.prefill.chunked_context
    assert len(getattr(context, "chunks", None) or context.seq_tot) > 1
    assert built.prefill.query_start_loc.tolist() == problem.starts
    out = problem.run(make_impl(weight=problem.weight), built.prefill.prefill_backend, context)
    problem.check(out)


@pytest.mark.usefixtures("kernels")
def test_vllms_metadata_of_sparse_attention(sparse_builder, make_sparse):
    """Decodes of other numbers of tokens, and a prompt of more keys than a token chooses: all are decoded, each token's
    own list."""
    table = torch.tensor([[3, 1, 9], [0, 4, 5], [2, 7, 8]], dtype=torch.int32)
    built = sparse_builder.build(0, common([0, 1, 3, 8], [9, 5, 12], table))
    assert isinstance(built, TsmlaSparseMetadata)
    assert (built.num_decodes, built.num_decode_tokens, built.num_prefills) == (2, 3, 1)
    assert built.req_id_per_token.tolist() == [0, 1, 1, 2, 2, 2, 2, 2] and built.block_size == 4
    assert built.prefill_max_seq_len == 12 and built.topk_tokens == 12
    cache = torch.randn(10, 4, 576).to(BF16)
    chosen = torch.full((8, 12), -1, dtype=torch.int32)
    chosen[:, :3] = torch.tensor([4, 0, 4], dtype=torch.int32)
    q = torch.randn(8, HEADS, 576).to(BF16)
    out, _ = make_sparse(chosen).forward_mqa(q, cache, built, None)
    for token, request in enumerate(built.req_id_per_token.tolist()):
        own = cache[table[request, [1, 0, 1]].long(), 0].double()
        want, _ = rows(0.1 * q[token].double() @ own.T, own[:, :512])
        close(out[token], want)


@pytest.mark.usefixtures("kernels")
def test_vllms_metadata_of_prompts_over_rows_of_656_bytes(sparse_builder, make_sparse):
    """A decode of two tokens, and prompts that end in a page and with one: their keys are read into bf16 rows."""
    table = torch.tensor([[3, 1, 9], [0, 4, 5], [2, 7, 8]], dtype=torch.int32)
    built = sparse_builder.build(0, common([0, 2, 5, 10], [9, 7, 12], table))
    assert (built.num_decodes, built.num_prefills) == (1, 2) and built.prompts is built.prompts
    assert built.prompts.starts.tolist() == [0, 8, 20] and built.prompts.rows == 20
    assert built.prompts.pages[1:].tolist() == [[0, 1, 2], [2, 3, 4]]
    row = ROWS["fp8_ds_mla"]
    cache = stored_as(row, torch.randn(10, 4, 576).to(BF16))
    chosen = torch.full((10, 12), -1, dtype=torch.int32)
    chosen[:, :3] = torch.tensor([6, 0, 6], dtype=torch.int32)
    q = torch.randn(10, 17, 576).to(BF16)
    impl = make_sparse(chosen, heads=17, cache="fp8_ds_mla")
    out, _ = impl.forward_mqa(q, cache.view(torch.uint8), built, None)
    for token, request in enumerate(built.req_id_per_token.tolist()):
        own = numbers_in(row, cache[table[request, [1, 0, 1]].long(), torch.tensor([2, 0, 2])]).double()
        want, _ = rows(0.1 * q[token].double() @ own.T, own[:, :512])
        torch.testing.assert_close(out[token].double(), want, rtol=1.5e-2, atol=0.03)


@pytest.mark.parametrize("contexts", [[45, 9, 0, 50], [0, 0, 0, 0]])
@pytest.mark.usefixtures("kernels", "vllm_ops", "masking")
def test_vllms_metadata_of_masked_prefills(sparse_builder, masking, make_sparse, contexts):
    """A decode and prompts of more keys than a token chooses, with and without context, in chunks that begin within a
    context and have others behind it."""
    problem = Problem(contexts, [20, 15, 33, 4])
    starts, lengths = [0, 2], [7]
    for context, new in zip(contexts, problem.new, strict=True):
        starts.append(starts[-1] + new)
        lengths.append(context + new)
    table = torch.cat((torch.zeros_like(problem.table[:1]), problem.table))
    chosen = problem.choose(12)
    built = sparse_builder.build(0, common(starts, lengths, table))
    assert (built.num_decodes, built.num_decode_tokens, built.num_prefills) == (1, 2, 4)
    assert not built.prefill.use_dense_mha and masking.masked_mha_workspace_fits(built.prefill)
    if any(contexts):
        chunks = built.prefill.chunked_context.chunks
        assert any(chunk.is_continuation and chunk.num_requests > 1 for chunk in chunks)
    impl = make_sparse(chosen[DECODED - 2 :], weight=problem.weight)
    impl.masked_mha_available = True
    out = torch.full((len(problem.q), HEADS * 128), math.nan, dtype=BF16)
    new = torch.cat([k[c:] for k, c in zip(problem.keys, contexts, strict=True)])
    impl.forward_mha(problem.q, new[:, :512], new[:, None, 512:], problem.cache, built, torch.ones(1), out)
    problem.check(out.view(-1, HEADS, 128))
