"""Writes and checks what a wheel holds and what made it, as a CycloneDX 1.6 document inside the wheel (PEP 770).

The root is the wheel, and its parts are its libraries, each with its hash. The tools that compiled and packed them are
listed, but are not parts (scope "excluded"). All of it is read from the wheel's own files, so that a reader can make
the document again and compare.
"""

from __future__ import annotations

import email.parser
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "kernels")]

from tsmla.errors import ManifestError  # noqa: E402
from tsmla.loading import manifest, toolchain  # noqa: E402

LIBRARIES = "tsmla/objs"
_PTXAS = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
"""ptxas' version in a CUDA image's compiler note, which images for Blackwell have and those for Hopper lack."""


def path(info: str) -> str:
    """Return the document's place in a wheel whose .dist-info directory is `info`."""
    return f"{info}/sboms/tsmla.cdx.json"


def document(wheel: str, root: Path, epoch: int) -> bytes:
    """Return the document of a wheel with this file name, unpacked in `root`. Raises ManifestError.

    epoch: the wheel's time, in seconds since 1970; it is the only one in the document.
    """
    records = manifest.read_directory(root / LIBRARIES).libraries if (root / LIBRARIES).exists() else ()
    libraries = [_library(record) for record in records]
    versions = {pair for record in records for pair in record.manifest.toolchain.items()}
    generator = email.parser.Parser().parsestr(next(root.glob("*.dist-info/WHEEL")).read_text("utf-8"))["Generator"]
    versions.add(tuple(generator.split(" ", 1)))
    tools = [_tool(*pair) | {"purl": "pkg:pypi/{}@{}".format(*pair)} for pair in sorted(versions)]
    tools += [_tool("ptxas", version) for version in sorted(_ptxas_versions(root / LIBRARIES))]
    made: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
            "lifecycles": [{"phase": "build"}],
            "component": _wheel(wheel, root),
        },
        "components": [*libraries, *tools],
        "dependencies": [
            {"ref": "wheel", "dependsOn": [library["bom-ref"] for library in libraries]},
            *({"ref": library["bom-ref"]} for library in libraries),
        ],
    }
    return json.dumps(made, indent=1, sort_keys=True).encode() + b"\n"


def problems(wheel: str, root: Path, epoch: int) -> Iterator[str]:
    """Yield how the document inside an unpacked wheel differs from one made of it now."""
    (said_in,) = root.glob("*.dist-info/sboms/tsmla.cdx.json")
    try:
        said = manifest.parse_json(said_in.read_bytes())
        true = json.loads(document(wheel, root, epoch))
        if said == true:
            return
        listed = {component["bom-ref"]: component for component in said["components"]}
        wanted = {component["bom-ref"]: component for component in true["components"]}
    except (ValueError, TypeError, KeyError, ManifestError) as error:
        yield f"its SBOM cannot be compared: {type(error).__name__}: {error}"
        return
    differing = sorted(ref for ref in listed.keys() | wanted.keys() if listed.get(ref) != wanted.get(ref))
    for ref in differing:
        wrong = "lacks" if ref not in listed else "misstates" if ref in wanted else "invents"
        yield f"its SBOM {wrong} {ref}"
    if not differing:
        keys = ", ".join(sorted(key for key in said.keys() | true.keys() if said.get(key) != true.get(key)))
        yield f"its SBOM is not of this wheel: {keys} should be different"


def _wheel(file: str, root: Path) -> dict[str, Any]:
    name, version, _ = file.split("-", 2)
    return {
        "type": "library",
        "bom-ref": "wheel",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}?file_name={file}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "properties": [{"name": "tsmla:source_digest", "value": toolchain.source_digest(root)}],
    }


def _library(record: manifest.LibraryRecord) -> dict[str, Any]:
    said = record.manifest
    properties = {
        "arch": said.arch,
        "family": said.family,
        "host": said.host,
        "kernels": len(said.kernels),
        "min_runtime": said.min_runtime,
        "source_digest": said.source_digest,
    }
    return {
        "type": "file",
        "bom-ref": record.file,
        "name": f"{LIBRARIES}/{record.file}",
        "hashes": [{"alg": "SHA-256", "content": record.sha256}],
        "properties": [{"name": f"tsmla:{key}", "value": str(value)} for key, value in properties.items()],
    }


def _tool(name: str, version: str) -> dict[str, str]:
    """Return a tool that made a part of the wheel, and is no part of it."""
    return {
        "type": "application",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "scope": "excluded",
    }


def _ptxas_versions(libraries: Path) -> set[str]:
    return {v.decode() for path in sorted(libraries.glob("*.so")) for v in _PTXAS.findall(path.read_bytes())}
