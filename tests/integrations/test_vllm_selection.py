"""How the vLLM plug-in is offered and selected: names, sentences of refusal, the command line."""

from __future__ import annotations

import logging
import re
import runpy
import types
from pathlib import Path

import other_facts
import pytest
import stub_vllm
import tomllib
import torch
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import Piece, RowFormat
from tsmla.identity.variant import Dtype
from tsmla.integrations import vllm as plugin
from tsmla.integrations.shared import decodes
from tsmla.integrations.shared.heads import why_not_prefilled
from tsmla.integrations.vllm import __main__ as command
from tsmla.integrations.vllm import backend, contract, options, served, sparse_backend
from tsmla.integrations.vllm.backend import TsmlaBackend
from tsmla.integrations.vllm.sparse_backend import TsmlaSparseBackend
from vllm.platforms.interface import DeviceCapability

ROOT = Path(__file__).resolve().parents[2]
SPARSE_PATH = "tsmla.integrations.vllm.sparse_backend.TsmlaSparseBackend"
HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)


def stub(monkeypatch: pytest.MonkeyPatch, takes_names: bool) -> types.SimpleNamespace:
    decode, prefill = (stub_vllm.registry(takes_names) for _ in range(2))
    offered = (
        (decode, stub_vllm.add_to(decode), {plugin.NAME: plugin.BACKEND, plugin.SPARSE: plugin.SPARSE_BACKEND}),
        (prefill, stub_vllm.add_to(prefill), {plugin.NAME: plugin.PREFILL}),
    )
    monkeypatch.setattr(plugin, "_registries", lambda: offered)
    return types.SimpleNamespace(decode=decode, prefill=prefill)


@pytest.mark.parametrize("takes_names, name, sparse", [(True, "TSMLA", "TSMLA_SPARSE"), (False, "CUSTOM", "CUSTOM")])
def test_registering_twice_is_registering_once(monkeypatch, caplog, takes_names, name, sparse):
    registries = stub(monkeypatch, takes_names)
    for _ in range(2):
        plugin.register()
        assert registries.decode[name].get_path() == plugin.BACKEND == "tsmla.integrations.vllm.backend.TsmlaBackend"
        assert registries.prefill[name].get_path() == plugin.PREFILL == "tsmla.integrations.vllm.prefill.TsmlaPrefill"
        assert not takes_names or registries.decode[sparse].get_path() == SPARSE_PATH == plugin.SPARSE_BACKEND
    assert plugin.selected_names() == (name, name) and plugin.selected_names(sparse=True) == (sparse, name)
    assert not caplog.records


@pytest.mark.parametrize("text, path", [("", plugin.BACKEND), ("0", plugin.BACKEND), ("1", SPARSE_PATH)])
def test_the_one_place_is_sparse_where_asked(monkeypatch, caplog, text, path):
    monkeypatch.setenv(options.SPARSE.name, text)
    registries = stub(monkeypatch, takes_names=False)
    plugin.register()
    assert registries.decode["CUSTOM"].get_path() == path
    assert registries.prefill["CUSTOM"].get_path() == plugin.PREFILL and not caplog.records


def test_a_wrong_wish_for_it_names_its_variable(monkeypatch, caplog):
    monkeypatch.setenv(options.SPARSE.name, "yes")
    stub(monkeypatch, takes_names=False)
    plugin.register()
    assert "TSMLA_VLLM_SPARSE is 'yes'; accepted: 0, 1" in caplog.text


def test_a_place_that_is_taken_stays_so(monkeypatch, caplog):
    registries = stub(monkeypatch, takes_names=False)
    registries.decode.overrides["CUSTOM"] = "other.Backend"
    plugin.register()
    assert registries.decode["CUSTOM"].get_path() == "other.Backend"
    assert registries.prefill["CUSTOM"].get_path() == plugin.PREFILL
    assert "taken by other.Backend" in caplog.text


def test_a_vllm_that_moved_on_is_a_warning(monkeypatch, caplog):
    def gone() -> None:
        raise ImportError("no module named vllm.v1")

    monkeypatch.setattr(plugin, "_registries", gone)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "not offered to vLLM" in caplog.text and "no module named vllm.v1" in caplog.text


def test_the_entry_point_names_the_function():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"tsmla": f"{plugin.__name__}:{plugin.register.__name__}"}


def test_the_example_names_both_backends():
    assert runpy.run_path(str(ROOT / "examples" / "vllm_generate.py"))["BACKENDS"] == {
        "backend": plugin.NAME,
        "mla_prefill_backend": plugin.NAME,
    }


def why(ours: type[TsmlaBackend] = TsmlaBackend, **changes) -> str | None:
    given = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "device_capability": HOPPER, **changes,
    }  # fmt: skip
    return ours.supports_combination(*given.values())


def why_not_sparse(**changes) -> str | None:
    return why(TsmlaSparseBackend, **{"use_sparse": True, **changes})


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL, DeviceCapability(10, 3)])
@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e4m3", None])
@pytest.mark.parametrize("block", [16, 32, 64, 128, 256, None])
def test_what_is_served(capability, cache, block):
    assert why(device_capability=capability, kv_cache_dtype=cache, block_size=block) is None
    assert TsmlaBackend.supports_compute_capability(capability)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device_capability": DeviceCapability(12, 0)}, "kernels for compute capability 9.0 .*this GPU's is 12.0"),
        ({"device_capability": DeviceCapability(10, 7)}, "kernels for compute capability 9.0 .*this GPU's is 10.7"),
        ({"device_capability": None}, "this GPU's is none"),
        ({"head_size": 320}, "rows of 576 .512 latent and 64 rope.*, not of 320"),
        ({"dtype": torch.float32}, "models in float16 and bfloat16, not in float32"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "fp8_ds_mla cache into bfloat16"),
        ({"use_sparse": True}, "serves dense MLA; for sparse attention, name "),
        ({"kv_cache_dtype": "fp8_e5m2"}, "not of fp8_e5m2"),
        ({"dtype": torch.float16, "kv_cache_dtype": "fp8"}, "fp8 cache into bfloat16 .*the model is in float16"),
        ({"dtype": torch.float16, "kv_cache_dtype": "bfloat16"}, "bfloat16 does not go with a model in float16"),
        ({"block_size": 24}, "pages of 16, 32, 64, 128 keys, of which 24 is no multiple"),
        ({"has_sink": True, "use_mm_prefix": True}, "without attention sinks or full attention to multimodal"),
        ({"use_mla": False}, "without attention that is not MLA"),
    ],
)
def test_what_is_refused_says_what_is_served(changes, sentence):
    reason = why(**changes)
    assert reason is not None and re.search(sentence, reason), reason


def test_rows_with_scales_are_served_where_they_are_decoded(monkeypatch):
    assert why(kv_cache_dtype="fp8_ds_mla") is None
    assert why(kv_cache_dtype="fp8_ds_mla", device_capability=BLACKWELL) is None
    other_facts.change(monkeypatch, Arch.SM100A, decode_rows={})
    sentence = "fp8_ds_mla rows .* has no decode of them for sm_100a yet; it decodes caches of auto, .*fp8_e4m3$"
    assert re.search(sentence, why(kv_cache_dtype="fp8_ds_mla", device_capability=BLACKWELL) or "")
    assert TsmlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8_ds_mla") == (7, 64, 656)
    assert TsmlaBackend.get_kv_cache_shape(7, 64, 1, 576, "fp8") == TsmlaBackend.get_kv_cache_shape(7, 64, 1, 576)


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", None])
@pytest.mark.parametrize("block", [16, 64, 256, None])
def test_what_is_served_of_sparse_attention(cache, block):
    assert why_not_sparse(kv_cache_dtype=cache, block_size=block) is None
    assert why_not_sparse(dtype=torch.float16) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_sparse": False}, "serves layers that choose their keys; for dense MLA, name "),
        ({"head_size": 320}, "rows of 576 .512 latent and 64 rope.*, not of 320"),
        ({"has_sink": True}, "MLA whose layers choose their keys, without attention sinks"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "not of nvfp4_ds_mla"),
        ({"dtype": torch.float16, "kv_cache_dtype": "fp8_ds_mla"}, "fp8_ds_mla cache into bfloat16"),
        ({"device_capability": DeviceCapability(12, 0)}, "this GPU's is 12.0"),
    ],
)
def test_what_is_refused_of_sparse_attention(changes, sentence):
    reason = why_not_sparse(**changes)
    assert reason is not None and re.search(sentence, reason), reason


@pytest.mark.parametrize("takes_names", [True, False])
def test_backends_name_each_other(monkeypatch, takes_names):
    for module in (backend, sparse_backend):
        monkeypatch.setattr(module, "AttentionBackendEnum", stub_vllm.registry(takes_names))
    other, back = "TSMLA_SPARSE", "TSMLA"
    if not takes_names:
        other, back = (
            f"CUSTOM {how} in the environment" for how in ("with TSMLA_VLLM_SPARSE=1", "without TSMLA_VLLM_SPARSE")
        )
    assert str(why(use_sparse=True)).endswith(f"for sparse attention, name {other}")
    assert str(why_not_sparse(use_sparse=False)).endswith(f"for dense MLA, name {back}")


def test_sparse_attention_is_served_where_chosen_keys_are_decoded(monkeypatch):
    other_facts.change(monkeypatch, Arch.SM100A, gathered_dtypes=(), gathered_rows=())
    reason = why_not_sparse(device_capability=BLACKWELL)
    assert str(reason).startswith(
        "tsmla's decode of keys that are copied one by one (indices, or a cache of two tensors) has no kernel for "
        "sm_100a yet; it exists for"
    )
    other_facts.change(monkeypatch, Arch.SM100A, gathered_dtypes=(Dtype.BF16,), gathered_rows=())
    assert why_not_sparse(device_capability=BLACKWELL) is None
    reason = why_not_sparse(device_capability=BLACKWELL, kv_cache_dtype="fp8_ds_mla")
    assert "for sm_100a reads rows of bf16, not of" in str(reason)


def test_rows_are_those_that_tsmla_has(monkeypatch):
    """A row of other columns is served as soon as operators have it."""
    short = RowFormat((Piece("latent", Dtype.BF16, 256),))
    monkeypatch.setitem(served.ROWS, "short", short)
    monkeypatch.setitem(served.SHAPES, 256, short)
    assert served.decode_kinds(torch.bfloat16, "auto", 256) == (Dtype.BF16, Dtype.BF16, short)
    assert "not of latent bf16 256" in str(why_not_sparse(head_size=256))
    monkeypatch.setattr(decodes, "why_unsupported", lambda variant: None)
    assert why_not_sparse(head_size=256) is None and 256 in TsmlaSparseBackend.get_supported_head_sizes()
    assert "no fp8_ds_mla cache with rows of 256" in str(why_not_sparse(head_size=256, kv_cache_dtype="fp8_ds_mla"))


def test_float16_is_served_without_fp8():
    assert why(dtype=torch.float16) is None and why(dtype=torch.float16, kv_cache_dtype="float16") is None
    assert why_not_prefilled(None, torch.float16, False, (128, 64, 128)) is None
    assert "heads of (query, value) dims (192, 128), (128, 128), (256, 256), not (96, 128)" in str(
        why_not_prefilled(None, torch.bfloat16, False, (32, 64, 128))
    )


def test_heads_of_256_are_served():
    dims = 192, 64, 256
    for arch in (None, *Arch):
        for fp8 in (False, True):
            assert why_not_prefilled(arch, torch.bfloat16, fp8, dims) is None
    for arch in Arch:
        assert "prefills fp16 heads" in str(why_not_prefilled(arch, torch.float16, False, dims))


def test_the_backends_promises():
    assert TsmlaBackend.get_supported_kernel_block_sizes() == [16, 32, 64, 128]
    assert TsmlaBackend.get_preferred_block_size(16) == 64 and 576 in TsmlaBackend.get_supported_head_sizes()
    assert TsmlaBackend.supports_sliding_window()
    assert TsmlaBackend.supports_batch_invariance()
    assert TsmlaBackend.supports_device_cpu_query_lens_mismatch()
    impl = TsmlaBackend.get_impl_cls()
    assert impl.can_return_lse_for_decode and impl.supports_dcp and impl.lse_base_on_e is False


def test_the_sparse_backends_promises():
    (size,) = TsmlaSparseBackend.get_supported_kernel_block_sizes()
    assert size.base == 16 and TsmlaSparseBackend.get_preferred_block_size(16) == 64
    assert TsmlaSparseBackend.is_sparse() and not TsmlaBackend.is_sparse()
    assert not TsmlaSparseBackend.supports_sliding_window() and not TsmlaSparseBackend.supports_non_causal()
    assert TsmlaSparseBackend.supports_batch_invariance()
    assert TsmlaSparseBackend.supports_device_cpu_query_lens_mismatch()
    with pytest.raises(NotImplementedError):
        TsmlaSparseBackend.get_kv_cache_stride_order(True)


@pytest.mark.parametrize("text", ["0", "1025", "-1", "4.0", "many", "²"])
def test_a_wrong_threshold_names_its_variable(monkeypatch, text):
    monkeypatch.setenv(options.DECODE_THRESHOLD.name, text)
    with pytest.raises(options.SettingError, match="TSMLA_VLLM_DECODE_THRESHOLD is .*accepted: 1 to 1024"):
        options.decode_threshold()


def test_the_command_says_whether_vllm_is_there(monkeypatch, capsys):
    monkeypatch.setattr(contract, "version", lambda: None)
    assert command.main() == 2 and "not installed" in capsys.readouterr().out


def test_the_command_says_what_to_write(monkeypatch, capsys):
    stub(monkeypatch, takes_names=True)
    monkeypatch.setattr(contract, "version", lambda: "0.33.0")
    monkeypatch.setattr(contract, "broken", lambda: [])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert command.main() == 0
    text = capsys.readouterr().out
    assert '{"backend": "TSMLA", "mla_prefill_backend": "TSMLA"}' in text and options.FP8_PREFILL.name in text
    assert "(sparse attention): TSMLA_SPARSE as the backend\n" in text
    stub(monkeypatch, takes_names=False)
    assert command.main() == 0
    assert "(sparse attention): CUSTOM as the backend, and TSMLA_VLLM_SPARSE=1" in capsys.readouterr().out
    monkeypatch.setattr(contract, "broken", lambda: ["x has no y"])
    assert command.main() == 1 and "does not fit: x has no y" in capsys.readouterr().out
