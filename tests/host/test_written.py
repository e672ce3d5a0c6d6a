"""An argument is its row, its parameter and nothing else: the rest of a function is written from these."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from tsmla.errors import ArgumentError
from tsmla.identity.arch import Arch
from tsmla.identity.call import PACK, Argument, LeftOut, Number
from tsmla.identity.variant import Dtype, PackVariant
from tsmla.loading import resolve
from tsmla.operators import written

OPERATOR = dataclasses.replace(
    PACK,
    name="pack_with_more",
    arguments=(
        *PACK.given,
        Argument("bias", "bias", ("heads",), "float32", left_out=LeftOut.EMPTY),
        *PACK.numbers,
        Number("rounds_up", "rounds_up", 0),
        Number("bias_scale", "bias_scale * v_scale_inv", 1.0, per_call=True),
    ),
)


@written.from_table(OPERATOR)
def pack_with_more(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_scale_inv: float = 1.0,
    v_scale_inv: float = 1.0,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    enable_pdl: bool = False,
    bias: torch.Tensor | None = None,
    rounds_up: bool = False,
    bias_scale: float = 1.0,
) -> Any:
    tensors, options = written.tensors(), written.options()
    call = written.given(OPERATOR, tensors, options)
    variant = PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128)
    served = written.served(OPERATOR, variant, call, {})
    served.kernel(*written.arguments(served))
    return tensors, options


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What kernels were given, by the table's names."""
    found: list[dict[str, Any]] = []
    names = [argument.name for argument in OPERATOR.arguments]

    def kernel(*given: Any) -> None:
        found.append(dict(zip(names, given, strict=True)))

    monkeypatch.setattr(resolve, "kernel", lambda variant: kernel)
    return found


def test_a_row_and_a_parameter_are_an_argument(launches: list[dict[str, Any]]) -> None:
    k_nope, k_pe, v, bias = zeros(5, 2, 128), zeros(5, 1, 64), zeros(5, 2, 128), torch.ones(2)
    pack_with_more(k_nope, k_pe, v, v_scale_inv=3.0, bias=bias, rounds_up=True, bias_scale=0.5)
    pack_with_more(k_nope, k_pe, v)
    given, left_out = launches
    assert given["bias"] is bias and (given["rounds_up"], given["bias_scale"], given["v_scale_inv"]) == (1, 1.5, 3.0)
    assert given["k_nope"] is k_nope and given["k_pe"].shape == (5, 64) and given["pdl"] == 0
    assert tuple(left_out["bias"].shape) == (0,) and str(left_out["bias"].dtype) == "float32"
    assert (left_out["rounds_up"], left_out["bias_scale"]) == (0, 1.0)


def test_a_flag_that_is_none_is_refused(launches: list[dict[str, Any]]) -> None:
    with pytest.raises(ArgumentError, match="pack_with_more: rounds_up is 7; it must be True or False"):
        pack_with_more(zeros(5, 2, 128), zeros(5, 64), zeros(5, 2, 128), rounds_up=7)  # type: ignore[arg-type]
    assert not launches


def test_the_tables_order_is_that_of_tensors_and_options_are_the_rest(launches: list[dict[str, Any]]) -> None:
    given = zeros(5, 2, 128), zeros(5, 64), zeros(5, 2, 128)
    tensors, options = pack_with_more(*given, fp8_dtype=torch.float8_e5m2, rounds_up=True)
    assert tensors == (*given, None, None, None)
    assert options == (torch.float8_e5m2, False, True)  # fp8_dtype, enable_pdl, rounds_up: factors are none


def test_tracebacks_and_signatures_are_of_the_source(launches: list[dict[str, Any]]) -> None:
    lines, first = inspect.getsourcelines(pack_with_more)
    with pytest.raises(IndexError) as raised:
        pack_with_more(zeros(5, 2, 128), torch.zeros(0), None)  # type: ignore[arg-type]
    shown = next(entry for entry in raised.traceback if entry.name == "pack_with_more")
    assert first <= shown.lineno + 1 < first + len(lines)
    assert list(inspect.signature(pack_with_more).parameters)[-1] == "bias_scale"


def test_a_missing_source_is_named() -> None:
    """Packages of compiled files alone cannot be imported, and say why."""
    names: dict[str, Any] = {"written": written, "PACK": PACK}
    text = "@written.from_table(PACK)\ndef packs(k_nope, k_pe, v, k_scale_inv, v_scale_inv, k_out, v_out): pass"
    with pytest.raises(ImportError, match=r"^nowhere\.py is missing: .* source"):
        exec(compile(text, "nowhere.py", "exec"), names)
