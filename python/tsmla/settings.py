"""Every environment variable of tsmla, read when used. None changes the code of a kernel. Standard library only.

`SETTINGS` is the documentation that `tsmla show-config` prints. An empty value means unset.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from .errors import SettingError

logger = logging.getLogger("tsmla")


class Setting(NamedTuple):
    """One variable: what it accepts, what holds when it is unset, and the older name that is accepted for it."""

    name: str
    accepted: str
    default: str
    meaning: str
    alias: str = ""


BINARY = Setting(
    "TSMLA_FMHA_BINARY_SO",
    "path of a library",
    "none",
    "prefill kernels come from this library; an unusable one, or one without the kernel asked for, is an error",
    "TOKENSPEED_MLA_FMHA_BINARY_SO",
)
BACKEND = Setting(
    "TSMLA_BACKEND",
    "auto, binary, jit",
    "auto",
    "binary: never compile; jit: use no library, neither shipped nor named; auto: libraries first",
    "TOKENSPEED_MLA_PREFILL_BACKEND",
)
CACHE = Setting(
    "TSMLA_CACHE_DIR",
    "path of a directory",
    "~/.cache/tsmla",
    "where compiled kernels are kept; one that others than this user or root own or can write to is not used",
)
VERIFY = Setting(
    "TSMLA_VERIFY",
    "0, 1",
    "0",
    "1: also compare kernels' signatures with the manifest before use; sizes and hashes of libraries always are",
)
AOT = Setting("TSMLA_AOT", "0, 1", "1", "read by the build: 0 makes a wheel without libraries")
ARCHS = Setting(
    "TSMLA_ARCHS", "architectures, separated by ;", "all that have kernels", "read by the build: what to compile for"
)
SETTINGS = (BINARY, BACKEND, CACHE, VERIFY, AOT, ARCHS)

_ALIASED_BACKENDS = {"cutedsl": "jit", "binary": "binary"}
_aliases_logged: set[str] = set()


def fmha_binary_so() -> Path | None:
    """The library that prefill kernels must come from, or None."""
    text = os.environ.get(BINARY.name) or _alias(BINARY)
    return Path(text).expanduser() if text else None


def backend(family: str) -> str:
    """How to find kernels of an operator family: "auto", "binary" or "jit". The alias speaks for prefill only."""
    accepted = tuple(BACKEND.accepted.split(", "))
    if text := os.environ.get(BACKEND.name):
        return _one_of(BACKEND.name, text, accepted)
    if family == "prefill" and (text := _alias(BACKEND)):
        return _ALIASED_BACKENDS[_one_of(BACKEND.alias, text, tuple(_ALIASED_BACKENDS))]
    return BACKEND.default


def cache_dir() -> Path:
    """Directory of compiled kernels; it need not exist."""
    return Path(os.environ.get(CACHE.name) or CACHE.default).expanduser()


def verify() -> bool:
    """Whether kernels' signatures are compared before use. Sizes and hashes of libraries always are."""
    return _one_of(VERIFY.name, os.environ.get(VERIFY.name) or VERIFY.default, ("0", "1")) == "1"


def current() -> dict[str, str]:
    """The variables, older names included, that are set in this process."""
    names = [name for setting in SETTINGS for name in (setting.name, setting.alias) if name]
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _alias(setting: Setting) -> str:
    text = os.environ.get(setting.alias, "")
    if text and setting.alias not in _aliases_logged:
        _aliases_logged.add(setting.alias)
        logger.warning("%s=%s is taken as an older name of %s", setting.alias, text, setting.name)
    return text


def _one_of(name: str, text: str, accepted: tuple[str, ...]) -> str:
    if text not in accepted:
        raise SettingError(f"{name} is {text!r}; accepted: {', '.join(accepted)}")
    return text
