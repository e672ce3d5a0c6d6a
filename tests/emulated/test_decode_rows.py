"""tsmla_decode of rows with a scale each, in emulation: edges of the contract, and how accurate it must be."""

from __future__ import annotations

import math

import pytest
import torch
from decode_reference import Sight, run
from decode_rows import (
    MOST_OFF,
    OUTLIERS,
    attend_stored,
    check_scaled,
    make_scaled,
    outlier_call,
    relative,
)
from emulated_archs import KERNELS, SMS
from tsmla import mla_quantize_q
from tsmla.identity.plan import plan_decode

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]

CASES = {
    "around a tile": ([127, 128, 129], 1, 16, 64, {"sight": Sight()}),
    "short": ([0, 1, 2, 63, 65], 1, 6, 16, {"power_of_two": False}),
    "window, two row tiles": ([400, 30], 5, 24, 32, {"sight": Sight(window_left=70), "side_by_side": True}),
    "long, and a packed batch": ([1100, 0, 300], [1, 2, 3], 8, 128, {"power_of_two": False, "output_scale": 0.5}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    *shape, page_size, fields = case
    check_scaled(make_scaled(*shape, page_size, **fields))


@pytest.mark.parametrize("heads", [16, 5])
def test_everything_that_hides_keys(gpu, heads):
    """Query tokens of their own visible lengths, in the keys of a context-parallel rank; 48 rows and 15, for which
    Hopper has another kernel."""
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check_scaled(make_scaled([190, 66], 3, heads, 32, visible=visible, causal_seqs=[380, 130], sight=sight))


@pytest.mark.parametrize("case", OUTLIERS)
def test_accuracy_on_rows_as_models_have_them(gpu, case):
    scaled = outlier_call(case, [300, 70], 16, power_of_two=case != OUTLIERS[0])
    out, _ = check_scaled(scaled)
    assert relative(out, attend_stored(scaled, "exact")[0]) <= MOST_OFF


def test_a_cast_of_weight_times_scale_would_be_noticed(gpu):
    """What kernels must not do fails the same gate, by far: scales are near 1/100 of what weights have to be."""
    scaled = make_scaled([300, 70], 1, 16)
    exact, _ = attend_stored(scaled, "exact")
    cast, _ = attend_stored(scaled, "cast")
    folded, _ = attend_stored(scaled, "folded")
    assert relative(folded, exact) <= MOST_OFF < 3 * MOST_OFF < relative(cast, exact)


@pytest.mark.parametrize("batch, heads, keys", [(1, 64, 128), (2, 64, 640)])
def test_accuracy_against_numbers_before_they_were_stored(gpu, batch, heads, keys):
    """On FlagGems' inputs, whose limits these are."""
    numbers = [torch.randn(keys, 576, device="cuda") * 0.1 for _ in range(batch)]
    query = torch.randn(batch, 1, heads, 576, device="cuda") * 0.1
    scaled = make_scaled([keys] * batch, 1, heads, query=query.bfloat16(), keys=numbers)
    out, lse = check_scaled(scaled)
    for request in range(batch):
        scores = query[request, 0].double() @ numbers[request].double().T * 576**-0.5
        exact = scores.softmax(-1) @ numbers[request].double()[:, :512]
        got = out[request, 0].double()
        assert relative(got, exact) <= 5e-2
        assert 1 - torch.cosine_similarity(got.flatten(), exact.flatten(), dim=0) <= 1e-3
        assert float((lse[request, 0] * math.log(2) - scores.logsumexp(-1)).abs().max()) <= 2e-2


@pytest.mark.parametrize("key_factor, query_factor", [(1e-36, 1e36), (1e30, 1e-30)])
def test_scales_of_any_magnitude(gpu, key_factor, query_factor):
    scaled = make_scaled(
        [130, 3],
        1,
        16,
        key_factor=key_factor,
        query_factor=query_factor,
        power_of_two=False,
        softmax_scale=1 / (24 * key_factor * query_factor),
    )
    assert all((own.scales > 0).all() for own in scaled.keys)
    check_scaled(scaled)


def test_scales_far_above_those_of_the_first_keys(gpu):
    """What is kept of a segment's rows is beside the scale of its first key, here of each tile's: float16 does not hold
    such averages as they are. The request is cut into single tiles."""
    keys = torch.randn(450, 576, device="cuda")
    keys[::64] *= 2.0**-20
    scaled = make_scaled([450], 1, 16, keys=[keys], softmax_scale=1e-3)
    check_scaled(scaled)


@pytest.mark.parametrize("lengths", [[1300], [400, 70, 0, 250, 129, 64]])
@pytest.mark.parametrize("heads", [8, 9])
def test_few_parts(gpu, monkeypatch, lengths, heads):
    """Rings that are filled more than once, tasks of several requests, and requests that are split."""
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, 2, *shape))
    check_scaled(make_scaled(lengths, 2, heads, 16, power_of_two=False, sight=Sight(window_left=1100)))


def test_scales_of_zero_and_nan(gpu):
    """A key with the scale 0 counts as hidden, as one beyond a request's keys does; NaN spoils who sees it only."""
    scaled = make_scaled([100, 80], 1, 16)
    page = int(scaled.problem.block_tables[0, 1])
    scaled.cache[2][page, 99 % 64] = 0.0
    out, lse = run(scaled.problem, **scaled.arguments())
    scaled.problem.seq_lens[0] = 99
    short, short_lse = run(scaled.problem, **scaled.arguments())
    assert torch.equal(out, short) and torch.equal(lse, short_lse)
    scaled.problem.seq_lens[0] = 100
    scaled.cache[2][page, 99 % 64] = math.nan
    spoiled, _ = run(scaled.problem, **scaled.arguments())
    assert spoiled[0].isnan().all() and torch.equal(spoiled[1], out[1])


def test_sinks_and_a_batch_that_changes_nothing(gpu):
    sinks = torch.randn(8, device="cuda")
    scaled = make_scaled([700, 64, 5], 2, 8, sinks=sinks, lse_includes_sink=True)
    out, lse = check_scaled(scaled, batch_invariant=True, enable_pdl=True)
    alone = scaled.arguments(batch_invariant=True, enable_pdl=True)
    alone["query"] = tuple(x[:1] for x in alone["query"])
    alone |= {"block_tables": scaled.problem.block_tables[:1], "out": None}
    alone["seq_lens"] = torch.tensor([700], dtype=torch.int32, device="cuda")
    got, got_lse = run(scaled.problem, **alone)
    assert torch.equal(got, out[:1]) and torch.equal(got_lse, lse[:1])


def test_a_query_of_other_strides_and_one_scale_for_all_heads(gpu):
    scaled = make_scaled([150, 0, 3], 3, 3)
    scaled.queries.scales = scaled.queries.scales[..., :1].expand(-1, -1, 3)
    out, lse = check_scaled(scaled)
    latent, rope = (x.transpose(0, 2).contiguous().transpose(0, 2) for x in scaled.arguments()["query"][:2])
    cache, *others = scaled.cache
    changed = {"query": (latent, rope, scaled.queries.scales[..., :1]), "kv_cache": (cache.view(torch.uint8), *others)}
    got, got_lse = run(scaled.problem, **scaled.arguments(**changed))
    assert torch.equal(got, out) and torch.equal(got_lse, lse)


def test_a_bf16_query_gives_the_bits_of_a_quantised_one(gpu):
    scaled = make_scaled([150, 3], 2, 8)
    query = torch.randn(2, 2, 8, 576, device="cuda").bfloat16()
    out, lse = run(scaled.problem, **scaled.arguments(query=mla_quantize_q(query)))
    assert (out != 0).any()
    for given in (query, (query[..., :512], query[..., 512:])):
        got, got_lse = run(scaled.problem, **scaled.arguments(query=given))
        assert torch.equal(got, out) and torch.equal(got_lse, lse)
