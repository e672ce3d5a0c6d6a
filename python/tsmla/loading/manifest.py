"""What a compiled library says about itself, and what a directory of them holds: schema, read, write, verify.

A library has the JSON text of its LibraryManifest inside (`image`). A directory of libraries has one `manifest.json`,
written last, so its presence means that everything it names is complete. Standard library only.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ManifestError
from ..identity.arch import Arch
from ..identity.variant import Variant, variant_from_dict
from . import trust

SCHEMA = 5
MANIFEST_FILE = "manifest.json"
_MOST_BYTES = 1 << 24


class Kernel(NamedTuple):
    """One exported function.

    signature: the text of the TypeError that calling it without arguments raises; compared again at load.
    resources: integers read from its machine code (registers, static_shared_bytes, stack_bytes, spill_stores, ...:
        `build_aot.cubin.RESOURCES` lists and explains them) and dynamic_shared_bytes, which its launch adds.
    """

    variant: Variant
    signature: str
    resources: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {
            "symbol": self.variant.symbol(),
            "variant": self.variant.to_dict(),
            "signature": self.signature,
            "resources": dict(self.resources),
        }


class LibraryManifest(NamedTuple):
    """What one library holds and how it was made.

    host: CPU as `platform.machine()` names it. min_runtime: lowest nvidia-cutlass-dsl whose runtime library loads it.
    toolchain: versions of what compiled it. source_digest: `toolchain.source_digest()` of the sources compiled.
    """

    schema: int
    family: str
    arch: Arch
    host: str
    min_runtime: str
    toolchain: dict[str, str]
    source_digest: str
    kernels: tuple[Kernel, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": self.schema,
            "family": self.family,
            "arch": self.arch.value,
            "host": self.host,
            "min_runtime": self.min_runtime,
            "toolchain": dict(self.toolchain),
            "source_digest": self.source_digest,
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }

    def to_json(self) -> str:
        """The text that the library holds: one spelling for one content."""
        return _dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str, source: str = "library manifest") -> LibraryManifest:
        """The manifest in `text`; `source` names where it came from in the ManifestError of an unusable one."""
        return _library(_load(text, source), source)


class LibraryRecord(NamedTuple):
    """One library file of a directory: its name, what its bytes hash to, its size in bytes, its own manifest."""

    file: str
    sha256: str
    size: int
    manifest: LibraryManifest

    @classmethod
    def of_file(cls, path: Path, manifest: LibraryManifest) -> LibraryRecord:
        """The record of a library that exists, hashed now."""
        return cls(path.name, file_sha256(path), path.stat().st_size, manifest)


class DirectoryManifest(NamedTuple):
    """Every library of a directory."""

    schema: int
    libraries: tuple[LibraryRecord, ...]

    @property
    def names(self) -> str:
        """The libraries' file names in words, for errors: "nothing" where there are none."""
        return ", ".join(library.file for library in self.libraries) or "nothing"


def library_file(family: str, arch: Arch, host: str) -> str:
    """File name of the library that holds one operator family for one GPU architecture and host CPU."""
    return f"tsmla_{family}_{arch}_{host}.so"


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a regular file's bytes."""
    digest = hashlib.sha256()
    with trust.open_regular(path) as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_directory(path: Path) -> DirectoryManifest:
    """The manifest of directory `path`. Raises ManifestError when it is missing, truncated or of another schema."""
    file = Path(path) / MANIFEST_FILE
    try:
        with trust.open_regular(file) as stream:
            text = trust.read_bounded(stream, _MOST_BYTES).decode("utf-8")
    except FileNotFoundError:
        raise ManifestError(
            f"{file} does not exist: this directory holds no finished build (binary wheels have one, and `python -m "
            "build_aot` makes one)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{file} cannot be read: {error}") from error
    return _directory(_load(text, str(file)), str(file))


def write_directory(path: Path, manifest: DirectoryManifest) -> None:
    """Write the directory's manifest atomically. Call it last: its presence says that the libraries are complete."""
    records = [
        {"file": r.file, "sha256": r.sha256, "size": r.size, "manifest": r.manifest.to_dict()}
        for r in sorted(manifest.libraries, key=lambda r: r.file)
    ]
    handle, temporary = tempfile.mkstemp(prefix=f".{MANIFEST_FILE}.", dir=path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(_dump({"schema": manifest.schema, "libraries": records}))
        os.chmod(temporary, 0o644)
        os.replace(temporary, Path(path) / MANIFEST_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def verify_file(directory: Path, record: LibraryRecord) -> None:
    """Check that the recorded library is there with the recorded bytes. Raises ManifestError saying what differs."""
    read_recorded(Path(directory) / record.file, record)


def read_recorded(path: Path, record: LibraryRecord) -> bytes:
    """The bytes of a library, which are those that were recorded. Raises ManifestError saying what differs."""
    try:
        with trust.open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != record.size:
                raise ManifestError(
                    f"{path} has {size} bytes but its manifest says {record.size}; rebuild or reinstall it"
                )
            content = trust.read_bounded(stream, record.size)
    except OSError as error:
        raise ManifestError(f"{path} is in the manifest but cannot be read: {error}") from error
    if (actual := hashlib.sha256(content).hexdigest()) != record.sha256:
        raise ManifestError(
            f"{path} hashes to {actual} but its manifest says {record.sha256}: "
            "the file changed after it was built; rebuild or reinstall it"
        )
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError alone, whatever the text.

    What Python's parser accepts or raises otherwise: NaN and infinities; nesting that is too deep for it; a number too
        long for an integer; a string with half of a surrogate pair, which no log could hold.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
        if b"\\u" in text if isinstance(text, bytes) else "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a string in it has half of a surrogate pair") from None
    return value


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _load(text: str, source: str) -> dict[str, Any]:
    """The object in a JSON text, of the schema that is read here."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ManifestError(
            f"{source} is not valid JSON, perhaps truncated ({len(text)} characters): {error}"
        ) from None
    if not isinstance(value, dict):
        raise ManifestError(f"{source} holds a JSON {type(value).__name__}, not an object")
    _check_schema(value, source)
    return value


def _check_schema(value: dict[str, Any], source: str) -> None:
    schema = _field(value, "schema", int, source)
    if schema != SCHEMA:
        raise ManifestError(
            f"{source} has schema {schema}; this tsmla reads schema {SCHEMA}. "
            "Build the library with this version, or install the version that built it"
        )


def _field(value: dict[str, Any], name: str, kind: type, source: str) -> Any:
    if name not in value:
        raise ManifestError(f"{source} lacks the field {name!r}; it has: {', '.join(sorted(value)) or 'none'}")
    found = value[name]
    if type(found) is not kind:
        raise ManifestError(f"{source}: field {name!r} is {found!r:.80}, not of type {kind.__name__}")
    return found


def _mapping(value: dict[str, Any], name: str, kind: type, source: str) -> dict[str, Any]:
    found = _field(value, name, dict, source)
    return {key: _field(found, key, kind, f"{source}: {name}") for key in found}


def _objects(value: dict[str, Any], name: str, source: str) -> list[dict[str, Any]]:
    found = _field(value, name, list, source)
    if not all(isinstance(entry, dict) for entry in found):
        raise ManifestError(f"{source}: field {name!r} holds something that is not an object")
    return found


def _library(value: dict[str, Any], source: str) -> LibraryManifest:
    _check_schema(value, source)
    arch_name = _field(value, "arch", str, source)
    if arch_name not in {arch.value for arch in Arch}:
        raise ManifestError(f"{source}: arch is {arch_name!r}; known: {', '.join(Arch)}")
    family, arch = _field(value, "family", str, source), Arch(arch_name)
    kernels = tuple(_kernel(entry, family, arch, source) for entry in _objects(value, "kernels", source))
    symbols = collections.Counter(kernel.variant.symbol() for kernel in kernels)
    if repeated := sorted(symbol for symbol, count in symbols.items() if count > 1):
        raise ManifestError(f"{source} lists more than once: {', '.join(repeated)}")
    min_runtime = _field(value, "min_runtime", str, source)
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})*", min_runtime):
        raise ManifestError(f"{source}: min_runtime is {min_runtime!r:.80}, not a version such as 4.7.1")
    return LibraryManifest(
        schema=_field(value, "schema", int, source),
        family=family,
        arch=arch,
        host=_field(value, "host", str, source),
        min_runtime=min_runtime,
        toolchain=_mapping(value, "toolchain", str, source),
        source_digest=_field(value, "source_digest", str, source),
        kernels=kernels,
    )


def _kernel(value: dict[str, Any], family: str, arch: Arch, source: str) -> Kernel:
    symbol = _field(value, "symbol", str, source)
    try:
        variant = variant_from_dict(_field(value, "variant", dict, source))
    except (ValueError, TypeError) as error:  # a field may be of any type
        raise ManifestError(f"{source}: {symbol}: {error}") from None
    if variant.symbol() != symbol:
        raise ManifestError(f"{source}: symbol {symbol} does not belong to its variant, whose symbol is {variant}")
    if (variant.family, variant.arch) != (family, arch):
        raise ManifestError(f"{source}: {symbol} does not belong in a {family} library for {arch}")
    return Kernel(variant, _field(value, "signature", str, source), _mapping(value, "resources", int, source))


def _directory(value: dict[str, Any], source: str) -> DirectoryManifest:
    records = []
    for entry in _objects(value, "libraries", source):
        file = _field(entry, "file", str, source)
        if not re.fullmatch(r"\w[\w.-]{0,200}", file, re.ASCII):
            raise ManifestError(f"{source}: library file {file!r} is not a plain file name")
        library = _library(_field(entry, "manifest", dict, f"{source}: {file}"), f"{source}: {file}")
        size, sha256 = _field(entry, "size", int, source), _field(entry, "sha256", str, source)
        records.append(LibraryRecord(file, sha256, size, library))
    return DirectoryManifest(_field(value, "schema", int, source), tuple(records))


def images_of(libraries: Path) -> dict[Variant, tuple[Path, int]]:
    """Return the library and the number of the GPU image of each kernel in a directory of libraries: images lie in the
    order in which a manifest names kernels."""
    return {
        kernel.variant: (libraries / record.file, number)
        for record in read_directory(libraries).libraries
        for number, kernel in enumerate(record.manifest.kernels)
    }
