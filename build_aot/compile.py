"""One variant to one host object with what is known about it, kept by content so that nothing is compiled twice.

What the compiler exported is kept, too: it becomes an object for another host in a fraction of a second.

`compile_one` runs in a worker process of its own environment; the rest imports nothing heavy."""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tsmla.identity.variant import Variant
from tsmla.loading import toolchain
from tsmla.loading.loader import signature_of
from tsmla.loading.manifest import Kernel

from . import cubin, link, sources
from .errors import BuildError
from .load import load

_LAUNCH_CONFIG, _SHARED_OFFSET = "{ [3 x i32], [3 x i32], i64, ptr, ptr, i32 }", 24
"""The exported host code's cudaLaunchConfig_t, and the offset of the dynamic shared memory's size in it."""

RESULT_SHAPING = ("compile.py", "cubin.py", "link.py", "load.py")
"""Files of this package that decide what a variant's result is."""
TRACED_OBJECTS = 100_000
"""Objects between two collections of garbage in a worker: tracing a kernel makes many, few of them in cycles."""


def build_key(host: str) -> str:
    """Hex SHA-256 over everything that a result for a host depends on besides its variant and sources."""
    digest = hashlib.sha256()
    decides = [toolchain.versions(), host, platform.python_implementation(), sys.version_info[:2]]
    digest.update(json.dumps(decides, sort_keys=True).encode())
    for name in RESULT_SHAPING:
        digest.update(hashlib.sha256(Path(__file__).with_name(name).read_bytes()).digest())
    return digest.hexdigest()


class ResultStore:
    """Compiled variants in one directory: `<symbol>.o`, `<symbol>.json` written last, `<symbol>.ptx` if asked for, and
    `<symbol>.ll.gz`, the LLVM IR from which objects for other hosts are made.

    A result counts only when it was made under the current build key, from sources that have not changed since; a new
    one replaces the old one of its variant.

    sources: every source -> its hash (`sources.hashes`), when the build began."""

    def __init__(self, directory: Path, key: str, sources: dict[str, str]):
        self.directory, self.key, self.sources = directory, key, sources

    def object(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.o"

    def ptx(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.ptx"

    def ir(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.ll.gz"

    def described(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.json"

    def find(self, variant: Variant) -> Kernel | None:
        """What was compiled for this variant of these sources under this key; None when nothing usable was."""
        try:
            kept = json.loads(self.described(variant).read_text("utf-8"))
            if not self.accepts(kept) or kept["sha256"] != _sha256(self.object(variant)):
                return None
            return Kernel(variant, kept["signature"], kept["resources"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def decided(self, variant: Variant) -> list[str]:
        """Names of the sources behind a result that was found."""
        return list(json.loads(self.described(variant).read_text("utf-8"))["sources"])

    def accepts(self, kept: dict[str, Any]) -> bool:
        """Whether a described result was made under this key from these sources."""
        return kept["key"] == self.key and bool(kept["sources"]) and kept["sources"].items() <= self.sources.items()

    def add(
        self, kernel: Kernel, sources: Iterable[str], obj: Path, ptx: Path | None = None, ir: str | None = None
    ) -> None:
        """Keep a result: its files are moved in, its description last.

        sources: names of those that decided it. ir: the LLVM IR that it was assembled of.
        """
        described = self.described(kernel.variant)
        described.unlink(missing_ok=True)
        os.replace(obj, self.object(kernel.variant))
        if ptx:
            os.replace(ptx, self.ptx(kernel.variant))
        else:
            self.ptx(kernel.variant).unlink(missing_ok=True)
        if ir is None:
            self.ir(kernel.variant).unlink(missing_ok=True)
        else:
            self.ir(kernel.variant).write_bytes(gzip.compress(ir.encode("utf-8"), compresslevel=6, mtime=0))
        kept = {
            "key": self.key,
            "sources": {name: self.sources[name] for name in sorted(sources)},
            "sha256": _sha256(self.object(kernel.variant)),
            "signature": kernel.signature,
            "resources": kernel.resources,
        }
        temporary = described.with_suffix(".new")
        temporary.write_text(json.dumps(kept), "utf-8")
        os.replace(temporary, described)


def prepare_worker(dumps: Path | None) -> None:
    """Set a worker process up, before it imports the compiler: no inherited setting may change or dump code.

    dumps: a directory in which the compiler leaves each variant's PTX; None keeps none.
    """
    gc.set_threshold(TRACED_OBJECTS)
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        del os.environ[name]
    if dumps:
        own = tempfile.mkdtemp(dir=dumps)
        os.environ.update(CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=own)


def compile_one(variant: Variant, store: ResultStore, host: str) -> float:
    """Compile a variant, check its GPU architecture, and add it to the store. Returns the seconds it took."""
    start = time.perf_counter()
    before = sources.loaded()
    from tsmla_kernels.registry import compile_variant, recipe

    dumps = os.environ.get("CUTE_DSL_DUMP_DIR")
    with tempfile.TemporaryDirectory(dir=store.directory) as name:
        scratch = Path(name)
        compiled = compile_variant(variant)
        decided = sources.behind(type(recipe(variant).entry).__module__)
        if unlisted := sources.names_of(sources.loaded() - before) - decided:
            raise BuildError(f"{variant} is decided by {', '.join(sorted(unlisted))}, too: see build_aot/sources.py")
        exported, obj = scratch / f"{variant}.ll", scratch / f"{variant}.o"
        compiled.export_to_c(str(exported), function_name=variant.symbol(), export_only_tvm_ffi_symbols=True)
        ir = exported.read_text("utf-8")
        link.assemble(ir, obj, host)
        found = cubin.images(obj)
        if len(found) != 1 or cubin.arch(found[0]) != variant.arch:
            archs = ", ".join(cubin.arch(image) for image in found) or "no GPU code"
            raise BuildError(f"{variant} should hold one image for {variant.arch}; it holds {archs}")
        alone = scratch / f"{variant}.so"
        link.link([obj], alone, host)
        used = cubin.resources(found[0]) | {"dynamic_shared_bytes": _dynamic_shared_bytes(ir, exported.name)}
        kernel = Kernel(variant, signature_of(load(alone).get_function(variant.symbol())), used)
        now = sources.hashes()
        if build_key(host) != store.key or any(now.get(name) != store.sources[name] for name in decided):
            raise BuildError("the sources changed while they were being compiled; run the build again")
        store.add(kernel, decided, obj, _collect_ptx(Path(dumps), scratch) if dumps else None, ir)
    return time.perf_counter() - start


def assemble_one(kernel: Kernel, compiled: ResultStore, store: ResultStore, host: str) -> None:
    """Add to the store of another host what was compiled for this one. Raises BuildError."""
    kept = compiled.ir(kernel.variant)
    try:
        ir = gzip.decompress(kept.read_bytes()).decode("utf-8")
    except (OSError, EOFError, zlib.error) as error:
        kept.unlink(missing_ok=True)
        raise BuildError(f"{kept} was damaged ({error}); run the build again to compile it again") from error
    with tempfile.TemporaryDirectory(dir=store.directory) as name:
        obj = Path(name) / f"{kernel.variant}.o"
        link.assemble(ir, obj, host)
        store.add(kernel, compiled.decided(kernel.variant), obj)


def _dynamic_shared_bytes(text: str, name: str) -> int:
    """Most shared memory that a launch in the exported host code asks for, on top of what its GPU code declares. Sizes
    that it computes are left out: such memory is asked for to keep other CTAs away, and not used."""
    configs = re.findall(rf"(%\S+) = alloca {re.escape(_LAUNCH_CONFIG)},", text)
    stores = [rf"(%\S+) = getelementptr [^\n]*ptr {re.escape(c)}, i64 {_SHARED_OFFSET}\n" for c in configs]
    sizes = []
    for store in stores:
        sizes += re.findall(store + r"(?:[^\n]*\n)*?  store i64 ([%\w.]+), ptr \1,", text)
    constant = [int(size) for _, size in sizes if size.isdecimal()]
    if not constant or len(sizes) != len(configs):
        raise BuildError(f"{name}: {len(configs)} launches, {len(sizes)} sizes, {len(constant)} of them constant")
    return max(constant)


def _collect_ptx(dumps: Path, scratch: Path) -> Path:
    """Everything that the compiler dumped for the variant just compiled, as one file."""
    found = sorted(dumps.glob("*.ptx"))
    if not found:
        raise BuildError(f"the compiler left no PTX in {dumps}")
    collected = scratch / "collected.ptx"
    with open(collected, "wb") as stream:
        stream.writelines(path.read_bytes().rstrip(b"\0") for path in found)
    shutil.rmtree(dumps)
    dumps.mkdir()
    return collected


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
