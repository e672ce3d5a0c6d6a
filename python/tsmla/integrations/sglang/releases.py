"""What releases of SGLang spell differently: 0.5.17, the last on torch 2.11, and 0.5.23."""

from __future__ import annotations

import importlib
from typing import Any

from sglang.srt.mem_cache.memory_pool import KVWriteLoc


def choices() -> Any:
    """Return the module where backends' names are added."""
    try:
        return importlib.import_module("sglang.srt.arg_groups.choices")
    except ModuleNotFoundError:
        return importlib.import_module("sglang.srt.server_args")


def write_location(forward_batch: Any) -> Any:
    """Return where a pool writes a batch's new keys, as its functions take it: 0.5.17's want the slots."""
    for_batch = getattr(KVWriteLoc, "for_batch", None)
    return for_batch(forward_batch) if for_batch else forward_batch.out_cache_loc


def prefill_backend(model_runner: Any) -> str:
    """Return the name of the backend that prefills. 0.5.17 tells its runner only after backends are made."""
    named = getattr(model_runner, "prefill_attention_backend_str", None)
    return named or model_runner.server_args.get_attention_backends()[0]
