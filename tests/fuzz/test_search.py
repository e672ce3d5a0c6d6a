"""The fuzzer finds what is wrong: operators that are broken in one way each, in all of which it must fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import tsmla
from tsmla.variant import Variant

from .decode_case import DecodeCase
from .pack_case import PackCase
from .places import Place
from .prefill_case import PrefillCase
from .properties import case_of, check
from .search import Found, search

_PREFILL, _DECODE, _PACK = tsmla.tsmla_prefill, tsmla.tsmla_decode, tsmla.mla_kv_pack_quantize_fp8


def _out(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _prefill_scaled(**given: Any) -> Any:
    """Outputs that are three per cent too large."""
    result = _PREFILL(**given)
    _out(result).mul_(1.03)
    return result


def _prefill_in_base_2(**given: Any) -> Any:
    result = _PREFILL(**given)
    if isinstance(result, tuple):
        result[1].div_(math.log(2))
    return result


def _prefill_left_aligned(**given: Any) -> Any:
    """A causal mask that forgets that queries are a sequence's last positions."""
    if given["is_causal"]:
        given["cum_seq_lens"] = torch.minimum(given["cum_seq_lens"], given["cum_seq_lens"][:1] + 1)
    return _PREFILL(**given)


def _prefill_of_next_head(**given: Any) -> Any:
    key = given["key"]
    k_nope, *k_pe = key if isinstance(key, tuple) else (key,)
    rolled = k_nope.roll(1, 1).contiguous()
    given["key"] = (rolled, *k_pe) if k_pe else rolled
    return _PREFILL(**given)


def _prefill_writes_all(**given: Any) -> Any:
    """Rows of no sequence, too."""
    result = _PREFILL(**given)
    _out(result).copy_(_out(result).float().nan_to_num(0))
    return result


def _decode_zeroed(**given: Any) -> Any:
    result = _DECODE(**given)
    _out(result)[-1].zero_()
    return result


def _decode_without_window(**given: Any) -> Any:
    return _DECODE(**{**given, "window_left": -1})


def _decode_of_rank_0(**given: Any) -> Any:
    return _DECODE(**{**given, "cp_rank": 0})


def _decode_scribbles(**given: Any) -> Any:
    """One byte behind the workspace."""
    result = _DECODE(**given)
    workspace = given["workspace_buffer"]
    workspace.as_strided((len(workspace) + 1,), (1,))[-1] = 7
    return result


def _decode_changes_input(**given: Any) -> Any:
    result = _DECODE(**given)
    given["seq_lens"].zero_()
    return result


def _pack_truncates(**given: Any) -> Any:
    """Codes one lower, where that changes a number by little."""
    results = _PACK(**given)
    codes = results[0].view(torch.uint8)
    codes.sub_((codes.to(torch.int16) % 128 > 100).to(torch.uint8))
    return results


_KERNELS: dict[str, Variant] = {
    "prefill": PrefillCase().variant("sm_90a"), "decode": DecodeCase().variant("sm_90a"),
    "pack": PackCase().variant("sm_90a"),
}  # fmt: skip
BROKEN: list[tuple[str, str, Callable[..., Any]]] = [
    ("prefill", "tsmla_prefill", _prefill_scaled),
    ("prefill", "tsmla_prefill", _prefill_in_base_2),
    ("prefill", "tsmla_prefill", _prefill_left_aligned),
    ("prefill", "tsmla_prefill", _prefill_of_next_head),
    ("prefill", "tsmla_prefill", _prefill_writes_all),
    ("decode", "tsmla_decode", _decode_zeroed),
    ("decode", "tsmla_decode", _decode_without_window),
    ("decode", "tsmla_decode", _decode_of_rank_0),
    ("decode", "tsmla_decode", _decode_scribbles),
    ("decode", "tsmla_decode", _decode_changes_input),
    ("pack", "mla_kv_pack_quantize_fp8", _pack_truncates),
]


@pytest.mark.parametrize("name, operator, broken", BROKEN, ids=[broken.__name__[1:] for *_, broken in BROKEN])
def test_what_is_broken_is_found(name, operator, broken, seed, monkeypatch):
    place, found = Place("sm_90a"), Found()
    monkeypatch.setattr(tsmla, operator, broken)
    for turn in range(30):
        search(name, place, 1.0, seed + turn, found, kernels=[_KERNELS[name]], hostile=False, shrinking=1.0)
        if found.failures:
            break
    assert found.failures, f"{found.cases.total()} cases, and none failed; seed {seed}"
    (failure, *_) = found.failures.values()
    with pytest.raises(AssertionError):
        check(case_of(repr(failure.case)), place)
    monkeypatch.undo()
    check(failure.case, place)
