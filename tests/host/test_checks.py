"""Argument checks: each error names operator, argument, what was given and what is accepted. CPU tensors do here."""

from __future__ import annotations

import fractions
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from tsmla.errors import ArgumentError, UnsupportedError
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype
from tsmla.operators import checks


def refused(check, *arguments, says: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as raised:
        check("operator", "query", *arguments)
    assert isinstance(raised.value, ValueError)
    for text in ("operator: query ", *says):
        assert text in str(raised.value)


def test_cpu_tensor() -> None:
    refused(checks.cuda, torch.zeros(1), says=("on cpu", "must be a CUDA tensor"))


def test_not_a_tensor() -> None:
    refused(checks.cuda, [1.0], says=("is a list", "must be a CUDA tensor"))
    refused(checks.same_device, None, "key", torch.device("cpu"), says=("is a NoneType", "tensor on cpu"))


def test_devices_that_differ() -> None:
    tensor = torch.zeros(1, device="meta")
    refused(checks.same_device, tensor, "key", torch.device("cpu"), says=("is on meta but key is on cpu",))
    checks.same_device("operator", "query", tensor, "key", torch.device("meta"))


def test_shape() -> None:
    refused(checks.shape, torch.zeros(2, 3), (2, 4), says=("shape [2, 3]", "must be [2, 4]"))
    refused(checks.shape, torch.zeros(2, 3), ("tokens", 2, 3), says=("shape [2, 3]", "must be [tokens, 2, 3]"))
    either = (("pages", 3), ("pages", 1, 3))
    refused(checks.shape, torch.zeros(2, 2, 3), *either, says=("must be [pages, 3] or [pages, 1, 3]",))
    for tensor in (torch.zeros(2, 3), torch.zeros(2, 1, 3)):
        assert checks.shape("operator", "query", tensor, *either) == {"pages": 2}


def test_dtype() -> None:
    accepted = (torch.bfloat16, torch.float16)
    refused(checks.dtype_in, torch.zeros(1), accepted, says=("torch.float32", "torch.bfloat16, torch.float16"))
    checks.dtype_in("operator", "query", torch.zeros(1, dtype=torch.float16), accepted)


def test_last_dimension() -> None:
    refused(checks.last_dim_contiguous, torch.zeros(4, 8).T, says=("strides (1, 8)", "stride 1", ".contiguous()"))
    checks.last_dim_contiguous("operator", "query", torch.zeros(4, 8)[:, :3])
    checks.last_dim_contiguous("operator", "query", torch.zeros(4, 8)[:, ::2][:, :1])


def test_contiguous() -> None:
    refused(checks.contiguous, torch.zeros(4, 8)[:, :3], says=("shape [4, 3] and strides (8, 1)", "contiguous"))
    checks.contiguous("operator", "query", torch.zeros(4, 8))


def test_alignment_of_address_and_strides() -> None:
    whole = torch.zeros(4, 24, dtype=torch.bfloat16)
    checks.aligned("operator", "query", whole, 16)
    refused(checks.aligned, whole[:, 1:], 16, says=("address", "aligned to 16 bytes"))
    refused(checks.aligned, torch.zeros(4, 20, dtype=torch.bfloat16), 16, says=("strides (20, 1)", "8 elements"))
    checks.aligned("operator", "query", torch.zeros(4, 20, dtype=torch.bfloat16)[:1], 16)


@pytest.mark.parametrize(("theirs", "ours"), checks.TORCH_DTYPES.items())
def test_names_of_dtypes(theirs: torch.dtype, ours: Dtype) -> None:
    assert checks.dtype_of(theirs) is ours


def test_every_dtype_has_a_torch_dtype() -> None:
    assert set(checks.TORCH_DTYPES.values()) == set(Dtype)


def test_unknown_dtype() -> None:
    with pytest.raises(ArgumentError, match="torch.int32 is not a dtype .* torch.bfloat16"):
        checks.dtype_of(torch.int32)


@pytest.mark.parametrize("arch", Arch)
def test_architecture_of_a_gpu_is_asked_once(monkeypatch, arch: Arch) -> None:
    asked = []
    monkeypatch.setattr(checks, "_arch_by_index", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: asked.append(i) or arch.capability)
    assert [checks.arch_of(torch.device("cuda", 3)) for _ in range(2)] == [arch, arch]
    assert asked == [3]


def test_a_gpu_without_kernels(monkeypatch) -> None:
    monkeypatch.setattr(checks, "_arch_by_index", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA A100")
    with pytest.raises(UnsupportedError, match=r"NVIDIA A100 with compute capability 8.0; .* sm_90a \(H100, H200\)"):
        checks.arch_of(torch.device("cuda", 0))


@given(some.lists(some.tuples(some.integers(0, 4), some.integers(0, 20)), min_size=1, max_size=4))
def test_overlap_is_found(layout) -> None:
    """Against the addresses of all elements. A dimension between another's elements counts as overlap, too."""
    shape, strides = zip(*layout, strict=True)
    view = torch.zeros(1 + sum((n - 1) * s for n, s in layout if n)).as_strided(shape, strides)
    places = torch.arange(view.untyped_storage().nbytes() // 4).as_strided(shape, strides).flatten()
    shared = len(places.unique()) < len(places)
    assert checks.overlapping(view) or not shared
    nested = all(
        small <= large or n <= 1 for (n, large), small in zip(sorted_by_stride(layout), spans(layout), strict=True)
    )
    assert checks.overlapping(view) == (not nested and view.numel() > 0)


def sorted_by_stride(layout) -> list[tuple[int, int]]:
    return sorted(((n, s) for n, s in layout), key=lambda entry: entry[::-1])


def spans(layout) -> list[int]:
    """For each dimension, in the order of strides, how many elements the ones before it span."""
    reached = [1]
    for n, stride in sorted_by_stride(layout):
        reached.append(reached[-1] + max(0, n - 1) * stride)
    return reached[:-1]


@pytest.mark.parametrize("tensor", [torch.zeros(4, 8)[:, :3], torch.zeros(4, 8).T, torch.zeros(1).expand(1, 1)])
def test_rows_apart_do_not_overlap(tensor) -> None:
    checks.no_overlap("operator", "out", tensor)


def test_rows_that_share_memory() -> None:
    refused_out = pytest.raises(ArgumentError, match=r"^operator: out has shape \[4, 8\] and strides \(0, 1\), so some")
    with refused_out:
        checks.no_overlap("operator", "out", torch.zeros(8).expand(4, 8))


@pytest.mark.parametrize("value", [fractions.Fraction(1, 2), np.float16(0.5), np.float64(0.5), np.longdouble(0.5), 0.5])
def test_numbers(value) -> None:
    assert checks.number("operator", "scale", value) == 0.5
    assert type(checks.number("operator", "scale", value)) is float


@pytest.mark.parametrize("value", [True, np.True_, "1", 1j, None, torch.tensor(1.0), [1.0], 10**400, -(10**400)])
def test_what_is_no_number(value) -> None:
    refused_scale = pytest.raises(ArgumentError, match="^operator: scale is .*; it must be (a Python number|finite)")
    with refused_scale:
        checks.number("operator", "scale", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**128, -(2.0**128), np.longdouble("1e4000")])
def test_scales_that_float32_does_not_hold(value) -> None:
    with pytest.raises(ArgumentError, match="^operator: scale is .*; it must be finite in float32$"):
        checks.scale("operator", "scale", value)


@pytest.mark.parametrize("wrapped", [torch.func.vmap, torch.func.grad])
def test_tensors_that_torch_transforms(wrapped) -> None:
    def asked(tensor):
        refused(checks.stored, tensor, says=("is a Tensor without memory", "must be a tensor"))
        return tensor.sum()

    wrapped(asked)(torch.zeros(2))


def test_a_tensor_whose_memory_was_freed() -> None:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    refused(checks.stored, tensor, says=("is a Tensor without memory", "must be a tensor"))


def test_a_quantised_tensor() -> None:
    quantised = torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)
    refused(checks.stored, quantised, says=("is a quantised tensor", "pass query.dequantize()"))


def test_a_conjugated_tensor() -> None:
    refused(checks.stored, torch.zeros(2, dtype=torch.complex64).conj(), says=("conjugates", "query.resolve_conj()"))
