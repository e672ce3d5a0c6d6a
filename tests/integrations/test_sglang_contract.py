"""The SGLang plug-in against the SGLang that is installed: its own registries, models, layers and base class, on a CPU.

Without SGLang these tests skip. A wheel of it with `--no-deps`, a CPU torch and what its modules import are enough;
docs/start/sglang.md says how.
"""

from __future__ import annotations

import inspect
import json
import types

import pytest
import torch
from sglang_server import BF16, HEADS, SCALE, Server
from tsmla.integrations import sglang as plugin
from tsmla.integrations.sglang import contract, models, served
from tsmla.integrations.sglang.metadata import Layout

if contract.version() is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

from sglang.srt import server_args  # noqa: E402
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend  # noqa: E402
from sglang.srt.layers.attention.verify_mask import VerifyMask  # noqa: E402
from sglang.srt.layers.dcp.layout import get_dcp_lens  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.model_executor import forward_context  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers  # noqa: E402
from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla  # noqa: E402
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod  # noqa: E402
from tsmla.integrations.sglang.backend import TsmlaBackend  # noqa: E402


def test_the_contract_holds():
    assert contract.broken() == []


def test_overrides_take_what_they_are_given():
    for name, method in vars(TsmlaBackend).items():
        theirs = vars(AttentionBackend).get(name)
        theirs, mine = (getattr(m, "fget", m) for m in (theirs, method))
        if name != "__init__" and inspect.isfunction(theirs):
            assert inspect.isfunction(mine), name
            given = dict(inspect.signature(theirs).parameters)
            given.pop("kwargs", None)
            assert list(given) == list(inspect.signature(mine).parameters)[: len(given)], name


def test_what_models_ask_their_backend_for(sglang, kernels):
    runner = Server([30]).runner()
    with forward_context.forward_context(forward_context.ForwardContext(attn_backend=TsmlaBackend(runner))):
        assert forward_context.get_req_to_token_pool() is runner.req_to_token_pool
        assert forward_context.get_token_to_kv_pool() is runner.token_to_kv_pool


def test_users_may_name_the_backend(tmp_path):
    plugin.register()
    assert ATTENTION_BACKENDS["tsmla"] is plugin.make
    assert "tsmla" in server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 512, "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "vocab_size": 1000, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = f"--model-path {tmp_path} --attention-backend tsmla --page-size {plugin.PAGE} --device cuda"
    view = resolved_view(server_args.prepare_server_args([*flags.split(), "--skip-tokenizer-init"]))
    assert attention_backends_of(view) == ("tsmla", "tsmla") and view.page_size == plugin.PAGE


def test_sglang_takes_the_lse_to_have_base_2():
    (base_on_e,) = (found for name, found in vars(forward_mla).items() if name.endswith("is_mla_dcp_lse_base_on_e"))
    assert not base_on_e(plugin.NAME) and base_on_e("flashmla")


def test_models_expand_keys_of_prefills_and_leave_decodes_latent():
    models.tell_models(plugin.NAME)
    assert plugin.NAME in forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    handler = handlers.AttentionBackendRegistry.get_handler(plugin.NAME)
    attn = types.SimpleNamespace(disable_chunked_prefix_cache=False)

    def method(mode: ForwardMode, context: int, disabled: bool = False) -> AttnForwardMethod:
        attn.disable_chunked_prefix_cache = disabled
        return handler(attn, types.SimpleNamespace(forward_mode=mode, extend_prefix_lens_cpu=[context, 0]))

    for context in (0, 5):
        assert method(ForwardMode.EXTEND, context) is AttnForwardMethod.MHA_CHUNKED_KV
        assert method(ForwardMode.TARGET_VERIFY, context) is AttnForwardMethod.MLA
    assert method(ForwardMode.DECODE, 0) is AttnForwardMethod.MLA
    assert method(ForwardMode.EXTEND, 5, disabled=True) is AttnForwardMethod.MLA


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_have_the_keys_that_sglang_gives_them(world):
    lengths = torch.arange(200)
    for rank in range(world):
        ours = Layout(torch.zeros(1, 1), 1, world, rank).local(lengths)
        assert ours.equal(get_dcp_lens(lengths, world, rank))


def test_sglangs_layers_say_what_is_looked_at():
    layer = RadixAttention(HEADS, 576, SCALE, 1, layer_id=3, v_head_dim=512)
    assert served.why_no_layer(layer, True, {}) is None
    assert (layer.tp_q_head_num, layer.qk_head_dim, layer.v_head_dim, layer.scaling) == (HEADS, 576, 512, SCALE)
    capped = RadixAttention(HEADS, 192, SCALE, HEADS, layer_id=3, logit_cap=30.0, sliding_window_size=128)
    assert "logit caps or sliding windows" in served.why_no_layer(capped, False, {})


@pytest.mark.usefixtures("kernels")
def test_sglangs_own_layer_runs_on_the_backend(sglang, monkeypatch):
    """RadixAttention shapes what it hands over, and the backend's base class says which function takes it."""
    from sglang.srt.layers import radix_attention

    server = Server([70, 33])
    backend = TsmlaBackend(server.runner())
    monkeypatch.setattr(radix_attention, "get_attn_backend", lambda: backend)
    batch = server.batch(ForwardMode.DECODE, [70, 33], global_num_token_non_padded_cpu=None)
    for request, n in enumerate((70, 33)):
        server.write(request, 0, n - 1)
    backend.init_forward_metadata(batch)
    batch.out_cache_loc, new = server.new([69, 32], [1, 1])
    layer = RadixAttention(HEADS, 576, SCALE, 1, layer_id=3, v_head_dim=512)
    q, nope, rope = torch.randn(2, HEADS, 576).to(BF16), new[:, None, :512], new[:, None, 512:]
    out = layer(q[..., :512].contiguous(), nope, nope, batch, q_rope=q[..., 512:], k_rope=rope)
    from sglang_server import close, expected

    close(out, expected(q, [server.kept(r) for r in range(2)], [1, 1]))


@pytest.mark.usefixtures("kernels")
def test_the_mask_of_verified_chains_is_not_read(sglang):
    sglang.spec.speculative_algorithm, sglang.spec.speculative_num_draft_tokens = "EAGLE", 4
    backend = TsmlaBackend(Server([3]).runner())
    backend.init_cuda_graph_state(2, 8)
    assert (
        isinstance(backend.verify_mask, VerifyMask) and not backend.verify_mask.is_read and backend.verify_mask.fits(2)
    )
