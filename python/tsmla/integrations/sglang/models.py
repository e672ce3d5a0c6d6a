"""What SGLang's DeepSeek models look up by a backend's name: how to call it."""

from __future__ import annotations

from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

MODEL = "trtllm_mla"
"""A backend of SGLang's that is called as this one wants to be: new tokens, and their context in chunks, with keys of
every head; absorbed where that cannot be."""


def tell_models(name: str) -> None:
    """Have models call the backend as they call MODEL, with query and key in two parts; again changes nothing.

    Without the second, models would join the parts, and would not hand queries of all ranks over under decode context
    parallelism.
    """
    AttentionBackendRegistry.register(name, AttentionBackendRegistry.get_handler(MODEL))
    if name not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
