"""A folder to install from on a host without a network: `python wheels/offline.py WHEEL --out DIR`

Downloads the wheel's requirements, and theirs, for one Python and platform; writes DIR/requirements.txt with the
SHA-256 of each file; and tries it: a fresh environment, no network, `tsmla verify`. On the host:

    pip install --no-index --find-links DIR --require-hashes -r DIR/requirements.txt

torch of the package index comes with gigabytes of CUDA libraries: --leave-out torch where the host has it already.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import archive

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}", platform.machine()
REQUIREMENTS = "requirements.txt"


def fill(wheel: Path, out: Path, leave_out: Sequence[str], constraint: Path | None, python: str) -> None:
    """Put the wheel and everything that it needs into `out`, and their hashes beside them. Raises RuntimeError.

    leave_out: distributions that the host has. constraint: pip's, for versions. python: the host's, such as 3.12.
    """
    ranges = archive.requirements(wheel)
    if unknown := sorted(set(leave_out) - ranges.keys()):
        raise RuntimeError(f"{', '.join(unknown)} cannot be left out: the wheel requires {', '.join(sorted(ranges))}")
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise RuntimeError(f"{out} is not empty: what lies there would be listed, too")
    shutil.copy(wheel, out)
    wanted = [f"{name}{text}" for name, text in ranges.items() if name not in leave_out]
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--dest", str(out), *wanted]
    if constraint:
        command += ["--constraint", str(constraint.absolute())]
    if (python, machine := host_of(wheel)) != HERE:
        command += ["--python-version", python, "--implementation", "cp"]
        for minor in range(28, 4, -1):
            command += ["--platform", f"manylinux_2_{minor}_{machine}"]
        command += ["--platform", f"manylinux2014_{machine}", "--platform", f"linux_{machine}"]
    if wanted:
        _run(command)
    lines = []
    for file in sorted(out.glob("*.whl")):
        name, version, _ = file.name.split("-", 2)
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n")
    (out / REQUIREMENTS).write_text("".join(lines))


def host_of(wheel: Path) -> str:
    """Return the host CPU that a wheel is for; this one's when it is for any."""
    platforms = wheel.stem.split("-")[-1]
    return HERE[1] if platforms == "any" else re.sub(r"^manylinux_\d+_\d+_", "", platforms)


def attempt(folder: Path, whole: bool) -> str:
    """Install from a folder for this Python and platform in a fresh environment; return how the network was kept away.

    whole: whether nothing was left out, so that pip has to find everything that it resolves. Raises RuntimeError.
    """
    apart = ["unshare", "--user", "--map-root-user", "--net"]
    possible = shutil.which(apart[0]) and not subprocess.run([*apart, "true"], capture_output=True).returncode
    prefix = apart if possible else []
    with tempfile.TemporaryDirectory() as scratch:
        python = str(Path(scratch, "venv", "bin", "python"))
        _run([sys.executable, "-m", "venv", str(Path(scratch, "venv"))])
        install = ["install", "--quiet", "--no-index", "--require-hashes", "--find-links", str(folder)]
        install += ["-r", str(folder / REQUIREMENTS), *([] if whole else ["--no-deps"])]
        _run([*prefix, python, "-m", "pip", *install])
        if whole:
            _run([*prefix, python, "-m", "pip", "check"])
        _run([*prefix, python, "-m", "tsmla", "verify"])
    return "without a network" if possible else "with --no-index; network namespaces are not permitted here"


def _run(command: Sequence[str]) -> None:
    """Run a command outside of this checkout and environment. Raises RuntimeError with the end of what was printed."""
    ours = ("PYTHON", "VIRTUAL", "TSMLA")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(command, cwd=tempfile.gettempdir(), env=kept, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="wheels/offline.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=archive.wheel_file)
    parser.add_argument("--out", type=Path, required=True, help="folder to fill; new or empty")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="NAME", help="what the host has already")
    parser.add_argument("--constraint", type=Path, help="versions to take, as pip's")
    parser.add_argument("--python", default=HERE[0], help="the host's; default %(default)s")
    asked = parser.parse_args()
    asked.out = asked.out.absolute()
    try:
        fill(asked.wheel, asked.out, asked.leave_out, asked.constraint, asked.python)
        files = list(asked.out.glob("*.whl"))
        print(f"{asked.out}: {len(files)} wheels, {sum(f.stat().st_size for f in files) / 1e6:,.0f} MB")
        if (asked.python, host_of(asked.wheel)) == HERE:
            print(f"installed and verified {attempt(asked.out, not asked.leave_out)}")
        else:
            print(f"not tried: this is Python {HERE[0]} on {HERE[1]}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
