"""`tsmla selftest` in the emulator: right kernels pass, and kernels that are wrong in one way each are reported."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from decode_reference import Problem, Sight
from decode_reference import attend as attend_decode
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.variant import (
    DecodeVariant,
    Dtype,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    WriteCacheVariant,
)
from tsmla.loading import gpu, resolve
from tsmla.problems import chosen as chosen_problems
from tsmla.problems import decode as decode_problems
from tsmla.problems import memory as memory_problems
from tsmla.problems import pack as pack_problems
from tsmla.problems import prefill as prefill_problems
from tsmla.problems.cases import ChosenCase, DecodeCase, PackCase, PrefillCase
from tsmla.problems.memory import Memory, Repetitions, is_poison
from tsmla.tools import cli, emulated
from tsmla.tools.selftest import child as selftest_child
from tsmla.tools.selftest.child import run_kernel
from tsmla.tools.selftest.protocol import Job
from tsmla_emulator.run import machine
from tsmla_emulator.run.emulate import emulated as emulation

ARCH = Arch.SM100A
PACK = PackVariant(ARCH, Dtype.BF16, Dtype.E4M3, 128, 64, 128)
PREFILL = PrefillVariant(ARCH, Dtype.BF16, Dtype.BF16, 128, 128, causal=True, lse=True)
DECODE = DecodeVariant(ARCH, Dtype.E4M3, Dtype.BF16, lse=True)
WRITE = WriteCacheVariant(ARCH, Dtype.BF16, ROWS["snapmla"])
READ = ReadCacheVariant(ARCH, Dtype.BF16, ROWS["fp8_ds_mla"])
QUERY = QuantizeQVariant(ARCH, Dtype.BF16, ROWS["snapmla"])
BYTES = (PACK, WRITE, READ, QUERY)
"""Kernels whose every byte is compared."""
JOB = Job([], full=False, repeats=2, steps=("emulated",), emulated=ARCH)


def run(variant, compiled, said=None, **options):
    """The outcome of a kernel, with `options` of the emulator."""
    with emulation(ARCH, compiled=compiled, **options):
        return run_kernel(variant, JOB, lambda event: said.append(event) if said is not None else None)


@pytest.mark.parametrize("variant", [*BYTES, PREFILL, DECODE], ids=str)
def test_a_kernel_passes(compiled_kernels, variant):
    said = []
    outcome = run(variant, compiled_kernels, said)
    assert outcome.ok and outcome.problem == "" and outcome.served == "emulated"
    assert outcome.cases == len(said) and outcome.worst_error <= 1
    assert outcome.worst_error > 0 or variant in BYTES


def test_short_cases_reach_both_prefill_kernels_of_hopper(compiled_kernels):
    """The one whose CTAs take several query tiles, and, in 16 bits, the one of long sequences."""
    variant = dataclasses.replace(PREFILL, arch=Arch.SM90A)
    with emulation(Arch.SM90A, machine.Options(async_mode="late"), compiled=compiled_kernels) as gpu:
        assert run_kernel(variant, dataclasses.replace(JOB, emulated=Arch.SM90A), lambda event: None).ok
    assert len({launch.entry for call in gpu.calls for launch in call.launches}) == 2


def without(text: str, replacement: str):
    """A rewrite of PTX."""

    def rewrite(module):
        assert text in module.text
        return machine.parse(module.text.replace(text, replacement))

    return rewrite


@pytest.mark.parametrize(
    ("variant", "text", "replacement", "problem"),
    [
        (PACK, "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32", "differ from torch's"),
        (WRITE, "rcp.approx.ftz.f32", "neg.f32", "differ from torch's"),
        (READ, "mul.f32", "add.f32", "differ from torch's"),
        (QUERY, "max.f32", "min.f32", "differ from torch's"),
        (PREFILL, "ex2.approx.ftz.f32", "neg.f32", "output is off by"),
        (PREFILL, "fence.mbarrier_init.release.cluster;", "trap;", "EmulationError: "),
    ],
    ids=["another format", "no reciprocals", "sums for products", "least for largest", "no exponentials", "a trap"],
)
def test_a_broken_kernel_is_reported(compiled_kernels, variant, text, replacement, problem):
    outcome = run(variant, compiled_kernels, rewrite=without(text, replacement))
    assert not outcome.ok and problem in outcome.problem


class Tampering:
    """Calls the pack operator, and then does something that a kernel must not do."""

    def __init__(self, act):
        self.calls, self._act, self._operator = 0, act, pack_problems.mla_kv_pack_quantize_fp8

    def __call__(self, *arguments):
        results = self._operator(*arguments)
        self.calls += 1
        self._act(self.calls, *(result.view(torch.uint8) for result in results))
        return results


def flip(call, k, v):
    v[-1, -1, -1] ^= 1


def flip_once(call, k, v):
    k[0, 0, 0] ^= call == 2


def overrun(call, k, v):
    v.as_strided((1,), (1,), v.storage_offset() + v.stride(0) * v.shape[0]).zero_()


def write_between(call, k, v):
    if k.stride(1) > k.shape[2]:
        k.as_strided((1,), (1,), k.storage_offset() + k.shape[2]).zero_()


def leave_poison(call, k, v):
    v[-1:].fill_(0xFF)


def call_another(call, k, v):
    resolve.resolve(dataclasses.replace(PACK, out_dtype=Dtype.E5M2))


@pytest.mark.parametrize(
    ("act", "problem"),
    [
        (flip, "1 of 128 elements of v differ from torch's"),
        (flip_once, "1 of 1 repetitions differ from the first call"),
        (overrun, "memory beside a result or the workspace was written"),
        (write_between, "strided: memory beside a result or the workspace was written"),
        (leave_poison, "128 of 128 elements of v differ from torch's"),
        (call_another, "as well"),
    ],
)
def test_whatever_is_wrong_is_reported(compiled_kernels, monkeypatch, act, problem):
    monkeypatch.setattr(pack_problems, "mla_kv_pack_quantize_fp8", Tampering(act))
    outcome = run(PACK, compiled_kernels)
    assert not outcome.ok and problem in outcome.problem


@pytest.mark.parametrize("at_once", [1, 2, 5], ids="{} at once".format)
@pytest.mark.parametrize(
    ("act", "calls", "problem"),
    [
        (flip, (2, 5), "2 of 5 repetitions differ from the first call"),
        (flip, (6,), "1 of 5 repetitions differ from the first call"),
        (flip, (1,), "5 of 5 repetitions differ from the first call"),
        (overrun, (4,), "memory beside a result or the workspace was written"),
        (overrun, (6,), "memory beside a result or the workspace was written"),
        (leave_poison, (3,), "1 of 5 repetitions differ from the first call"),
    ],
)
def test_whatever_a_repetition_does_is_reported(compiled_kernels, monkeypatch, act, calls, problem, at_once):
    """Repetitions are looked at several at a time; each counts."""
    case = PackCase("small", 3, 2)
    monkeypatch.setattr(selftest_child, "cases_of", lambda family, full: (case,))
    monkeypatch.setattr(memory_problems, "_BYTES_AT_ONCE", at_once * 2 * 12288)
    tampering = Tampering(lambda call, k, v: act(call, k, v) if call in calls else None)
    monkeypatch.setattr(pack_problems, "mla_kv_pack_quantize_fp8", tampering)
    with emulation(ARCH, compiled=compiled_kernels):
        outcome = run_kernel(PACK, dataclasses.replace(JOB, repeats=6), lambda event: None)
    assert tampering.calls == 6 and f"small: {problem}" in outcome.problem.split("; ")
    assert ("differ from the first" in outcome.problem) == (act is not overrun)


def test_scratch_memory_may_differ_but_not_what_is_beside_it():
    with emulation(ARCH):
        first = Memory()
        first.allocate((100,), torch.int8, scratch=True)
        first.allocate((3, 5), torch.float16, gap=2)
        for beside in (False, True):
            again = Repetitions(first)
            for room in again.rooms(3):
                workspace = room.allocate((100,), torch.int8, scratch=True)
                assert is_poison(workspace).all() and is_poison(room.allocate((3, 5), torch.float16, gap=2)).all()
                workspace.as_strided((100,), (1,), workspace.storage_offset() + beside).fill_(7)
            assert (again.differing(), again.overrun()) == (0, beside)
        with pytest.raises(RuntimeError, match="where the first call asked for"):
            next(Repetitions(first).rooms(1)).allocate((99,), torch.int8, scratch=True)


def test_a_kernel_that_another_step_served_is_reported(compiled_kernels, monkeypatch):
    with emulation(ARCH, compiled=compiled_kernels):
        search = resolve._search
        monkeypatch.setattr(resolve, "_search", lambda variant: search(variant)._replace(step="jit"))
        outcome = run_kernel(PACK, JOB, lambda event: None)
        monkeypatch.undo()
    assert outcome.problem == "served by jit, not by emulated"


@pytest.mark.parametrize(
    ("variant", "case", "problems", "owner"),
    [
        (PREFILL, PrefillCase("small", (3, 5), (8, 70)), prefill_problems, "sequence"),
        (DECODE, DecodeCase("small", (9, 70), heads=5, q_lens=(2, 1)), decode_problems, "request"),
    ],
    ids=["prefill", "decode"],
)
def test_writes_to_rows_that_belong_to_nobody_are_reported(compiled_kernels, variant, case, problems, owner):
    with emulation(ARCH, compiled=compiled_kernels):
        memory = Memory()
        results = problems.run(variant, case, memory, pdl=False)
        assert problems.check(variant, case, results).problems == [] and not memory.overrun()
        first = sum(case.lengths_q if variant is PREFILL else case.q_lens)
        for name, result in results.items():
            changed = {**results, name: result.clone()}
            changed[name][first : first + 1] = 0
            found = problems.check(variant, case, changed).problems
            assert found == [f"{name} has rows that belong to no {owner} and were written"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda given: {"topk_length": None},
        lambda given: {"indices": given["indices"].clamp(0, 12 * 61 - 1)},
        lambda given: {"indices": given["indices"].flip(-1)},
        lambda given: {"batch_invariant": True},
    ],
    ids=["whole lists", "strays name keys", "lists backwards", "another order of sums"],
)
def test_wrong_lists_of_keys_are_reported(compiled_kernels, monkeypatch, wrong, request):
    """The order of sums is free."""
    case = ChosenCase("small", 130, 3, lengths=(130, 64, 0), page=61, outside=0.3, sinks=True)
    kernel = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, lse=True, gathers=True)
    decode = chosen_problems.tsmla_decode
    monkeypatch.setattr(
        chosen_problems, "tsmla_decode", lambda *given, **named: decode(*given, **{**named, **wrong(named)})
    )
    with emulation(kernel.arch, compiled=compiled_kernels):
        results = chosen_problems.run(kernel, case, Memory(), pdl=False)
        judged = chosen_problems.check(kernel, case, results)
    assert (judged.problems == []) == ("another order" in request.node.name)


@pytest.mark.parametrize("q_lens", [(), (2, 1, 4)], ids=["one query length", "a pack"])
@pytest.mark.parametrize("ranks, interleave, window, causal", [(1, 1, -1, True), (2, 3, 9, True), (3, 1, -1, False)])
def test_decode_expects_what_the_tests_expect(ranks, interleave, window, causal, q_lens):
    """The two references are written apart; the tests' asks every key by itself."""
    case = DecodeCase("small", (5, 0, 40), 3, 2, 16, causal, window, ranks, interleave, output_scale=0.5, q_lens=q_lens)
    with emulation(ARCH):
        given = decode_problems._problem(case, Dtype.BF16, uniform_row(Dtype.BF16))
        ours, _ = decode_problems._expected(case, Dtype.BF16, uniform_row(Dtype.BF16), torch.bfloat16)
        sight = Sight(causal, window, ranks, ranks - 1, interleave)
        problem = Problem(
            given.given,
            given.rows,
            given.cache,
            given.tables,
            [len(rows) for rows in given.rows],
            list(case.lengths),
            sight=sight,
            output_scale=0.5,
            cum_q=[*itertools.accumulate(q_lens, initial=0)] if q_lens else None,
        )
        out, lse = attend_decode(problem, torch.float64)
        out, lse = out.flatten(0, -3)[: len(ours.out)], lse.flatten(0, -2)[: len(ours.lse)]
        assert torch.allclose(ours.out, out) and torch.allclose(ours.lse, lse) and out.abs().max() > 0


def test_a_result_that_is_not_merged_is_reported(compiled_kernels, monkeypatch):
    case = PrefillCase("small", (3, 5), (8, 70), merges=True)
    operator = prefill_problems.tsmla_prefill

    def forgets(*args, merge_into, **named):
        out, lse = merge_into
        given = [*args]
        given[13] = out
        return operator(*given, **{**named, "lse": lse})

    with emulation(ARCH, compiled=compiled_kernels):
        for which in (operator, forgets):
            monkeypatch.setattr(prefill_problems, "tsmla_prefill", which)
            results = prefill_problems.run(PREFILL, case, Memory(), pdl=True)
            problems = prefill_problems.check(PREFILL, case, results).problems
            assert bool(problems) == (which is forgets), problems


def test_the_command_runs_a_child(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    symbol = emulated.examples(Arch.SM100A)[0].symbol()
    assert cli.main(["selftest", "--emulated", "sm_100a", "--kernel", symbol, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["gpu"] == "emulated sm_100a" and record["emulated"] and not record["full"]
    assert [(kernel["symbol"], kernel["ok"], kernel["served"]) for kernel in record["kernels"]] == [
        (symbol, True, "emulated")
    ]


@pytest.mark.parametrize(
    ("tests", "variant", "case"),
    [
        (prefill_problems, PREFILL, PrefillCase("small", (3, 5), (8, 70), sinks=True, lse_includes_sink=True)),
        (
            prefill_problems,
            PREFILL,
            PrefillCase("small", (3, 5, 2), (8, 70, 0), (5, 1), factors=(1.0, 2.0, 0.5), sinks=True, merges=True),
        ),
        (decode_problems, DECODE, DecodeCase("small", (9, 70), heads=5, sinks=True, lse_includes_sink=True)),
    ],
    ids=["prefill", "a merged prefill", "decode"],
)
def test_sinks_that_are_forgotten_are_reported(compiled_kernels, monkeypatch, tests, variant, case):
    name = f"tsmla_{tests.__name__.rpartition('.')[2]}"
    operator = getattr(tests, name)
    with emulation(ARCH, compiled=compiled_kernels):
        for forgotten in ((), ("sinks",), *[("lse_includes_sink",)] * case.lse_includes_sink):
            given = {which: None if which == "sinks" else False for which in forgotten}
            monkeypatch.setattr(tests, name, lambda *args, given=given, **named: operator(*args, **{**named, **given}))
            memory = Memory()
            results = tests.run(variant, case, memory, pdl=True)
            problems = tests.check(variant, case, results).problems
            assert bool(problems) == bool(forgotten), problems
