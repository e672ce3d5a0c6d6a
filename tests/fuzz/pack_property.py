"""mla_kv_pack_quantize_fp8 is right, whatever the case: every byte of its outputs, and no byte of anything else."""

from __future__ import annotations

from typing import Any

import torch
import tsmla
from tsmla.identity.variant import Dtype
from tsmla.operators.checks import TORCH_DTYPE_OF

from .guarded import Guarded, Memory, strides
from .pack_case import PackCase
from .places import Place
from .reference_pack import differences, quantized


def check(case: PackCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    inputs = k_nope, k_pe, v = drawn(case)
    with place.running(case.schedule):
        memory, given = case.manner.arrange(lambda: arranged(case, inputs))
        results = case.manner.call(place, tsmla.mla_kv_pack_quantize_fp8, memory, given)
        results = [tensor.cpu() for tensor in results]
        for name, guarded in memory.items():
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if name.endswith("_out") else None
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    fp8 = TORCH_DTYPE_OF[Dtype(case.fp8)]
    key = torch.cat([k_nope, k_pe.expand(-1, case.heads, -1)], -1)
    for name, got, values, scale in zip(
        ("k_out", "v_out"), results, (key, v), (case.k_scale_inv, case.v_scale_inv), strict=True
    ):
        assert got.dtype == fp8 and got.shape == values.shape, f"{name} is {got.dtype} of {tuple(got.shape)}"
        wanted = quantized(values, scale, fp8)
        wrong = differences(got, wanted).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            found, right = int(got.view(torch.uint8)[at]), int(wanted[at])
            raise AssertionError(
                f"{name}: {len(wrong)} of {got.numel()} elements are wrong, first {at}: {float(values[at])} x {scale} "
                f"gives code {found:#x} instead of {right:#x}"
            )


def drawn(case: PackCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k_nope, k_pe (with three dimensions) and v on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype = TORCH_DTYPE_OF[Dtype(case.dtype)]

    def values(*shape: int) -> torch.Tensor:
        if case.values == "any bits":
            bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
            return bits.to(torch.int16).view(dtype)
        if case.values == "spread":
            exponents = torch.randint(-14, 14, shape, generator=generator)
            return torch.ldexp(torch.randn(shape, generator=generator), exponents).to(dtype)
        codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        number, next_one = (
            (codes + step).view(TORCH_DTYPE_OF[Dtype(case.fp8)]).double().to(torch.float32) for step in (0, 1)
        )
        beside = torch.randint(-1, 2, shape, generator=generator) * 2.0**-9
        return ((number + next_one) / 2 * (1 + beside)).to(dtype)

    tokens, heads = case.tokens, case.heads
    d_nope, d_rope, d_v = case.dims
    return values(tokens, heads, d_nope), values(tokens, 1, d_rope), values(tokens, heads, d_v)


def arranged(case: PackCase, inputs: tuple[torch.Tensor, ...]) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    k_nope, k_pe, v = inputs
    d_nope, d_rope, d_v = case.dims
    offset, fp8 = 16 * case.offset, TORCH_DTYPE_OF[Dtype(case.fp8)]
    memory = Memory(case.offset)

    def put(name: str, content: torch.Tensor, layout: str) -> torch.Tensor:
        shape = tuple(content.shape)
        return memory.put(name, content, strides(layout, shape, content.element_size()), offset)

    given: dict[str, Any] = {}
    if case.layouts[0] == "slices":
        both = put("k_nope and v", torch.cat([k_nope, v], -1), "contiguous")
        given |= {"k_nope": both[..., :d_nope], "v": both[..., d_nope:]}
    else:
        given |= {"k_nope": put("k_nope", k_nope, case.layouts[0]), "v": put("v", v, case.layouts[1])}
    rope = put("k_pe", k_pe, case.rope[1])
    given["k_pe"] = rope if case.rope[0] == 3 else rope[:, 0]
    for name, layout, width in (("k_out", case.layouts[2], d_nope + d_rope), ("v_out", case.layouts[3], d_v)):
        shape = (case.tokens, case.heads, width)
        if layout != "new":
            given[name] = memory.space(name, shape, fp8, strides(layout, shape, 1))
    return memory, {
        **given,
        "k_scale_inv": case.k_scale_inv,
        "v_scale_inv": case.v_scale_inv,
        "fp8_dtype": fp8,
        "enable_pdl": case.pdl,
    }
