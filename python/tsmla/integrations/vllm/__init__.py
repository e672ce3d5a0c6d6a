"""vLLM's MLA layers on tsmla: backends for decode, for sparse attention and for prefill, offered by an entry point.

vLLM calls `register` in each of its processes when tsmla is installed beside it. Nothing is used until a user names it:

    vllm serve MODEL --attention-config '{"backend": "TSMLA", "mla_prefill_backend": "TSMLA"}'

Models whose layers choose their keys (sparse attention) take TSMLA_SPARSE as their backend.
`python -m tsmla.integrations.vllm` says what holds for the vLLM that is installed; docs/start/vllm.md has the rest.
"""

from __future__ import annotations

import logging
from typing import Any

from . import options

logger = logging.getLogger("tsmla")

NAME, CUSTOM = "TSMLA", "CUSTOM"
"""The name that users call the backends by; and, where vLLM's registries take no new names, the one name that they
reserve for a backend from outside."""
SPARSE = f"{NAME}_SPARSE"
"""The name of the backend for layers that choose their keys."""
BACKEND = f"{__name__}.backend.TsmlaBackend"
SPARSE_BACKEND = f"{__name__}.sparse_backend.TsmlaSparseBackend"
PREFILL = f"{__name__}.prefill.TsmlaPrefill"


def register() -> None:
    """Offer the backends to vLLM; calling it again changes nothing.

    What hinders it is a warning, because vLLM calls it for users who may not want tsmla at all.
    """
    try:
        registries = _registries()
    except Exception as error:
        logger.warning("tsmla is not offered to vLLM, whose registries are not where they were: %s", error)
        return
    for registry, add, paths in registries:
        try:
            _offer(registry, add, paths)
        except Exception as error:
            logger.warning("tsmla is not offered to vLLM's %s: %s", registry.__name__, error)


def selected_names(sparse: bool = False) -> tuple[str, str]:
    """Return the names to write into this vLLM's options for the decode and for the prefill backend."""
    (decode, _, _), (prefill, _, _) = _registries()
    return name_in(decode, SPARSE if sparse else NAME), name_in(prefill)


def name_in(registry: Any, name: str = NAME) -> str:
    return name if _takes_names(registry) else CUSTOM


def _takes_names(registry: Any) -> bool:
    return hasattr(registry, "register")


def _registries() -> tuple[tuple[Any, Any, dict[str, str]], ...]:
    """Return (enum of backends, function that adds to it, paths of tsmla's by name), for decode and for prefill."""
    from vllm.v1.attention.backends.mla.prefill import registry as prefill
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    return (
        (AttentionBackendEnum, register_backend, {NAME: BACKEND, SPARSE: SPARSE_BACKEND}),
        (prefill.MLAPrefillBackendEnum, prefill.register_mla_prefill_backend, {NAME: PREFILL}),
    )


def _offer(registry: Any, add: Any, paths: dict[str, str]) -> None:
    if _takes_names(registry):
        for name, path in paths.items():
            if name not in registry.__members__:
                add(name, path)
        return
    place, path = registry[CUSTOM], paths[SPARSE if SPARSE in paths and options.sparse() else NAME]
    if place.is_overridden() and place.get_path() != path:
        logger.warning("tsmla is not offered to vLLM: %s is taken by %s", place, place.get_path())
        return
    add(place, path)
