"""mla_quantize_q in emulation: every byte as PyTorch computes it."""

from __future__ import annotations

import math

import pytest
import torch
from cache_rows import POISON, Cache, difficult, stored
from decode_queries import LAYOUTS, laid_out
from emulated_archs import KERNELS
from tsmla import mla_quantize_q, mla_write_cache

pytestmark = pytest.mark.archs(*KERNELS)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
WIDTHS = {"nope_out": (512, E4M3), "rope_out": (64, BF16), "scale_out": (1, torch.float32)}


def held(results: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The bytes of each row, by what `stored` calls them."""
    nope, rope, scale = results
    rows = {"cache": nope, "rope_cache": rope, "scale_cache": scale[..., None]}
    return {name: x.contiguous().view(torch.uint8).flatten(0, -2) for name, x in rows.items()}


def differences(results: tuple[torch.Tensor, ...], rows: torch.Tensor, rounded: bool = True) -> dict[str, int]:
    """Bytes that differ from the formula's."""
    wanted = stored(rows[:, :512], rows[:, 512:], "snapmla", power_of_two=rounded)
    counts = {name: int((got != wanted[name]).sum()) for name, got in held(results).items()}
    return {name: count for name, count in counts.items() if count}


def poisoned(*outer: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Make, for each result, memory and the tensor in it: rows lie apart, and nobody wrote anything."""
    found = {}
    for name, (width, dtype) in WIDTHS.items():
        memory = torch.full((*outer, width * dtype.itemsize + 16), POISON, dtype=torch.uint8, device="cuda")
        rows = memory[..., : width * dtype.itemsize].view(dtype)
        found[name] = memory, rows[..., 0] if name == "scale_out" else rows
    return found


@pytest.mark.parametrize("rounded", [True, False])
def test_bytes_of_difficult_rows(gpu, rounded):
    rows = difficult(32, BF16)
    results = mla_quantize_q(rows.view(2, 2, 8, 576), power_of_two_scales=rounded)
    assert [(tuple(x.shape), x.dtype, x.is_contiguous()) for x in results] == [
        ((2, 2, 8, 512), E4M3, True),
        ((2, 2, 8, 64), BF16, True),
        ((2, 2, 8), torch.float32, True),
    ]
    assert not differences(results, rows, rounded)


@pytest.mark.parametrize(
    "layout, shape, packed",
    [*zip(LAYOUTS, [(3, 2, 5), (1, 1, 1), (1, 9, 3)] * 2, [False, False, True] * 2, strict=True)],
)
def test_strides_of_their_own(gpu, layout, shape, packed):
    """Joined queries and pieces in any order, results with guards between their rows, packed tokens or requests."""
    rows = difficult(math.prod(shape), BF16)
    query, results = laid_out(rows.view(*shape, 576), layout), poisoned(*shape)
    given = {name: tensor for name, (_, tensor) in results.items()}
    if packed:
        query = tuple(x[0] for x in query) if isinstance(query, tuple) else query[0]
        given = {name: tensor[0] for name, tensor in given.items()}
    returned = mla_quantize_q(query, **given, enable_pdl=True)
    assert all(x is y for x, y in zip(returned, given.values(), strict=True))
    assert not differences(returned, rows)
    for name, (memory, _) in results.items():
        assert (memory[..., -16:] == POISON).all(), f"{name}: guards between rows"


def test_a_key_and_a_query_of_the_same_numbers_hold_the_same_bytes(gpu):
    rows = difficult(16, BF16)
    cache = Cache("snapmla", 2, 8)
    mla_write_cache(rows[:, :512], rows[:, 512:], torch.arange(16, device="cuda"), **cache.tensors, format="snapmla")
    results = held(mla_quantize_q(rows.view(4, 4, 576)))
    for name, got in held(tuple(cache.tensors.values())).items():
        assert torch.equal(got, results[name]), name


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 0, 3), (2, 3, 0), (0, 5)])
def test_nothing_to_do(gpu, shape):
    results = mla_quantize_q(torch.empty(*shape, 576, dtype=BF16, device="cuda"))
    assert [x.shape for x in results] == [(*shape, 512), (*shape, 64), shape]
