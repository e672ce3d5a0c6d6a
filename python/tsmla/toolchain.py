"""What a compiled kernel depends on besides its variant: the kernel sources and the compiler's versions.

Build reuse and the JIT cache use these as keys, and every manifest records them. Standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

from . import gpu
from .manifest import MANIFEST_FILE
from .variant import SHIPPED_ARCHS, Arch

COMPILERS = ("apache-tvm-ffi", "nvidia-cutlass-dsl", "ziglang")
"""Distributions whose version can change a compiled library."""
CUDA_13_COMPILER = "nvidia-cutlass-dsl-libs-cu13"
"""Distribution that nvidia-cutlass-dsl[cu13] adds. Where it is, CuTe DSL compiles everything with it, unless the driver
is too old."""
MIN_RUNTIME = "4.7.1"
"""Lowest nvidia-cutlass-dsl whose libcute_dsl_runtime.so has every symbol that a library built here needs."""
CODE_SHAPING = ("call.py", "dtype.py", "plan.py", "row_format.py", "support.py", "variant.py")
"""Files of tsmla itself that decide what a kernel source compiles to."""


def versions() -> dict[str, str]:
    """Installed versions of COMPILERS, and of CUDA_13_COMPILER where it is what compiles, by distribution name; one
    that is not installed is left out."""
    found = {}
    for name in (*COMPILERS, *([CUDA_13_COMPILER] if _compiles_for() == 13 else [])):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def why_not_compiled(arch: Arch) -> str | None:
    """A sentence saying why the compiler here cannot make code for an architecture, and what to install; None when it
    can, or is not installed at all. Every compiler makes what ships; sm_107a takes that of CUDA 13."""
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
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return {major for major in (12, 13) for root in roots if (root / f"cu{major}" / "lib").is_dir()}


def kernel_sources() -> Path:
    """Directory of the package tsmla_kernels. Raises ModuleNotFoundError when it is not installed, or is not this
    package's: it imports `tsmla` by that name, and Hugging Face's `kernels` loads this package under another."""
    if __package__ != "tsmla":
        raise ModuleNotFoundError(
            f"this copy of tsmla, loaded as {__package__}, comes without kernel sources: install tsmla to compile",
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
    """Directory that the libraries of this installation lie in; it need not exist.

    An editable install has two: what was built by hand beside the sources, if finished, goes before what pip built.
    """
    parts = [str(Path(__file__).parent), *sys.modules[__package__].__path__]
    candidates = [Path(part) / "objs" for part in dict.fromkeys(parts)]
    return next((path for path in candidates if (path / MANIFEST_FILE).exists()), candidates[0])


def sources(root: Path | None = None) -> dict[str, Path]:
    """Every source that shapes compiled code, by its name in an installation, such as `tsmla/variant.py`.

    root: directory that both packages lie in, such as an unpacked wheel, of which nothing is run; None: those imported.
    """
    kernels, package = (root / "tsmla_kernels", root / "tsmla") if root else (kernel_sources(), Path(__file__).parent)
    files = {f"tsmla_kernels/{path.relative_to(kernels).as_posix()}": path for path in kernels.rglob("*.py")}
    return files | {f"tsmla/{name}": package / name for name in CODE_SHAPING}


def source_digest(root: Path | None = None) -> str:
    """Hex SHA-256 over `sources`: the same wherever the package is installed."""
    digest = hashlib.sha256()
    for name, path in sorted(sources(root).items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
