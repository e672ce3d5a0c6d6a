"""The fuzzer finds what is wrong: operators that are broken in one way each, in all of which it must fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS

from . import __main__ as command
from . import search as search_module
from .chosen_case import ChosenCase
from .decode_case import DecodeCase
from .pack_case import PackCase
from .places import Place
from .prefill_case import PrefillCase
from .properties import PROPERTIES, Case, case_of, check
from .scaled_rows import Scaling
from .search import Found, kernels_of, search

_PREFILL, _DECODE, _PACK = tsmla.tsmla_prefill, tsmla.tsmla_decode, tsmla.mla_kv_pack_quantize_fp8


def _out(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _prefill_scaled(**given: Any) -> Any:
    """Outputs that are three per cent too large."""
    result = _PREFILL(**given)
    _out(result).mul_(1.03)
    return result


def _prefill_scaled_where_packs_are_long(**given: Any) -> Any:
    """A GPU kernel of Hopper's that only a pack of many more keys than are of sequences reaches."""
    long = len(given["value"]) > LONG_KEYS * given["batch_size"]
    return _prefill_scaled(**given) if long else _PREFILL(**given)


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


def _prefill_without_mask(**given: Any) -> Any:
    del given["key_mask"]
    return _PREFILL(**given)


def _prefill_of_next_bit(**given: Any) -> Any:
    """Bits that are one key off."""
    given["key_mask"] = given["key_mask"] << 1
    return _PREFILL(**given)


def _prefill_writes_all(**given: Any) -> Any:
    """Rows of no sequence, too."""
    result = _PREFILL(**given)
    _out(result).copy_(_out(result).float().nan_to_num(0))
    return result


def _decode_zeroed(**given: Any) -> Any:
    result = _DECODE(**given)
    _out(result)[-1:].zero_()  # of no request there is none
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


def _decode_with_scales_of_next_key(**given: Any) -> Any:
    cache, rope, scales = given["kv_cache"]
    return _DECODE(**{**given, "kv_cache": (cache, rope, scales.roll(1, 1))})


def _decode_with_one_query_scale(**given: Any) -> Any:
    """The first head's for all heads."""
    if not isinstance(given["query"], torch.Tensor) and len(given["query"]) == 3:
        latent, rope, scales = given["query"]
        given["query"] = latent, rope, scales[..., :1].contiguous()
    return _DECODE(**given)


def _pack_truncates(**given: Any) -> Any:
    """Codes one lower, where that changes a number by little."""
    results = _PACK(**given)
    codes = results[0].view(torch.uint8)
    codes.sub_((codes.to(torch.int16) % 128 > 100).to(torch.uint8))
    return results


def _decode_without_nan(**given: Any) -> Any:
    result = _DECODE(**given)
    _out(result).nan_to_num_(0)
    return result


def _decode_scaled(**given: Any) -> Any:
    result = _DECODE(**given)
    _out(result).mul_(1.03)
    return result


_A_PREFILL, _A_DECODE, _A_PACK = PrefillCase(), DecodeCase(), PackCase()
_OF_SCALED_ROWS = DecodeCase(dtype="e4m3", rows="snapmla")
BROKEN: list[tuple[Case, str, Callable[..., Any]]] = [
    (_A_PREFILL, "tsmla_prefill", _prefill_scaled),
    (_A_PREFILL, "tsmla_prefill", _prefill_scaled_where_packs_are_long),
    (_A_PREFILL, "tsmla_prefill", _prefill_in_base_2),
    (_A_PREFILL, "tsmla_prefill", _prefill_left_aligned),
    (_A_PREFILL, "tsmla_prefill", _prefill_of_next_head),
    (_A_PREFILL, "tsmla_prefill", _prefill_writes_all),
    (PrefillCase(mask="random"), "tsmla_prefill", _prefill_without_mask),
    (PrefillCase(mask="random"), "tsmla_prefill", _prefill_of_next_bit),
    (_A_DECODE, "tsmla_decode", _decode_zeroed),
    (_A_DECODE, "tsmla_decode", _decode_without_window),
    (_A_DECODE, "tsmla_decode", _decode_of_rank_0),
    (_A_DECODE, "tsmla_decode", _decode_scribbles),
    (_A_DECODE, "tsmla_decode", _decode_changes_input),
    (_OF_SCALED_ROWS, "tsmla_decode", _decode_with_scales_of_next_key),
    (_OF_SCALED_ROWS, "tsmla_decode", _decode_with_one_query_scale),
    (_A_PACK, "mla_kv_pack_quantize_fp8", _pack_truncates),
]


@pytest.mark.parametrize("case, operator, broken", BROKEN, ids=[broken.__name__[1:] for *_, broken in BROKEN])
def test_what_is_broken_is_found(case, operator, broken, seed, monkeypatch):
    place, found, kernel = Place("sm_90a"), Found(), case.variant("sm_90a")
    edits_anything = torch.inference_mode()  # tensors made in inference mode may be edited in it only
    monkeypatch.setattr(tsmla, operator, edits_anything(broken))
    for turn in range(30):
        search(kernel.family, place, 1.0, seed + turn, found, kernels=[kernel], hostile=False, shrinking=1.0)
        if found.failures:
            break
    assert found.failures, f"{found.cases.total()} cases, and none failed; seed {seed}"
    (failure, *_) = found.failures.values()
    with pytest.raises(AssertionError):
        check(case_of(repr(failure.case)), place)
    monkeypatch.undo()
    check(failure.case, place)


@pytest.mark.parametrize("sinks", [None, (0.0, math.inf)])
@pytest.mark.parametrize("broken", [_decode_without_nan, _decode_scaled])
def test_rows_of_a_key_whose_scale_is_nan_are_judged(broken, sinks, monkeypatch):
    """Those that see it must be NaN, whatever sinks there are; those of the same request that do not must be right."""
    case = DecodeCase(
        dtype="e4m3", rows="snapmla", scaling=Scaling(special=((0, 68, math.nan),)), seq_lens=(70,), q_len=4, heads=2,
        width=2, sinks=sinks,
    )  # fmt: skip
    check(case, Place("sm_90a"))
    chosen = ChosenCase(
        dtype="e4m3", rows="snapmla", scaling=Scaling(special=((0, 0, math.nan),)), shape=(1,), heads=2, top_k=9,
        outside=0, sinks=sinks,
    )  # fmt: skip
    check(chosen, Place("sm_90a"))
    monkeypatch.setattr(tsmla, "tsmla_decode", torch.inference_mode()(broken))
    with pytest.raises(AssertionError):
        check(case, Place("sm_90a"))
    if broken is _decode_without_nan:  # a list's token sees all of its keys
        with pytest.raises(AssertionError, match="token 0: not NaN"):
            check(chosen, Place("sm_90a"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device"], "--device needs a CUDA GPU; torch sees none"),
        (["--case", "nonsense"], "'nonsense' is no case as a failure prints it: name 'nonsense' is not defined"),
        (["--case", "PackCase(nope=1)"], "'PackCase(nope=1)' is no case"),
        (["--case", "3"], "'3' is a int, not one of PrefillCase, DecodeCase"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(monkeypatch, capsys, arguments, said):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["python -m tests.fuzz", *arguments])
    assert command.main() == 2
    assert said in capsys.readouterr().err


def test_the_machines_gpu_has_an_architecture_already(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["python -m tests.fuzz", "--device", "--arch", "sm_100a"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "--device runs on this machine's" in capsys.readouterr().err


def test_a_search_ends_with_the_case_that_took_the_gpu(monkeypatch):
    """What comes after an illegal access fails as well, and a smaller case of that would be anybody's."""
    ran = []

    def lost(case, place):
        ran.append(case)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(search_module, "check", lost)
    monkeypatch.setattr(search_module, "usable", lambda: False)
    found, told = Found(), []
    with pytest.raises(search_module.UnusableGpu):
        search("pack", Place("sm_90a", device=True), 5.0, 1, found, report=told.append)
    (failure,) = found.failures.values()
    assert ran == [failure.case] and repr(failure.case) in told[0]


@pytest.mark.parametrize("name", PROPERTIES)
def test_cases_are_served_by_the_kernel_that_they_are_drawn_for(name, seed):
    """A face that cannot make a drawn call gets another one, and that must not be another kernel's."""
    limits = hypothesis.settings(database=None, deadline=None, max_examples=4, phases=[hypothesis.Phase.generate])
    served: list[Any] = []
    for arch in Arch:
        for kernel in kernels_of(name, arch):
            drawing = hypothesis.given(PROPERTIES[name].cases(kernel, True))
            hypothesis.seed(seed)(limits(drawing(lambda case: served.append(case))))()
            assert {served.pop().variant(arch) for _ in range(len(served))} == {kernel}
