"""attn_implementation="tsmla" on a GPU: a small random DeepSeek-V3 says what it says with sdpa."""

from __future__ import annotations

import pytest
import torch
from ragged_attention import deepseek
from tsmla.operators.checks import dtype_of

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

BATCH, PROMPT = 3, 40
LEFT = torch.ones(BATCH, PROMPT, dtype=torch.int64)
LEFT[1, :17], LEFT[2, : PROMPT - 1] = 0, 0


@pytest.fixture(autouse=True)
def registered() -> None:
    from tsmla.integrations.transformers import register

    register()


def model_of(dtype: torch.dtype, arch) -> torch.nn.Module:
    if dtype_of(dtype) not in arch.facts.prefill:
        pytest.skip(f"prefill for {arch} has no {dtype} kernel")
    return deepseek(device="cuda").to(dtype)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "left padding"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_same_tokens_as_with_sdpa(dtype, padded, cache, arch) -> None:
    """Where the two best tokens are told apart: a tie within rounding ends the comparison of its row."""
    model = model_of(dtype, arch)
    ids = torch.randint(3, 199, (BATCH, PROMPT), generator=torch.Generator().manual_seed(7)).cuda()
    mask = (LEFT if padded else torch.ones_like(LEFT)).cuda()
    said = {}
    for implementation in ("sdpa", "tsmla"):
        model.set_attn_implementation(implementation)
        said[implementation] = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=24,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
    compared = 0
    for row in range(BATCH):
        for step, (one, other) in enumerate(zip(said["sdpa"].logits, said["tsmla"].logits, strict=True)):
            scale = one[row].float().abs().max()
            difference = (one[row].float() - other[row].float()).abs().max()
            assert difference <= 0.05 * scale, f"row {row}, step {step}: logits differ by {difference} of {scale}"
            best = one[row].float().topk(2).values
            if best[0] - best[1] <= 2 * difference:
                break
            token = PROMPT + step
            assert said["sdpa"].sequences[row, token] == said["tsmla"].sequences[row, token]
            compared += 1
    assert compared >= 12, "too few tokens were told apart to prove anything"


@pytest.mark.parametrize("length", [1, 129, 700])
def test_the_logits_of_a_pack_are_those_of_its_sequences(length, arch) -> None:
    model = model_of(torch.bfloat16, arch)
    lengths = (length, 33, 5)
    ids = torch.randint(3, 199, (1, sum(lengths)), device="cuda")
    ends = torch.tensor([0, length, length + 33, sum(lengths)], dtype=torch.int32, device="cuda")
    positions = torch.cat([torch.arange(count) for count in lengths])[None].cuda()
    with torch.no_grad():
        model.set_attn_implementation("tsmla")
        packed = model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False).logits
        model.set_attn_implementation("sdpa")
        alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)
    assert (packed - alone).float().norm() <= 0.03 * alone.float().norm()


def test_a_compiled_model_says_the_same(arch) -> None:
    model = model_of(torch.bfloat16, arch)
    model.set_attn_implementation("tsmla")
    ids = torch.randint(3, 199, (BATCH, PROMPT), device="cuda")
    with torch.no_grad():
        want = model(ids, attention_mask=LEFT.cuda(), use_cache=False).logits
        got = torch.compile(model)(ids, attention_mask=LEFT.cuda(), use_cache=False).logits
    valid = LEFT.bool().cuda()
    assert (got[valid] - want[valid]).float().norm() <= 0.03 * want[valid].float().norm()
