"""SGLang's MLA layers on tsmla: one attention backend for decode, verification and prefill, offered by an entry point.

SGLang calls `register` in each of its processes when tsmla is installed beside it. Nothing is used until a user names
the backend:

    python -m sglang.launch_server --model-path MODEL --attention-backend tsmla --page-size 64

`python -m tsmla.integrations.sglang` says what holds for the SGLang that is installed; docs/start/sglang.md has the
rest.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("tsmla")

NAME = "tsmla"
"""The name that users call the backend by."""
PAGE = 64
"""Keys of a page to ask for, as --page-size: the kernels copy such pages whole."""


def register() -> None:
    """Offer the backend to SGLang; calling it again changes nothing.

    What hinders it is a warning, because SGLang calls it for users who may not want tsmla at all.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from .releases import choices

        known = choices()
        if NAME not in known.ATTENTION_BACKEND_CHOICES:
            known.add_attention_backend_choices([NAME])
        if NAME not in known.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
            known.add_chunked_prefix_cache_attention_backend(NAME)
        register_attention_backend(NAME)(make)
    except Exception as error:
        logger.warning("tsmla is not offered to SGLang, whose registries are not where they were: %s", error)


def make(model_runner: Any) -> Any:
    """Make the backend of one of SGLang's model runners, and tell SGLang's models how to call it."""
    from .backend import TsmlaBackend
    from .models import tell_models

    tell_models(NAME)
    return TsmlaBackend(model_runner)
