"""The combine kernel alone: partial results made up here, merged as float64 merges them; whole units left alone."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cutlass import Float16, Float32
from decode_part_kernels import compiled_combiner
from tsmla.identity.arch import Arch, Deal
from tsmla.identity.plan import RECORD_BYTES
from tsmla.identity.support import LATENT_DIM
from tsmla.identity.variant import DecodeVariant, Dtype
from tsmla_emulator.dealt import Sight, deal_out
from tsmla_kernels.decode.partial_rows import LIFTED_COLUMNS, Lifted, PartialRows

DEAL = Deal(row_tile=16, tile_kv=64, overhead=1, least=1, split=0)
VARIANT = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, lse=True)
TORCH = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
FLOAT32 = PartialRows()
KEPT = {Float32: torch.float32, Float16: torch.float16}
GUARD = 123.0

CASES = {
    "one unit, few pieces": ([200], 1, 5, 3),
    "one unit, as many pieces as a warp loads of": ([64 * 8], 1, 11, 9),
    "one unit, many pieces": ([64 * 40], 1, 3, 41),
    "one unit, columns in two slices": ([64 * 40], 1, 40, 41),
    "one unit, all columns together": ([64 * 40, 64 * 40], 1, 40, 41),
    "CTAs with several rows of many pieces": ([64 * 12] * 40, 1, 16, 240),
    "two row tiles, few units": ([700, 64, 3000], 2, 12, 16),
    "more units than groups": ([100, 900, 0, 640, 1, 129, 400, 64, 900, 20], 1, 7, 6),
    "more row tiles than a group": ([1500, 300], 5, 32, 24),
    "more row tiles than a group, equal pieces": ([640, 600], 5, 32, 64),
    "nothing to cut": ([64] * 8, 1, 6, 8),
}


def run(
    gpu, case, variant: DecodeVariant = VARIANT, output_scale=0.5, kept: PartialRows = FLOAT32, spread: float = 20.0
):
    """Fill the workspace as attention kernels would, which keep partial rows as `kept` says, with LSE that differ by a
    few times `spread`; returns (what was written, what must be, which rows were cut)."""
    seq_lens, q_len, heads, workers = case
    rows = q_len * heads
    stored, slots = min(DEAL.row_tile, rows), 2 * workers
    dealt = deal_out(DEAL, seq_lens, q_len, heads, workers, slots, Sight(causal=0))
    partial_rows = torch.full((slots, stored, LATENT_DIM), math.nan, dtype=KEPT[kept.dtype])
    partial_lse = torch.full((slots, stored), math.nan)
    # Of blocks of columns that share one, powers of two: a row's next to the smallest, the others' around 1.
    factors = kept.lifted.factors if kept.lifted else 0
    downs = torch.full((slots, stored, factors), math.nan)
    pieces: dict[tuple[int, int], list[int]] = {}
    for own in dealt.segments:
        for segment in own:
            if segment.slot >= 0:
                count = min(stored, rows - segment.row_tile * DEAL.row_tile)
                partial_rows[segment.slot, :count] = torch.randn(count, LATENT_DIM) * 2.0**kept.bias
                partial_lse[segment.slot, :count] = torch.randn(count) * spread
                if kept.lifted:
                    downs[segment.slot, :count] = 2.0 ** torch.randint(-9, 10, (count, factors))
                    downs[segment.slot, count - 1] *= 2.0**-100
                # Rows that see no key: the first in every piece, the second in the last piece only.
                for row in [0, 1][: 2 if segment.first_tile else 1]:
                    partial_rows[segment.slot, row], partial_lse[segment.slot, row] = 0.0, -math.inf
                pieces.setdefault((segment.request, segment.row_tile), []).append(segment.slot)

    as_kept, values = partial_rows, partial_rows.double() * 0.5**kept.bias
    if kept.lifted:
        of_block = [kept.lifted.of(block) for block in range(LATENT_DIM // LIFTED_COLUMNS)]
        values = values.unflatten(2, (-1, LIFTED_COLUMNS)) * downs.double()[:, :, of_block, None]
        values = values.flatten(2)
    if kept.in_quads:
        as_kept = as_kept.unflatten(2, (-1, 4, 4, 2)).transpose(3, 4).flatten(2)
    shape = (len(seq_lens), rows)
    expected = torch.full((*shape, LATENT_DIM), GUARD, dtype=torch.float64)
    expected_lse = torch.full(shape, GUARD, dtype=torch.float64)
    was_cut = torch.zeros(shape, dtype=torch.bool)
    for (request, row_tile), slot_list in pieces.items():
        span = slice(row_tile * DEAL.row_tile, min((row_tile + 1) * DEAL.row_tile, rows))
        count = span.stop - span.start
        lses = partial_lse[slot_list, :count].double() * math.log(2)
        weights = torch.softmax(lses, 0).nan_to_num(0.0)
        expected[request, span] = (weights[..., None] * values[slot_list, :count]).sum(0) * output_scale
        expected_lse[request, span] = lses.logsumexp(0) / math.log(2)
        was_cut[request, span] = True

    def cuda(tensor):
        return tensor.to("cuda")

    dtype = TORCH[variant.out_dtype]
    outer = (len(seq_lens), q_len, heads)
    out = cuda(torch.full((*outer, LATENT_DIM), GUARD, dtype=dtype))
    lse = cuda(torch.full(outer, GUARD, dtype=torch.float32)) if variant.lse else None
    query = torch.empty((*outer, 576), dtype=dtype, device="cuda")
    cache = torch.empty((1, 64, 576), dtype=dtype, device="cuda")
    lens = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
    told = torch.tensor(dealt.records, dtype=torch.int32)
    written = (told, as_kept, partial_lse, *([downs] if kept.lifted else []))
    held = torch.cat([x.contiguous().view(torch.int8).flatten() for x in written])
    size = len(told) * RECORD_BYTES + slots * stored * kept.row_bytes(LATENT_DIM)
    workspace = torch.full((size,), -1, dtype=torch.int8)
    workspace[: len(held)] = held
    workspace = cuda(workspace)
    kernel = gpu.emulation.adopt(compiled_combiner(DEAL, variant, kept), lambda name: name in ("out", "lse"))
    kernel(
        query,
        query.new_empty((0, 0, 0, 64)),
        cache,
        lens[:, None],
        lens,
        lens,
        lens.new_empty(0),
        lens.new_empty((0, 0)),
        query.new_empty(0, dtype=torch.float32),
        out,
        lse,
        workspace,
        None,
        None,
        None,
        1.0,
        output_scale,
        0,
        -1,
        1,
        0,
        1,
        0,
        1.0,
        0,
        q_len,
        16,
        workers,
        0,
    )
    written = out.cpu().double().view(*shape, LATENT_DIM), None if lse is None else lse.cpu().double().view(shape)
    return written, (expected, expected_lse), was_cut


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pieces_are_merged_and_nothing_else_is_touched(gpu, case):
    (out, lse), (expected, expected_lse), was_cut = run(gpu, case)
    assert was_cut.any() == (case is not CASES["nothing to cut"])
    assert torch.allclose(out, expected, rtol=2**-8, atol=1e-6)
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
    assert (out[~was_cut] == GUARD).all() and (lse[~was_cut] == GUARD).all()
    empty = expected_lse == -math.inf
    assert (out[empty] == 0).all()


@pytest.mark.archs("sm_100a")
@pytest.mark.parametrize("lse", [False, True])
def test_other_variants(gpu, lse):
    variant = DecodeVariant(Arch.SM100A, Dtype.FP16, Dtype.FP16, lse)
    (out, got_lse), (expected, expected_lse), _ = run(gpu, CASES["two row tiles, few units"], variant)
    assert torch.allclose(out, expected, rtol=2**-11, atol=1e-6)
    assert (got_lse is not None) == lse
    assert got_lse is None or torch.allclose(got_lse, expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.archs("sm_90a", "sm_100a")
@pytest.mark.parametrize("name", [*list(CASES)[:3], "two row tiles, few units"])
def test_rows_kept_in_16_bits(gpu, name):
    variant = DecodeVariant(Arch(gpu.arch), Dtype.BF16, Dtype.BF16, lse=True)
    kept = dataclasses.replace(PartialRows.of(Dtype.E4M3), in_quads=variant.arch is Arch.SM90A)
    (out, lse), (expected, expected_lse), _ = run(gpu, CASES[name], variant, kept=kept)
    assert torch.allclose(out, expected, rtol=2**-8, atol=1e-6)
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.archs("sm_90a", "sm_100a")
@pytest.mark.parametrize("workers", [8, 40, 80])
def test_the_highest_lse_is_any_of_a_rows(gpu, workers):
    """Powers of the others' distance from a lower one would be infinite."""
    variant = DecodeVariant(Arch(gpu.arch), Dtype.BF16, Dtype.BF16, lse=True)
    kept = dataclasses.replace(PartialRows.of(Dtype.E4M3), in_quads=variant.arch is Arch.SM90A)
    (out, lse), (expected, expected_lse), _ = run(gpu, ([64 * workers], 1, 16, workers), variant, kept=kept, spread=400)
    assert torch.allclose(out, expected, rtol=2**-8, atol=1e-6)
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("lifted", Lifted)
@pytest.mark.parametrize("name", CASES)
def test_rows_lifted_by_powers_of_two(gpu, name, lifted):
    """Each power is taken out; a row that is small as a whole is no less right. Rows with one power are kept with a
    bias, in order."""
    kept = PartialRows(Float16, in_quads=True, lifted=lifted)
    if lifted is Lifted.WHOLE_ROW:
        kept = PartialRows(Float16, bias=6, lifted=lifted)
    (out, lse), (expected, expected_lse), was_cut = run(gpu, CASES[name], kept=kept)
    assert ((out - expected).abs() <= expected.abs() * 2**-8 + expected.abs().amax(-1, keepdim=True) * 2**-20).all()
    assert torch.allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
    assert (out[~was_cut] == GUARD).all() and (lse[~was_cut] == GUARD).all()
