"""What runners have in common: options, a record with its birth certificate, and a table in print."""

from __future__ import annotations

import argparse
import datetime
import importlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import published

RESULTS = Path(__file__).parent / "results" / "current"


def add_arguments(parser: argparse.ArgumentParser, seconds: float | None = 2.0) -> None:
    """Add the options that every runner has. seconds: the default per case, None for a runner that counts instead."""
    parser.add_argument("--commit", help="git commit measured; default: what git says about this checkout")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the JSON record (%(default)s)")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="per case and regime (%(default)s)")


def other(text: str) -> tuple[str, Callable[..., Any]]:
    """Read --against NAME=MODULE:FUNCTION, for argparse."""
    name, _, location = text.partition("=")
    module, _, function = location.partition(":")
    if not (name and module and function):
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=MODULE:FUNCTION")
    try:
        return name, getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}; expected NAME=MODULE:FUNCTION") from None


def existing(text: str) -> Path:
    """Read the path of a file or directory that exists, for argparse."""
    if not (path := Path(text)).exists():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file or directory")
    return path


def one_of(accepted: Sequence[str]) -> Callable[[str], str]:
    """Return a reader of one of some words, for argparse: `choices` would refuse that all are left out."""

    def read(text: str) -> str:
        if text not in accepted:
            raise argparse.ArgumentTypeError(f"{text!r} is not known; accepted: {', '.join(accepted)}")
        return text

    return read


def require_gpu() -> None:
    """End the process with a sentence where there is no GPU to measure."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks measure on a CUDA GPU; torch sees none")


def command() -> str:
    """Return the command line of this process, as one may type it."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])


def certificate(commit: str | None) -> dict[str, Any]:
    """Return where and when a number was born: device, driver, limits, versions, command, date, commit."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, max_clock, power_limit = _nvidia_smi("driver_version", "clocks.max.sm", "power.limit")
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "max_sm_clock_mhz": max_clock,
        "power_limit_w": power_limit,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or _git_commit(),
    }


def write_record(directory: Path, name: str, record: dict[str, Any]) -> Path:
    """Write `record`, which has its certificate under "certificate", as <name>-<device>-<date>.json."""
    born = record["certificate"]
    device = born["device"].lower().replace(" ", "-")
    stamp = born["date"][:19].replace(":", "").replace("-", "")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{device}-{stamp}.json"
    path.write_text(published.text_of(record))
    return path


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return plain columns: numbers to the right, with three significant digits where they are small."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value)


def gpu_uuid() -> str:
    """Return the current device's UUID, as nvidia-smi takes it."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _nvidia_smi(*fields: str) -> list[str | None]:
    if not shutil.which("nvidia-smi"):
        return [None] * len(fields)
    query = ["nvidia-smi", f"--id={gpu_uuid()}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True)
    values = [value.strip() for value in answer.stdout.split(",")]
    return list(values) if answer.returncode == 0 and len(values) == len(fields) else [None] * len(fields)


def _git_commit() -> str:
    here = Path(__file__).parent
    git = ["git", "-C", str(here)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode:
        return "unknown (no git checkout; pass --commit)"
    changes = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True)
    return commit.stdout.strip() + (" with uncommitted changes" if changes.stdout.strip() else "")
