"""A request's bits do not depend on its batch: of decodes with batch_invariant, in emulation, and of all prefills."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
import tsmla
from batch_invariance import Result, differing
from decode_reference import Problem, check, make_problem, run
from emulated_archs import KERNELS, SMS
from prefill_reference import make_problem as make_prefill
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla_emulator.run import machine
from unwatched import unwatched

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]


def on_sms(monkeypatch, count: int) -> None:
    """Plan for a GPU of so many SMs."""
    monkeypatch.setattr("tsmla.operators.decode.plan_decode", lambda arch, _, *shape: plan_decode(arch, count, *shape))


def check_invariance(gpu, monkeypatch, problem: Problem) -> None:
    """Together on few SMs, alone on more."""
    on_sms(monkeypatch, 3)
    together = check(problem, batch_invariant=True)
    on_sms(monkeypatch, 8)
    with unwatched(gpu):
        assert differing(problem, together, batch_invariant=True) == []


@pytest.mark.parametrize("heads, q_len", [(16, 1), (48, 3)])
def test_requests_of_one_query_length(gpu, monkeypatch, heads, q_len):
    check_invariance(gpu, monkeypatch, make_problem([520, 65, 0, 300], q_len, heads))


@pytest.mark.parametrize("heads, query_lengths", [(16, [1, 9, 0, 20]), (80, [1, 3, 0, 2])])
def test_requests_of_any_query_lengths(gpu, monkeypatch, heads, query_lengths):
    """Alone they are no pack: one that the plug-in need not make gives the same bits, too."""
    check_invariance(gpu, monkeypatch, make_problem([520, 65, 300, 70], query_lengths, heads))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_other_dtypes(gpu, monkeypatch, dtype):
    check_invariance(gpu, monkeypatch, make_problem([520, 65, 300], [1, 9, 2], 16, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_whatever_the_queries_of_others_hold(gpu, dtype):
    """They lie behind a request's own in its row tile."""
    problem = make_problem([700, 300], [2, 5], 3, dtype)
    exact, exact_lse = check(problem, batch_invariant=True)
    for value in (math.nan, math.inf, torch.finfo(dtype).max, 0.0):
        query = problem.query.clone()
        query[2:] = value
        with unwatched(gpu):
            out, lse = run(dataclasses.replace(problem, query=query), batch_invariant=True)
        assert torch.equal(out[:2], exact[:2]) and torch.equal(lse[:2], exact_lse[:2])


def test_nothing_is_launched_to_combine(gpu, monkeypatch):
    """There is nothing to: no request is split."""
    entries = []
    run_launches = machine.run_launches

    def noted(module, launches, regions, options):
        entries.extend(launch.entry for launch in launches)
        return run_launches(module, launches, regions, options)

    monkeypatch.setattr(machine, "run_launches", noted)
    problem = make_problem([700, 65, 0], 1, 16)
    check(problem)
    assert sum("combine" in entry for entry in entries) == 1 and len(entries) == 2
    entries.clear()
    check(problem, batch_invariant=True)
    assert len(entries) == 1 and "combine" not in entries[0]


def test_otherwise_bits_do_depend(gpu, monkeypatch):
    on_sms(monkeypatch, 6)
    problem = make_problem([1300, 900], 1, 16)
    with unwatched(gpu):
        assert differing(problem, run(problem))


def test_nothing_is_written_into_the_workspace_but_that_there_is_nothing_to_combine(gpu, monkeypatch):
    on_sms(monkeypatch, 6)
    problem = make_problem([700, 65], 1, 16)
    given = problem.arguments(batch_invariant=True)
    before = given["workspace_buffer"].clone()
    run(problem, **given)
    written = (given["workspace_buffer"] != before).nonzero()
    plan = plan_decode(Arch(gpu.arch), 6, 2, 1, 16, 700, batch_invariant=True)
    assert plan.slots == 0 and plan.workspace_bytes == 32 * plan.records
    assert written.numel() and int(written.max()) < plan.workspace_bytes
    words = given["workspace_buffer"][: plan.workspace_bytes].view(torch.int32).view(-1, 8)
    assert not words[:, 0].any()
    check(problem, batch_invariant=True, workspace_buffer=given["workspace_buffer"][: plan.workspace_bytes])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_prefill_never_depends(gpu, causal):
    lengths_q, lengths_kv = [150, 3, 1], [300, 40, 400]
    problem = make_prefill(lengths_q, lengths_kv, 2, 1, 192, 128, torch.bfloat16, "cuda")
    ends_q, ends_kv = (list(itertools.accumulate(n, initial=0)) for n in (lengths_q, lengths_kv))

    def ends(length: int) -> torch.Tensor:
        return torch.tensor([0, length], dtype=torch.int32, device="cuda")

    def call(query, key, value, cum_q, cum_kv, batch) -> Result:
        return tsmla.tsmla_prefill(
            query, key, value, None, cum_kv, 400, batch, problem.softmax_scale, causal, True, cum_q
        )

    out, lse = call(problem.query, problem.key, problem.value, problem.cum_seq_lens_q, problem.cum_seq_lens_kv, 3)
    for i, (n, m) in enumerate(zip(lengths_q, lengths_kv, strict=True)):
        mine, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_kv[i], ends_kv[i + 1])
        with unwatched(gpu):
            single = call(problem.query[mine], problem.key[keys], problem.value[keys], ends(n), ends(m), 1)
        assert torch.equal(single[0], out[mine]) and torch.equal(single[1], lse[mine])
