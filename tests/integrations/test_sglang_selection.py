"""How the SGLang plug-in is offered and made: names, kernels that are loaded, sentences of refusal, the command."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import tomllib
import torch
from sglang.srt.layers.attention import attention_registry
from sglang_server import BF16, E4M3, HEADS, Layer, Server
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla.identity.variant import DecodeVariant, Dtype, PrefillVariant
from tsmla.integrations import sglang as plugin
from tsmla.integrations.sglang import __main__ as command
from tsmla.integrations.sglang import contract, models, ready, releases, served
from tsmla.integrations.sglang.backend import TsmlaBackend

ROOT = Path(__file__).resolve().parents[2]


def test_registering_twice_is_registering_once(caplog):
    choices = releases.choices()
    for _ in range(2):
        plugin.register()
    assert choices.ATTENTION_BACKEND_CHOICES.count("tsmla") == 1
    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("tsmla") == 1
    assert attention_registry.ATTENTION_BACKENDS["tsmla"] is plugin.make and not caplog.records


def test_a_release_without_a_module_of_choices_has_them_among_its_arguments(monkeypatch, caplog):
    """SGLang 0.5.17 is such a release."""
    former, names, prefixes = types.ModuleType("sglang.srt.server_args"), ["fa3"], ["fa3"]
    former.ATTENTION_BACKEND_CHOICES, former.add_attention_backend_choices = names, names.extend
    former.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS = prefixes
    former.add_chunked_prefix_cache_attention_backend = prefixes.append
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", former)
    plugin.register()
    assert (names, prefixes) == (["fa3", "tsmla"], ["fa3", "tsmla"]) and not caplog.records


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("prefills", ["tsmla", "fa3"])
def test_a_runner_that_is_told_later_asks_its_arguments_what_prefills(sglang, prefills):
    """SGLang 0.5.17 has such runners."""
    arguments = types.SimpleNamespace(get_attention_backends=lambda: (prefills, "tsmla"))
    runner = Server([3]).runner(server_args=arguments)
    del runner.prefill_attention_backend_str, runner.kv_index_translator
    TsmlaBackend(runner)
    assert any(isinstance(variant, PrefillVariant) for variant in sglang.loaded) == (prefills == "tsmla")


def test_an_sglang_that_has_moved_on_is_a_warning(monkeypatch, caplog):
    choices = releases.choices()
    monkeypatch.delattr(choices, "add_attention_backend_choices")
    monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", [])
    plugin.register()
    assert "not offered to SGLang" in caplog.text and "add_attention_backend_choices" in caplog.text


@pytest.mark.usefixtures("kernels")
def test_models_call_the_backend_as_they_call_one_with_chunks(sglang):
    handlers, parted = models.AttentionBackendRegistry, models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    for _ in range(2):
        assert isinstance(plugin.make(Server([3]).runner()), TsmlaBackend)
    assert handlers.get_handler("tsmla") is handlers.get_handler(models.MODEL)
    assert handlers.get_handler("tsmla") is not handlers.get_handler("a backend of no name")
    assert parted.count("tsmla") == 1


def test_the_entry_point_is_the_function():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert points["sglang.srt.plugins"] == {"tsmla": "tsmla.integrations.sglang:register"}


@pytest.mark.parametrize(
    "page, cache, world, prefills, decode",
    [
        (64, BF16, 1, True, DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, False)),
        (64, E4M3, 2, False, DecodeVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, True)),
        (1, BF16, 1, False, DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, True, gathers=True)),
    ],
)
def test_kernels_are_loaded_when_the_backend_is_made(sglang, kernels, page, cache, world, prefills, decode):
    sglang.parallel.dcp_enabled, sglang.parallel.dcp_size = world > 1, world
    runner = Server([3], page=page, dtype=cache, world=world).runner()
    runner.prefill_attention_backend_str = "tsmla" if prefills else "fa3"
    TsmlaBackend(runner)
    kinds = ((True, False), (True, True), (False, True)) if prefills else ()
    assert sglang.loaded == [
        decode,
        *(PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, causal, lse) for causal, lse in kinds),
    ]


@pytest.mark.parametrize("arch, processors", [(Arch.SM90A, 132), (Arch.SM100A, 148)])
def test_no_decode_needs_more_workspace_than_is_allocated(arch, processors):
    for heads in (1, 3, 16, 128):
        sizes = [
            max(plan_decode(arch, processors, batch, q, heads, None, True).workspace_bytes for batch in (1, 9, 1 << 16))
            for q in (*range(1, ready.MOST_ROWS + 1), 500, 1024, 5000, 16384)
        ]
        assert max(sizes[ready.MOST_ROWS :]) <= max(sizes[: ready.MOST_ROWS])


def test_small_pages_are_warned_of(sglang, kernels, caplog):
    TsmlaBackend(Server([3], page=1).runner())
    assert "--page-size 64 is faster" in caplog.text
    caplog.clear()
    TsmlaBackend(Server([3], page=16).runner())
    assert not caplog.records


def model(**changes) -> served.Model:
    given = {"mla": True, "latent": 512, "dims": (128, 64, 128), "dtype": BF16, "cache": BF16, "page": 64}
    return served.Model(**{**given, "prefills": True, **changes})


HOPPER = ready.Capability(9, 0)


@pytest.mark.parametrize("capability", [HOPPER, ready.Capability(10, 0), ready.Capability(10, 3)])
@pytest.mark.parametrize("changes", [{}, {"cache": E4M3}, {"page": 1}, {"algorithm": "EAGLE", "candidates": 1}])
def test_what_is_served(capability, changes):
    assert served.why_not_served(model(**changes), capability) is None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"mla": False}, "serves MLA models"),
        ({"latent": 256}, "576 .*, not of kv_lora_rank 256 and qk_rope_head_dim 64"),
        ({"dtype": torch.float32}, "not in float32"),
        ({"cache": torch.float8_e5m2}, "of float8_e4m3fn .*, not of float8_e5m2"),
        ({"dtype": torch.float16, "cache": E4M3}, "--dtype bfloat16"),
        ({"page": 48}, "pages of 1, 2, 4, 8, 16, 32, 64, 128 keys, not of 48"),
        ({"dims": (64, 64, 256)}, "not .128, 256.; name another --prefill-attention-backend"),
        ({"algorithm": "NGRAM"}, "not of NGRAM"),
        ({"algorithm": "EAGLE", "candidates": 4}, "--speculative-eagle-topk is 4"),
        ({"odd": {"sparse attention": True, "other": False}}, "dense causal MLA, without sparse attention$"),
    ],
)
def test_models_that_are_refused(changes, says):
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(served.why_not_served(model(**changes), HOPPER))


def test_gpus_that_are_refused():
    for capability in (None, ready.Capability(8, 0), ready.Capability(12, 0)):
        assert "compute capability" in served.why_not_served(model(), capability)


@pytest.mark.parametrize("name", ["index_topk", "llama_4_scaling"])
def test_the_models_config_is_looked_at(sglang, kernels, name):
    runner = Server([3]).runner()
    setattr(runner.model_config.hf_text_config, name, {})
    with pytest.raises(NotImplementedError, match="dense causal MLA, without"):
        TsmlaBackend(runner)
    runner = Server([3]).runner(use_mla_backend=False)
    with pytest.raises(NotImplementedError, match="other attention"):
        TsmlaBackend(runner)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"logit_cap": 30.0}, "logit caps"),
        ({"sliding_window_size": 128}, "sliding windows"),
        ({"is_cross_attention": True}, "cross-attention"),
        ({"xai_temperature_len": 9}, "temperatures"),
        ({"attn_type": types.SimpleNamespace(value="encoder_only")}, "encoder_only attention"),
        ({"k_scale_float": 0.5}, "k_scale 0.5"),
    ],
)
def test_layers_that_are_refused(changes, says):
    assert served.why_no_layer(Layer(k_scale_float=1.0), True, {}) is None
    assert served.why_no_layer(Layer(k_scale_float=0.5), False, {"attn_sink": None}) is None
    assert says in served.why_no_layer(Layer(**changes), True, {})
    assert "attn_sink (given to layer 3)" in served.why_no_layer(Layer(), True, {"attn_sink": 1})


def test_a_layer_is_refused_when_it_is_called(sglang, kernels):
    server = Server([3])
    backend, q = TsmlaBackend(server.runner()), torch.zeros(1, HEADS, 576)
    with pytest.raises(NotImplementedError, match="sliding windows"):
        backend.forward_decode(q, None, None, Layer(sliding_window_size=7), None)


def test_the_command_says_whether_sglang_is_there(monkeypatch, capsys):
    monkeypatch.setattr(contract, "version", lambda: None)
    assert command.main() == 2 and "not installed" in capsys.readouterr().out


def test_the_command_says_what_to_write(monkeypatch, capsys):
    monkeypatch.setattr(contract, "version", lambda: "0.5.23")
    monkeypatch.setattr(contract, "broken", lambda: [])
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert command.main() == 0
    text = capsys.readouterr().out
    assert "--attention-backend tsmla --page-size 64" in text and "with 0.5.17 only" in text
    monkeypatch.setattr(contract, "broken", lambda: ["x has no y"])
    assert command.main() == 1 and "does not fit: x has no y" in capsys.readouterr().out
