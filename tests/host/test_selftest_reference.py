"""What `tsmla selftest` holds kernels against: its float64 attention, and that its bounds refuse what is wrong."""

from __future__ import annotations

import math

import pytest
import torch
from cache_rows import cut, restored, stored
from judgement import assert_right
from tsmla.identity.row_format import ROWS
from tsmla.problems import cache as cache_problems
from tsmla.problems import chosen as chosen_problems
from tsmla.problems import decode as decode_problems
from tsmla.problems import key_mask as key_mask_problems
from tsmla.problems import pack as pack_problems
from tsmla.problems import prefill as prefill_problems
from tsmla.problems.cases import cases_of
from tsmla.problems.reference import (
    LARGEST_ERROR,
    Attended,
    Tolerance,
    attend,
    judge,
    with_sinks,
)
from tsmla.problems.rows import numbers_in, stored_as

TOLERANCE = Tolerance(torch.finfo(torch.bfloat16).eps, 0.0, (1e-5, 2e-6))


@pytest.fixture(autouse=True, params=range(3))
def seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(request.param)


def problem(rows: int = 40, keys: int = 70, dtype: torch.dtype = torch.bfloat16):
    """q, k, v, and a mask in which the first row sees nothing."""
    q, k, v = (torch.randn(n, d).to(dtype) for n, d in ((rows, 192), (keys, 192), (keys, 128)))
    return q, k, v, torch.rand(rows, keys) < torch.linspace(0, 1, rows)[:, None]


def kernel(dtype: torch.dtype = torch.bfloat16):
    """What a kernel gives that does everything right, in float64 and plain."""
    given = problem(dtype=dtype)
    exact, plain = (attend(*given, 192**-0.5, compute) for compute in (torch.float64, dtype))
    return Attended(exact.out.bfloat16(), exact.lse.float()), exact, plain


def test_float64_is_what_torch_computes():
    q, k, v, seen = problem(dtype=torch.float64)
    out, lse = attend(q, k, v, seen, 0.1, torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(*(x[None] for x in (q, k, v)), seen[None], scale=0.1)[0]
    some = seen.any(-1)
    assert torch.allclose(out[some], expected[some])
    assert torch.allclose(lse[some].exp(), (torch.exp(q @ k.T * 0.1) * seen).sum(-1)[some])
    assert (out[~some] == 0).all() and (lse[~some] == -math.inf).all() and not some.all()


def test_no_keys():
    q, k, v, seen = problem(keys=0)
    out, lse = attend(q, k, v, seen, 0.1, torch.float64)
    assert out.shape == (40, 128) and (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("in_lse", [False, True])
def test_a_sink_is_a_key_without_a_value(in_lse):
    q, k, v, seen = problem(dtype=torch.float64)
    plain = attend(q, k, v, seen, 0.1, torch.float64)
    for sink in (0.5, 30.0, -math.inf):
        scores = torch.cat([(q @ k.T * 0.1).masked_fill(~seen, -math.inf), q.new_full((40, 1), sink)], 1)
        lse = scores.logsumexp(-1)
        weights = scores.softmax(-1).nan_to_num(0.0)
        got = with_sinks(Attended(plain.out[:, None], plain.lse[:, None]), torch.tensor([sink]), in_lse)
        assert torch.allclose(got.out[:, 0], weights @ torch.cat([v, v.new_zeros(1, 128)]))
        assert torch.equal(got.lse[:, 0], plain.lse) if not in_lse else torch.allclose(got.lse[:, 0], lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_the_right_result_is_accepted(dtype):
    judged = judge(*kernel(dtype), TOLERANCE)
    assert judged.problems == [] and 0 < judged.error <= 1


WRONG = {
    "zeros": (lambda out, lse: out.zero_(), "output's relative RMSE"),
    "a NaN": (lambda out, lse: out[5:6].fill_(math.nan), "output is off by 1e+06 times what is allowed, at [5, 0]"),
    "an infinity": (lambda out, lse: out[5:6].fill_(math.inf), "output is off"),
    "one element": (lambda out, lse: out[7, 3:4].add_(0.2), "output is off"),
    "small, everywhere": (lambda out, lse: out.mul_(1.01), "output's relative RMSE"),
    "another row": (lambda out, lse: out.copy_(out.roll(1, 0)), "output"),
    "something for no key": (lambda out, lse: out[0].fill_(1e-30), "a row that sees no key does not give 0"),
    "NaN for no key": (lambda out, lse: out[0].fill_(math.nan), "a row that sees no key does not give 0"),
    "LSE": (lambda out, lse: lse[9:10].add_(1e-4), "LSE is off"),
    "LSE of base 2": (lambda out, lse: lse.div_(math.log(2)), "LSE is off"),
    "LSE NaN": (lambda out, lse: lse[9:10].fill_(math.nan), "LSE is off"),
    "LSE for no key": (lambda out, lse: lse[0:1].fill_(0.0), "LSE is not -inf"),
    "no LSE for keys": (lambda out, lse: lse[-1:].fill_(-math.inf), "LSE is not -inf"),
}


@pytest.mark.parametrize("change, text", WRONG.values(), ids=WRONG.keys())
def test_wrong_results_are_refused(change, text):
    got, exact, plain = kernel()
    change(got.out, got.lse)
    judged = judge(got, exact, plain, TOLERANCE)
    assert any(text in problem for problem in judged.problems), judged
    assert 0 <= judged.error <= LARGEST_ERROR


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 16), (torch.float8_e4m3fn, 128)], ids=str)
def test_a_row_that_loses_keys_of_many_is_refused(dtype, lost):
    """Outputs over 8,192 random keys are 0.01; a step of 1, which elements are held to, is as large."""
    q, k, v = (torch.randn(n, d).to(dtype) for n, d in ((16, 192), (8192, 192), (8192, 128)))
    seen = torch.ones(16, 8192, dtype=torch.bool)
    exact, plain = (attend(q, k, v, seen, 0.02, compute) for compute in (torch.float64, dtype))
    seen[5, 1000 : 1000 + lost] = False
    fewer = attend(q, k, v, seen, 0.02, torch.float64)
    right, wrong = (Attended(made.out.bfloat16(), exact.lse.float()) for made in (exact, fewer))
    assert judge(right, exact, plain, TOLERANCE).problems == []
    problems = judge(wrong, exact, plain, TOLERANCE).problems
    assert any("a row's RMSE" in problem and "at [5]" in problem for problem in problems), problems
    assert_right(*right, exact, plain, TOLERANCE)
    with pytest.raises(AssertionError, match=r"row \[5\] is off"):
        assert_right(*wrong, exact, plain, TOLERANCE)


def test_without_lse_nothing_is_asked_of_it():
    got, exact, plain = kernel()
    got.lse.fill_(math.nan)
    assert judge(got, exact, plain, TOLERANCE, has_lse=False).problems == []


@pytest.mark.parametrize(
    ("tests", "families"),
    [
        (prefill_problems, ["prefill", "masked"]),
        (decode_problems, ["decode", "gathered"]),
        (chosen_problems, ["gathered"]),
        (pack_problems, ["pack"]),
        (cache_problems, ["write_cache", "read_cache", "quantize_q"]),
        (key_mask_problems, ["key_mask"]),
    ],
)
def test_what_one_kernel_made_is_there_for_the_next(tests, families):
    """Kernels go through all cases in turn: of a cache for fewer than these, nothing would be found."""
    kept = [each.cache_parameters()["maxsize"] for each in vars(tests).values() if hasattr(each, "cache_parameters")]
    assert kept and min(kept) >= max(len(cases_of(family, full=True)) for family in families)


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_stored_and_read_as_formats_say(name):
    """With powers of two for scales, and NaN where a number is."""
    row = ROWS[name]
    numbers = (torch.randn(9, 576) * torch.logspace(-3, 1, 9)[:, None]).bfloat16()
    kept = stored_as(row, numbers)
    format_dtype = torch.float16 if name.endswith("fp16") else torch.bfloat16
    wanted = stored(*cut(numbers.to(format_dtype), name), name, power_of_two=True)
    for got, want in zip(kept if isinstance(kept, tuple) else (kept,), wanted.values(), strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8).view(9, -1), want.view(9, -1))
    read = restored(wanted, name, format_dtype)
    assert torch.equal(numbers_in(row, kept).float(), read.float())
    numbers[3, 200] = math.nan
    assert numbers_in(row, stored_as(row, numbers))[3, 200].isnan()
