"""Every property by name: what draws its cases and what checks one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st
from tsmla.identity.variant import (
    DecodeVariant,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)

from . import (
    cache_property,
    chosen_property,
    decode_property,
    face_property,
    mask_property,
    pack_property,
    prefill_property,
    query_property,
    refusal_property,
)
from .cache_case import CacheCase, cache_cases
from .chosen_case import ChosenCase, chosen_cases
from .decode_case import DecodeCase, decode_cases, decode_extremes
from .face_case import FaceCase, face_cases
from .manner import Manner
from .mask_case import MaskCase, mask_cases
from .pack_case import PackCase, pack_cases
from .places import Schedule
from .prefill_case import PrefillCase, prefill_cases, prefill_extremes
from .query_case import QueryCase, query_cases
from .reference_decode import Sight
from .refusal_case import Refusal, refusals
from .scaled_rows import Scaling

Case = PrefillCase | DecodeCase | ChosenCase | PackCase | CacheCase | QueryCase | MaskCase | FaceCase | Refusal


class Property(NamedTuple):
    """family: whose kernels it is about. cases: (kernel, hostile or not) -> strategy. each: cases for one kernel before
    the next, whose PTX takes a second to be read. weight: its share of the time. gathers: whether it is about kernels
    that copy keys one by one, or about all others."""

    family: type
    cases: Callable[..., st.SearchStrategy[Any]]
    each: int
    weight: float
    gathers: bool = False

    def is_about(self, kernel: Variant) -> bool:
        """Whether it draws calls that this kernel serves."""
        gathers = isinstance(kernel, DecodeVariant) and kernel.gathers
        return isinstance(kernel, self.family) and gathers == self.gathers


PROPERTIES = {
    "prefill": Property(PrefillVariant, prefill_cases, 12, 4),
    "prefill extreme": Property(PrefillVariant, prefill_extremes, 12, 1),
    "prefill refused": Property(PrefillVariant, refusals, 40, 0.4),
    "decode": Property(DecodeVariant, decode_cases, 12, 4),
    "decode extreme": Property(DecodeVariant, decode_extremes, 12, 1),
    "decode of chosen keys": Property(DecodeVariant, chosen_cases, 12, 2, gathers=True),
    "decode of keys one by one": Property(DecodeVariant, decode_cases, 12, 1, gathers=True),
    "decode by faces": Property(DecodeVariant, face_cases, 12, 1),
    "prefill by faces": Property(PrefillVariant, face_cases, 12, 0.5),
    "decode refused": Property(DecodeVariant, refusals, 40, 0.4),
    "pack": Property(PackVariant, pack_cases, 20, 1),
    "pack refused": Property(PackVariant, refusals, 40, 0.2),
    "write_cache": Property(WriteCacheVariant, cache_cases, 20, 0.5),
    "read_cache": Property(ReadCacheVariant, cache_cases, 20, 0.5),
    "quantize_q": Property(QuantizeQVariant, query_cases, 20, 0.3),
    "key_mask": Property(KeyMaskVariant, mask_cases, 20, 0.3),
    "key_mask refused": Property(KeyMaskVariant, refusals, 40, 0.2),
    "write_cache refused": Property(WriteCacheVariant, refusals, 40, 0.2),
    "read_cache refused": Property(ReadCacheVariant, refusals, 40, 0.2),
    "quantize_q refused": Property(QuantizeQVariant, refusals, 40, 0.2),
}
_CHECKS: dict[type, Callable[..., None]] = {
    PrefillCase: prefill_property.check,
    DecodeCase: decode_property.check,
    ChosenCase: chosen_property.check,
    PackCase: pack_property.check,
    CacheCase: cache_property.check,
    QueryCase: query_property.check,
    MaskCase: mask_property.check,
    FaceCase: face_property.check,
    Refusal: refusal_property.check,
}


def check(case: Case, place: Any) -> None:
    """Run a case somewhere and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    _CHECKS[type(case)](case, place)


def case_of(text: str) -> Case:
    """The case whose repr this is. Raises ValueError for what is none."""
    names = {kind.__name__: kind for kind in (*_CHECKS, Manner, Schedule, Sight, Scaling)}
    try:
        case = eval(text, {"__builtins__": {}}, {**names, "nan": float("nan"), "inf": float("inf")})
    except (NameError, SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no case as a failure prints it: {error}") from error
    if type(case) not in _CHECKS:
        raise ValueError(f"{text!r} is a {type(case).__name__}, not one of {', '.join(k.__name__ for k in _CHECKS)}")
    return case
