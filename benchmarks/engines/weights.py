"""Random weights of the model that `model.shape` describes, the same on any number of GPUs: each tensor is drawn whole,
by a seed of its own, and vLLM divides it as it divides a checkpoint's.

Values are as large as keep their products' variance, so that all layers are of weight in the result. Queries are
_PEAKED times as large, so that softmax has peaks: over flat scores, a backend that confuses keys would give nearly the
same tokens as one that does not. Rows of the head differ in size, which sets the first logit apart from the second:
where all are of one size, rounding to bfloat16 decides three times as many tokens.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FORMAT = "tsmla_random"
_PEAKED = 3.0


def register() -> None:
    """Make FORMAT a load format of vLLM's in this process, and in those that it forks."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Random(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            shape = json.loads(Path(model_config.model, "config.json").read_text())
            first = next(model.parameters())
            loaded = model.load_weights(drawn(shape, first.dtype, first.device))
            if missing := dict(model.named_parameters()).keys() - loaded:
                raise ValueError(f"no weights were drawn for {', '.join(sorted(missing))}")

    register_model_loader(FORMAT)(Random)


def drawn(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of every tensor of a checkpoint of this shape, and values. Norms are 1, their biases 0."""
    for name, size in sizes(shape).items():
        if len(size) == 1:
            yield name, torch.full(size, float(name.endswith("weight")), dtype=dtype, device=device)
            continue
        inputs = 1 if "embed_tokens" in name else size[1]
        bound = math.sqrt(3 / inputs) * (_PEAKED if "q_b_proj" in name else 1)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(size, dtype=dtype, device=device).uniform_(-bound, bound, generator=generator)
        if "head" in name:
            values *= torch.empty(size[0], 1, dtype=dtype, device=device).log_normal_(generator=generator)
        yield name, values


def sizes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the size of every tensor of a checkpoint, by its name in DeepSeek's."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    vocabulary = shape["vocab_size"], hidden
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": vocabulary, "model.norm.weight": (hidden,), "lm_head.weight": vocabulary
    }  # fmt: skip
    for index in range(layers + shape["num_nextn_predict_layers"]):
        inner = _layer(shape) | (_drafting(hidden, vocabulary) if index >= layers else {})
        found |= {f"model.layers.{index}.{name}": size for name, size in inner.items()}
    return found


def _layer(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    query, latent, rope = shape["q_lora_rank"], shape["kv_lora_rank"], shape["qk_rope_head_dim"]
    nope, value = shape["qk_nope_head_dim"], shape["v_head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (query, hidden),
        "self_attn.q_a_layernorm.weight": (query,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), query),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), latent),
        "self_attn.o_proj.weight": (hidden, heads * value),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if "index_topk" in shape:
        choosing, width = shape["index_n_heads"], shape["index_head_dim"]
        found |= {
            "self_attn.indexer.wq_b.weight": (choosing * width, query),
            "self_attn.indexer.wk.weight": (width, hidden),
            "self_attn.indexer.k_norm.weight": (width,),
            "self_attn.indexer.k_norm.bias": (width,),
            "self_attn.indexer.weights_proj.weight": (choosing, hidden),
        }
    return found


def _drafting(hidden: int, vocabulary: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Return what a layer that drafts tokens (mtp) has besides."""
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": vocabulary,
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": vocabulary,
    }
