"""Open one kernel library through TVM-FFI, once its file is known to be sound, and find its functions by symbol.

Loading takes milliseconds and needs neither a GPU nor the compiler: NVIDIA's libcute_dsl_runtime.so is mapped first
(the libraries name it in DT_NEEDED), then the library. The machine code goes to a GPU at a function's first call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LibraryError, ManifestError, RuntimeLibraryError
from ..identity.arch import SHIPPED_ARCHS, Arch
from ..identity.variant import Variant
from . import gpu, image, manifest, toolchain, trust
from .toolchain import INSTALL

RUNTIME_FILE = "libcute_dsl_runtime.so"
WHEEL_TAGS = {host: f"py3-none-manylinux_2_28_{host}" for host in image.HOSTS.values()}
"""Host -> tag of the wheel that has libraries for it. Its manylinux version is what the two runtime packages
promise."""

_RUNTIME_SYMBOLS = ("CuteDSLRT_", "cuda_dialect_", "_cuda", "_cuKernel")
_lock = threading.RLock()
_opened: dict[Path, Library] = {}


class Library(NamedTuple):
    """A loaded library, the hash of the file that it was loaded from, and its manifest."""

    path: Path
    sha256: str
    manifest: manifest.LibraryManifest
    module: Any

    def function(self, variant: Variant, *, check_signature: bool) -> Callable[..., None]:
        """The kernel of a variant. Raises LibraryError when the library lacks it.

        check_signature: also compare the function's parameters with the manifest's. That makes the function raise an
        error, and TVM-FFI's first error in a process that has loaded torch takes a second to collect a backtrace.
        """
        symbol = variant.symbol()
        kernel = next((k for k in self.manifest.kernels if k.variant == variant), None)
        if kernel is None:
            held = "\n  ".join(k.variant.symbol() for k in self.manifest.kernels) or "nothing"
            raise LibraryError(f"{self.path} has no {symbol}; it holds:\n  {held}")
        function = _exported(self.module, symbol)
        if function is None:
            raise LibraryError(f"{self.path} lists {symbol} in its manifest but does not export it; rebuild it")
        if check_signature and (found := signature_of(function)) != kernel.signature:
            raise LibraryError(
                f"{self.path}: {symbol} does not take what its manifest says; rebuild it\n"
                f"  manifest: {kernel.signature}\n  function: {found}"
            )
        return function


def signature_of(function: Callable[..., None]) -> str:
    """The parameters of a TVM-FFI function, as the TypeError of calling it without any spells them."""
    try:
        function()
    except TypeError as error:
        return str(error)
    raise LibraryError("a kernel accepted a call without arguments; it was not built by tsmla")


def open_library(
    path: Path,
    *,
    family: str | None = None,
    arch: Arch | None = None,
    record: manifest.LibraryRecord | None = None,
) -> Library:
    """Load a library once per process, after checking its file.

    The file must be whole, for this host and, where given, for this family and arch, and as its directory's `record`
    says. Raises RuntimeLibraryError when NVIDIA's runtime library is missing or too old, ManifestError for an unusable
    manifest and a file that is not as recorded, and LibraryError for everything else that keeps the file from serving.
    """
    try:
        path = Path(path).expanduser().absolute()
    except (RuntimeError, OSError, ValueError) as error:  # ~ of nobody, or a path from a directory that is gone
        raise LibraryError(f"{path} cannot be read: {error}") from error
    with _lock:
        library = _opened.get(path)
        if library is not None:
            _check_purpose(path, library.manifest, family, arch)
            if record is not None and record.sha256 != library.sha256:
                raise LibraryError(f"{path} has been replaced since this process loaded it; start the process again")
            return library
        return _opened.setdefault(path, _load(path, family, arch, record))


def _check_purpose(path: Path, said: manifest.LibraryManifest, family: str | None, arch: Arch | None) -> None:
    if family is not None and said.family != family:
        raise LibraryError(f"{path} is a {said.family} library; a {family} library is asked for")
    if arch is not None and said.arch != arch:
        raise LibraryError(f"{path} is for {said.arch} ({said.arch.gpus}); {arch} ({arch.gpus}) is asked for")


def runtime_library() -> Path:
    """NVIDIA's runtime library: the one CUTE_DSL_LIBS names when it exists, else the installed package's.

    The CUDA 13 flavour is taken when it is installed and the driver is that new, as the compiler itself does, so that
    both share one copy.
    """
    named = [Path(text) for text in os.environ.get("CUTE_DSL_LIBS", "").split(":") if text.endswith(RUNTIME_FILE)]
    try:
        roots, unknown = toolchain.dsl_roots(), ""
    except OSError as error:
        roots, unknown = [], f"nvidia-cutlass-dsl cannot be looked for: {error}"
    flavours = ("cu13", "cu12") if (gpu.driver_cuda_major() or 0) >= 13 else ("cu12",)
    installed = [root / flavour / "lib" / RUNTIME_FILE for flavour in flavours for root in roots]
    places = [*named, *installed]
    for file in places:
        if os.path.isfile(file):
            return file
    causes = [f"looked for {', '.join(map(_unserved, places))}"] if places else []
    if not installed:
        causes.append(unknown or "nvidia-cutlass-dsl is not installed")
    fix = INSTALL
    if not all(map(trust.missing, places)):
        fix = f"let user {os.geteuid()} read these files, or install nvidia-cutlass-dsl where this user may"
    raise RuntimeLibraryError(f"{RUNTIME_FILE} of NVIDIA's CuTe DSL is missing ({'; '.join(causes)}); fix: {fix}")


def _unserved(file: Path) -> str:
    """A path at which no file is, with the reason unless nothing is there."""
    error = trust.why_unseen(file)
    cause = error.strerror if error else "it is no regular file"
    return str(file) if trust.missing(file) else f"{file}: {cause}"


@functools.lru_cache(maxsize=1)
def _map_runtime() -> ctypes.CDLL:
    file = runtime_library()
    try:
        return ctypes.CDLL(str(file), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise RuntimeLibraryError(f"{file} cannot be loaded: {error}; fix: {INSTALL}") from error


def _load(path: Path, family: str | None, arch: Arch | None, record: manifest.LibraryRecord | None) -> Library:
    """Load a library. Everything that the file says is checked before the system maps it: mapping may run code, or
    crash on damage.

    The system opens the path again. That these are still the same bytes is up to whoever may write to the directory.
    """
    if path.suffix != ".so":
        raise LibraryError(f"{path} is not named like a library: its name must end in .so")
    found = image.read_image(path, record)
    said = found.manifest
    if record is not None and said != record.manifest:
        raise ManifestError(f"{path} says other things about itself than {path.parent / manifest.MANIFEST_FILE}")
    for host in (found.host, said.host):
        if host != platform.machine():
            raise LibraryError(f"{path} is for {host} hosts; this one is {platform.machine()}{_where_to_get_it()}")
    _check_purpose(path, said, family, arch)
    _check_runtime_version(path, said.min_runtime)
    _check_runtime_cuda(path, said.arch)
    if reason := toolchain.why_tvm_ffi_not_accepted():
        raise RuntimeLibraryError(f"{path} cannot be loaded: {reason}")
    _map_runtime()
    try:
        import tvm_ffi
    except Exception as error:  # OSError where a library that it needs is missing, RuntimeError where its own is
        raise RuntimeLibraryError(
            f"tvm_ffi cannot be imported: {error}; fix: pip install -U '{toolchain.TVM_FFI}'"
        ) from error
    try:
        spelled = os.fsencode(path).decode()  # TVM-FFI takes UTF-8, whatever the locale's encoding
    except UnicodeError:
        raise LibraryError(
            f"{str(path)!r} cannot be loaded: TVM-FFI takes paths in UTF-8, and this is none; rename its directories"
        ) from None
    try:
        module = tvm_ffi.load_module(spelled)
    except Exception as error:  # TVM-FFI raises plain RuntimeError with dlopen's text
        text = str(error)
        if "undefined symbol" in text and any(symbol in text for symbol in _RUNTIME_SYMBOLS):
            raise RuntimeLibraryError(
                f"{runtime_library()} is too old for {path} ({text.strip().splitlines()[-1]}); fix: {INSTALL}"
            ) from error
        raise LibraryError(f"{path} cannot be loaded: {text}") from error
    return Library(path, found.sha256, said, module)


def _where_to_get_it() -> str:
    """The end of a sentence: what has libraries for this machine's CPU."""
    tag = WHEEL_TAGS.get(platform.machine())
    return f": install the wheel {tag}" if tag else ", for which there are no libraries: kernels compile just in time"


def _exported(module: Any, name: str) -> Callable[..., Any] | None:
    try:
        return module.get_function(name)
    except AttributeError:
        return None


def _check_runtime_version(path: Path, needed: str) -> None:
    installed = toolchain.installed_version("nvidia-cutlass-dsl")
    if installed is None:
        return  # the runtime library came from CUTE_DSL_LIBS, whose version nobody records; its symbols did resolve
    if toolchain.release(installed) < toolchain.release(needed):
        raise RuntimeLibraryError(f"{path} needs nvidia-cutlass-dsl {needed}, {installed} is installed; fix: {INSTALL}")


def _check_runtime_cuda(path: Path, arch: Arch) -> None:
    """Refuse CUDA 12 for a library of an architecture that does not ship: CUDA 13's compiler made its host code, which
    sets cudaFuncAttributeSharedMemoryMode. CUDA 12 lacks that attribute, and a launch fails where setting it fails."""
    if arch in SHIPPED_ARCHS or 13 in toolchain.installed_compilers():
        return
    if (file := runtime_library()).parent.parent.name == "cu12":
        raise RuntimeLibraryError(
            f"{path} needs {RUNTIME_FILE} of CUDA 13; {file} is of CUDA 12. Fix: pip install 'nvidia-cutlass-dsl[cu13]'"
        )
