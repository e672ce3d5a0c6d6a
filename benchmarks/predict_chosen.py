"""Models what `decode-chosen` measures, with the emulator's timing model; no GPU.

    python -m benchmarks predict-chosen [--machine B200] [--formats FORMAT ...] [--beside RECORD] [--peers]

--beside: a record of `decode-chosen`, whose isolated times are written beside the modelled ones.
--peers: kernels of chosen keys of flash-attn-4 and of cuDNN's frontend beside ours of bf16 on a Blackwell GPU, heads
filled up to those that a kernel has. The packages must be installed: `python -m tsmla_emulator.prove.controls` says
how.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from tsmla.identity.arch import Arch
from tsmla_emulator.time.machines import MACHINES, Machine
from tsmla_emulator.time.peers import peers
from tsmla_emulator.time.problem import CHOSEN_OF, Shape, traced

from . import published
from .bench_decode_chosen import SHAPES, TOP_K
from .runner import command, existing

DIMS = {"bf16": "bf16_to_bf16_d512x64", "fp8_ds_mla": "bf16_to_bf16_d512e4m3s128x64", "e4m3": "e4m3_to_bf16_d512x64",
        "bf16_512": "bf16_to_bf16_d512"}  # fmt: skip
PEERS = {"bf16": (512, 64), "bf16_512": (512, 0)}
"""Formats that others' kernels have, and their columns."""
MANY = ((8, 1, 64), (512, 1, 64), (512, 1, 128))
"""Shapes beside those of `decode-chosen`: what kernels of a prompt's tokens are made for."""
ARCHS = {gpu: str(arch) for arch in Arch for gpu in arch.facts.gpus}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", choices=MACHINES, default="B200")
    parser.add_argument("--formats", choices=DIMS, nargs="+", default=["bf16", "fp8_ds_mla", "e4m3"])
    parser.add_argument("--shapes", nargs="+", default=[], metavar="SxQxKxH", help="only these of decode-chosen's")
    parser.add_argument("--beside", type=existing, metavar="RECORD")
    parser.add_argument("--peers", action="store_true", help="others' kernels, too")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "modelled")


def run(options: argparse.Namespace) -> None:
    machine = MACHINES[options.machine]
    measured = _measured(options.beside) if options.beside else {}
    cases: dict[str, Any] = {}
    for form in options.formats:
        for requests, q_len, heads in (*SHAPES, *(MANY if options.peers else ())):
            shape = Shape(requests, q_len, TOP_K, heads)
            if options.shapes and str(shape) not in options.shapes:
                continue
            name = f"{form} {shape}"
            cases[name] = _said(f"tsmla_decode_{ARCHS[machine.name]}_{DIMS[form]}_gathers_lse", shape, machine)
            if options.peers and form in PEERS:
                theirs = {peer: _said(peer, shape, machine) for peer in _peers(PEERS[form], machine, heads)}
                best = min(one["us"] for one in theirs.values())
                cases[name] |= {"peers": theirs, "of_best_peer": round(cases[name]["us"] / best, 3)}
            if us := measured.get((form, requests, q_len, heads)):
                cases[name] |= {"measured_us": us, "error": round(cases[name]["us"] / us - 1, 3)}
            print(name, cases[name], flush=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = {
        "modelled": True,
        "machine": options.machine,
        "mhz": machine.clock.value,
        "date": now,
        "command": command(),
        "commit": options.commit,
        "beside": options.beside and options.beside.name,
        "slots": CHOSEN_OF,
        "cases": cases,
    }
    stamp = now[:19].replace(":", "").replace("-", "")
    path = options.results / f"chosen-decode-modelled-{options.machine.lower()}-{stamp}.json"
    path.write_text(published.text_of(record))
    print(path)


def _peers(dims: tuple[int, int], machine: Machine, heads: int) -> list[str]:
    """Return the names of others' kernels that have enough heads."""
    return [
        name
        for name, peer in peers().items()
        if peer.gathers and (peer.arch, peer.dims) == (ARCHS[machine.name], dims) and heads <= (peer.heads or 128)
    ]


def _measured(path: Path) -> dict[tuple[str, int, int, int], float]:
    """Return isolated times, in us, by format and shape."""
    results = [one for one in json.loads(path.read_text())["results"] if one["regime"] == "isolated"]
    return {
        (form, *one["shape"]): one["timings"][form]["median_us"]
        for one in results
        for form in DIMS
        if form in one["timings"]
    }


def _said(symbol: str, shape: Shape, machine: Machine) -> dict[str, Any]:
    found = traced(symbol, shape, machine)
    modelled = found.model(machine)
    coverage = modelled.shown.coverage
    return {
        "of": symbol,
        "us": round(modelled.microseconds, 1),
        "clocks": round(modelled.clocks + modelled.launch),
        "per_tile": round(modelled.per_tile),
        "from_hbm": round(found.new(machine), 3),
        "machine_code": round(coverage["code"] / sum(coverage.values()), 3),
        "busy": {unit: round(clocks / modelled.shown.clocks, 2) for unit, clocks in modelled.shown.busy.items()},
        "details": {name: round(value, 1) for name, value in modelled.details.items()},
    }
