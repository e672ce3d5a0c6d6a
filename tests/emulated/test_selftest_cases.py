"""Every case of `tsmla selftest --full` on right kernels: a case that expects something else calls them wrong on users'
GPUs, and none of its repetitions there would be noticed here."""

from __future__ import annotations

from collections import defaultdict

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import (
    FAMILIES,
    DecodeVariant,
    Dtype,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    WriteCacheVariant,
)
from tsmla.problems import cache as cache_problems
from tsmla.problems import kept
from tsmla.problems.cases import PrefillCase, cases_of, kind_of
from tsmla.problems.memory import Memory
from tsmla.tools.selftest.child import CALLS, run_kernel
from tsmla.tools.selftest.protocol import Job
from tsmla_emulator.prove.check import check
from tsmla_emulator.run.emulate import Emulation
from tsmla_emulator.run.emulate import emulated as emulation
from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS

KERNELS = {
    "prefill": (
        PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, causal=True, lse=True),
        PrefillVariant(Arch.SM100A, Dtype.E4M3, Dtype.BF16, 192, 128, causal=False, lse=True),
        PrefillVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, 192, 128, causal=False, lse=True, masked=True),
    ),
    "decode": (
        DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, lse=True),
        DecodeVariant(Arch.SM100A, Dtype.E4M3, Dtype.BF16, lse=True),
        DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, lse=True, gathers=True),
        DecodeVariant(Arch.SM100A, Dtype.BF16, Dtype.BF16, lse=True, row=ROWS["latent_bf16"]),
    ),
    "pack": (PackVariant(Arch.SM100A, Dtype.BF16, Dtype.E4M3, 128, 64, 128),),
    "write_cache": (
        WriteCacheVariant(Arch.SM100A, Dtype.BF16, ROWS["snapmla"]),
        WriteCacheVariant(Arch.SM100A, Dtype.BF16, ROWS["latent_e4m3"]),
    ),
    "read_cache": (
        ReadCacheVariant(Arch.SM100A, Dtype.BF16, ROWS["fp8_ds_mla"]),
        ReadCacheVariant(Arch.SM100A, Dtype.BF16, ROWS["latent_bf16"]),
    ),
    "key_mask": (KeyMaskVariant(Arch.SM100A),),
    "quantize_q": (QuantizeQVariant(Arch.SM100A, Dtype.BF16, ROWS["snapmla"]),),
}
"""Kernels that each case of their family means something to: with an LSE, and rope pieces where there may be any."""


@pytest.mark.parametrize(
    "variant", [kernel for family in FAMILIES for kernel in KERNELS[family]], ids=lambda kernel: kernel.symbol()
)
def test_right_kernels_pass_every_case(compiled_kernels, variant):
    job = Job([], full=True, repeats=1, steps=("emulated",), emulated=variant.arch)
    begun: list[tuple[str, int]] = []
    with emulation(variant.arch, compiled=compiled_kernels) as gpu:
        outcome = run_kernel(variant, job, lambda event: begun.append((event["case"], len(gpu.calls))))
    assert outcome.problem == "" and outcome.served == "emulated"
    cases = cases_of(kind_of(variant), full=True)
    assert [name for name, _ in begun] == [case.name for case in cases]
    reached = {launch.entry for call in gpu.calls for launch in call.launches}
    assert reached == {*gpu.calls[0].module.entries}, "a kernel that no case launches"
    if kind_of(variant) == "prefill" and variant.arch is Arch.SM90A:
        ends = [*(calls for _, calls in begun[1:]), len(gpu.calls)]
        entries = defaultdict(set)
        for case, (_, start), end in zip(cases, begun, ends, strict=True):
            assert isinstance(case, PrefillCase)
            long = sum(case.lengths_kv) + case.unused_keys > LONG_KEYS * len(case.lengths_kv)
            entries[long] |= {launch.entry for call in gpu.calls[start:end] for launch in call.launches}
        assert len(entries[True]) == len(entries[False]) == 1 and entries[True] != entries[False]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("name", ["fp8_ds_mla", "snapmla"])
def test_cases_launch_every_kernel_of_scaled_rows(compiled_kernels, monkeypatch, name, gathers):
    """Kernels of few rows, of many and of pairs; nothing is run here."""
    dtype = Dtype.E4M3 if name == "snapmla" else Dtype.BF16
    variant = DecodeVariant(Arch.SM90A, dtype, Dtype.BF16, lse=True, row=ROWS[name], gathers=gathers)
    kernels, launched = set(), set()

    def run(_, symbol, module, launches, *rest):
        assert symbol == variant.symbol()
        kernels.update(module.entries)
        launched.update(launch.entry for launch in launches)

    monkeypatch.setattr(Emulation, "run", run)
    with emulation(variant.arch, compiled=compiled_kernels):
        for case in cases_of(kind_of(variant), full=True):
            CALLS[type(case)].run(variant, case, Memory(), pdl=False)
    assert launched == kernels and len(kernels) >= 5


def test_queries_of_lists_of_scaled_rows_are_quantised_already(compiled_kernels):
    """A query that the operator quantises first would be served by another kernel as well."""
    variant = DecodeVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, lse=True, row=ROWS["snapmla"], gathers=True)
    with emulation(variant.arch, compiled=compiled_kernels):
        outcome = run_kernel(variant, Job([], full=False, repeats=1, steps=("emulated",), emulated=variant.arch), print)
    assert outcome.problem == "" and outcome.served == "emulated"


@pytest.mark.parametrize("family", ["write_cache", "read_cache", "quantize_q"])
def test_checks_leave_nothing_to_the_next_one(compiled_kernels, monkeypatch, family):
    """Inputs of another check were drawn from its seed, and lie in memory that its calls were recorded with."""
    kept.forget()
    variant, drawn = KERNELS[family][0], []
    surrounded = cache_problems.surrounded
    monkeypatch.setattr(cache_problems, "surrounded", lambda *asked: drawn.append(asked) or surrounded(*asked))
    for _ in range(2):
        assert check(variant, compiled=compiled_kernels).error is None
    first, second = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    assert first == second and first
