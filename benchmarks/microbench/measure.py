"""Compile the microbenchmarks, run them, and write what they measured as one record.

    python -m benchmarks microbench [TOPIC ...] [--commit HASH] [--results DIRECTORY]

Needs nvcc and a Hopper GPU. A topic that fails is named in the record and on the last line; the others are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from .. import protocol, runner

HERE = Path(__file__).parent
TOPICS = ("pipes", "sync", "wgmma", "shared", "tma", "gather", "gather-prompts", "launch", "dependents", "code")
"""Names of programs, some with an argument behind a hyphen."""
TARGET = "-gencode=arch=compute_90a,code=sm_90a"
SECONDS = 60
"""Seconds after which a topic is given up."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "topics", nargs="*", type=runner.one_of(TOPICS), metavar="TOPIC", help=f"{', '.join(TOPICS)}; default all"
    )
    runner.add_arguments(parser, seconds=None)


def run(options: argparse.Namespace) -> int:
    measured: dict[str, dict[str, object]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch, protocol.Monitor() as monitor:
        for topic in options.topics or TOPICS:
            results, error = _run(topic, Path(scratch))
            measured |= results
            if error:
                failed[topic] = error
        clocks = [clock for _, clock, _ in monitor.samples]
    record = {
        "certificate": runner.certificate(options.commit),
        "sm_clock_mhz": {"median": statistics.median(clocks), "least": min(clocks), "most": max(clocks)}
        if clocks
        else None,
        "results": measured,
        "failed": failed,
    }
    print(runner.write_record(options.results, "-".join(["microbench", *options.topics]), record))
    for topic, error in failed.items():
        print(f"{topic} failed: {error}", file=sys.stderr)
    return 1 if failed else 0


def _run(topic: str, scratch: Path) -> tuple[dict[str, dict[str, object]], str]:
    """Return results by name and, where it failed, what it said last."""
    name, *arguments = topic.split("-")
    program = scratch / name
    command = ["nvcc", "-O3", "-std=c++17", TARGET, "-o", str(program), str(HERE / f"{name}.cu")]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode:
        return {}, built.stderr.strip()[-2000:]
    lines = scratch / f"{topic}.txt"
    with lines.open("w") as out:  # a file, so that lines before a failure are kept
        try:
            call = [str(program), *arguments]
            done = subprocess.run(call, stdout=out, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
            error = done.stderr.strip()[-2000:] or f"exit status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"no end after {SECONDS} s"
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    return {row.pop("name"): row for row in rows}, error
