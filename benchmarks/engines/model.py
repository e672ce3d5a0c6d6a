"""A random DeepSeek-V3-shaped model, and a vLLM on it whose MLA backends are chosen by name.

Attention has the real dimensions; layers are dense and few, so that the model fits beside others on one GPU. `weights`
draws what vLLM's own dummy weights are not: values that make attention decide tokens, and that are the same when
several GPUs divide the model.

With --sparse the model has DeepSeek-V3.2's shape: each layer's indexer, as random as the rest, chooses keys. vLLM
computes it with DeepGEMM, which compiles kernels with nvcc as they are used. With --dims 256, heads and indexer have
GLM-5's dimensions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from . import weights

OURS = "TSMLA"
DIMS = {192: (128, 128, 64), 256: (192, 256, 32)}
"""Columns of a query's head -> those of them without rope, those of a value's, and heads of an indexer."""
_FORWARDED = (
    "sparse", "dims", "heads", "layers", "kv", "cache_gib", "max_len", "max_seqs", "batched_tokens", "graphs",
    "fp8_prefill", "speculate", "cached",
)  # fmt: skip
_PARALLEL = (
    "tensor_parallel_size", "decode_context_parallel_size", "cp_kv_cache_interleave_size", "dcp_comm_backend",
    "disable_custom_all_reduce",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Backend:
    """The MLA backends of one vLLM.

    name: the decode backend's in vLLM, or "auto".
    prefill: the prefill backend's.
    settings: NAME=VALUE, each a variable of its process, or, in lower case, an argument of vLLM's, in JSON or a word.
    """

    name: str
    prefill: str
    settings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Backend:
        """Read NAME or NAME+PREFILL, with settings behind commas. tsmla's decode comes with its prefill unless another
        is named."""
        backend, *settings = text.split(",")
        name, _, prefill = backend.partition("+")
        if not all(setting.find("=") > 0 for setting in settings):
            raise argparse.ArgumentTypeError(f"{text}: expected NAME=VALUE behind commas")
        return cls(name, prefill or (OURS if name == OURS else "auto"), tuple(settings))

    def __str__(self) -> str:
        named = self.name if self.prefill in ("auto", self.name) else f"{self.name}+{self.prefill}"
        return ",".join((named, *self.settings))

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in map(_named, self.settings) if not name.islower()}

    @property
    def arguments(self) -> dict[str, Any]:
        """vLLM's arguments that this backend has for itself."""
        return {name: _value(text) for name, text in map(_named, self.settings) if name.islower()}

    @property
    def gpus(self) -> int:
        return self.arguments.get("tensor_parallel_size", 1)

    def on_one_gpu(self) -> Backend:
        """Return the backend as it is without parallelism."""
        alone = [setting for setting in self.settings if _named(setting)[0] not in _PARALLEL]
        return dataclasses.replace(self, settings=tuple(alone))


def _named(setting: str) -> tuple[str, str]:
    name, _, value = setting.partition("=")
    return name, value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "backends",
        nargs="+",
        type=Backend.parse,
        help="NAME or NAME+PREFILL, such as TSMLA, auto, FLASHMLA; ,VARIABLE=VALUE behind it sets one for its process, "
        "and ,argument=VALUE one of vLLM's, such as ,tensor_parallel_size=2,decode_context_parallel_size=2; "
        ",drafts=NAME names the backend of layers that draft, which vLLM chooses otherwise",
    )
    parser.add_argument("--sparse", action="store_true", help="keys are chosen, by a random indexer (%(default)s)")
    parser.add_argument("--dims", type=int, choices=DIMS, default=192, help="columns of a query's head (%(default)s)")
    parser.add_argument("--kv", default="auto", help="dtype of the KV cache: auto, fp8, fp8_ds_mla (%(default)s)")
    parser.add_argument(
        "--cache-gib",
        type=float,
        help="size of each KV cache, for engines that start at the same time (a share of memory, measured one by one)",
    )
    parser.add_argument("--heads", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=24, help="(%(default)s)")
    parser.add_argument("--max-len", type=int, default=32768, help="longest context, in tokens (%(default)s)")
    parser.add_argument("--max-seqs", type=int, help="most requests of a step: fewer, fewer graphs (vLLM's default)")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="most tokens of a step (%(default)s)")
    parser.add_argument("--graphs", default="FULL_DECODE_ONLY", help="vLLM's cudagraph_mode (%(default)s)")
    parser.add_argument(
        "--speculate",
        type=_speculation,
        metavar="METHOD:TOKENS",
        help="draft so many tokens by vLLM's mtp (a random layer: hardly a draft is taken) or ngram_gpu",
    )
    parser.add_argument("--patience", type=float, default=900, help="seconds that an engine's answer may take")
    parser.add_argument("--cached", action="store_true", help="prompts stay in the cache (%(default)s)")
    parser.add_argument("--fp8-prefill", action="store_true", help="use_prefill_query_quantization (%(default)s)")


def _speculation(text: str) -> dict[str, Any]:
    method, _, tokens = text.partition(":")
    if method not in ("mtp", "ngram_gpu") or not tokens.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected mtp or ngram_gpu, and a number of tokens, such as mtp:3")
    looks_for = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram_gpu" else {}
    return {"method": method, "num_speculative_tokens": int(tokens), **looks_for}


def forwarded(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `start` needs of the options."""
    return {name: getattr(options, name) for name in _FORWARDED}


def label(options: argparse.Namespace) -> str:
    """Return the part of a record's name that says which model and cache it is about, on how many GPUs, and what drafts
    tokens."""
    gpus = max(backend.gpus for backend in options.backends)
    parts = [options.kv, f"{options.heads}-heads", f"{options.dims}" * (options.dims != 192)]
    parts += ["sparse" * options.sparse, f"{gpus}-gpus" * (gpus > 1)]
    if options.speculate:
        parts.append(f"{options.speculate['method']}-{options.speculate['num_speculative_tokens']}")
    return "-".join(filter(None, parts))


def start(backend: Backend, memory: float, options: dict[str, Any]) -> tuple[Any, float]:
    """Start a vLLM in this process; return (vllm.LLM, seconds that it took). memory: share of the GPU's."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1"
    )
    os.environ["TSMLA_VLLM_SPARSE"] = str(int(options["sparse"]))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    weights.register()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(shape(options)))
        llm = LLM(model=directory, **arguments(backend, memory, options))
    return llm, time.perf_counter() - started


def arguments(backend: Backend, memory: float, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's LLM, the model aside. A backend's `drafts` names that of the layers that draft."""
    own, speculation = dict(backend.arguments), options["speculate"]
    drafts = own.pop("drafts", None)
    if speculation and drafts:
        speculation = speculation | {"attention_backend": _selected(options)[0].get(drafts, drafts)}
    given = {
        "skip_tokenizer_init": True,
        "load_format": weights.FORMAT,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": options["max_len"],
        "gpu_memory_utilization": memory,
        "kv_cache_memory_bytes": options["cache_gib"] and int(options["cache_gib"] * 2**30),
        "kv_cache_dtype": options["kv"],
        "attention_config": attention(backend, options),
        "enable_prefix_caching": options["cached"],
        "max_num_seqs": options["max_seqs"],
        "max_num_batched_tokens": options["batched_tokens"],
        "speculative_config": speculation,
        "disable_log_stats": options["speculate"] is None,
        "compilation_config": {"mode": 0, "cudagraph_mode": options["graphs"]},
    }
    return given | own


def _selected(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what names of decode and prefill backends stand for. Where vLLM takes no new names, tsmla is CUSTOM."""
    from tsmla.integrations.vllm import selected_names

    return [dict.fromkeys(["auto"]) | {OURS: ours} for ours in selected_names(options["sparse"])]


def attention(backend: Backend, options: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's attention config."""
    decode, prefill = _selected(options)
    chosen = {
        "backend": decode.get(backend.name, backend.name),
        "mla_prefill_backend": prefill.get(backend.prefill, backend.prefill),
    }
    named = {name: value for name, value in chosen.items() if value}
    return named | {"use_prefill_query_quantization": options["fp8_prefill"]}


def shape(options: dict[str, Any]) -> dict[str, Any]:
    """Return the model's config.json."""
    heads, layers = options["heads"], options["layers"]
    nope, value, choosing = DIMS[options["dims"]]
    drafting = 1 if options["speculate"] and options["speculate"]["method"] == "mtp" else 0
    indexer = {"index_topk": 2048, "index_n_heads": choosing, "index_head_dim": 128} if options["sparse"] else {}
    version = 32 if options["sparse"] else 3
    return {
        "architectures": [f"DeepseekV{version}ForCausalLM"], "model_type": f"deepseek_v{version}",
        "torch_dtype": "bfloat16", **indexer,
        "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 32000,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": nope, "qk_rope_head_dim": 64, "v_head_dim": value, "rope_theta": 10000.0,
        "max_position_embeddings": max(65536, options["max_len"]), "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        # Mixture-of-experts fields that the architecture asks for; all layers are dense.
        "first_k_dense_replace": layers + drafting, "n_routed_experts": 8, "n_shared_experts": 1, "moe_layer_freq": 1,
        "moe_intermediate_size": 1024, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.0,
        "initializer_range": 0.02, "num_nextn_predict_layers": drafting,
    }  # fmt: skip


def prompts(lengths: list[int], seed: int) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(5, 31999) for _ in range(n)]} for n in lengths]


def sampling(new: int, logprobs: bool) -> Any:
    """Return sampling parameters: greedy, `new` tokens, whatever they are."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=1 if logprobs else None
    )
