"""What ships is what was promised, and everything that ships can be built."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.support import CACHE_DTYPES, why_unsupported
from tsmla.identity.variant import FAMILIES

from build_aot import matrix


def test_the_promised_kernels_ship():
    counted = Counter((variant.family, variant.arch) for variant in matrix.shipped())
    assert counted == {
        ("prefill", Arch.SM90A): 48 + 12,  # without, and with a key mask
        ("prefill", Arch.SM100A): 48 + 12,
        ("prefill", Arch.SM103A): 48 + 12,
        ("decode", Arch.SM90A): 18 + 9,  # keys in pages, and chosen ones
        ("decode", Arch.SM100A): 18 + 9,
        ("decode", Arch.SM103A): 18 + 9,
        ("pack", Arch.SM90A): 6,
        ("pack", Arch.SM100A): 6,
        ("pack", Arch.SM103A): 6,
        **{("key_mask", arch): 1 for arch in SHIPPED_ARCHS},
        **{("quantize_q", arch): 1 for arch in SHIPPED_ARCHS},
        **{
            (f"{verb}_cache", arch): sum(map(len, CACHE_DTYPES.values()))
            for verb in ("write", "read")
            for arch in SHIPPED_ARCHS
        },
    }


def test_the_changelog_states_how_many():
    said = " ".join((Path(__file__).parents[2] / "CHANGELOG.md").read_text().split())
    assert f"All {len(matrix.shipped())} kernels build" in said


def test_every_shipped_variant_is_supported_and_has_its_own_symbol():
    shipped = matrix.shipped()
    assert [why_unsupported(variant) for variant in shipped] == [None] * len(shipped)
    assert len({variant.symbol() for variant in shipped}) == len(shipped)


@pytest.mark.parametrize("arch", SHIPPED_ARCHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_part_of_the_matrix_is_what_the_whole_has_of_it(arch, family):
    part = matrix.shipped([arch], [family])
    assert part == tuple(v for v in matrix.shipped() if v.arch is arch and v.family == family)


def test_libraries_partition_the_matrix_by_family_and_architecture():
    groups = matrix.libraries(reversed(matrix.shipped()), "x86_64")
    assert sorted(v.symbol() for group in groups.values() for v in group) == [v.symbol() for v in matrix.shipped()]
    for name, group in groups.items():
        assert {f"tsmla_{v.family}_{v.arch}_x86_64.so" for v in group} == {name}
        assert list(group) == sorted(group, key=lambda v: v.symbol())
