"""What a compiled kernel depends on besides its variant: the kernel sources and the compiler's versions.

Build reuse and the JIT cache use these as keys, and every manifest records them. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..identity.arch import SHIPPED_ARCHS, Arch
from . import gpu, trust
from .manifest import MANIFEST_FILE

COMPILERS = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "ziglang")
"""Distributions whose version can change a compiled library."""
CUDA_13_COMPILER = "nvidia-cutlass-dsl-libs-cu13"
"""The distribution that nvidia-cutlass-dsl[cu13] adds. Where it is installed, CuTe DSL compiles everything with it,
unless the driver is too old."""
MIN_RUNTIME = "4.7.1"
"""Lowest nvidia-cutlass-dsl whose libcute_dsl_runtime.so has every symbol that a library built here needs."""
INSTALL = f"pip install -U 'nvidia-cutlass-dsl>={MIN_RUNTIME}'"
TVM_FFI_FROM, TVM_FFI_BELOW = "0.1.11", "0.2"
"""Range of apache-tvm-ffi versions that libraries load with: from the first on, below the second."""
TVM_FFI = f"apache-tvm-ffi>={TVM_FFI_FROM},<{TVM_FFI_BELOW}"
CODE_SHAPING = tuple(
    f"identity/{name}.py" for name in ("arch", "call", "dtype", "plan", "row_format", "support", "variant")
)
"""Files of tsmla itself that decide what a kernel source compiles to."""
_PACKAGE, _FOLDER = __package__.rpartition(".")[0], Path(__file__).parents[1]
"""This package, which is not called `tsmla` where Hugging Face's `kernels` loads it."""


def versions() -> dict[str, str]:
    """Return installed versions of COMPILERS, and of CUDA_13_COMPILER where it is what compiles, by distribution name.
    One that is not installed is left out."""
    names = (*COMPILERS, *([CUDA_13_COMPILER] if _compiles_for() == 13 else []))
    return {name: version for name in names if (version := installed_version(name))}


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None where none is installed, or what says so cannot be read."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, to compare: (4, 7, 1) of 4.7.1.post2."""
    found = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def why_tvm_ffi_not_accepted() -> str | None:
    """A sentence saying that the installed apache-tvm-ffi is too old or too new, and what to do; None when it is
    neither, and where its version is not known."""
    found = installed_version("apache-tvm-ffi")
    if found is None or release(TVM_FFI_FROM) <= release(found) < release(TVM_FFI_BELOW):
        return None
    accepted = TVM_FFI.removeprefix("apache-tvm-ffi")
    return f"apache-tvm-ffi {found} is installed, accepted is {accepted}; fix: pip install '{TVM_FFI}'"


def why_no_cutlass() -> str:
    """The reason, and what to do, where CuTe DSL's package `cutlass` cannot be imported: nvidia-cutlass-dsl is not
    installed, or it is in a directory whose .pth files Python does not read."""
    try:
        places = [root / name for root in dsl_roots() for name in sorted(os.listdir(root))]
    except OSError as error:
        return f"nvidia-cutlass-dsl cannot be looked for: {error}"
    place = next((place for place in places if os.path.isfile(place / "cutlass" / "__init__.py")), None)
    if place is None:
        return f"nvidia-cutlass-dsl is not installed; fix: {INSTALL}"
    return (
        f"nvidia-cutlass-dsl lies in {place.parents[1]}, but its package cutlass, in {place}, is not on Python's path: "
        "the .pth file which puts it there is read in site directories only. Fix: add "
        f"{place} to PYTHONPATH, or install nvidia-cutlass-dsl without --target"
    )


def why_not_compiled(arch: Arch) -> str | None:
    """Return a sentence that says why the compiler here cannot make code for an architecture, and what to install.

    None when it can, or is not installed at all. Every compiler makes what ships; sm_107a takes that of CUDA 13.
    """
    found = _compiles_for()
    if arch in SHIPPED_ARCHS or found in (None, 13):
        return None
    cause = f"CuTe DSL's compiler here is that of CUDA {found}"
    if 13 in installed_compilers():
        cause += f", because the driver runs CUDA {gpu.driver_cuda_major()} at most"
    return (
        f"code for {arch} ({arch.gpus}) needs the compiler of CUDA 13; {cause}. Fix: pip install "
        "'nvidia-cutlass-dsl[cu13]', to build libraries in an environment of its own: those for other architectures "
        "are made with CUDA 12's, so that older drivers load them"
    )


def _compiles_for() -> int | None:
    """CUDA major version of the compiler that CuTe DSL takes here: the newest that the driver, if any, is ready for."""
    driver = gpu.driver_cuda_major()
    return max((major for major in installed_compilers() if driver is None or major <= driver), default=None)


def installed_compilers() -> set[int]:
    """CUDA major versions that CuTe DSL is installed for."""
    try:
        roots = dsl_roots()
    except OSError:
        return set()
    return {major for major in (12, 13) for root in roots if os.path.isdir(root / f"cu{major}" / "lib")}


def dsl_roots() -> list[Path]:
    """Directories of the package nvidia_cutlass_dsl, none where it is not installed. Raises OSError where Python's path
    cannot be searched for it."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    return [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []


def kernel_sources() -> Path:
    """Return the directory of the package tsmla_kernels.

    Raises ModuleNotFoundError when it is not installed, or belongs to another package: it imports `tsmla` by that name,
    and Hugging Face's `kernels` loads this package under another. Raises OSError where Python's path cannot be
    searched.
    """
    if _PACKAGE != "tsmla":
        raise ModuleNotFoundError(
            f"this copy of tsmla, loaded as {_PACKAGE}, comes without kernel sources: install tsmla to compile",
            name="tsmla_kernels",
        )
    spec = importlib.util.find_spec("tsmla_kernels")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "tsmla_kernels is not importable: reinstall tsmla, or put its kernels/ directory on PYTHONPATH",
            name="tsmla_kernels",
        )
    return Path(spec.origin).parent


def shipped_libraries() -> Path:
    """Return the directory that the libraries of this installation lie in; it need not exist.

    An editable install has two, and the one that was built by hand beside the sources, if finished, goes before the one
    that pip built. Where no other is finished, one that cannot be looked at is returned, so that reading it says why.
    """
    parts = [str(_FOLDER), *sys.modules[_PACKAGE].__path__]
    candidates = [Path(part) / "objs" for part in dict.fromkeys(parts)]
    found = [path for path in candidates if trust.why_unseen(path / MANIFEST_FILE) is None]
    unknown = [path for path in candidates if not trust.missing(path / MANIFEST_FILE)]
    return [*found, *unknown, *candidates][0]


def sources(root: Path | None = None) -> dict[str, Path]:
    """Return every source that shapes compiled code, by its name in an installation, such as
    `tsmla/identity/variant.py`.

    root: the directory that both packages lie in, such as an unpacked wheel; nothing in it is run. None: those
    imported.
    """
    kernels, package = (root / "tsmla_kernels", root / "tsmla") if root else (kernel_sources(), _FOLDER)
    files = {f"tsmla_kernels/{path.relative_to(kernels).as_posix()}": path for path in _python_files(kernels)}
    return files | {f"tsmla/{name}": package / name for name in CODE_SHAPING}


def _python_files(root: Path) -> Iterator[Path]:
    """Every Python file below a directory. Unlike rglob, raises OSError where a directory cannot be listed: a digest of
    the others would be that of other sources."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for directory, _, names in os.walk(root, onerror=refuse):
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def source_digest(root: Path | None = None) -> str:
    """Hex SHA-256 over `sources`: the same wherever the package is installed. Raises OSError where one cannot be read,
    and what `kernel_sources` raises."""
    digest = hashlib.sha256()
    for name, path in sorted(sources(root).items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
