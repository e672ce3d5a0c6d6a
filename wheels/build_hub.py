"""A folder for the Hugging Face Hub, made of binary wheels: `python wheels/build_hub.py WHEEL... --out DIR`.

`kernels.get_kernel` and `get_local_kernel` load it. DIR/README.md is the card; DIR/build has a folder for each host,
one wheel's, and each CUDA version. A folder is the package tsmla with its libraries, as they are in the wheel, and
metadata.json, which names it: `kernels` imports it under that name, so that it meets neither an installed tsmla nor
another version of itself. Kernel sources stay behind, since they import `tsmla`, and so does what only an installed
distribution can serve: the command line and vLLM's plug-in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import archive
import verify_release
from audit_wheel import HOSTS, LIBRARIES
from tsmla.identity.arch import Arch
from tsmla.loading.manifest import read_directory

CARD = Path(__file__).with_name("hub_card.md")
CUDA_VERSIONS = ("12.9", "13.0")
"""The oldest CUDA of each major version whose driver is sure to load what ptxas 12.9 made; `kernels` takes newer minor
ones."""
TVM_FFI = "0.1"
"""The version of apache-tvm-ffi that `kernels` looks for, out of the range that the wheels require."""
KERNEL_VERSION = 1
"""The Hub's version of this interface. It grows when callers have to change."""
REQUIRED = ["tvm-ffi", "nvidia-cutlass-dsl"]
"""Required distributions, by the names of `kernels`, which asks whether they are installed."""
LEFT_OUT = ("__main__.py", "integrations/vllm", "problems", "tools")
"""Rooms and files that no public function needs."""
METADATA = ("METADATA", "licenses", "sboms")
"""Parts of the wheel's .dist-info that are kept: version, licence, and what the libraries were made of."""


def build(wheels: Sequence[Path], out: Path) -> list[Path]:
    """Fill `out`, which must be empty or missing, from one binary wheel for each host; returns the folders.

    Raises RuntimeError for a wheel that is damaged or has no libraries, and for wheels of different sources or of one
    host.
    """
    if out.exists() and any(out.iterdir()):
        raise RuntimeError(f"{out} is not empty")
    with tempfile.TemporaryDirectory() as scratch:
        roots = {}
        for wheel in wheels:
            host = _host_of(wheel)
            if host in roots:
                raise RuntimeError(f"two wheels are for {host}")
            roots[host] = Path(scratch, host)
            archive.unpack(wheel, roots[host])
        infos = {host: archive.info_directory(wheel) for host, wheel in zip(roots, wheels, strict=True)}
        archs = _same_in(list(roots.values()))
        made = {host: _fill(root, infos[host], out / "build", host, archs) for host, root in sorted(roots.items())}
        version = next(iter(infos.values())).removesuffix(".dist-info").split("-")[1]
        (out / "README.md").write_text(_card(made, archs, version), "utf-8")
    return [folder for folders in made.values() for folder in folders]


def variant_name(cuda: str, host: str) -> str:
    """Return the name that `kernels` gives a folder for a host and the CUDA versions from this one to the next major
    one."""
    return f"tvm-ffi{TVM_FFI.replace('.', '')}-cu{cuda.replace('.', '')}-{host}-linux"


def _host_of(wheel: Path) -> str:
    """Return the host that a wheel's libraries are for. Raises RuntimeError unless it is whole and has any."""
    if found := verify_release.problems(wheel):
        raise RuntimeError(f"{wheel.name} is refused:\n" + "\n".join(f"  - {problem}" for problem in found))
    host = HOSTS.get(wheel.stem.split("-", 2)[2])
    if host is None:
        raise RuntimeError(f"{wheel.name} has no libraries: give binary wheels")
    return host


def _same_in(roots: Sequence[Path]) -> list[Arch]:
    """Return the architectures of unpacked wheels. Raises RuntimeError unless all have the same, and the same Python
    files."""
    texts = [[verify_release.texts(root / package) for package in ("tsmla", "tsmla_kernels")] for root in roots]
    held = [{record.manifest.arch for record in read_directory(root / LIBRARIES).libraries} for root in roots]
    if any(other != texts[0] for other in texts) or any(other != held[0] for other in held):
        raise RuntimeError("the wheels are of different sources or architectures")
    return [arch for arch in Arch if arch in held[0]]


def _fill(root: Path, info: str, out: Path, host: str, archs: list[Arch]) -> list[Path]:
    """Make the folders of one host, from its wheel unpacked in `root`."""
    first, *others = (out / variant_name(cuda, host) for cuda in CUDA_VERSIONS)
    shutil.copytree(root / "tsmla", first, ignore=lambda folder, names: _ignored(root / "tsmla", Path(folder), names))
    for part in METADATA:
        copy = shutil.copytree if (root / info / part).is_dir() else shutil.copyfile
        (first / info).mkdir(exist_ok=True)
        copy(root / info / part, first / info / part)
    (first / "metadata.json").write_text(json.dumps(_metadata(first, archs), indent=2) + "\n", "utf-8")
    for other in others:
        shutil.copytree(first, other, copy_function=os.link)
    return [first, *others]


def _ignored(package: Path, folder: Path, names: list[str]) -> list[str]:
    """Return the names in a folder of the package that are left out."""
    inside = {name: (folder / name).relative_to(package) for name in names}
    return [name for name, path in inside.items() if str(path) in LEFT_OUT]


def _metadata(folder: Path, archs: list[Arch]) -> dict[str, Any]:
    """Return metadata.json. Its id, the module's name in a process, is a hash of what the folder holds."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return {
        "name": "tsmla",
        "id": f"_tsmla_cuda_{digest.hexdigest()[:12]}",
        "version": KERNEL_VERSION,
        "license": "Apache-2.0",
        "python-depends": REQUIRED,
        "backend": {"type": "cuda", "archs": ["{}.{}a".format(*arch.capability) for arch in archs]},
    }


def _card(made: dict[str, list[Path]], archs: list[Arch], version: str) -> str:
    rows = [
        f"| `build/{folder.name}` | {host} | {cuda} |"
        for host, folders in made.items()
        for folder, cuda in zip(folders, CUDA_VERSIONS, strict=True)
    ]
    gpus = ", ".join(f"{arch} ({arch.gpus})" for arch in archs)
    values = {"gpus": gpus, "version": version, "kernel_version": KERNEL_VERSION, "folders": "\n".join(rows)}
    return CARD.read_text("utf-8").format(**values)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="wheels/build_hub.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, nargs="+", help="binary wheels, one for each host")
    parser.add_argument("--out", type=Path, required=True, help="folder to fill")
    asked = parser.parse_args()
    try:
        for folder in build(asked.wheel, asked.out):
            print(folder)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
