"""Where wheels came from: `python wheels/provenance.py WHEEL... --builder URI --source URI > statement.json`.

An in-toto statement (v1) with SLSA's provenance predicate (v1): the wheels' hashes, who built them, from which commit,
with which tools. It is not signed: the publishing workflow does that, and `verify_release.py` compares it with a wheel.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import archive
import sbom

ROOT = Path(__file__).resolve().parent.parent
STATEMENT, PREDICATE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:tsmla:wheel:v1"
"""The build that a statement is about: `python wheels/build_wheel.py --kind KIND` in a checkout, for each kind in the
parameters."""


def statement(wheels: Sequence[Path], builder: str, source: str, commit: str, invocation: str = "") -> dict[str, Any]:
    """Return the statement about wheels that were built from a commit.

    builder: URI of who ran the build and is trusted to tell.
    source: URI of the repository.
    invocation: URI of the run.
    """
    tools: dict[str, dict[str, Any]] = {}
    for wheel in wheels:
        for component in document_in(wheel)["components"]:
            if component.get("scope") == "excluded":
                uri = component.get("purl") or f"pkg:generic/{component['bom-ref']}"
                tools[uri] = {"uri": uri, "name": component["name"]}
    kinds = sorted({"jit" if wheel.stem.endswith("-any") else "binary" for wheel in wheels})
    run = {"builder": {"id": builder}} | ({"metadata": {"invocationId": invocation}} if invocation else {})
    return {
        "_type": STATEMENT,
        "subject": [{"name": wheel.name, "digest": {"sha256": sha256(wheel)}} for wheel in sorted(wheels)],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"kinds": kinds, "source": f"git+{source}@{commit}"},
                "resolvedDependencies": [
                    {"uri": f"git+{source}@{commit}", "digest": {"gitCommit": commit}},
                    *(tools[uri] for uri in sorted(tools)),
                ],
            },
            "runDetails": run,
        },
    }


def problems(wheel: Path, said: Any) -> list[str]:
    """Return how a wheel differs from a statement, or a signed bundle's. Whether it is signed is not looked at."""
    try:
        if "dsseEnvelope" in said:
            said = json.loads(base64.b64decode(said["dsseEnvelope"]["payload"]))
        if (said["_type"], said["predicateType"]) != (STATEMENT, PREDICATE):
            return [f"the statement is of type {said['_type']}, {said['predicateType']}; it has to be {PREDICATE}"]
        subjects = {subject["name"]: subject["digest"]["sha256"] for subject in said["subject"]}
    except (TypeError, KeyError, ValueError) as error:
        return [f"the provenance statement cannot be read: {type(error).__name__}: {error}"]
    if wheel.name not in subjects:
        return [f"the provenance statement is about {', '.join(subjects) or 'nothing'}"]
    if (actual := sha256(wheel)) != subjects[wheel.name]:
        return [f"its SHA-256 is {actual}; the provenance statement says {subjects[wheel.name]}"]
    return []


def document_in(wheel: Path) -> Any:
    """Return the SBOM inside a wheel."""
    with zipfile.ZipFile(wheel) as opened:
        return json.loads(opened.read(sbom.path(archive.info_directory(wheel))))


def sha256(file: Path) -> str:
    """Return a file's SHA-256 in hex."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="wheels/provenance.py", description=__doc__)
    parser.add_argument("wheel", type=Path, nargs="+", help="built from the commit that is checked out here")
    parser.add_argument("--builder", required=True, help="URI of who ran the build and is trusted to tell")
    parser.add_argument("--source", required=True, help="URI of the repository")
    parser.add_argument("--invocation", default="", help="URI of the run")
    asked = parser.parse_args()
    if changed := _git("status", "--porcelain"):
        print(f"the checkout is not what its commit says, so that no commit can be named:\n{changed}", file=sys.stderr)
        return 1
    made = statement(asked.wheel, asked.builder, asked.source, _git("rev-parse", "HEAD"), asked.invocation)
    print(json.dumps(made, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
