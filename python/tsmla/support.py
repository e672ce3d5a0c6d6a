"""The one statement of which variants can be built. Builder, operators, command line, docs and tests all ask here."""

from __future__ import annotations

from .dtype import Dtype
from .row_format import NAMES, ROWS, uniform_row
from .variant import (
    Arch,
    DecodeVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)

PREFILL_DIMS = ((192, 128), (128, 128), (256, 256))
"""(d_qk, d_v): the columns of a query or key, and of a value."""
NOPE_DIMS = {192: 128, 128: 128, 256: 192}
"""d_qk -> elements of a prefill's query or key that do not depend on its position; those after them, ROPE_DIM if any,
do."""
_PREFILL_EIGHT_BITS = {Dtype.E4M3: (Dtype.BF16,), Dtype.E5M2: (Dtype.BF16,)}
_PREFILL_BLACKWELL = {Dtype.BF16: (Dtype.BF16,), Dtype.FP16: (Dtype.FP16, Dtype.BF16), **_PREFILL_EIGHT_BITS}
PREFILL_DTYPES: dict[Arch, dict[Dtype, tuple[Dtype, ...]]] = {
    Arch.SM90A: {Dtype.BF16: (Dtype.BF16,), Dtype.FP16: (Dtype.FP16,), **_PREFILL_EIGHT_BITS},
    Arch.SM100A: _PREFILL_BLACKWELL,
    Arch.SM103A: _PREFILL_BLACKWELL,
    Arch.SM107A: _PREFILL_BLACKWELL,
}
"""Input dtype -> the output dtypes there are, what is written unless asked for something else first."""
_PREFILL_ONLY: dict[tuple[int, int], dict[Arch, tuple[Dtype, ...]]] = {
    (256, 256): {Arch.SM90A: (Dtype.BF16, Dtype.E4M3)},
}
"""Head dims of PREFILL_DIMS that not every prefill has -> the input dtypes of those that do."""
LATENT_DIM, ROPE_DIM = (uniform_row(Dtype.BF16).piece(name).columns for name in NAMES)
"""Elements of a decode cache row that are both key and value; those after them, which are key only."""
DECODE_OUT_DTYPES = {Dtype.BF16: Dtype.BF16, Dtype.FP16: Dtype.FP16, Dtype.E4M3: Dtype.BF16, Dtype.E5M2: Dtype.BF16}
"""Dtype of the query -> dtype of the output."""
DECODE_DTYPES: dict[Arch, tuple[Dtype, ...]] = dict.fromkeys(Arch, tuple(DECODE_OUT_DTYPES))
DECODE_ROWS: dict[Arch, dict[str, tuple[Dtype, ...]]] = dict.fromkeys(
    Arch, {"snapmla": (Dtype.E4M3,), "fp8_ds_mla": (Dtype.BF16,)}
)
"""Rows (`row_format.ROWS`) that decode reads besides those of the query's own dtype -> dtypes of the query's latent
piece."""
PACK_DTYPES = (Dtype.BF16, Dtype.FP16)
PACK_OUT_DTYPES = (Dtype.E4M3, Dtype.E5M2)
PACK_VECTOR = 16
"""Elements that one thread of the pack kernel loads, converts and stores at a time; every dim is a multiple."""
PACK_MAX_DIM = 1024
CACHE_DTYPES = {
    "bf16": (Dtype.BF16,),
    "fp16": (Dtype.FP16,),
    "e4m3": (Dtype.BF16, Dtype.FP16),
    "fp8_ds_mla": (Dtype.BF16,),
    "snapmla": (Dtype.BF16,),
}
"""Format of a cache's rows (`row_format.ROWS`) -> dtypes that are written to it and read from it."""
QUANTIZED_QUERIES = {name: dtypes for name, dtypes in CACHE_DTYPES.items() if ROWS[name].apart}
"""Format of the cache that a query is quantised for, as its rows are -> dtypes of the query."""


def why_unsupported(variant: Variant) -> str | None:
    """A sentence saying why this variant cannot be built, or None when it can."""
    if isinstance(variant, PrefillVariant):
        return _why_prefill(variant)
    if isinstance(variant, DecodeVariant):
        return _why_decode(variant)
    if isinstance(variant, PackVariant):
        return _why_pack(variant)
    if isinstance(variant, WriteCacheVariant | ReadCacheVariant):
        return _why_cache(variant)
    if isinstance(variant, QuantizeQVariant):
        return _why_quantize_q(variant)
    raise TypeError(f"not a variant: {variant!r}")


def dtypes_of_dims(arch: Arch, dims: tuple[int, int]) -> tuple[Dtype, ...]:
    """The input dtypes of this architecture's prefills with head dims `dims`, which are in PREFILL_DIMS."""
    every = tuple(PREFILL_DTYPES.get(arch, ()))
    return _PREFILL_ONLY[dims].get(arch, ()) if dims in _PREFILL_ONLY else every


def prefill_dims(arch: Arch, dtype: Dtype) -> tuple[tuple[int, int], ...]:
    """Those of PREFILL_DIMS that this architecture's prefill of `dtype` has."""
    return tuple(dims for dims in PREFILL_DIMS if dtype in dtypes_of_dims(arch, dims))


def pack_dims(arch: Arch, dtype: Dtype) -> tuple[tuple[int, int, int], ...]:
    """(d_nope, d_rope, d_v) of this architecture's prefills of `dtype` that have a rope, whose keys and values packs
    make. A pack may have other dims, too."""
    with_rope = ((NOPE_DIMS[d_qk], d_qk - NOPE_DIMS[d_qk], d_v) for d_qk, d_v in prefill_dims(arch, dtype))
    return tuple(dims for dims in with_rope if dims[1])


def prefill_out_dtype(dtype: Dtype) -> Dtype:
    """What prefill writes for inputs of `dtype`, unless asked for something else: their dtype, bf16 for 8 bits."""
    return Dtype.BF16 if dtype.bits == 8 else dtype


def _listed(values) -> str:
    return ", ".join(str(value) for value in values)


def _why_prefill(variant: PrefillVariant) -> str | None:
    dtypes = PREFILL_DTYPES.get(variant.arch)
    if dtypes is None:
        return f"prefill has no kernel for {variant.arch} yet; it exists for {_listed(PREFILL_DTYPES)}"
    if variant.dtype not in dtypes:
        return f"prefill for {variant.arch} takes {_listed(dtypes)}, not {variant.dtype}"
    written = dtypes[variant.dtype]
    if variant.out_dtype not in written:
        return f"prefill of {variant.dtype} for {variant.arch} writes {_listed(written)}, not {variant.out_dtype}"
    dims = variant.d_qk, variant.d_v
    if dims not in PREFILL_DIMS:
        return f"prefill head dims (qk, v) are {_listed(PREFILL_DIMS)}, not {dims}"
    if variant.dtype not in dtypes_of_dims(variant.arch, dims):
        there = " and ".join(f"{_listed(found)} for {arch}" for arch, found in _PREFILL_ONLY[dims].items())
        others = _listed(prefill_dims(variant.arch, variant.dtype))
        return (
            f"prefill of head dims (qk, v) {dims} takes {there}, not {variant.dtype} for {variant.arch}, which has "
            f"{others}"
        )
    return None


def _why_decode(variant: DecodeVariant) -> str | None:
    dtypes = DECODE_DTYPES.get(variant.arch)
    if dtypes is None:
        there = f"it exists for {_listed(DECODE_DTYPES)}" if DECODE_DTYPES else "it exists for no GPU"
        return f"decode has no kernel for {variant.arch} yet; {there}"
    if variant.dtype not in dtypes:
        return f"decode for {variant.arch} takes {_listed(dtypes)}, not {variant.dtype}"
    if variant.out_dtype != (out_dtype := DECODE_OUT_DTYPES[variant.dtype]):
        return f"decode of {variant.dtype} writes {out_dtype}, not {variant.out_dtype}"
    named = DECODE_ROWS.get(variant.arch, {})
    rows = [uniform_row(variant.dtype), *(ROWS[name] for name in named if variant.dtype in named[name])]
    if variant.row not in rows:
        listed = " or ".join(map(str, rows))
        reason = f"decode of {variant.dtype} for {variant.arch} reads cache rows of {listed}, not of {variant.row}"
        others = next((dtypes for name, dtypes in named.items() if ROWS[name] == variant.row), None)
        return f"{reason}, which take a query of {_listed(others)}" if others else reason
    return None


def _why_pack(variant: PackVariant) -> str | None:
    if variant.dtype not in PACK_DTYPES:
        return f"pack takes {_listed(PACK_DTYPES)}, not {variant.dtype}"
    if variant.out_dtype not in PACK_OUT_DTYPES:
        return f"pack writes {_listed(PACK_OUT_DTYPES)}, not {variant.out_dtype}"
    for name in ("d_nope", "d_rope", "d_v"):
        size = getattr(variant, name)
        if size <= 0 or size % PACK_VECTOR or size > PACK_MAX_DIM:
            return f"pack needs {name} to be a multiple of {PACK_VECTOR} up to {PACK_MAX_DIM}, not {size}"
    return None


def _why_cache(variant: WriteCacheVariant | ReadCacheVariant) -> str | None:
    done, how = ("written", "from") if isinstance(variant, WriteCacheVariant) else ("read", "as")
    dtypes = next((CACHE_DTYPES[name] for name, row in ROWS.items() if row == variant.row), None)
    if dtypes is None:
        return f"a cache of {variant.row} cannot be {done}; rows are {_listed(ROWS)}"
    if variant.dtype not in dtypes:
        return f"a cache of {variant.row} is {done} {how} {_listed(dtypes)}, not {variant.dtype}"
    return None


def _why_quantize_q(variant: QuantizeQVariant) -> str | None:
    dtypes = next((QUANTIZED_QUERIES[name] for name in QUANTIZED_QUERIES if ROWS[name] == variant.row), None)
    if dtypes is None:
        return f"a query is not quantised for a cache of {variant.row}; it is for {_listed(QUANTIZED_QUERIES)}"
    if variant.dtype not in dtypes:
        return f"a query is quantised from {_listed(dtypes)}, not {variant.dtype}"
    return None
