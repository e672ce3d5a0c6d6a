"""attn_implementation="tsmla" on a CPU, where a float64 reference stands for the kernel, against sdpa."""

from __future__ import annotations

import types

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged_attention import deepseek, prefill
from tsmla import ArgumentError, UnsupportedError
from tsmla.identity.arch import Arch
from tsmla.integrations import transformers as integration
from tsmla.operators import checks

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

PROMPT = 9


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "tsmla_prefill", prefill)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    integration.register()
    integration.register()
    return deepseek()


def prompts(batch: int, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(3, 199, (batch, length), generator=torch.Generator().manual_seed(batch))


def both(model: torch.nn.Module, run) -> tuple:
    results = []
    for implementation in ("sdpa", "tsmla"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            results.append(run(model))
    return tuple(results)


LEFT = torch.tensor([[1] * PROMPT, [0] * 4 + [1] * (PROMPT - 4), [0] * (PROMPT - 1) + [1]])
GENERATION = {
    "greedy": {},
    "left padding": {"attention_mask": LEFT},
    "beams": {"attention_mask": LEFT, "num_beams": 2},
    "without a cache": {"attention_mask": LEFT, "use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "static cache, left padding": {"cache_implementation": "static", "attention_mask": LEFT},
}


@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
def test_the_same_tokens_as_with_sdpa(model, reference, options) -> None:
    expected, got = both(model, lambda model: model.generate(prompts(3), max_new_tokens=6, do_sample=False, **options))
    assert torch.equal(got, expected)
    assert len(got[:, PROMPT:].unique()) > 1, "a model that says one thing proves nothing"


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), batch=st.integers(1, 3), cached=st.integers(0, 5), new=st.integers(1, 5))
def test_the_same_logits_wherever_padding_lies(model, reference, data, batch, cached, new) -> None:
    """At tokens that are none. The first part of a sequence may be in the cache already."""
    length = cached + new
    row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    mask = torch.tensor(data.draw(st.lists(row, min_size=batch, max_size=batch)))
    ids = prompts(batch, length)

    def run(model):
        cache = None
        if cached:
            cache = model(ids[:, :cached], attention_mask=mask[:, :cached], use_cache=True).past_key_values
        return model(ids[:, cached:], attention_mask=mask, past_key_values=cache, use_cache=bool(cached)).logits

    expected, got = both(model, run)
    valid = mask[:, cached:].bool()
    assert torch.allclose(got[valid], expected[valid], rtol=1e-4, atol=1e-4)


def test_a_pack_told_by_its_ends_is_its_sequences_one_by_one(model, reference) -> None:
    lengths = (5, 1, 3)
    ids = prompts(1)
    ends = torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    model.set_attn_implementation("tsmla")
    with torch.no_grad():
        packed = model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False).logits
        model.set_attn_implementation("sdpa")
        alone = [model(part, use_cache=False).logits for part in ids.split(lengths, 1)]
    assert torch.allclose(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


def test_a_compiled_model_gives_the_same(model, reference) -> None:
    """The reference reads lengths on the host, so it stays outside of the graph."""
    ids = prompts(2)
    expected, got = both(
        model,
        lambda model: (
            (torch.compile(model, backend="eager") if model.config._attn_implementation == "tsmla" else model)(
                ids, attention_mask=LEFT[:2], use_cache=False
            ).logits
        ),
    )
    valid = LEFT[:2].bool()
    assert torch.allclose(got[valid], expected[valid], rtol=1e-4, atol=1e-4)


def call(**changes):
    """The attention function as a model calls it."""
    module = types.SimpleNamespace(is_causal=True)
    given = {
        "query": torch.randn(2, 4, 5, 192),
        "key": torch.randn(2, 2, 7, 192),
        "value": torch.randn(2, 2, 7, 128),
        "attention_mask": None,
        "scaling": 0.1,
    }
    return integration.attention(module, **{**given, **changes})


def test_shared_key_heads_and_modules_without_a_mask(reference) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(2, 4, 5, 192), torch.randn(2, 2, 7, 192), torch.randn(2, 2, 7, 128)
    for causal in (True, False):
        out, weights = call(query=query, key=key, value=value, is_causal=causal)
        hidden = torch.ones(5, 7, dtype=torch.bool).triu(3) if causal else torch.zeros(5, 7, dtype=torch.bool)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), ~hidden, scale=0.1
        )
        assert weights is None and torch.allclose(out, expected.transpose(1, 2), rtol=0, atol=1e-5)


PACK = {"cu_seq_lens_q": torch.tensor([0, 5]), "cu_seq_lens_k": torch.tensor([0, 7])}
ONE = {"query": torch.randn(1, 4, 5, 192), "key": torch.randn(1, 4, 7, 192), "value": torch.randn(1, 4, 7, 128)}
REFUSED = {
    "dropout": ({"dropout": 0.1}, ArgumentError, "dropout is 0.1; there is none here"),
    "weights": ({"output_attentions": True}, ArgumentError, "output_attentions is True"),
    "gradient": ({"query": torch.randn(2, 4, 5, 192).requires_grad_()}, ArgumentError, "query, key or value requires"),
    "4-D mask": ({"attention_mask": torch.ones(2, 1, 5, 7)}, ArgumentError, r"attention_mask has shape \[2, 1, 5, 7\]"),
    "softcap": ({"softcap": 30.0}, ArgumentError, "softcap is given; no kernel takes it"),
    "sinks": ({"s_aux": torch.zeros(4)}, ArgumentError, "s_aux is given"),
    "window": ({"sliding_window": 4}, ArgumentError, "sliding_window is given"),
    "paged cache": ({"cache": object()}, ArgumentError, "cache is given"),
    "pack of two": (PACK, ArgumentError, "cu_seq_lens_q is given and the batch size is 2"),
    "half a pack": ({**ONE, "cu_seq_lens_q": PACK["cu_seq_lens_q"]}, ArgumentError, ".* but cu_seq_lens_k is not"),
    "padded pack": ({**ONE, **PACK, "attention_mask": torch.ones(1, 7)}, ArgumentError, ".* attention_mask as well"),
}


@pytest.mark.parametrize(("change", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused_by_name(reference, change, error, message) -> None:
    with pytest.raises(error, match=f"^tsmla: {message}"):
        call(**change)


def test_what_no_kernel_takes_is_refused_in_the_operators_words(monkeypatch) -> None:
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(checks, "arch_of", lambda device: Arch.SM90A)
    with pytest.raises(ArgumentError, match="query is torch.float32; accepted: torch.bfloat16, torch.float16"):
        call()
    narrow = {name: x[..., :64].bfloat16() for name, x in ONE.items()}
    with pytest.raises(UnsupportedError, match="head dim"):
        call(**narrow)


def test_on_a_cpu_the_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match="query is on cpu; it must be a CUDA tensor"):
        call()


def test_models_that_ask_for_more_are_refused(reference) -> None:
    integration.register()
    model = deepseek(attention_dropout=0.5)
    model.set_attn_implementation("tsmla")
    with pytest.raises(ArgumentError, match="requires a gradient"):
        model(prompts(1))
    with torch.no_grad(), pytest.raises(ArgumentError, match="dropout is 0.5"):
        model.train()(prompts(1))
    model.eval()
    with torch.no_grad(), pytest.raises(ArgumentError, match="output_attentions is True"):
        model(prompts(1), output_attentions=True)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="told by cu_seq_lens_q and cu_seq_lens_k"):
        model(prompts(1), position_ids=positions, use_cache=False)


@pytest.mark.parametrize("make", ["sliding_window_causal_mask_function", "chunked_causal_mask_function"])
def test_masks_without_a_kernel_are_refused_where_they_are_needed(reference, make) -> None:
    from transformers import masking_utils

    function = getattr(masking_utils, make)(*([3] if "sliding" in make else [3, torch.zeros(2, dtype=torch.int64)]))
    found = integration.mask(2, 5, 7, 2, 0, function)
    with pytest.raises(UnsupportedError, match="^tsmla: masks other than causal and full ones"):
        call(attention_mask=found)


def test_another_contract_is_refused(monkeypatch) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(UnsupportedError, match="mask functions do not get attention_mask, .*q_length"):
        integration.register()
