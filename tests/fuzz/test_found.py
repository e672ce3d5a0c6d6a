"""Cases that failed once, on every architecture that has kernels for them; what they do not say is as by default."""

from __future__ import annotations

import pytest
import tsmla

from .pack_case import PackCase
from .places import ARCHS, Place, Schedule
from .prefill_case import PrefillCase
from .properties import Case, case_of, check
from .refusal_case import Refusal

LATE = Schedule(quantum=64)

FOUND: dict[str, Case] = {
    "prefill: more queries than a tile has, one key": PrefillCase(ends_q=(0, 129), tokens_q=129),
    "prefill: queries before any key": PrefillCase(ends_q=(0, 257), ends_kv=(0, 63), tokens_q=257, tokens_kv=63),
    "prefill: output of a single row with odd strides": PrefillCase(out="odd where single"),
    "prefill: a batch size that is no number": Refusal(PrefillCase(), "batch_size", "value", 1),
}
SHOWN: dict[str, Case] = {
    "pack: any bits": PackCase(tokens=3, heads=2, layouts=("slices", "slices", "gaps", "heads first")),
}
EXAMPLES = FOUND | SHOWN


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_found_case(case, arch):
    if tsmla.why_unsupported(case.variant(arch)) is None:
        check(case, Place(arch))


@pytest.mark.parametrize("case", EXAMPLES.values(), ids=EXAMPLES.keys())
def test_a_case_is_its_repr(case):
    assert repr(case_of(repr(case))) == repr(case)
