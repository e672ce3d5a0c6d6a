"""Host side of the build: LLVM IR to a baseline object, objects to one library. Both with zig, both deterministic.

Both work for every host in `ZIG_TARGETS`, whichever of them this machine is: the GPU code inside is the same.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tsmla.loading import toolchain
from tsmla.loading.elf import SHN_UNDEF, SHT_DYNSYM, SHT_SYMTAB, Elf, ElfError, Symbol
from tsmla.loading.image import DIGEST_BYTES, DIGEST_SECTION, MANIFEST_SECTION, sealed

from .errors import BuildError

ZIG_TARGETS = {"x86_64": "x86_64-linux-gnu.2.28", "aarch64": "aarch64-linux-gnu.2.28"}
"""Host CPU, as platform.machine() names it -> zig target: the oldest processor and glibc that a library runs on."""
NEEDED = ("libcute_dsl_runtime.so", "libtvm_ffi.so")
"""Libraries that every built library links against; both come from PyPI packages at run time."""
FROM_LIBC = frozenset({"printf"})
"""What exported host code may call of the C library, which every process has; decode's says so when a launch fails."""
RUNPATH = (
    "$ORIGIN/../../nvidia_cutlass_dsl/cu12/lib:$ORIGIN/../../nvidia_cutlass_dsl/cu13/lib:$ORIGIN/../../tvm_ffi/lib"
)
"""Where a library in site-packages/tsmla/objs finds the two. A fallback: the loader opens both libraries first,
wherever they are installed."""

_DESCRIPTION = f"""\
#define KEPT(name) __attribute__((used, retain, section(name))) static const char
KEPT("{MANIFEST_SECTION}") manifest[] = {{
#embed "manifest.json"
}};
KEPT("{DIGEST_SECTION}") digest[{DIGEST_BYTES}] = {{0}};
"""


def host() -> str:
    """This machine's CPU, if libraries can be built for it. Raises BuildError."""
    machine = platform.machine()
    if machine not in ZIG_TARGETS:
        raise BuildError(
            f"no libraries are built on {machine}, only on {' and '.join(ZIG_TARGETS)}; "
            "install with TSMLA_AOT=0 to compile kernels just in time instead"
        )
    return machine


def runtime_directories() -> tuple[Path, Path]:
    """Where libcute_dsl_runtime.so and libtvm_ffi.so lie. Imports neither package. Raises BuildError."""
    cutlass, tvm_ffi = _package("nvidia_cutlass_dsl", "nvidia-cutlass-dsl"), _package("tvm_ffi", "apache-tvm-ffi")
    return cutlass / f"cu{max(toolchain.installed_compilers(), default=12)}" / "lib", tvm_ffi / "lib"


def assemble(ir: str, obj: Path, host: str) -> None:
    """Compile the text of exported LLVM IR to an object for the oldest supported CPU, whatever CPU exported it."""
    with tempfile.TemporaryDirectory(dir=obj.parent) as scratch:
        text = re.sub(r"^target (triple|datalayout) = .*\n", "", ir, flags=re.MULTILINE)
        Path(scratch, "exported.ll").write_text(text, "utf-8")
        _zig(host, scratch, "-c", "-Wno-override-module", "exported.ll", "-o", obj)


def link(objects: Sequence[Path], library: Path, host: str, manifest: str | None = None) -> None:
    """Link objects, in the order given, into a library that exports what they export.

    manifest: text for the library to hold about itself; then it has its digest inside, too (`tsmla.loading.image`).
    """
    with tempfile.TemporaryDirectory() as scratch:
        directories = runtime_directories() if host == platform.machine() else _stubs(objects, host, Path(scratch))
        inputs = [str(path.resolve()) for path in objects]
        if manifest is not None:
            Path(scratch, "manifest.json").write_text(manifest, "utf-8")
            Path(scratch, "manifest.c").write_text(_DESCRIPTION, "utf-8")
            _zig(host, scratch, "-c", "-std=c23", "-g0", "manifest.c", "-o", "manifest.o")
            inputs.append("manifest.o")
        flags = ["-shared", "-nostdlib", "-s", f"-Wl,-soname,{library.name}", f"-Wl,-rpath,{RUNPATH}", "-Wl,-z,now"]
        found = [f"-L{directory}" for directory in directories]
        needed = [f"-l{name.removeprefix('lib').removesuffix('.so')}" for name in NEEDED]
        _zig(host, scratch, *flags, *inputs, *found, *needed, "-o", "linked.so")
        library.parent.mkdir(parents=True, exist_ok=True)
        temporary = library.with_name(f".{library.name}.new")
        linked = Path(scratch, "linked.so").read_bytes()
        try:
            temporary.write_bytes(linked if manifest is None else sealed(linked))
        except ElfError as error:
            raise BuildError(f"{library.name} was linked without a place for its digest: {error}") from error
        temporary.chmod(0o755)
        os.replace(temporary, library)


def provided(host: str) -> set[str]:
    """The symbols that a library for another host than this machine's may need: those of NVIDIA's stub for it, and of
    this machine's libtvm_ffi.so, which has the same names everywhere. Raises BuildError."""
    return _exported(_stub(host)) | _exported(runtime_directories()[1] / NEEDED[1]) | FROM_LIBC


def _stub(host: str) -> Path:
    """What the linker takes for another host's libcute_dsl_runtime.so; nvidia-cutlass-dsl's wheel brings it."""
    directory = runtime_directories()[0] / "stubs"
    stub = directory / f"{host}-unknown-linux-gnu" / NEEDED[0]
    if not stub.is_file():
        raise BuildError(f"{directory} has no {NEEDED[0]} for {host}: build libraries for {host} on such a machine")
    return stub


def _stubs(objects: Sequence[Path], host: str, scratch: Path) -> tuple[Path, Path]:
    """Directories of what stands in for the two libraries of another host, of which a linker reads names only: NVIDIA's
    stub, and one made here of the names in this machine's libtvm_ffi.so that the objects need."""
    stub = _stub(host)
    needed = {symbol.name for path in objects for symbol in _symbols(path, SHT_SYMTAB) if symbol.section == SHN_UNDEF}
    if missing := sorted(needed - provided(host) - {""}):
        raise BuildError(f"neither {' nor '.join(NEEDED)} has {', '.join(missing)}, which the objects need")
    functions = sorted(needed - _exported(stub) - FROM_LIBC - {""})
    Path(scratch, "stub.c").write_text("".join(f"void {name}(void) {{}}\n" for name in functions), "utf-8")
    _zig(host, scratch, "-shared", "-nostdlib", f"-Wl,-soname,{NEEDED[1]}", "stub.c", "-o", NEEDED[1])
    return stub.parent, scratch


def _exported(library: Path) -> set[str]:
    return {symbol.name for symbol in _symbols(library, SHT_DYNSYM) if symbol.section != SHN_UNDEF}


def _symbols(path: Path, table: int) -> list[Symbol]:
    return Elf(path.read_bytes()).symbols(table)


def _package(module: str, distribution: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{distribution} is not installed: pip install '{distribution}'")
    return Path(next(iter(spec.submodule_search_locations)))


def _zig(host: str, directory: Path | str, *arguments: str | Path) -> None:
    _package("ziglang", "ziglang")
    caches = {name: str(Path(directory) / "zig") for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")}
    command = [sys.executable, "-m", "ziglang", "cc", "-target", ZIG_TARGETS[host], "-mcpu=baseline", "-O2", "-fPIC"]
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=directory, env={**os.environ, **caches}, capture_output=True, text=True
    )
    if done.returncode:
        raise BuildError(f"zig cc {' '.join(map(str, arguments))} failed:\n{done.stderr.strip()[-4000:]}")
