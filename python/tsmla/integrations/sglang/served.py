"""What the plug-in serves, and the sentences that refuse anything else: of models when a server starts, of layers at
their first call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from tsmla.integrations.shared.decodes import Kinds, kinds_of, no_kernel, why_no_model, why_not_from_8_bits
from tsmla.integrations.shared.gpus import arch_of, why_no_gpu
from tsmla.integrations.shared.heads import name_of, why_not_prefilled
from tsmla.integrations.shared.rows import SHAPES, listed, plain_row, shapes_in_words
from tsmla.operators.checks import TORCH_DTYPES
from tsmla.operators.decode import PAGE_SIZES, SMALL_PAGE_SIZES

FP8 = torch.float8_e4m3fn
CHAINS = ("EAGLE", "EAGLE3", "STANDALONE")
"""Speculative algorithms whose drafts are a chain where they have one candidate a step."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What of a model, its cache and its server decides whether it is served.

    dims: nope, rope and value of a head. latent: kv_lora_rank. algorithm: of speculative decoding; None without.
    candidates: tokens that it drafts in a step. odd: features that are not served, and whether the model has them.
    """

    mla: bool
    latent: int
    dims: tuple[int, int, int]
    dtype: torch.dtype
    cache: torch.dtype
    page: int
    prefills: bool
    world: int = 1
    algorithm: str | None = None
    candidates: int = 1
    odd: dict[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def columns(self) -> int:
        return self.latent + self.dims[1]

    @property
    def decode_kinds(self) -> Kinds | None:
        """Return what a decode reads and writes; None where the cache has no such rows."""
        query = TORCH_DTYPES.get(self.cache)
        return kinds_of(query, None if query is None else plain_row(query, self.columns))


def why_not_served(model: Model, capability: Any) -> str | None:
    """Return a sentence that says why a model is not served, and what is; None when it is."""
    if not model.mla:
        return "tsmla serves MLA models (DeepSeek V3, Kimi K2 and others of their shape); this one has other attention"
    return "; ".join(_reasons(model, capability)) or None


def _reasons(model: Model, capability: Any) -> Iterator[str]:
    arch = arch_of(capability)
    if reason := why_no_gpu(capability):
        yield reason
    row = SHAPES.get(model.columns)
    if row is None or row.value_columns != model.latent:
        yield (
            f"tsmla decodes cache rows of {shapes_in_words()}, not of kv_lora_rank {model.latent} and qk_rope_head_dim "
            f"{model.dims[1]}"
        )
    if reason := why_no_model(model.dtype):
        yield reason
    elif model.cache not in (model.dtype, FP8):
        yield (
            f"tsmla reads caches of the model's dtype and of {name_of(FP8)} (--kv-cache-dtype fp8_e4m3), not of "
            f"{name_of(model.cache)}"
        )
    elif model.cache is FP8 and (reason := why_not_from_8_bits(model.dtype, "FP8")):
        yield reason
    elif row is not None:
        gathers = model.page in SMALL_PAGE_SIZES
        yield from no_kernel(arch, model.decode_kinds, gathers, name_of(model.cache), model.columns)
    if model.page not in (sizes := (*SMALL_PAGE_SIZES, *PAGE_SIZES)):
        yield f"tsmla reads pages of {listed(sizes)} keys, not of {model.page} (--page-size)"
    if model.prefills and (reason := why_not_prefilled(arch, model.dtype, False, model.dims)):
        yield f"{reason}; name another --prefill-attention-backend"
    if model.algorithm not in (None, *CHAINS):
        yield f"tsmla verifies drafts of {listed(CHAINS)}, not of {model.algorithm}"
    elif model.algorithm is not None and model.candidates > 1:
        yield (
            "tsmla verifies chains of drafts (--speculative-eagle-topk 1), not trees: --speculative-eagle-topk is "
            f"{model.candidates}"
        )
    if odd := [feature for feature, has in model.odd.items() if has]:
        yield f"tsmla's SGLang plug-in serves dense causal MLA, without {' or '.join(odd)}"


def why_no_layer(layer: Any, fp8: bool, given: dict[str, Any]) -> str | None:
    """Return a sentence that says why a layer's attention is not served; None when it is.

    fp8: whether the cache is. given: what its model hands over besides query, key and value.
    """
    scale = layer.k_scale_float if fp8 else None
    odd = {
        "logit caps": bool(layer.logit_cap),
        "sliding windows": layer.sliding_window_size > -1,
        "cross-attention": layer.is_cross_attention,
        "temperatures that depend on the length": layer.xai_temperature_len > 0,
        f"{layer.attn_type.value} attention": layer.attn_type.value != "decoder",
        f"scales of an FP8 cache (k_scale {scale}), by which SGLang does not divide what it writes": scale
        not in (None, 1.0),
        **{f"{name} (given to layer {layer.layer_id})": value is not None for name, value in given.items()},
    }
    features = [feature for feature, has in odd.items() if has]
    return f"tsmla's SGLang plug-in serves dense causal MLA, without {' or '.join(features)}" if features else None
