"""why_unsupported: a sentence for every variant that cannot be built, nothing for every one that can."""

from __future__ import annotations

import dataclasses

import other_facts
import pytest
from example_variants import DECODE, PACK, PREFILL, QUANTIZE_Q, READ_CACHE, WRITE_CACHE
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import RowFormat, Scales, latent_row, uniform_row
from tsmla.identity.support import (
    NOPE_DIMS,
    PACK_MAX_DIM,
    PACK_VECTOR,
    PREFILL_DIMS,
    prefill_dims,
    why_unsupported,
)
from tsmla.identity.variant import Dtype
from tsmla_kernels.registry import recipe


@pytest.mark.parametrize("dims", PREFILL_DIMS)
@pytest.mark.parametrize(
    ("arch", "dtype", "out"), [(a, d, out) for a in Arch for d, outs in a.facts.prefill.items() for out in outs]
)
def test_prefill_that_exists(arch: Arch, dtype: Dtype, out: Dtype, dims: tuple[int, int]) -> None:
    variant = dataclasses.replace(PREFILL, arch=arch, dtype=dtype, out_dtype=out, d_qk=dims[0], d_v=dims[1])
    exists = dims != (256, 256) or dtype in (Dtype.BF16, Dtype.E4M3)
    assert (why_unsupported(variant) is None) == exists
    assert (dims in prefill_dims(arch, dtype)) == exists


@pytest.mark.parametrize(
    ("arch", "dtype", "others"),
    [
        (Arch.SM90A, Dtype.FP16, "not fp16 for sm_90a, which has (192, 128), (128, 128)"),
        (Arch.SM100A, Dtype.FP16, "not fp16 for sm_100a, which has (192, 128), (128, 128)"),
        (Arch.SM103A, Dtype.E5M2, "not e5m2 for sm_103a, which has (192, 128), (128, 128)"),
    ],
)
def test_head_dims_that_some_prefills_have(arch: Arch, dtype: Dtype, others: str) -> None:
    out = arch.facts.prefill[dtype][0]
    variant = dataclasses.replace(PREFILL, arch=arch, dtype=dtype, out_dtype=out, d_qk=256, d_v=256)
    there = " and ".join(f"bf16, e4m3 for {arch}" for arch in Arch)
    assert why_unsupported(variant) == f"prefill of head dims (qk, v) (256, 256) takes {there}, {others}"


def test_every_head_has_its_rope() -> None:
    assert NOPE_DIMS == {192: 128, 128: 128, 256: 192} and set(NOPE_DIMS) == {d_qk for d_qk, _ in PREFILL_DIMS}


@pytest.mark.parametrize("arch", Arch)
def test_pack_exists_for_every_architecture(arch: Arch) -> None:
    assert why_unsupported(dataclasses.replace(PACK, arch=arch)) is None


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        (dataclasses.replace(PREFILL, dtype=Dtype.E4M3, out_dtype=Dtype.E4M3), ("prefill of e4m3", "not e4m3")),
        (dataclasses.replace(PREFILL, out_dtype=Dtype.FP16), ("prefill", "bf16", "not fp16")),
        (dataclasses.replace(PREFILL, d_qk=96), ("(192, 128), (128, 128), (256, 256)", "not (96, 128)")),
        (
            dataclasses.replace(DECODE, row=uniform_row(Dtype.E4M3)),
            ("latent bf16 512, rope bf16 64", "not of latent e4m3 512, rope e4m3 64"),
        ),
        (
            dataclasses.replace(DECODE, row=RowFormat(DECODE.row.pieces, Scales("latent", 128, in_row=True))),
            ("not of latent bf16 512 (a float32 scale for every 128, in the row), rope bf16 64",),
        ),
        (dataclasses.replace(DECODE, row=RowFormat(DECODE.row.pieces[1:])), ("not of rope bf16 64",)),
        (
            dataclasses.replace(DECODE, dtype=Dtype.E5M2, row=latent_row(Dtype.E5M2)),
            ("decode of e5m2 for sm_90a reads cache rows of latent e5m2 512, rope e5m2 64, not of latent e5m2 512",),
        ),
        (dataclasses.replace(PACK, dtype=Dtype.E4M3), ("pack takes bf16, fp16", "not e4m3")),
        (dataclasses.replace(PACK, out_dtype=Dtype.BF16), ("pack writes e4m3, e5m2", "not bf16")),
        (dataclasses.replace(PACK, d_rope=PACK_VECTOR + 1), ("d_rope", f"multiple of {PACK_VECTOR}", "not 17")),
        (dataclasses.replace(PACK, d_v=PACK_MAX_DIM + PACK_VECTOR), ("d_v", f"up to {PACK_MAX_DIM}")),
        (dataclasses.replace(PACK, d_nope=0), ("d_nope", "not 0")),
        (
            dataclasses.replace(WRITE_CACHE, dtype=Dtype.FP16),
            ("in the row), rope bf16 64 is written from bf16, not fp16",),
        ),
        (dataclasses.replace(READ_CACHE, row=DECODE.row, dtype=Dtype.E4M3), ("is read as bf16, not e4m3",)),
        (dataclasses.replace(QUANTIZE_Q, dtype=Dtype.FP16), ("a query is quantised from bf16, not fp16",)),
        (
            dataclasses.replace(QUANTIZE_Q, row=WRITE_CACHE.row),
            ("not quantised for a cache of latent e4m3 512 (a float32 scale for every 128", "it is for snapmla"),
        ),
        (
            dataclasses.replace(WRITE_CACHE, row=uniform_row(Dtype.E5M2)),
            ("latent e5m2 512, rope e5m2 64 cannot be written; rows are bf16, fp16, e4m3, fp8_ds_mla, snapmla",),
        ),
    ],
    ids=lambda value: str(value) if not isinstance(value, tuple) else "",
)
def test_the_sentence_names_what_is_wrong_and_what_is_accepted(variant, words: tuple[str, ...]) -> None:
    reason = why_unsupported(variant)
    assert reason is not None
    for word in words:
        assert word in reason
    with pytest.raises(ValueError) as raised:
        recipe(variant)
    assert variant.symbol() in str(raised.value) and reason in str(raised.value)


def test_a_dtype_that_an_architecture_lacks_is_named(monkeypatch) -> None:
    for arch in Arch:
        other_facts.change(monkeypatch, arch, prefill={})
    other_facts.change(monkeypatch, Arch.SM90A, prefill={Dtype.BF16: (Dtype.BF16,), Dtype.FP16: ()})
    assert why_unsupported(dataclasses.replace(PREFILL, dtype=Dtype.E5M2)) == (
        "prefill for sm_90a takes bf16, fp16, not e5m2"
    )
    assert why_unsupported(dataclasses.replace(PREFILL, arch=Arch.SM100A)) == (
        "prefill has no kernel for sm_100a yet; it exists for sm_90a"
    )


def test_what_is_not_a_variant_is_refused() -> None:
    with pytest.raises(TypeError, match="not a variant"):
        why_unsupported("prefill")  # type: ignore[arg-type]
