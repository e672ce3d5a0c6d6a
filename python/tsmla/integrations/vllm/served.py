"""What the plug-in serves, and the sentence that refuses any other decode when a backend is selected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tsmla.identity.row_format import ROWS, RowFormat, uniform_row
from tsmla.identity.support import LATENT_DIM, ROPE_DIM
from tsmla.identity.variant import Dtype
from tsmla.integrations.shared.gpus import arch_of, why_no_gpu
from tsmla.integrations.shared.heads import name_of
from tsmla.operators.checks import TORCH_DTYPES

ROW = LATENT_DIM + ROPE_DIM
DTYPES = [torch.float16, torch.bfloat16]
"""Dtypes of models."""
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
) -> str | None:
    """Return a sentence that says why a layer is not decoded and what is; None when it is decoded.

    unserved: features that no MLA layer gets from tsmla, and whether this one wants them.
    """

    def reasons() -> Iterator[str]:
        if reason := why_no_gpu(capability):
            yield reason
        if head_size != ROW:
            yield f"tsmla decodes cache rows of {ROW} ({LATENT_DIM} latent and {ROPE_DIM} rope), not of {head_size}"
        if dtype not in DTYPES:
            yield f"tsmla serves models in {' and '.join(map(name_of, DTYPES))}, not in {name_of(dtype)}"
        arch = arch_of(capability)
        if cache in ROWS_CACHES and arch is not None and cache not in arch.facts.decode_rows:
            others = ", ".join(name for name in CACHES if name not in ROWS_CACHES)
            yield (
                f"tsmla writes and reads {cache} rows (mla_write_cache, mla_read_cache) but has no decode of them for "
                f"{arch} yet; it decodes caches of {others}"
            )
        elif cache is not None and cache not in CACHES:
            yield f"tsmla reads caches of {', '.join(CACHES)}, not of {cache}"
        elif cache in (*FP8_CACHES, *ROWS_CACHES) and dtype is not torch.bfloat16:
            model = name_of(dtype)
            yield f"tsmla decodes an {cache} cache into bfloat16 (--dtype bfloat16), and the model is in {model}"
        elif OWN_CACHES.get(cache or "", dtype) is not dtype:
            model = name_of(dtype)
            yield f"tsmla decodes with queries of the cache's dtype: {cache} does not go with a model in {model}"
        if block_size is not None and block_size % PAGES[0]:
            yield f"tsmla reads pages of {', '.join(map(str, PAGES))} keys, of which {block_size} is no multiple"
        if wanted := [feature for feature, wants in unserved.items() if wants]:
            yield f"tsmla's vLLM plug-in serves dense causal and non-causal MLA, without {' or '.join(wanted)}"

    return "; ".join(reasons()) or None


def decode_dtypes(dtype: torch.dtype, cache: str) -> tuple[Dtype, Dtype, RowFormat]:
    """Return the dtypes of a decode's query and output, and the cache's rows. dtype: the model's. cache: its name in
    vLLM."""
    if cache in FP8_CACHES:
        return Dtype.E4M3, Dtype.BF16, uniform_row(Dtype.E4M3)
    own = TORCH_DTYPES[dtype]
    return own, own, ROWS[cache] if cache in ROWS_CACHES else uniform_row(own)
