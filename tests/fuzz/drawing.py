"""What strategies of several operators draw: sizes, scales, schedules, and values that nobody checks."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.variant import Dtype

from .places import Schedule

SIZES = sorted({max(0, edge * n + off) for edge in (64, 128) for n in (0, 1, 2, 3, 4) for off in (-1, 0, 1)})
"""Around the tiles of all kernels."""
FEWEST = st.sampled_from((1,) * 15 + (0,))
"""The least number of sequences or requests of a call."""
INT32 = (-(2**31), 2**31 - 1)
EXTREME_VALUES = ("normal", "normal", "opposed")
"""Opposed: no score is above 0, so that whole rows are as far below it as their numbers allow."""
_HIGHEST_SCORE = 18
"""log2 of the typical score in the most extreme calls; the largest are 2**22 then."""
_EXPONENTS = {Dtype.BF16: (-60, 50), Dtype.FP16: (-10, 8), Dtype.E4M3: (-5, 4), Dtype.E5M2: (-12, 10)}
"""log2 of the magnitudes that inputs can have, with room for random numbers."""

_WARPGROUPS = [tuple(range(first, first + 4)) for first in (0, 4, 8)]


@st.composite
def schedules(draw: Any) -> Schedule:
    """Late completion with the race check is the strictest; the others find what it hides."""
    completion = draw(st.sampled_from(("late", "late", "random", "eager")))
    return Schedule(
        completion,
        seed=draw(st.integers(0, 999)),
        quantum=draw(st.sampled_from((0, 0, 1, 64))),
        races=draw(st.sampled_from((True, True, True, False))),
        highest=draw(st.booleans()),
        starved=draw(st.sampled_from((None, None, None, (0,), (4,), (1, 2), *_WARPGROUPS, (12,), (13,)))),
        sums=draw(st.sampled_from((False, False, False, True))),
    )


@st.composite
def scales(draw: Any, d_qk: int) -> dict[str, float]:
    """Factors of the scores near what models use, and of the output any that leaves it in range."""
    return {
        "softmax_scale": d_qk**-0.5 * draw(st.sampled_from((1.0, 1.0, 1.0, 0.05, 2.0))),
        "output_scale": draw(st.sampled_from((1.0, 1.0, 1.0, 0.5, -0.3, 0.0, 100.0, 1e-3))),
    }


@st.composite
def heads_sinks(draw: Any, heads: int) -> dict[str, Any]:
    """Sinks of the heads, or none, and whether the LSE counts them. LSEs of inf are left to other tests."""
    if draw(st.integers(0, 2)) < 2:
        return {"lse_includes_sink": draw(st.booleans())}
    counted = draw(st.booleans())
    logits = (-math.inf, 0.0, -3.5, 2.0, 9.0, 60.0, -1e30, *(() if counted else (math.inf,)))
    few = tuple(draw(st.lists(st.sampled_from(logits), min_size=1, max_size=5)))
    return {"sinks": (few * heads)[:heads], "lse_includes_sink": counted}


@st.composite
def magnitude_for(draw: Any, dtype: Dtype, d_qk: int) -> tuple[float, float]:
    """(softmax_scale, magnitude of query and key) that reach scores of up to 2**22, with any scale that is accepted."""
    score = draw(st.integers(-30, _HIGHEST_SCORE))
    scale = draw(st.integers(-126, 10))
    lowest, highest = _EXPONENTS[dtype]
    root = math.log2(d_qk) / 2
    magnitude = min(max(round((score - scale - root) / 2), lowest), highest)
    scale = max(-126, min(scale, math.floor(_HIGHEST_SCORE - 2 * magnitude - root)))
    return 2.0**scale, 2.0**magnitude


@st.composite
def hostile_ends(draw: Any, ends: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Cumulative lengths with some entries replaced by any int32."""
    anything = st.one_of(
        st.sampled_from((*INT32, -1, tokens, tokens + 1, tokens + 64)), st.integers(0, tokens), st.integers(*INT32)
    )
    places = draw(st.lists(st.tuples(st.integers(0, len(ends) - 1), anything), min_size=1, max_size=4))
    changed = list(ends)
    for place, value in places:
        changed[place] = value
    return tuple(changed)
