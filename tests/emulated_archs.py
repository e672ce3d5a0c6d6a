"""Architectures on which emulated tests run what every architecture has."""

from __future__ import annotations

import re

from tsmla.identity.arch import Arch
from tsmla.identity.variant import Variant

from build_aot.compare import anonymous

KERNELS = ("sm_90a", "sm_100a")
"""Decode, pack and cache kernels. Their PTX for sm_103a is that for sm_100a but for the target, which
`test_every_variant` asserts of all that ship. Prefills of the two differ in their softmax (`sm100.prefill.schedule`):
sm_100a computes some exponentials on the FMA pipes, sm_103a has the maxima of scores with their load. Tests of prefills
run on both where scores, masks, maxima or exponentials are what is tested, and on these where it is lengths, strides,
addresses, or what becomes of a result."""
PREFILLS = (*KERNELS, "sm_103a")
SMS = 32
"""SMs of the emulated GPU in tests of decodes: more than requests there are cut into pieces. A CTA without work, which
others' kernels have a hundred of, takes the emulator as long as two tiles of keys."""


def has_a_text_of_its_own(variant: Variant) -> bool:
    """Whether the kernel is not that of another architecture."""
    return variant.family == "prefill" or variant.arch is not Arch.SM103A


def text_of(ptx: str) -> str:
    """PTX without its target, comments and names."""
    return anonymous(re.sub(r"(?<=\.target )sm_\w+", "", ptx))
