"""mla_kv_pack_quantize_fp8 without a GPU: what it accepts, what it says about the rest, and what it launches.

CPU tensors pass for CUDA ones here, and a recorder stands where the compiled kernel would.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from odd_tensors import FLOATS_ONLY, ODD, OVERLAPPING
from tsmla import ArgumentError, UnsupportedError
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PackVariant
from tsmla.loading import resolve
from tsmla.operators import pack

TOKENS, HEADS, D_NOPE, D_ROPE, D_V = 5, 3, 128, 64, 128


def inputs(tokens: int = TOKENS, heads: int = HEADS, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {
        "k_nope": torch.zeros(tokens, heads, D_NOPE, dtype=dtype),
        "k_pe": torch.zeros(tokens, 1, D_ROPE, dtype=dtype),
        "v": torch.zeros(tokens, heads, D_V, dtype=dtype),
    }


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, Dtype.BF16), (torch.float16, Dtype.FP16)])
@pytest.mark.parametrize(("fp8", "fp8_name"), [(torch.float8_e4m3fn, Dtype.E4M3), (torch.float8_e5m2, Dtype.E5M2)])
def test_the_variant_follows_the_arguments(recorder, dtype, name, fp8, fp8_name, pdl):
    pack.mla_kv_pack_quantize_fp8(**inputs(dtype=dtype), fp8_dtype=fp8, enable_pdl=pdl)
    assert recorder.variants == [PackVariant(Arch.SM90A, name, fp8_name, D_NOPE, D_ROPE, D_V)]
    assert recorder.launches[0][-1] == pdl


@pytest.mark.parametrize("rope_dims", [2, 3])
def test_the_kernel_gets_its_arguments_in_contract_order(recorder, rope_dims):
    given = inputs()
    if rope_dims == 2:
        given["k_pe"] = given["k_pe"].squeeze(1)
    k_out, v_out = pack.mla_kv_pack_quantize_fp8(**given, k_scale_inv=2, v_scale_inv=np.float32(0.5))
    (arguments,) = recorder.launches
    assert [tuple(a.shape) for a in arguments[:5]] == [
        (TOKENS, HEADS, D_NOPE),
        (TOKENS, D_ROPE),
        (TOKENS, HEADS, D_V),
        (TOKENS, HEADS, D_NOPE + D_ROPE),
        (TOKENS, HEADS, D_V),
    ]
    assert arguments[0] is given["k_nope"] and arguments[2] is given["v"]
    assert arguments[1].data_ptr() == given["k_pe"].data_ptr()
    assert arguments[3] is k_out and arguments[4] is v_out
    assert arguments[5:] == (2.0, 0.5, 0) and all(type(scale) is float for scale in arguments[5:7])
    assert k_out.dtype == v_out.dtype == torch.float8_e4m3fn
    assert k_out.is_contiguous() and v_out.is_contiguous()


def test_given_outputs_are_written_and_returned(recorder):
    k_out = torch.empty(TOKENS, HEADS, D_NOPE + D_ROPE, dtype=torch.float8_e4m3fn)
    v_out = torch.empty(TOKENS, HEADS, 2 * D_V, dtype=torch.float8_e4m3fn)[..., :D_V]
    returned = pack.mla_kv_pack_quantize_fp8(**inputs(), k_out=k_out, v_out=v_out)
    assert returned[0] is k_out and returned[1] is v_out
    assert recorder.launches[0][3] is k_out and recorder.launches[0][4] is v_out


def test_slices_of_one_projection_are_taken_as_they_are(recorder):
    both = torch.zeros(TOKENS, HEADS, D_NOPE + D_V, dtype=torch.bfloat16)
    k_nope, v = both[..., :D_NOPE], both[..., D_NOPE:]
    pack.mla_kv_pack_quantize_fp8(k_nope, inputs()["k_pe"], v)
    assert recorder.launches[0][0] is k_nope and recorder.launches[0][2] is v


def test_an_odd_stride_over_a_single_row_is_not_an_error(recorder):
    given = inputs(tokens=1, heads=1)
    given["k_nope"] = given["k_nope"].as_strided((1, 1, D_NOPE), (1, 1, 1))
    pack.mla_kv_pack_quantize_fp8(**given)
    assert len(recorder.launches) == 1


def test_a_kind_of_call_seen_before_is_not_resolved_again(recorder):
    given = inputs()
    for call in range(3):
        pack.mla_kv_pack_quantize_fp8(**given, v_scale_inv=float(call))
    assert len(recorder.variants) == 1 and [launch[6] for launch in recorder.launches] == [0.0, 1.0, 2.0]
    pack.mla_kv_pack_quantize_fp8(**given, fp8_dtype=torch.float8_e5m2)
    pack.mla_kv_pack_quantize_fp8(**given, enable_pdl=True)
    assert [v.out_dtype for v in recorder.variants[1:]] == [Dtype.E5M2, Dtype.E4M3]
    resolve.forget()
    pack.mla_kv_pack_quantize_fp8(**given)
    assert len(recorder.variants) == 4


@pytest.mark.parametrize(("tokens", "heads"), [(0, HEADS), (TOKENS, 0), (0, 0)])
def test_nothing_to_do_launches_nothing(recorder, tokens, heads):
    k_out, v_out = pack.mla_kv_pack_quantize_fp8(**inputs(tokens, heads))
    assert recorder.launches == []
    assert k_out.shape == (tokens, heads, D_NOPE + D_ROPE) and v_out.shape == (tokens, heads, D_V)


def test_cpu_tensors_are_refused():
    with pytest.raises(ArgumentError, match="mla_kv_pack_quantize_fp8: k_nope is on cpu; it must be a CUDA tensor"):
        pack.mla_kv_pack_quantize_fp8(**inputs())


FP8 = torch.float8_e4m3fn


def fp8(width: int) -> torch.Tensor:
    return torch.zeros(TOKENS, HEADS, width, dtype=FP8)


WRONG = {
    "k_nope of two dimensions": (
        {"k_nope": torch.zeros(TOKENS, D_NOPE, dtype=torch.bfloat16)},
        r"k_nope has shape \[5, 128\]; it must be \[tokens, heads, d_nope\]",
    ),
    "k_pe of four dimensions": (
        {"k_pe": torch.zeros(TOKENS, 1, 1, D_ROPE, dtype=torch.bfloat16)},
        r"k_pe has shape \[5, 1, 1, 64\]; it must be \[5, d_rope\] or \[5, 1, d_rope\]",
    ),
    "k_pe per head": (
        {"k_pe": torch.zeros(TOKENS, HEADS, D_ROPE, dtype=torch.bfloat16)},
        r"k_pe has shape \[5, 3, 64\]; it must be \[5, d_rope\] or \[5, 1, d_rope\]",
    ),
    "k_pe of other tokens": (
        {"k_pe": torch.zeros(TOKENS + 1, D_ROPE, dtype=torch.bfloat16)},
        r"k_pe has shape \[6, 64\]; it must be \[5, d_rope\] or \[5, 1, d_rope\]",
    ),
    "v of other heads": (
        {"v": torch.zeros(TOKENS, HEADS + 1, D_V, dtype=torch.bfloat16)},
        r"v has shape \[5, 4, 128\]; it must be \[5, 3, d_v\]",
    ),
    "v of another dtype": (
        {"v": torch.zeros(TOKENS, HEADS, D_V, dtype=torch.float16)},
        r"v is torch.float16; accepted: torch.bfloat16",
    ),
    "v elsewhere": (
        {"v": torch.zeros(TOKENS, HEADS, D_V, dtype=torch.bfloat16, device="meta")},
        r"v is on meta but k_nope is on cpu; all tensors must share a device",
    ),
    "v transposed": (
        {"v": torch.zeros(TOKENS, D_V, HEADS, dtype=torch.bfloat16).transpose(1, 2)},
        r"v has strides \(384, 1, 3\); its last dimension must have stride 1 \(pass v.contiguous\(\)\)",
    ),
    "v that starts in the middle of 16 bytes": (
        {"v": torch.zeros(TOKENS, HEADS, D_V + 8, dtype=torch.bfloat16)[..., 4 : 4 + D_V]},
        r"v starts at address 0x[0-9a-f]+8; it must be aligned to 16 bytes \(v.clone\(\) is\)",
    ),
    "inputs of a dtype without a kernel": (
        inputs(dtype=torch.float32),
        r"k_nope is torch.float32; accepted: torch.bfloat16, torch.float16",
    ),
    "an output dtype that is not FP8": (
        {"fp8_dtype": torch.bfloat16},
        r"fp8_dtype is torch.bfloat16; accepted: torch.float8_e4m3fn, torch.float8_e5m2",
    ),
    "an output dtype in a list": ({"fp8_dtype": [1]}, r"fp8_dtype is a list; accepted: torch.float8_e4m3fn, "),
    "an output dtype in words": ({"fp8_dtype": "e4m3"}, r"fp8_dtype is a str; accepted: torch.float8_e4m3fn, "),
    "k_nope with an odd pitch": (
        {"k_nope": torch.zeros(TOKENS, HEADS, D_NOPE + 4, dtype=torch.bfloat16)[..., :D_NOPE]},
        r"k_nope has strides \(396, 132, 1\) of 2-byte elements; .* multiples of 16 bytes \(8 elements; those of "
        + r"k_nope.contiguous\(\) are\)",
    ),
    "k_out of another dtype": (
        {"k_out": torch.zeros(TOKENS, HEADS, D_NOPE + D_ROPE, dtype=torch.float8_e5m2)},
        r"k_out is torch.float8_e5m2; accepted: torch.float8_e4m3fn",
    ),
    "k_out without the rope part": (
        {"k_out": torch.zeros(TOKENS, HEADS, D_NOPE, dtype=FP8)},
        r"k_out has shape \[5, 3, 128\]; it must be \[5, 3, 192\]",
    ),
    "v_out with an odd pitch": (
        {"v_out": torch.zeros(TOKENS, HEADS, D_V + 8, dtype=FP8)[..., :D_V]},
        r"v_out has strides \(408, 136, 1\) of 1-byte elements; the outer strides must be multiples of 16 bytes",
    ),
    "v_out elsewhere": (
        {"v_out": torch.zeros(TOKENS, HEADS, D_V, dtype=FP8, device="meta")},
        r"v_out is on meta but k_nope is on cpu",
    ),
    "a scale on the device": (
        {"k_scale_inv": torch.ones(())},
        r"k_scale_inv is a Tensor; it must be a Python number \(reading a tensor here would wait for the GPU\)",
    ),
    "a scale of NaN": ({"k_scale_inv": math.nan}, r"k_scale_inv is nan; it must be finite in float32"),
    "an infinite scale": ({"v_scale_inv": -math.inf}, r"v_scale_inv is -inf; it must be finite in float32"),
    "a scale beyond float32": ({"v_scale_inv": 2.0**128}, r"v_scale_inv is 3.4\d+e\+38; it must be finite in float32"),
    "a scale beyond floats": ({"k_scale_inv": -(10**400)}, r"k_scale_inv is a number of more than 20 digits, beyond"),
    "a flag for a scale": ({"k_scale_inv": True}, r"k_scale_inv is a bool; it must be a Python number"),
    "a flag in words": ({"enable_pdl": "off"}, r"enable_pdl is 'off'; it must be True or False"),
    "a flag on the device": ({"enable_pdl": torch.ones(2)}, r"enable_pdl is a Tensor; it must be True or False"),
    "a scale that is no number": ({"v_scale_inv": None}, r"v_scale_inv is a NoneType; it must be a Python number"),
    "more rows than the kernel counts": (
        {
            "k_nope": torch.zeros(1, 1, D_NOPE, dtype=torch.bfloat16).expand(2**20, 2**11, D_NOPE),
            "k_pe": torch.zeros(1, D_ROPE, dtype=torch.bfloat16).expand(2**20, D_ROPE),
            "v": torch.zeros(1, 1, D_V, dtype=torch.bfloat16).expand(2**20, 2**11, D_V),
        },
        r"k_nope has 1048576 tokens x 2048 heads; at most 1073741824 rows fit one call",
    ),
}


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(recorder, case, seen):
    change, message = WRONG[case]
    if seen:
        outputs = {"k_out": fp8(D_NOPE + D_ROPE), "v_out": fp8(D_V)}
        pack.mla_kv_pack_quantize_fp8(**inputs(), **outputs)
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match="mla_kv_pack_quantize_fp8: " + message):
        pack.mla_kv_pack_quantize_fp8(**{**inputs(), **change})
    assert recorder.launches == []


@pytest.mark.parametrize("name", ["d_nope", "d_rope", "d_v"])
def test_head_dimensions_without_a_kernel_are_named(recorder, name):
    argument = {"d_nope": "k_nope", "d_rope": "k_pe", "d_v": "v"}[name]
    given = inputs()
    given[argument] = given[argument][..., :56]
    with pytest.raises(UnsupportedError, match=f"pack needs {name} to be a multiple of 16 up to 1024, not 56"):
        pack.mla_kv_pack_quantize_fp8(**given)


TENSORS = ("k_nope", "k_pe", "v", "k_out", "v_out")


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("case", [*ODD, *FLOATS_ONLY])
def test_tensors_that_are_not_what_memory_holds_are_named(recorder, case, name, seen):
    make, message = {**ODD, **FLOATS_ONLY}[case]
    given = {**inputs(), "k_out": fp8(D_NOPE + D_ROPE), "v_out": fp8(D_V)}
    changed = {**given, name: make(given[name])}
    if seen:
        pack.mla_kv_pack_quantize_fp8(**given)
        recorder.launches.clear()
    if seen and case == "fake":
        changed, name = {n: make(x) for n, x in given.items()}, "k_nope"
    with pytest.raises(ArgumentError, match=f"^mla_kv_pack_quantize_fp8: {name} {message.format(name=name)}"):
        pack.mla_kv_pack_quantize_fp8(**changed)
    assert recorder.launches == []


@pytest.mark.parametrize("seen", [False, True], ids=["first call", "kind of call seen before"])
@pytest.mark.parametrize("name", ["k_out", "v_out"])
@pytest.mark.parametrize("case", OVERLAPPING)
def test_an_output_whose_rows_share_memory_is_named(recorder, case, name, seen):
    given = {**inputs(), "k_out": fp8(D_NOPE + D_ROPE), "v_out": fp8(D_V)}
    for _ in range(seen):
        pack.mla_kv_pack_quantize_fp8(**given)
        recorder.launches.clear()
    with pytest.raises(ArgumentError, match=f": {name} has shape .* so some of its elements share memory"):
        pack.mla_kv_pack_quantize_fp8(**{**given, name: OVERLAPPING[case](given[name])})
    assert recorder.launches == []


def test_a_strided_output_is_looked_up_once(recorder):
    k_out = torch.zeros(HEADS, TOKENS, 256, dtype=FP8).transpose(0, 1)[..., : D_NOPE + D_ROPE]
    for _ in range(2):
        pack.mla_kv_pack_quantize_fp8(**inputs(), k_out=k_out)
    assert len(recorder.variants) == 1 and len(recorder.launches) == 2


def test_parameters_are_read_where_no_gradient_is_asked_for(recorder):
    given = inputs()
    with torch.no_grad():
        pack.mla_kv_pack_quantize_fp8(**{**given, "v": torch.nn.Parameter(given["v"])})
    assert len(recorder.launches) == 1
