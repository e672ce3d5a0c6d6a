"""The one statement of which variants can be built. Builder, operators, command line, docs and tests all ask here."""

from __future__ import annotations

from .arch import UNKNOWN, Arch, Facts
from .dtype import Dtype
from .row_format import NAMES, ROWS, format_of, uniform_row
from .variant import (
    DecodeVariant,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)

PREFILL_DIMS = tuple(dict.fromkeys(dims for arch in Arch for dims in arch.facts.prefill_dims))
"""(d_qk, d_v) that some architecture has: the columns of a query or key, and of a value."""
NOPE_DIMS = {192: 128, 128: 128, 256: 192}
"""d_qk -> elements of a prefill's query or key that do not depend on its position; those after them, ROPE_DIM if any,
do."""
LATENT_DIM, ROPE_DIM = (uniform_row(Dtype.BF16).piece(name).columns for name in NAMES)
"""Elements of a decode cache row that are both key and value; those after them, which are key only."""
DECODE_OUT_DTYPES = {Dtype.BF16: Dtype.BF16, Dtype.FP16: Dtype.FP16, Dtype.E4M3: Dtype.BF16, Dtype.E5M2: Dtype.BF16}
"""Dtype of the query -> dtype of the output."""
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
    "latent_bf16": (Dtype.BF16,),
    "latent_fp16": (Dtype.FP16,),
    "latent_e4m3": (Dtype.BF16,),
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
    if isinstance(variant, KeyMaskVariant):
        return None
    raise TypeError(f"not a variant: {variant!r}")


def prefill_dims(arch: Arch, dtype: Dtype) -> tuple[tuple[int, int], ...]:
    """Those of PREFILL_DIMS that this architecture's prefill of `dtype` has."""
    if dtype not in arch.facts.prefill:
        return ()
    return tuple(dims for dims, dtypes in arch.facts.prefill_dims.items() if dtype in dtypes)


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


def _facts(variant: PrefillVariant | DecodeVariant) -> Facts:
    """What is known of a variant's architecture, which may have been given as a word that names none."""
    return next((arch.facts for arch in Arch if arch == variant.arch), UNKNOWN)


def _why_prefill(variant: PrefillVariant) -> str | None:
    dtypes = _facts(variant).prefill
    if not dtypes:
        there = _listed(arch for arch in Arch if arch.facts.prefill)
        return f"prefill has no kernel for {variant.arch} yet; it exists for {there}"
    if variant.dtype not in dtypes:
        return f"prefill for {variant.arch} takes {_listed(dtypes)}, not {variant.dtype}"
    written = dtypes[variant.dtype]
    if variant.out_dtype not in written:
        return f"prefill of {variant.dtype} for {variant.arch} writes {_listed(written)}, not {variant.out_dtype}"
    dims = variant.d_qk, variant.d_v
    if dims not in PREFILL_DIMS:
        return f"prefill head dims (qk, v) are {_listed(PREFILL_DIMS)}, not {dims}"
    if dims not in prefill_dims(Arch(variant.arch), variant.dtype):
        found = {arch: arch.facts.prefill_dims.get(dims, ()) for arch in Arch}
        there = " and ".join(f"{_listed(dtypes)} for {arch}" for arch, dtypes in found.items() if dtypes)
        others = _listed(prefill_dims(Arch(variant.arch), variant.dtype))
        return (
            f"prefill of head dims (qk, v) {dims} takes {there}, not {variant.dtype} for {variant.arch}, which has "
            f"{others}"
        )
    if variant.masked and (variant.causal or not variant.lse):
        return "a prefill with a key_mask is told at run time whether it is causal, and always writes an LSE"
    return None


def _why_decode(variant: DecodeVariant) -> str | None:
    facts = _facts(variant)
    dtypes = facts.decode
    if not dtypes:
        there = _listed(arch for arch in Arch if arch.facts.decode) or "no GPU"
        return f"decode has no kernel for {variant.arch} yet; it exists for {there}"
    if variant.dtype not in dtypes:
        return f"decode for {variant.arch} takes {_listed(dtypes)}, not {variant.dtype}"
    if variant.out_dtype != (out_dtype := DECODE_OUT_DTYPES[variant.dtype]):
        return f"decode of {variant.dtype} writes {out_dtype}, not {variant.out_dtype}"
    named = facts.decode_rows
    rows = [uniform_row(variant.dtype), *(ROWS[name] for name in named if variant.dtype in named[name])]
    if variant.row not in rows:
        listed = " or ".join(map(str, rows))
        reason = f"decode of {variant.dtype} for {variant.arch} reads cache rows of {listed}, not of {variant.row}"
        others = next((dtypes for name, dtypes in named.items() if ROWS[name] == variant.row), None)
        return f"{reason}, which take a query of {_listed(others)}" if others else reason
    return _why_not_gathered(variant, facts) if variant.gathers else None


_ONE_BY_ONE = "decode of keys that are copied one by one (indices, or a cache of two tensors)"


def _why_not_gathered(variant: DecodeVariant, facts: Facts) -> str | None:
    rows = *facts.gathered_dtypes, *facts.gathered_rows
    if not rows:
        has = _listed(arch for arch in Arch if arch.facts.gathered_dtypes or arch.facts.gathered_rows) or "no GPU"
        return f"{_ONE_BY_ONE} has no kernel for {variant.arch} yet; it exists for {has}"
    uniform = variant.row == uniform_row(variant.dtype)
    if not (variant.dtype in facts.gathered_dtypes if uniform else format_of(variant.row) in facts.gathered_rows):
        return f"{_ONE_BY_ONE} for {variant.arch} reads rows of {_listed(rows)}, not of {variant.row}"
    if not variant.lse:
        return "a decode that gathers keys one by one always writes an LSE"
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
