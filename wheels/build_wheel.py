"""Make the wheels, and print their paths: `python wheels/build_wheel.py [--kind binary|jit|all] [--host HOST...] [--out
DIR]`.

binary: every shipped kernel compiled, for Linux on each host named; an x86-64 machine makes both hosts' and compiles
each kernel once for them. jit: no library, kernels compile on their first call.

The same sources give the same bytes, wherever, whenever and by whomever they are built, but for register numbers that
ptxas chooses (`reproduce.py` tells): file times are fixed unless SOURCE_DATE_EPOCH says otherwise. A document inside
says what the wheel holds (`sbom.py`).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

import archive  # noqa: E402
import sbom  # noqa: E402
from tsmla.identity.arch import SHIPPED_ARCHS  # noqa: E402
from tsmla.loading.loader import WHEEL_TAGS  # noqa: E402

JIT_TAG = "py3-none-any"
ENVIRONMENT = {"binary": {"TSMLA_AOT": "1", "TSMLA_ARCHS": ";".join(SHIPPED_ARCHS)}, "jit": {"TSMLA_AOT": "0"}}
"""Environment of each kind of build: neither this machine's GPUs nor its variables choose what a wheel holds."""
PINNED = dict.fromkeys(("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), (ROOT / "constraints.txt").as_uri())
"""Variables that pin the tools which pip installs for an isolated build: the first for pip before 25.3, the second from
it on, which refuses it where nothing is isolated."""


def build_wheel(
    kind: str, out: Path, isolated: bool = True, settings: Sequence[str] = (), host: str = platform.machine()
) -> Path:
    """Build one wheel into `out` and return its path. Raises RuntimeError with the builder's output when it fails.

    isolated: install the pinned compiler into a fresh environment first, rather than use this one's. settings: more
    config settings for pip, NAME=VALUE; a wheel to publish takes none. host: CPU that a binary wheel is for.
    """
    if kind == "binary" and host not in WHEEL_TAGS:
        raise RuntimeError(f"no binary wheel is made for {host}, only for {' and '.join(WHEEL_TAGS)}")
    tag = WHEEL_TAGS[host] if kind == "binary" else JIT_TAG
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or archive.EARLIEST) // 2 * 2  # a zip counts in two seconds
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-cache-dir", str(ROOT)]
    for setting in (f"wheel.tags={tag}", f"cmake.define.TSMLA_HOST={host}", *settings):
        command += ["--config-settings", setting]
    command += [] if isolated else ["--no-build-isolation"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SKBUILD", "CMAKE_"))}
    environment = {**inherited, "SOURCE_DATE_EPOCH": str(epoch), **ENVIRONMENT[kind]} | (PINNED if isolated else {})
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        done = subprocess.run(
            [*command, "--wheel-dir", scratch],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if done.returncode:
            raise RuntimeError(f"the {kind} wheel was not built:\n{done.stdout}")
        (made,) = Path(scratch).glob("*.whl")
        unpacked, finished = Path(scratch, "unpacked"), Path(scratch, "finished", made.name)
        archive.unpack(made, unpacked)
        document = unpacked / sbom.path(archive.info_directory(made))
        document.parent.mkdir()
        document.write_bytes(sbom.document(made.name, unpacked, epoch))
        finished.parent.mkdir()
        archive.write(finished, unpacked, epoch)
        return finished.replace(out / made.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="wheels/build_wheel.py", description=__doc__)
    parser.add_argument("--kind", choices=[*ENVIRONMENT, "all"], default="all", help="default %(default)s")
    parser.add_argument(
        "--host",
        choices=list(WHEEL_TAGS),
        nargs="+",
        default=[platform.machine()],
        metavar="HOST",
        help="of binary wheels: x86_64, aarch64; default: this machine's",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default %(default)s")
    parser.add_argument("--no-isolation", action="store_true", help="use this environment's compiler and build tools")
    parser.add_argument("-C", dest="settings", metavar="NAME=VALUE", action="append", default=[], help="as pip's")
    asked = parser.parse_args()
    wanted = [("binary", host) for host in asked.host] if asked.kind in ("binary", "all") else []
    wanted += [("jit", platform.machine())] if asked.kind in ("jit", "all") else []
    for kind, host in wanted:
        try:
            print(build_wheel(kind, asked.out, not asked.no_isolation, asked.settings, host))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
