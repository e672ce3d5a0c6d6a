"""The plug-in's options, which are environment variables, read when vLLM builds a model."""

from __future__ import annotations

import os
from typing import Any

from tsmla.errors import SettingError
from tsmla.loading.settings import Setting

FP8_PREFILL = Setting(
    "TSMLA_VLLM_FP8_PREFILL",
    "0, 1",
    "what use_prefill_query_quantization of vLLM's attention config says",
    "1: queries, keys and values of prefills are rounded to e4m3 (scale 1, saturating) before attention",
)
DECODE_THRESHOLD = Setting(
    "TSMLA_VLLM_DECODE_THRESHOLD",
    "1 to 1024",
    "128",
    "requests of up to so many new tokens, whatever others have, read the cache as decodes do and are not prefilled",
)
SPARSE = Setting(
    "TSMLA_VLLM_SPARSE",
    "0, 1",
    "0",
    "1: CUSTOM is the backend for sparse attention; for vLLM 0.26, which takes no name such as TSMLA_SPARSE",
)
SETTINGS = (FP8_PREFILL, DECODE_THRESHOLD, SPARSE)
_MOST = 1024


def fp8_prefill(vllm_config: Any) -> bool:
    given = _flag(FP8_PREFILL)
    return bool(vllm_config.attention_config.use_prefill_query_quantization) if given is None else given


def sparse() -> bool:
    return bool(_flag(SPARSE))


def _flag(setting: Setting) -> bool | None:
    """Read a setting that is 0 or 1; None when it is unset."""
    text = os.environ.get(setting.name) or ""
    if text not in ("", "0", "1"):
        raise SettingError(f"{setting.name} is {text!r}; accepted: {setting.accepted}")
    return text == "1" if text else None


def decode_threshold() -> int:
    text = os.environ.get(DECODE_THRESHOLD.name) or DECODE_THRESHOLD.default
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= _MOST):
        raise SettingError(f"{DECODE_THRESHOLD.name} is {text!r}; accepted: {DECODE_THRESHOLD.accepted}")
    return int(text)
