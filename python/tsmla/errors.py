"""Every exception that tsmla raises on purpose. Catch `TsmlaError` for all of them. Standard library only."""

from __future__ import annotations


class TsmlaError(Exception):
    """Base of the package's errors."""


class ArgumentError(TsmlaError, ValueError):
    """An operator got an argument it does not take; the text names operator, argument, what was given and accepted."""


class UnsupportedError(ArgumentError):
    """The arguments ask for a kernel that does not exist: architecture, dtype or head dimension."""


class SettingError(TsmlaError, ValueError):
    """An environment variable holds a value that is not accepted."""


class ManifestError(TsmlaError):
    """A manifest is missing, truncated, of an unknown schema, or does not describe the file next to it."""


class LibraryError(TsmlaError, RuntimeError):
    """A kernel library is not one of ours, damaged, for another architecture or host, or lacks a symbol."""


class RuntimeLibraryError(LibraryError):
    """NVIDIA's CuTe DSL runtime library is missing or too old; the text names the pip command that fixes it."""


class KernelUnavailable(TsmlaError, RuntimeError):
    """No step (override, shipped, cached, JIT) could serve a variant; the text lists each step and why."""


class CacheMiss(TsmlaError):
    """The on-disk cache has no sound entry for a variant."""


class CompileError(TsmlaError, RuntimeError):
    """A variant could not be compiled here, or its object could not be loaded."""
