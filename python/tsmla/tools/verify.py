"""Checks a directory of libraries, as `tsmla verify` does: sources, hashes, load, manifests, symbols, signatures.

Needs no GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ..errors import ManifestError, TsmlaError
from ..loading import loader, manifest, resolve


@dataclasses.dataclass(frozen=True)
class Checked:
    """One library: how many kernels it holds, and what is wrong with it ("" when nothing is)."""

    file: str
    kernels: int
    problem: str


def verify_directory(directory: Path) -> list[Checked]:
    """Check every library that the directory's manifest names. Raises ManifestError when it has no usable one."""
    return [_verify(directory, record) for record in manifest.read_directory(directory).libraries]


def _verify(directory: Path, record: manifest.LibraryRecord) -> Checked:
    kernels = record.manifest.kernels
    try:
        manifest.verify_file(directory, record)
        library = loader.open_library(directory / record.file, family=record.manifest.family, arch=record.manifest.arch)
        if library.manifest != record.manifest:
            raise ManifestError(f"{library.path} describes itself differently than {manifest.MANIFEST_FILE} does")
        resolve._check_sources(library)
        for kernel in kernels:
            library.function(kernel.variant, check_signature=True)
    except TsmlaError as error:
        return Checked(record.file, len(kernels), str(error))
    return Checked(record.file, len(kernels), "")
