"""vLLM's MLA layers on tsmla: a decode backend and a prefill backend, offered to vLLM by an entry point.

vLLM calls `register` in each of its processes when tsmla is installed beside it. Nothing is used until a user names it:

    vllm serve MODEL --attention-config '{"backend": "TSMLA", "mla_prefill_backend": "TSMLA"}'

`python -m tsmla.integrations.vllm` says what holds for the vLLM that is installed; docs/start/vllm.md has the rest.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("tsmla")

NAME, CUSTOM = "TSMLA", "CUSTOM"
"""The name that users call the backends by; and, where vLLM's registries take no new names, the one name that they
reserve for a backend from outside."""
BACKEND = f"{__name__}.backend.TsmlaBackend"
PREFILL = f"{__name__}.prefill.TsmlaPrefill"


def register() -> None:
    """Offer both backends to vLLM; calling it again changes nothing.

    What hinders it is a warning, because vLLM calls it for users who may not want tsmla at all.
    """
    try:
        registries = _registries()
    except Exception as error:
        logger.warning("tsmla is not offered to vLLM, whose registries are not where they were: %s", error)
        return
    for registry, add, path in registries:
        try:
            _offer(registry, add, path)
        except Exception as error:
            logger.warning("tsmla is not offered to vLLM's %s: %s", registry.__name__, error)


def selected_names() -> tuple[str, str]:
    """Return the names to write into this vLLM's options for the decode and for the prefill backend."""
    decode, prefill = (name_in(registry) for registry, _, _ in _registries())
    return decode, prefill


def name_in(registry: Any) -> str:
    return NAME if hasattr(registry, "register") else CUSTOM


def _registries() -> tuple[tuple[Any, Any, str], ...]:
    """Return (enum of backends, function that adds to it, path of tsmla's), for decode and for prefill."""
    from vllm.v1.attention.backends.mla.prefill import registry as prefill
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    return (
        (AttentionBackendEnum, register_backend, BACKEND),
        (prefill.MLAPrefillBackendEnum, prefill.register_mla_prefill_backend, PREFILL),
    )


def _offer(registry: Any, add: Any, path: str) -> None:
    name = name_in(registry)
    if name == NAME:
        if name not in registry.__members__:
            add(name, path)
        return
    place = registry[name]
    if place.is_overridden() and place.get_path() != path:
        logger.warning("tsmla is not offered to vLLM: %s is taken by %s", place, place.get_path())
        return
    add(place, path)
