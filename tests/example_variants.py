"""What host tests share: one variant of each family, made-up manifests, a C compiler, fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import (
    DecodeVariant,
    Dtype,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    WriteCacheVariant,
)
from tsmla.loading import manifest, toolchain

from build_aot import link

PACK = PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128)
PREFILL = PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, causal=True, lse=True)
MASKED = PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, causal=False, lse=True, masked=True)
DECODE = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, lse=True)
WRITE_CACHE = WriteCacheVariant(Arch.SM90A, Dtype.BF16, ROWS["fp8_ds_mla"])
READ_CACHE = ReadCacheVariant(Arch.SM90A, Dtype.BF16, ROWS["fp8_ds_mla"])
QUANTIZE_Q = QuantizeQVariant(Arch.SM90A, Dtype.BF16, ROWS["snapmla"])
KEY_MASK = KeyMaskVariant(Arch.SM90A)
SIGNATURE = "Expects 1 parameters when calling: `stand_in(x: int)`"


def library_manifest(*variants, **fields) -> manifest.LibraryManifest:
    """The manifest of a library made here and now, with `fields` instead of what is true."""
    values = {
        "schema": manifest.SCHEMA,
        "family": variants[0].family,
        "arch": variants[0].arch,
        "host": link.host(),
        "min_runtime": toolchain.MIN_RUNTIME,
        "toolchain": toolchain.versions(),
        "source_digest": toolchain.source_digest(),
        "kernels": tuple(manifest.Kernel(variant, SIGNATURE, {"registers": 1}) for variant in variants),
    }
    return manifest.LibraryManifest(**{**values, **fields})


def compile_c(source: Path, out: Path, *flags: str) -> Path:
    """Compile C for this host against TVM-FFI's headers."""
    include = f"-I{link.runtime_directories()[1].parent / 'include'}"
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", link.ZIG_TARGETS[link.host()], "-O1", "-fPIC", "-g0"]
    caches = {"ZIG_GLOBAL_CACHE_DIR": str(out.parent / "zig"), "ZIG_LOCAL_CACHE_DIR": str(out.parent / "zig")}
    subprocess.run(
        [*zig, include, *flags, str(source), "-o", str(out)], check=True, env={**os.environ, **caches}, timeout=120
    )
    return out


def run_python(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that imports what this one imports."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=python_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )


def python_environment(**changes: str) -> dict[str, str]:
    """The environment of a child interpreter with this one's import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **changes}
