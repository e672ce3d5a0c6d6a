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
from tsmla.integrations import vllm as plugin
from tsmla.integrations.shared.heads import why_not_prefilled
from tsmla.integrations.vllm import __main__ as command
from tsmla.integrations.vllm import contract, options
from tsmla.integrations.vllm.backend import TsmlaBackend
from vllm.platforms.interface import DeviceCapability

ROOT = Path(__file__).resolve().parents[2]
HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)


def stub(monkeypatch: pytest.MonkeyPatch, takes_names: bool) -> types.SimpleNamespace:
    decode, prefill = (stub_vllm.registry(takes_names) for _ in range(2))
    pairs = ((decode, stub_vllm.add_to(decode), plugin.BACKEND), (prefill, stub_vllm.add_to(prefill), plugin.PREFILL))
    monkeypatch.setattr(plugin, "_registries", lambda: pairs)
    return types.SimpleNamespace(decode=decode, prefill=prefill)


@pytest.mark.parametrize("takes_names, name", [(True, "TSMLA"), (False, "CUSTOM")])
def test_registering_twice_is_registering_once(monkeypatch, caplog, takes_names, name):
    registries = stub(monkeypatch, takes_names)
    for _ in range(2):
        plugin.register()
        assert registries.decode[name].get_path() == plugin.BACKEND == "tsmla.integrations.vllm.backend.TsmlaBackend"
        assert registries.prefill[name].get_path() == plugin.PREFILL == "tsmla.integrations.vllm.prefill.TsmlaPrefill"
    assert plugin.selected_names() == (name, name) and not caplog.records


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


def why(**changes) -> str | None:
    given = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "device_capability": HOPPER, **changes,
    }  # fmt: skip
    return TsmlaBackend.supports_combination(*given.values())


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
        ({"head_size": 320}, "rows of 576 .512 latent and 64 rope., not of 320"),
        ({"dtype": torch.float32}, "models in float16 and bfloat16, not in float32"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "fp8_ds_mla cache into bfloat16"),
        ({"kv_cache_dtype": "fp8_ds_mla", "use_sparse": True}, "without sparse attention"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "not of fp8_e5m2"),
        ({"dtype": torch.float16, "kv_cache_dtype": "fp8"}, "fp8 cache into bfloat16 .*the model is in float16"),
        ({"dtype": torch.float16, "kv_cache_dtype": "bfloat16"}, "bfloat16 does not go with a model in float16"),
        ({"block_size": 24}, "pages of 16, 32, 64, 128 keys, of which 24 is no multiple"),
        ({"has_sink": True, "use_sparse": True}, "without attention sinks or sparse attention"),
        ({"use_mla": False}, "without attention that is not MLA"),
    ],
)
def test_what_is_refused_says_what_is_served(changes, sentence):
    import re

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


def test_float16_is_served_without_fp8():
    assert why(dtype=torch.float16) is None and why(dtype=torch.float16, kv_cache_dtype="float16") is None
    assert why_not_prefilled(None, torch.float16, False, (128, 64, 128)) is None
    assert "heads of (query, value) dims (192, 128), (128, 128), (256, 256), not (96, 128)" in str(
        why_not_prefilled(None, torch.bfloat16, False, (32, 64, 128))
    )


def test_heads_of_256_are_served_on_hopper():
    dims = 192, 64, 256
    for fp8 in (False, True):
        assert why_not_prefilled(None, torch.bfloat16, fp8, dims) is None
        assert why_not_prefilled(Arch.SM90A, torch.bfloat16, fp8, dims) is None
        sentence = "prefills .* heads of .query, value. dims .192, 128., .128, 128. on sm_100a, not .256, 256."
        assert re.search(sentence, why_not_prefilled(Arch.SM100A, torch.bfloat16, fp8, dims) or "")
    assert "prefills fp16 heads" in str(why_not_prefilled(Arch.SM90A, torch.float16, False, dims))


def test_the_backends_promises():
    assert TsmlaBackend.get_supported_kernel_block_sizes() == [16, 32, 64, 128]
    assert TsmlaBackend.get_preferred_block_size(16) == 64 and TsmlaBackend.get_supported_head_sizes() == [576]
    assert TsmlaBackend.supports_sliding_window()
    assert TsmlaBackend.supports_batch_invariance()
    assert TsmlaBackend.supports_device_cpu_query_lens_mismatch()
    impl = TsmlaBackend.get_impl_cls()
    assert impl.can_return_lse_for_decode and impl.supports_dcp and impl.lse_base_on_e is False


@pytest.mark.parametrize("text", ["0", "1025", "-1", "4.0", "many", "²"])
def test_a_wrong_threshold_names_its_variable(monkeypatch, text):
    monkeypatch.setenv(options.DECODE_THRESHOLD.name, text)
    with pytest.raises(options.SettingError, match="TSMLA_VLLM_DECODE_THRESHOLD is .*accepted: 1 to 1024"):
        options.decode_threshold()


def newer(backend, class_path, extra=None, *, must): ...


class Older:
    backend: str


def test_a_broken_contract_is_told_clause_by_clause():
    clauses = (
        contract.Function(f"{__name__}:newer", "backend path"),
        contract.Function(f"{__name__}:newer", "backend class_path", exactly=True, also="must"),
        contract.Names(f"{__name__}:Older", "backend mla_prefill_backend"),
        contract.Names(f"{__name__}:gone", "x"),
        contract.Names(f"{__name__}.gone", "x"),
    )
    import sys

    sys.modules.setdefault(__name__, sys.modules[newer.__module__])
    told = contract.broken(clauses)
    assert told[0] == f"{__name__}:newer takes no path"
    assert told[1] == f"{__name__}:newer takes extra, which the plug-in does not know"
    assert told[2] == f"{__name__}:Older has no mla_prefill_backend"
    assert "gone is not there" in told[3] and "gone is not there" in told[4] and len(told) == 5


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
    monkeypatch.setattr(contract, "broken", lambda: ["x has no y"])
    assert command.main() == 1 and "does not fit: x has no y" in capsys.readouterr().out
