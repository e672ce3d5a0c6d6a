"""Barriers that kernels initialise, and bytes that they announce: those of their tables of edges."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.plan import wide_rows
from tsmla.identity.variant import DecodeVariant, PrefillVariant
from tsmla_kernels.parts.edges import Copies, Either
from tsmla_kernels.sm90.decode.row64.geometry import PAIR
from tsmla_kernels.sm90.decode.row64.schedule import WARPS
from tsmla_kernels.sm90.prefill.geometry import PrefillGeometry

from docs.pictures import VARIANTS, schedules_of

ONE_OF_EACH = list(
    {(*schedules_of(v), v.dtype.bits, getattr(v, "gathers", False)): v for v in reversed(VARIANTS)}.values()
)
_CONSTANT = re.compile(r"mov\.b32\s+(%r\d+), (\d+);")
_WRITTEN = re.compile(r"^\s+[a-z][\w.:]*\s+(%r\d+), ", re.MULTILINE)
_INIT = re.compile(r"mbarrier\.init\S*\s+\[__dynamic_shmem__\w*?(?:\+(\d+))?\], (%r\d+);")
_ANNOUNCED = re.compile(r"mbarrier\.arrive\.expect_tx\S*\s+\S+, \[[^]]*\], (%r\d+);")


def kernels_of(ptx: str) -> list[str]:
    """The kernels that have barriers."""
    return [text for text in re.split(r"\.entry", ptx)[1:] if "mbarrier.init" in text]


@pytest.mark.parametrize("variant", ONE_OF_EACH, ids=str)
def test_barriers_are_those_of_the_table(variant, compiled_kernels):
    kernels = kernels_of(compiled_kernels(variant).ptx.read_text())
    schedules = list(schedules_of(variant).values())
    tables = {}
    for schedule in schedules:
        expected = {}
        for edge in schedule.edges:
            first = 8 * schedule.edges.first_barrier(edge.name)
            for stage in range(edge.stages):
                expected[first + 8 * stage] = edge.fills
                if edge.leaves:
                    expected[first + 8 * (edge.stages + stage)] = edge.leaves
        tables[frozenset(expected.items())] = announced(schedule, variant)
    assert len(schedules) == len(tables)
    met = set()
    for text in kernels:
        written = Counter(_WRITTEN.findall(text))
        constants = {register: value for register, value in _CONSTANT.findall(text) if written[register] == 1}
        inits = [(int(at or 0), int(constants[register])) for at, register in _INIT.findall(text)]
        assert len(inits) == text.count("mbarrier.init")
        met.add(frozenset(inits))
        assert met <= set(tables)
        told = {int(constants[register]) for register in _ANNOUNCED.findall(text) if register in constants}
        assert told <= tables[frozenset(inits)]
        assert told or variant.gathers, "where lanes copy all keys, nothing may be announced"
    assert met == set(tables)
    assert len(kernels) == len(schedules) + more_of_one_table(variant)


def more_of_one_table(variant) -> int:
    """Packs have a decode of their own on Hopper, and few rows of queries of 16 bits on Blackwell; long sequences of 16
    bits have a prefill."""
    on_hopper = variant.arch is Arch.SM90A
    if isinstance(variant, DecodeVariant):
        return on_hopper or int(wide_rows(variant.row, variant.gathers))
    return isinstance(variant, PrefillVariant) and on_hopper and PrefillGeometry.of(variant).policy.alone_if_long


def announced(schedule, variant) -> set[int]:
    """What a kernel may announce at a time: the bytes of a stage; of Hopper's `landed` it announces piece by piece; and
    where CTAs come in pairs and convert keys for each other, a warp announces the piece of its counterpart, and the one
    that loads the rope pieces."""
    edges = [edge for edge in schedule.edges if not (isinstance(variant, DecodeVariant) and edge.name == "landed")]
    found = set()
    for edge in edges:
        paired = variant.arch is Arch.SM90A and getattr(schedule.geometry, "ctas", 1) == PAIR
        if paired and edge.name.startswith("kv"):
            latent, *_, rope = schedule.geometry.strip_bytes
            found |= {latent // (PAIR * WARPS), rope}
            continue
        for party in edge.filled_by:
            if isinstance(party, Copies) or isinstance(party, Either) and isinstance(party.one, Copies):
                found.add(edge.bytes)
    return found
