"""Finds the sources that decide one variant's result, so that a change elsewhere compiles nothing anew.

They are what its kernel's module imports, directly or not, together with the registry and what every variant goes
through. Every compile checks that it imported nothing else. Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import modulefinder
import sys
from collections.abc import Iterable

from tsmla.loading import toolchain

PACKAGE = "tsmla_kernels"
SHARED = (f"{PACKAGE}.registry", f"{PACKAGE}.entry")
"""Modules behind every variant. The registry imports each kernel where it needs it: those are not followed."""


def hashes() -> dict[str, str]:
    """Return every source that shapes compiled code -> its hex SHA-256."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in toolchain.sources().items()}


@functools.cache
def behind(kernel: str) -> frozenset[str]:
    """Return the names, as in `hashes`, of the sources that decide what the variants of a kernel's module compile to.

    kernel: full name of the module, such as tsmla_kernels.pack.kernel.
    """
    finder = modulefinder.ModuleFinder([str(toolchain.kernel_sources().parent)])
    for module in (*SHARED[1:], kernel):
        finder.import_hook(module)
    reached = {name for name in finder.modules if name.split(".")[0] == PACKAGE} | set(SHARED)
    shared = {f"tsmla/{name}" for name in toolchain.CODE_SHAPING}
    return frozenset(shared | names_of(reached))


def names_of(modules: Iterable[str]) -> set[str]:
    """Return the names, as in `hashes`, of modules of the kernels' package."""
    stems = {module.replace(".", "/") for module in modules}
    return {name for name in toolchain.sources() if name.removesuffix(".py").removesuffix("/__init__") in stems}


def loaded() -> set[str]:
    """Return the modules of the kernels' package that this process has imported."""
    return {name for name in sys.modules if name.split(".")[0] == PACKAGE}
