"""One variant to one host object with what is known about it, kept by content so that nothing is compiled twice.

What the compiler exported is kept, too: an object for another host is assembled of that in a fraction of a second.

`compile_one` runs in a worker process of its own environment; the rest imports nothing heavy.
"""

from __future__ import annotations

import gc
import gzip
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import zlib
from pathlib import Path

from tsmla import toolchain
from tsmla.loader import signature_of
from tsmla.manifest import Kernel
from tsmla.variant import Variant

from . import cubin, link
from .errors import BuildError
from .load import load

_LAUNCH_CONFIG, _SHARED_OFFSET = "{ [3 x i32], [3 x i32], i64, ptr, ptr, i32 }", 24
"""The exported host code's cudaLaunchConfig_t, and where in it the dynamic shared memory's size lies."""

TRACED_OBJECTS = 100_000
"""Objects between two collections of garbage in a worker: tracing a kernel makes many, few of them in cycles."""


def build_key(host: str) -> str:
    """Hex SHA-256 over everything that a result for a host depends on besides its variant: sources, compilers, this
    package."""
    digest = hashlib.sha256()
    digest.update(json.dumps([toolchain.source_digest(), toolchain.versions(), host], sort_keys=True).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class ResultStore:
    """Compiled variants in one directory: `<symbol>.o`, `<symbol>.json` written last, `<symbol>.ptx` if asked for, and
    `<symbol>.ll.gz`, the LLVM IR of which objects for other hosts are made.

    A result counts only when it was made under the same build key, so a new one replaces the old one of its variant.
    """

    def __init__(self, directory: Path, key: str):
        self.directory, self.key = directory, key

    def object(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.o"

    def ptx(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.ptx"

    def ir(self, variant: Variant) -> Path:
        return self.directory / f"{variant}.ll.gz"

    def find(self, variant: Variant) -> Kernel | None:
        """What was compiled for this variant under this key; None when nothing usable was."""
        try:
            kept = json.loads((self.directory / f"{variant}.json").read_text("utf-8"))
            if kept["key"] != self.key or kept["sha256"] != _sha256(self.object(variant)):
                return None
            return Kernel(variant, kept["signature"], kept["resources"])
        except (OSError, ValueError, KeyError):
            return None

    def add(self, kernel: Kernel, obj: Path, ptx: Path | None = None, ir: str | None = None) -> None:
        """Keep a result: its files are moved in, its description last."""
        described = self.directory / f"{kernel.variant}.json"
        described.unlink(missing_ok=True)
        os.replace(obj, self.object(kernel.variant))
        if ptx:
            os.replace(ptx, self.ptx(kernel.variant))
        else:
            self.ptx(kernel.variant).unlink(missing_ok=True)
        if ir is None:
            self.ir(kernel.variant).unlink(missing_ok=True)
        else:
            self.ir(kernel.variant).write_bytes(gzip.compress(ir.encode("utf-8"), mtime=0))
        kept = {
            "key": self.key,
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
    from tsmla_kernels.registry import compile_variant

    start = time.perf_counter()
    dumps = os.environ.get("CUTE_DSL_DUMP_DIR")
    with tempfile.TemporaryDirectory(dir=store.directory) as name:
        scratch = Path(name)
        compiled = compile_variant(variant)
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
        if build_key(host) != store.key:
            raise BuildError("the sources changed while they were being compiled; run the build again")
        store.add(kernel, obj, _collect_ptx(Path(dumps), scratch) if dumps else None, ir)
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
        store.add(kernel, obj)


def _dynamic_shared_bytes(text: str, name: str) -> int:
    """Most shared memory that a launch in the exported host code asks for, on top of what its GPU code declares. What
    it computes is left out: that is asked for to keep other CTAs away, and not used."""
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
