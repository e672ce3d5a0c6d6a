"""A wrong argument is refused in the operator's own words: it is named, nothing is launched, and no byte changes.

Where a decode quantises the query first, into memory of its own, that may have been launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import tsmla

from . import cache_property, decode_property, mask_property, pack_property, prefill_property, query_property
from .guarded import Guarded
from .places import Place
from .refusal_case import TABLES, Refusal
from .wrong_arguments import SPOIL

_OPERATORS: dict[str, Callable[..., Any]] = {
    "prefill": tsmla.tsmla_prefill,
    "decode": tsmla.tsmla_decode,
    "pack": tsmla.mla_kv_pack_quantize_fp8,
    "write_cache": tsmla.mla_write_cache,
    "read_cache": tsmla.mla_read_cache,
    "quantize_q": tsmla.mla_quantize_q,
    "key_mask": tsmla.tsmla_key_mask,
}
_PROPERTIES: dict[str, Any] = {
    "prefill": prefill_property,
    "decode": decode_property,
    "pack": pack_property,
    "write_cache": cache_property,
    "read_cache": cache_property,
    "quantize_q": query_property,
    "key_mask": mask_property,
}


def check(case: Refusal, place: Place) -> None:
    """Make the wrong call. Raises AssertionError, and what the emulator and a right call raise."""
    kind = case.family
    operator = _OPERATORS[kind]
    inputs = _PROPERTIES[kind].drawn(case.call)
    _, values, related = TABLES[kind][case.argument]
    with place.running(case.call.schedule) as launched:
        if case.seen:
            _, right = _PROPERTIES[kind].arranged(case.call, inputs)
            operator(**right)
        memory: dict[str, Guarded]
        memory, given = _PROPERTIES[kind].arranged(case.call, inputs)
        name, _, piece = case.argument.partition("[")
        whole = given.get(name)
        right_one = whole[int(piece[:-1])] if piece else whole
        wrong_one = values[case.index] if case.wrong == "value" else SPOIL[case.wrong](right_one, case.index)
        given[name] = tuple(wrong_one if x is right_one else x for x in whole) if piece else wrong_one
        before = launched()
        try:
            operator(**given)
        except tsmla.TsmlaError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(f"raised {type(error).__name__}, not a TsmlaError: {error}") from error
        else:
            raise AssertionError(f"{case.argument} = {_shown(wrong_one)} was accepted")
        torch.cuda.synchronize()
        more = launched() - before
        assert more <= _quantises(given), f"{more} kernels were launched before it was refused: {said}"
        for name, guarded in memory.items():
            wrong = guarded.changed()
            assert not wrong, f"{name}: {wrong}"
    assert said.startswith(f"{operator.__name__}: "), f"the error does not name the operator: {said}"
    assert any(name in said for name in (case.argument, *related)), f"the error does not name {case.argument}: {said}"


def _quantises(given: dict[str, Any]) -> bool:
    """Whether a call is of a decode that quantises its query."""
    query, cache = given.get("query"), given.get("kv_cache")
    pieces = query if isinstance(query, tuple) else (query,)
    bf16 = all(isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 for x in pieces)
    return isinstance(cache, tuple) and bf16 and len(pieces) < 3


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of {tuple(value.shape)}, strides {tuple(value.stride())}, on {value.device}"
    return repr(value)
