"""What probabilities enter value products as, and partial results are kept as: what each kernel stores and multiplies
is what `Probabilities` say, and the types hold what they must."""

from __future__ import annotations

import pytest
import torch
from tsmla.identity.arch import Arch
from tsmla.identity.plan import DEALS, RECORD_BYTES, plan_decode
from tsmla.identity.row_format import multiplied_row
from tsmla.identity.support import LATENT_DIM
from tsmla.identity.variant import DecodeVariant, Dtype, PrefillVariant
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla_emulator.dealt import deal_out
from tsmla_kernels.decode.partial_rows import LEAST_LIFTED, LIFTED_TO, Lifted, PartialRows
from tsmla_kernels.parts.blackwell import umma
from tsmla_kernels.parts.precision import Probabilities, numeric
from tsmla_kernels.sm90.decode.forms import FEW_ROWS, partial_rows_of
from tsmla_kernels.sm90.decode.row64.geometry import DecodeGeometry
from tsmla_kernels.sm90.decode.row64.kernel import Row64Kernel
from tsmla_kernels.sm90.prefill.kernel import PrefillKernel as HopperPrefill
from tsmla_kernels.sm100.decode.kernel import DecodeKernel as BlackwellDecode
from tsmla_kernels.sm100.prefill.kernel import PrefillKernel as BlackwellPrefill

from build_aot.matrix import shipped

VARIANTS = [v for v in shipped() if isinstance(v, DecodeVariant | PrefillVariant) and v.lse]


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize("dtype", Dtype, ids=str)
def test_the_type_holds_the_largest_exponential(dtype, widens):
    probabilities = Probabilities.of(dtype, widens)
    largest = 2.0 ** (probabilities.bias + probabilities.slack)
    assert largest <= torch.finfo(TORCH_DTYPE_OF[probabilities.dtype]).max
    if widens and dtype.bits == 8:
        assert probabilities.operands == (Dtype.FP16, Dtype.FP16)
    else:
        assert probabilities == Probabilities.of(dtype)
        assert probabilities.operands == (probabilities.dtype, dtype)
        assert probabilities.dtype.bits == dtype.bits


@pytest.mark.parametrize("variant", [v for v in VARIANTS if isinstance(v, PrefillVariant) and v.arch is not Arch.SM90A])
def test_the_type_holds_the_largest_exponential_of_a_prefill_that_keeps_its_reference_longer(variant):
    probabilities = BlackwellPrefill(variant).schedule.probabilities
    largest = 2.0 ** (probabilities.bias + probabilities.slack)
    held = torch.tensor(largest).to(TORCH_DTYPE_OF[probabilities.dtype])
    assert abs(held.double() / largest - 1) <= torch.finfo(held.dtype).eps / 2


@pytest.mark.parametrize("dtype", [Dtype.E4M3, Dtype.E5M2], ids=str)
def test_eight_bit_probabilities_have_the_more_precise_type(dtype):
    assert Probabilities.of(dtype).dtype is Dtype.E4M3


def test_float16_holds_averages_of_the_largest_and_the_smallest_values():
    """Probabilities are rounded up to less than twice. Where one of 2^12 keys has the smallest value and the others 0,
    8 bits of it are left, as many as bf16 has."""
    kept, values, held = PartialRows.of(Dtype.E4M3), torch.finfo(torch.float8_e4m3fn), torch.finfo(torch.float16)
    assert kept.dtype is numeric(Dtype.FP16)
    assert 2 * values.max * 2.0**kept.bias <= held.max
    assert values.smallest_normal * values.eps * 2.0 ** (kept.bias - 12) >= held.smallest_normal * held.eps * 2.0**7


def test_float16_holds_what_is_lifted_with_11_bits():
    """A power of two for 2^-110 and one for the largest float32, and what takes them out again, are normal numbers."""
    held, float32 = torch.finfo(torch.float16), torch.finfo(torch.float32)
    assert 2 * LIFTED_TO <= held.max and LIFTED_TO * 2.0**-28 >= held.smallest_normal
    for power in (LEAST_LIFTED, 2.0**127):
        assert all(float32.smallest_normal <= up <= 2.0**127 for up in (LIFTED_TO / power, power / LIFTED_TO))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if isinstance(v, DecodeVariant)], ids=str)
def test_partial_rows_by_variant(variant):
    """Lifted in 16 bits where Hopper multiplies bf16 rows, as they are stored or converted, with a factor for each
    warpgroup's columns, or rows with scales, with one factor. Outputs of fp16 rows would be rounded twice to the same
    bits. Of few query rows, those with scales and bf16 ones that are gathered have a
    factor for each warp."""
    if variant.arch is not Arch.SM90A:
        assert not BlackwellDecode(variant).few.geometry.partial_rows.lifted
        return
    geometry = DecodeGeometry.of(variant)
    kept = geometry.partial_rows
    lifted = Lifted.EVEN_AND_ODD if variant.dtype is Dtype.BF16 else Lifted.WHOLE_ROW if geometry.scaled else None
    assert kept.lifted is lifted
    assert kept.dtype.width == (16 if kept.lifted or variant.dtype is Dtype.E4M3 else 32)
    assert kept.row_bytes(LATENT_DIM) == LATENT_DIM * kept.dtype.width // 8 + 4 * (
        1 + (lifted.factors if lifted else 0)
    )
    few = partial_rows_of(variant, FEW_ROWS)
    assert partial_rows_of(variant, FEW_ROWS + 1) == kept
    if geometry.converts or geometry.scaled or (geometry.gathers and variant.dtype is Dtype.BF16):
        assert few.lifted is Lifted.NONE and few.row_bytes(LATENT_DIM) == 2 * LATENT_DIM + 4 + 4 * 4
    else:
        assert few == kept


def test_shorter_partial_rows_occupy_more_sms():
    """Where callers' workspaces have room for one float32 partial result of each SM, 32 requests occupy but 100 CTAs,
    of 42 tiles at most where equal pieces have 32."""
    plan = plan_decode(Arch.SM90A, 132, 32, 8, 8, 8192)
    kept = DecodeGeometry.of(DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, lse=False)).partial_rows
    room = plan.workspace_bytes - plan.records * RECORD_BYTES
    slots = room // (64 * kept.row_bytes(LATENT_DIM))
    for room, cut in ((plan.slots, (100, 42)), (slots, (128, 32))):
        line = deal_out(DEALS[Arch.SM90A], [8192] * 32, 8, 8, plan.workers, room).line
        assert (line.groups, line.chunk) == cut


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.arch is not Arch.SM90A], ids=str)
def test_blackwell_descriptors(variant):
    """PTX ISA, tcgen05 instruction descriptor: bits 7-9 are A's type, 10-12 B's."""
    if isinstance(variant, DecodeVariant):
        kernel = BlackwellDecode(variant)
        products = [kernel.few.products, kernel.pair.products]
    else:
        products = [BlackwellPrefill(variant).products]
    formats = tuple(umma._FORMAT[dtype] for dtype in Probabilities.of(variant.dtype).operands)
    for product in products:
        assert (product.values >> 7 & 7, product.values >> 10 & 7) == formats
        assert (product.scores >> 7 & 7, product.scores >> 10 & 7) == (umma._FORMAT[variant.dtype],) * 2


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.arch is Arch.SM90A], ids=str)
def test_hopper_products(variant, monkeypatch):
    made = []
    monkeypatch.setattr("cutlass.utils.hopper_helpers.make_trivial_tiled_mma", lambda *given: made.append(given[:2]))
    if isinstance(variant, DecodeVariant):
        Row64Kernel(DecodeGeometry.of(variant), DEALS[variant.arch]).products()
    else:
        HopperPrefill(variant)._mmas()
    pieces = [variant.dtype]
    if isinstance(variant, DecodeVariant):
        pieces = [piece.dtype for piece in multiplied_row(variant.row, variant.dtype).pieces]
    scores = [(numeric(dtype), numeric(dtype)) for dtype in pieces]
    values = Probabilities.of(variant.dtype, widens=variant.dtype.bits == 8)
    assert made == [*scores, tuple(map(numeric, values.operands))]


def test_every_dtype_is_held_against_its_probabilities():
    taken = {dtype for arch in Arch for dtype in (*arch.facts.prefill, *arch.facts.decode)}
    assert {v.dtype for v in VARIANTS} == taken == set(Dtype)
