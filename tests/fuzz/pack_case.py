"""Calls of mla_kv_pack_quantize_fp8: what determines one, and how they are drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PackVariant

from .drawing import schedules
from .guarded import LAYOUTS
from .manner import Manner, manners
from .places import Schedule
from .plain import Plain

VALUES = ("any bits", "spread", "halfway")
"""All 16-bit patterns, infinities and NaN included; normal numbers over 28 powers of two; numbers halfway between two
of the 8-bit format, or next to that."""


@dataclasses.dataclass(frozen=True, repr=False)
class PackCase(Plain):
    """A call. layouts: of k_nope, v, k_out and v_out, each one of LAYOUTS; k_nope and v may also be "slices" of one
    tensor, and outputs "new". rope: dimensions and layout of k_pe. offset: bytes / 16 by which addresses miss multiples
    of 256. dims: of k_nope, k_pe and v."""

    dtype: str = "bf16"
    fp8: str = "e4m3"
    tokens: int = 1
    heads: int = 1
    k_scale_inv: float = 1.0
    v_scale_inv: float = 1.0
    values: str = "any bits"
    layouts: tuple[str, str, str, str] = ("contiguous", "contiguous", "new", "new")
    rope: tuple[int, str] = (3, "contiguous")
    pdl: bool = False
    offset: int = 0
    seed: int = 0
    schedule: Schedule = Schedule()
    dims: tuple[int, int, int] = (128, 64, 128)
    manner: Manner = Manner()

    def variant(self, arch: str) -> PackVariant:
        """The kernel that serves the call on this architecture, if there is one."""
        return PackVariant(Arch(arch), Dtype(self.dtype), Dtype(self.fp8), *self.dims)


@st.composite
def pack_cases(draw: Any, variant: PackVariant, hostile: bool = True) -> PackCase:
    """Any call that the contract allows and this kernel serves; hostile or not, it reads no lengths."""
    layout = st.sampled_from(LAYOUTS)
    given = draw(st.sampled_from(("slices", None)))
    scale = st.one_of(
        st.sampled_from((1.0, 1.0, 0.5, -0.37, 0.0, 3e-6, 1e30, 1e-39)),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
    out = st.sampled_from(("new", *LAYOUTS))
    tokens, heads = st.one_of(st.integers(0, 40), st.integers(0, 300)), st.sampled_from((1, 1, 2, 3, 7, 16, 128))
    drawn = draw(tokens), draw(heads)
    if drawn[0] * drawn[1] > 1000:
        drawn = drawn[0] % 8, drawn[1]
    return PackCase(
        str(variant.dtype),
        str(variant.out_dtype),
        *drawn,
        draw(scale),
        draw(scale),
        draw(st.sampled_from(VALUES)),
        (given or draw(layout), given or draw(layout), draw(out), draw(out)),
        (draw(st.sampled_from((2, 3))), draw(st.sampled_from(("contiguous", "gaps")))),
        draw(st.booleans()),
        draw(st.sampled_from((0, 0, 1, 3, 8))),
        draw(st.integers(0, 2**31 - 1)),
        draw(schedules()),
        (variant.d_nope, variant.d_rope, variant.d_v),
        draw(manners()),
    )
