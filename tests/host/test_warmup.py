"""warmup: resolves each variant, and launches those of this GPU once with arguments that fit the kernel."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import tsmla
from example_variants import PACK, PREFILL
from refusing import refusing
from tsmla.errors import KernelUnavailable
from tsmla.identity.arch import Arch
from tsmla.identity.variant import FAMILIES
from tsmla.loading import gpu, jit, resolve
from tsmla.operators import checks, prepare

from build_aot import matrix


@pytest.fixture
def cpu_for_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tensors that warmup asks for on CUDA are made on the CPU; the list records synchronisation."""
    calls: list[str] = []
    for name in ("zeros", "tensor"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, device=None, **kw: make(*a, **kw))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    return calls


def test_without_a_gpu_it_resolves_only(monkeypatch, shipped: Path) -> None:
    monkeypatch.setattr(gpu, "current_arch", lambda: (None, "no GPU"))
    assert tsmla.warmup([PACK]) == {PACK: "shipped"}
    assert resolve.served() == {PACK: "shipped"}


def test_what_is_no_variant_is_refused_with_what_is_one() -> None:
    with pytest.raises(TypeError, match="^warmup: 'pack' is not a variant; accepted: PrefillVariant, DecodeVariant, "):
        tsmla.warmup(["pack"])


def test_it_raises_what_resolving_raises(monkeypatch, nothing_shipped) -> None:
    monkeypatch.setattr(gpu, "current_arch", lambda: (None, "no GPU"))
    monkeypatch.setenv("TSMLA_BACKEND", "binary")
    with pytest.raises(KernelUnavailable):
        tsmla.warmup([PACK])


def test_kernels_of_this_gpu_are_launched_once_and_waited_for(monkeypatch, nothing_shipped, cpu_for_cuda) -> None:
    launched = []
    other = dataclasses.replace(PACK, arch=Arch.SM100A)
    monkeypatch.setattr(gpu, "current_arch", lambda: (Arch.SM90A, "GPU 0"))
    monkeypatch.setattr(jit, "load_cached", lambda variant: lambda *arguments: launched.append(variant))
    assert tsmla.warmup([PACK, other, PREFILL]) == {PACK: "cached", other: "cached", PREFILL: "cached"}
    assert launched == [PACK, PREFILL]
    assert cpu_for_cuda == ["synchronize"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_arguments_are_those_that_kernels_take(family, cpu_for_cuda) -> None:
    for variant in matrix.shipped([Arch.SM90A, Arch.SM100A], [family]):
        refusing(variant)(*prepare._one_token(variant))


def test_every_dtype_of_a_variant_has_a_torch_dtype() -> None:
    assert len(set(checks.TORCH_DTYPES.values())) == len(checks.TORCH_DTYPES)
