"""Hardware counters of decodes of chosen keys, tsmla's and the peers', side by side, as Nsight Compute reads them.

    python -m benchmarks counters [--shapes REQUESTSxQ_LENxHEADS ...] [--formats F ...] [--raw FILE]

Needs ncu and a right to read counters. Each candidate of `decode-chosen` runs once: its kernels one after the other,
each from a cold L2, so that nothing overlaps. The record has every kernel's counters.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from . import runner
from .bench_decode_chosen import SHAPES, SLOTS, Case

METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__cycles_active.avg",
    "dram__bytes_read.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_read_lookup_hit.sum",
    "smsp__inst_executed.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "sm__inst_executed_pipe_lsu.sum",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_no_instruction_per_issue_active.ratio",
    "launch__grid_size",
    "launch__registers_per_thread",
)
"""What is read, by ncu's names; few, because each pass over a kernel restores its memory."""
SHOWN = {
    "ns": "gpu__time_duration.sum",
    "clk of an SM": "sm__cycles_active.avg",
    "bytes from memory": "dram__bytes_read.sum",
    "sectors from L2": "lts__t_sectors_op_read.sum",
    "instructions": "smsp__inst_executed.sum",
    "% issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "% tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "CTAs": "launch__grid_size",
}
MARK = "spin_kernel"
"""The kernel that stands before each candidate's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser, seconds=None)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="RxQxH", help="(default: all)")
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_ds_mla"], help="formats of our rows")
    parser.add_argument("--raw", type=Path, help="keep all that ncu says, as CSV")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)


def _shape(text: str) -> tuple[int, int, int]:
    requests, q_len, heads = (int(number) for number in text.split("x"))
    return requests, q_len, heads


def run(options: argparse.Namespace) -> None:
    if options.launch:
        return _launch(options)
    if not shutil.which("ncu"):
        raise SystemExit("counters are read by Nsight Compute; there is no ncu on the PATH")
    with tempfile.TemporaryDirectory() as scratch:
        raw = options.raw or Path(scratch) / "raw.csv"
        command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(raw)]
        command += ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all"]
        command += ["--metrics", ",".join(known_metrics())]
        command += [sys.executable, "-m", "benchmarks", *sys.argv[1:], "--launch"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(
                f"ncu ended with {done.returncode}: {done.stdout}{raw.read_text() if raw.exists() else ''}"
            )
        labels = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
        results = read(raw.read_text().splitlines(), labels)
    record = {"certificate": runner.certificate(options.commit), "slots": SLOTS, "results": results}
    header = ("shape", "candidate", "kernel", *SHOWN)
    rows = (
        [one["shape"], one["candidate"], one["kernel"][:30], *(one.get(metric) for metric in SHOWN.values())]
        for one in results
    )
    print(runner.table(header, rows))
    print(runner.write_record(options.results, "counters-chosen-decode", record))


def known_metrics() -> list[str]:
    """Return those of METRICS that ncu has for Hopper; of others it would make an error. What is told of a launch is
    not among those that it lists."""
    said = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], stdout=subprocess.PIPE, text=True).stdout
    names = {line.split()[0] for line in said.splitlines() if line.strip()}
    return [one for one in METRICS if one.partition(".")[0] in names or one.startswith("launch__")]


def _launch(options: argparse.Namespace) -> None:
    """Launch each candidate once where the profiler looks, and print its label before."""
    for requests, q_len, heads in options.shapes:
        case = Case.make(requests * q_len, heads, SLOTS, options.formats)
        for name, launch in case.launches(options.formats).items():
            launch()
            torch.cuda.synchronize()
            print(f"{requests}x{q_len}x{heads}\t{name}", flush=True)
            torch.cuda.cudart().cudaProfilerStart()
            torch.cuda._sleep(1)
            launch()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
        del case
        torch.cuda.empty_cache()


def read(lines: Iterable[str], labels: list[list[str]]) -> list[dict[str, Any]]:
    """Return the counters of each kernel. lines: what ncu wrote; labels: shape and candidate, in the order of marks."""
    found: list[dict[str, Any]] = []
    rows, place = list(_rows(lines)), -1
    if (marks := sum(MARK in row["Kernel Name"] for row in rows)) != len(labels):
        raise SystemExit(f"{marks} candidates have counters, of the {len(labels)} that ran")
    for row in rows:
        if MARK in row["Kernel Name"]:
            place += 1
            continue
        counters = {metric: _number(text) for metric, text in row.items() if metric in METRICS}
        shape, candidate = labels[place]
        found.append({"shape": shape, "candidate": candidate, "kernel": row["Kernel Name"], **counters})
    return found


def _rows(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield ncu's rows by metric, without its own messages and the line of units."""
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    yield from (row for row in table if row["ID"])


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
