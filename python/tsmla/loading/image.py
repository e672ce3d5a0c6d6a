"""A library's file, checked before any of it runs: whether it is regular, whole and tsmla's, and what it says of
itself.

A library has its manifest as JSON text in the ELF section `.tsmla.manifest` (`readelf -p .tsmla.manifest FILE` prints
it), and in `.tsmla.digest` the SHA-256 of its own file, counted with zeros in that section's place. Damage is thus
found even in a library of which only the path is known. Standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from ..errors import LibraryError
from . import elf, manifest, trust

MANIFEST_SECTION, DIGEST_SECTION = ".tsmla.manifest", ".tsmla.digest"
DIGEST_BYTES = hashlib.sha256().digest_size
HOSTS = {elf.EM_X86_64: "x86_64", elf.EM_AARCH64: "aarch64"}
"""ELF machine -> the CPU of each kind of host that libraries are built for, as `platform.machine()` names it."""
_MOST_BYTES = 1 << 30


class Image(NamedTuple):
    """What was read from a library's file.

    sha256: of the whole file, in hex. host: CPU that its code is for, as `platform.machine()` names it.
    """

    path: Path
    sha256: str
    host: str
    manifest: manifest.LibraryManifest


def read_image(path: Path, record: manifest.LibraryRecord | None = None) -> Image:
    """Read a library and check that it is as it was built: by the directory's `record` of it, or else by its digest.

    It may be for another host. Raises LibraryError for a file that is not a library of ours or is damaged, and
    ManifestError when it is not what the record says or its manifest is unusable.
    """
    if record is not None:
        content = manifest.read_recorded(path, record)
    else:
        try:
            with trust.open_regular(path) as stream:
                content = trust.read_bounded(stream, _MOST_BYTES)
        except OSError as error:
            raise LibraryError(f"{path} cannot be read: {error}") from error
    try:
        parts = elf.Elf(content)
    except elf.ElfError as error:
        raise LibraryError(
            f"{path} ({len(content)} bytes) is not a 64-bit ELF library or is damaged: {error}; rebuild or reinstall it"
        ) from None
    described, digest = parts.section(MANIFEST_SECTION), parts.section(DIGEST_SECTION)
    if described is None or digest is None or digest.size != DIGEST_BYTES:
        raise LibraryError(
            f"{path} is not a tsmla library, or is damaged, or an older version built it: it lacks the sections "
            f"{MANIFEST_SECTION} and {DIGEST_SECTION}. Make one with `python -m build_aot`"
        )
    if record is not None:
        sha256 = record.sha256
    else:
        actual, sha256 = _hashes(content, digest.offset)
        if actual != digest.data:
            raise LibraryError(
                f"{path} is damaged: its bytes hash to {actual.hex()}, those that were linked to {digest.data.hex()}; "
                "rebuild or reinstall it"
            )
    source = f"the manifest inside {path}"
    said = manifest.LibraryManifest.from_json(described.data.decode("utf-8", "replace"), source)
    return Image(path, sha256, HOSTS.get(parts.machine, f"ELF machine {parts.machine}"), said)


def sealed(content: bytes) -> bytes:
    """Return the bytes of a linked library with its digest put in its place. Raises ElfError when it has no place for
    one."""
    place = elf.Elf(content).section(DIGEST_SECTION)
    if place is None or place.size != DIGEST_BYTES:
        raise elf.ElfError(f"no section {DIGEST_SECTION} of {DIGEST_BYTES} bytes")
    digest, _ = _hashes(content, place.offset)
    return content[: place.offset] + digest + content[place.offset + place.size :]


def _hashes(content: bytes, place: int) -> tuple[bytes, str]:
    """Return two SHA-256 of a library's bytes: with zeros where the digest has its place, and, in hex, as they are.

    Machine code, which is nearly all of a library, lies before that place and is hashed once.
    """
    view = memoryview(content)
    whole = hashlib.sha256(view[:place])
    digest = whole.copy()
    whole.update(view[place:])
    digest.update(bytes(DIGEST_BYTES))
    digest.update(view[place + DIGEST_BYTES :])
    return digest.digest(), whole.hexdigest()
