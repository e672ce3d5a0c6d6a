"""The environment variables of tsmla's build, loading and operators, read when used. None changes the code of a kernel.
Standard library only. The vLLM plug-in has more (`integrations/vllm/options.py`).

`SETTINGS` is the documentation that `tsmla show-config` prints. An empty value means unset.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from ..errors import SettingError

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
    "binary: forbid compiling, a kernel without a library is an error; jit: use no library, neither shipped nor named; "
    "auto: libraries first",
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
    "TSMLA_ARCHS",
    "native, or architectures separated by ;",
    "native",
    "read by the build: what to compile for; native: the architectures of the GPUs present, all where none has kernels",
)
SETTINGS = (BINARY, BACKEND, CACHE, VERIFY, AOT, ARCHS)

NOWHERE = Path(os.devnull, "tsmla")
"""A directory that nobody can make, not even root. It is the cache's where that is not set and there is no home
directory."""

_ALIASED_BACKENDS = {"cutedsl": "jit", "binary": "binary"}
_logged: set[str] = set()
"""Variables about which something was logged, each once per process."""


def fmha_binary_so() -> Path | None:
    """The library that prefill kernels must come from, or None."""
    if text := os.environ.get(BINARY.name):
        return _path(BINARY.name, text)
    return _path(BINARY.alias, text) if (text := _alias(BINARY)) else None


def backend(family: str) -> str:
    """How to find kernels of an operator family: "auto", "binary" or "jit". The alias speaks for prefill only."""
    accepted = tuple(BACKEND.accepted.split(", "))
    if text := os.environ.get(BACKEND.name):
        return _one_of(BACKEND.name, text, accepted)
    if family == "prefill" and (text := _alias(BACKEND)):
        return _ALIASED_BACKENDS[_one_of(BACKEND.alias, text, tuple(_ALIASED_BACKENDS))]
    return BACKEND.default


def cache_dir() -> Path:
    """Return the directory of compiled kernels; it need not exist.

    It is `NOWHERE`, with one warning, when it is not set and this user has no home directory: each process then
    compiles for itself.
    """
    if text := os.environ.get(CACHE.name):
        return _path(CACHE.name, text)
    try:
        return Path(CACHE.default).expanduser()
    except RuntimeError:
        _warn_once(
            CACHE.name,
            "compiled kernels are not kept: user %d has no home directory (HOME is not set and no passwd entry names "
            "one); set %s to a directory to keep them",
            os.getuid(),
            CACHE.name,
        )
        return NOWHERE


def verify() -> bool:
    """Whether kernels' signatures are compared before use. Sizes and hashes of libraries always are."""
    return _one_of(VERIFY.name, os.environ.get(VERIFY.name) or VERIFY.default, ("0", "1")) == "1"


def current() -> dict[str, str]:
    """The variables, older names included, that are set in this process."""
    names = [name for setting in SETTINGS for name in (setting.name, setting.alias) if name]
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def _alias(setting: Setting) -> str:
    text = os.environ.get(setting.alias, "")
    if text:
        _warn_once(setting.alias, "%s=%s is taken as an older name of %s", setting.alias, text, setting.name)
    return text


def _warn_once(variable: str, text: str, *values: object) -> None:
    if variable not in _logged:
        _logged.add(variable)
        logger.warning(text, *values)


def _path(name: str, text: str) -> Path:
    """The path that a variable holds, with ~ and ~user replaced by home directories."""
    if "\0" in text:
        raise SettingError(f"{name} is {text!r}; a path has no NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        cause = f"no user is called {user[1:]!r}" if user != "~" else "HOME is not set and no passwd entry names one"
        raise SettingError(
            f"{name} is {text!r}, but {user} has no home directory: {cause}; write the whole path"
        ) from None


def _one_of(name: str, text: str, accepted: tuple[str, ...]) -> str:
    if text not in accepted:
        raise SettingError(f"{name} is {text!r}; accepted: {', '.join(accepted)}")
    return text
