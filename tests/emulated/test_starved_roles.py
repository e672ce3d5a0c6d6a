"""Prefill where some warps run only when no other can: nobody may rely on how far others have come."""

from __future__ import annotations

import dataclasses

import pytest
from emulated_archs import KERNELS
from tsmla.identity.arch import Arch
from tsmla.identity.dtype import Dtype
from tsmla.identity.support import prefill_dims
from tsmla.identity.variant import PrefillVariant
from tsmla_emulator.prove.check import check
from tsmla_emulator.run.machine import Options

from docs.pictures import schedules_of

LENGTHS = {
    True: ([256, 129, 300, 256], [100, 255, 64, 129]),
    False: ([129, 257, 384, 130], [700, 128, 0, 300]),
}
"""Causal and full: query tiles that begin or end with another KV tile than their neighbours, or see none."""

VARIANTS = [
    PrefillVariant(arch, dtype, Dtype.BF16, causal=causal, lse=True, d_qk=d_qk, d_v=d_v)
    for arch in map(Arch, KERNELS)
    for dtype in (Dtype.BF16, Dtype.E4M3)
    for d_qk, d_v in prefill_dims(arch, dtype)
    if d_qk > 128  # those of 128 have the same roles and tiles as those of 192
    for causal in (True, False)
]


def groups_of(variant: PrefillVariant) -> list[tuple[int, ...]]:
    """Warps that work together: of each role, those of one warpgroup."""
    (schedule,) = schedules_of(variant).values()
    return [
        tuple(warp for warp in role.warps if warp // 4 == group)
        for role in schedule.roles
        for group in sorted({warp // 4 for warp in role.warps})
    ]


COMPLETION = {True: "late", False: "eager"}
"""When work completes in causal kernels and in full ones, which have the same roles and edges."""


@pytest.mark.parametrize(
    "variant, starved", [(variant, group) for variant in VARIANTS for group in groups_of(variant)], ids=str
)
def test_starved(variant, starved, compiled_kernels):
    options = Options(async_mode=COMPLETION[variant.causal], happens_before=True, starve=starved)
    assert check(variant, options, lengths=LENGTHS[variant.causal], compiled=compiled_kernels).error is None


def shape_of(schedule) -> tuple:
    """Edges and roles without numbers of registers."""
    edges = [(edge.name, edge.stages, edge.fills, edge.leaves, edge.bytes) for edge in schedule.edges]
    return edges, [(role.name, role.warps) for role in schedule.roles]


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.causal], ids=str)
def test_causal_and_full_kernels_have_the_same_edges(variant):
    (causal,), (full,) = (schedules_of(each).values() for each in (variant, dataclasses.replace(variant, causal=False)))
    assert shape_of(causal) == shape_of(full)
