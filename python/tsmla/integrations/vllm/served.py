"""What the plug-in serves, and the sentence that refuses any other decode when a backend is selected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tsmla.identity.dtype import Dtype
from tsmla.identity.row_format import ROWS
from tsmla.integrations.shared.decodes import DTYPES, Kinds, kinds_of, no_kernel, why_no_model, why_not_from_8_bits
from tsmla.integrations.shared.gpus import arch_of, why_no_gpu
from tsmla.integrations.shared.heads import name_of
from tsmla.integrations.shared.rows import SHAPES, listed, plain_row, shapes_in_words
from tsmla.operators.checks import TORCH_DTYPES

FP8_CACHES = ("fp8", "fp8_e4m3")
OWN_CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
ROWS_CACHES = ("fp8_ds_mla",)
"""Cache formats with scales in their rows that vLLM and tsmla call the same; decode reads them with a bf16 query."""
CACHES = ["auto", *OWN_CACHES, *FP8_CACHES, *ROWS_CACHES]
PAGES = [16, 32, 64, 128]
PREFERRED_PAGE = 64


def why_not_decoded(
    head_size: int,
    dtype: torch.dtype,
    cache: str | None,
    block_size: int | None,
    capability: Any,
    unserved: dict[str, bool],
    sparse: bool = False,
) -> str | None:
    """Return a sentence that says why a layer is not decoded and what is; None when it is decoded.

    unserved: features that no MLA layer gets from tsmla, and whether this one wants them.
    sparse: the layer chooses its keys.
    """

    def reasons() -> Iterator[str]:
        if reason := why_no_gpu(capability):
            yield reason
        if head_size not in SHAPES:
            yield f"tsmla decodes cache rows of {shapes_in_words()}, not of {head_size}"
        if reason := why_no_model(dtype):
            yield reason
        arch = arch_of(capability)
        if cache in ROWS_CACHES and arch is not None and cache not in arch.facts.decode_rows:
            others = listed(name for name in CACHES if name not in ROWS_CACHES)
            yield (
                f"tsmla writes and reads {cache} rows (mla_write_cache, mla_read_cache) but has no decode of them for "
                f"{arch} yet; it decodes caches of {others}"
            )
        elif cache is not None and cache not in CACHES:
            yield f"tsmla reads caches of {listed(CACHES)}, not of {cache}"
        elif cache in (*FP8_CACHES, *ROWS_CACHES) and (reason := why_not_from_8_bits(dtype, cache)):
            yield reason
        elif OWN_CACHES.get(cache or "", dtype) is not dtype:
            model = name_of(dtype)
            yield f"tsmla decodes with queries of the cache's dtype: {cache} does not go with a model in {model}"
        elif arch is not None and head_size in SHAPES and dtype in DTYPES:
            kinds = decode_kinds(dtype, cache or "auto", head_size)
            yield from no_kernel(arch, kinds, sparse, cache or "auto", head_size)
        if block_size is not None and block_size % PAGES[0]:
            yield f"tsmla reads pages of {listed(PAGES)} keys, of which {block_size} is no multiple"
        if wanted := [feature for feature, wants in unserved.items() if wants]:
            what = "MLA whose layers choose their keys" if sparse else "dense causal and non-causal MLA"
            yield f"tsmla's vLLM plug-in serves {what}, without {' or '.join(wanted)}"

    return "; ".join(reasons()) or None


def decode_kinds(dtype: torch.dtype, cache: str, head_size: int) -> Kinds | None:
    """Return what a decode reads and writes; None where the cache has no such rows.

    dtype: the model's. cache: its name in vLLM. head_size: elements of a row.
    """
    query = Dtype.E4M3 if cache in FP8_CACHES else TORCH_DTYPES[dtype]
    if cache in ROWS_CACHES:
        return kinds_of(query, ROWS[cache] if ROWS[cache].columns == head_size else None)
    return kinds_of(query, plain_row(query, head_size))
