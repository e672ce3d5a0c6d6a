"""Sums of products as tensor cores make them, and that results are judged by them closely."""

from __future__ import annotations

import math

import decode_reference
import prefill_reference
import pytest
import torch
from fuzz import reference_attention
from fuzz.reference_attention import Cores
from tsmla.identity.arch import Arch
from tsmla.problems import reference, sums
from tsmla.problems.prefill import rmse_of_rounding
from tsmla.problems.sums import narrow_products, products, summed, sums_of, weight_dtype

E4M3 = torch.float8_e4m3fn
NARROW = sums_of(Arch.SM90A, E4M3)
WEIGHTS = weight_dtype(Arch.SM90A, E4M3)
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


def rows(*values: float) -> torch.Tensor:
    """One row of 64 columns."""
    return torch.tensor([[*values, *[0.0] * (64 - len(values))]]).to(E4M3)


def test_what_14_bits_hold_is_exact():
    q, k = (torch.randint(-3, 4, (n, 192)).to(E4M3) for n in (5, 7))
    assert torch.equal(summed(q, k, NARROW), q.double() @ k.double().T)


def test_each_term_is_cut_off_below_the_largest_exponent():
    ones = torch.ones(1, 64).to(E4M3)
    assert summed(rows(256, 2**-5, 2**-6, -(2**-6)), ones, NARROW).item() == 256 + 2**-5
    assert summed(rows(2**-6, 256, -256), ones, NARROW).item() == 0
    q = torch.zeros(1, 64)
    q[0, 0], q[0, 40] = 256, 2**-6  # to a sum of 14 bits
    assert summed(q.to(E4M3), ones, NARROW).item() == 256


def test_exponents_are_those_of_operands():
    """1.5 x 1.5 has the exponent of 1; a subnormal number that of the smallest normal one."""
    assert summed(rows(24, 2**-9, -24), rows(1.5, 1, 1.5), NARROW).item() == 2**-9
    assert summed(rows(2**-9, 2**-9), rows(256, 2**-3), NARROW).item() == 0.5


def test_a_sum_is_cut_off_to_the_bits_that_it_keeps():
    thirty_one = rows(*[1.0] * 31, 2**-9), rows(*[1.0] * 32)
    assert summed(*thirty_one, NARROW).item() == 31 + 2**-9
    assert summed(rows(*[240.0] * 32), rows(*[1.0] * 31, 1.125), NARROW).item() == 240 * 31 + 270
    assert summed(rows(*[240.0] * 32), rows(*[1.0] * 31, 2**-9), NARROW).item() == 240 * 31


def test_rows_in_pieces_go_on_from_the_sum_before_and_are_scaled():
    torch.manual_seed(0)
    latent = [torch.randn(n, 512).to(E4M3) for n in (3, 5)]
    rope = [torch.randn(n, 64).bfloat16() for n in (3, 5)]
    scales = [torch.rand(n) for n in (3, 5)]
    made = products(*zip(latent, rope, scales, strict=True), Arch.SM90A)
    first = summed(*latent, NARROW)
    both = summed(*rope, sums_of(Arch.SM90A, torch.bfloat16), first)
    assert torch.equal(made, both * scales[0].double()[:, None] * scales[1].double())
    assert not torch.equal(both, first + rope[0].double() @ rope[1].double().T)


def test_sums_are_narrow_on_hopper_alone():
    assert [sums_of(arch, E4M3).narrow for arch in (Arch.SM90A, Arch.SM100A)] == [True, False]
    assert not sums_of(Arch.SM90A, torch.bfloat16).narrow
    assert narrow_products(rows(1), rows(1)) is None  # no GPU


@pytest.fixture
def on_hopper(monkeypatch):
    """References judge as they do there, though no GPU is at hand."""
    monkeypatch.setattr(sums, "_arch_of", lambda _: Arch.SM90A)
    monkeypatch.setattr(prefill_reference.checks, "arch_of", lambda _: Arch.SM90A)


def made_by(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, fault: str) -> tuple[torch.Tensor, ...]:
    """Output and natural LSE of a prefill on Hopper, which computes everything else in float64."""
    q = q.clone()
    if fault == "low bits of one column":
        q.view(torch.uint8)[:, 17] &= 0xFC
    found = {
        "one bit less": NARROW._replace(fraction=12, kept=12),
        "16 products at a time": NARROW._replace(depth=16),
        "64 products at a time": NARROW._replace(depth=64),
    }.get(fault, NARROW)
    scores = summed(q, k, found) * scale
    if fault == "a scale off by 2^-9":
        scores *= 1 + 2**-9
    if fault == "one score off by 2^-5":
        scores[:, 3] += 2**-5
    if fault == "a maximum off by 2^-10":
        scores += 2**-10
    lse = scores.logsumexp(-1)
    top = scores.amax(-1, keepdim=True)
    weights = ((scores - top).exp() * 256).to(E4M3 if fault == "weights of 8 bits" else WEIGHTS)
    products = weights.double() @ v.double()
    if fault == "values summed in 13 bits":
        products = summed(weights, v.T.contiguous(), NARROW)
    return (products / 256 * (top - lse[:, None]).exp()).bfloat16(), lse.float()


def accepted(judged_by: str, problem: tuple[torch.Tensor, ...], scale: float, fault: str) -> bool:
    """Whether a reference accepts what a kernel with a fault makes of q, k and v."""
    q, k, v = problem
    out, lse = made_by(q, k, v, scale, fault)
    seen = torch.ones(len(q), len(k), dtype=torch.bool)
    if judged_by == "selftest":
        own = narrow_products(q, k)
        exact, plain = (
            reference.attend(q, k, v, seen, scale, x, 256.0, own, WEIGHTS) for x in (torch.float64, q.dtype)
        )
        tolerance = reference.Tolerance(rmse_of_rounding(WEIGHTS, out.dtype), 0.0, (1e-5, 2e-6))
        return not reference.judge(reference.Attended(out, lse), exact, plain, tolerance).problems
    try:
        if judged_by == "tests":
            ends = [torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k)]
            heads = [x[:, None] for x in problem]
            whole = prefill_reference.Problem(*heads, *ends, [len(q)], [len(k)], scale)
            prefill_reference.judge(whole, False, out[:, None], lse[:, None])
        else:
            expected = reference_attention.attend(q, k, v, seen, scale, Cores(Arch.SM90A, q.dtype))
            precision = reference_attention.precision(WEIGHTS, torch.bfloat16)
            reference_attention.judge(expected, out, lse, 1.0, precision)
    except AssertionError:
        return False
    return True


FAULTS = (
    "one bit less", "16 products at a time", "64 products at a time", "low bits of one column",
    "a scale off by 2^-9", "one score off by 2^-5", "a maximum off by 2^-10", "weights of 8 bits",
)  # fmt: skip


@pytest.mark.parametrize("judged_by", ["selftest", "tests", "fuzz"])
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("opposed", [False, True])
def test_faults_within_what_sums_lose_are_refused(on_hopper, judged_by, dtype, opposed):
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, d) for n, d in ((6, 192), (60, 192), (60, 128)))
    if opposed:
        q, k = -q.abs(), k.abs()
    problem = tuple(x.to(dtype) for x in (q, k, v))
    scale = 1 / math.sqrt(192)
    assert accepted(judged_by, problem, scale, "")
    assert [fault for fault in FAULTS if accepted(judged_by, problem, scale, fault)] == []


@pytest.mark.parametrize("judged_by", ["selftest", "tests", "fuzz"])
def test_values_of_one_sign_tell_that_13_bits_sum_them(on_hopper, judged_by):
    torch.manual_seed(0)
    k, v = torch.randn(200, 192), (torch.rand(200, 128) + 0.5) / 64
    v[0] *= 2**13
    problem = tuple(x.to(E4M3) for x in (torch.zeros(6, 192), k, v))
    assert accepted(judged_by, problem, 1.0, "")
    assert not accepted(judged_by, problem, 1.0, "values summed in 13 bits")


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_a_decode_whose_weights_have_8_bits_is_refused(on_hopper, dtype):
    torch.manual_seed(0)
    q, k = (torch.randn(n, 576).to(dtype) for n in (6, 60))
    problem = decode_reference.Problem(q[None, None], [k], k[None], torch.zeros(1, 1, dtype=torch.int32), [60])

    def judge(fault: str) -> None:
        out, lse = made_by(q, k, k[:, :512], problem.softmax_scale, fault)
        decode_reference.judge(problem, out[None, None], lse[None, None] / math.log(2))

    judge("")
    with pytest.raises(AssertionError, match="is off by|relative RMSE"):
        judge("weights of 8 bits")
