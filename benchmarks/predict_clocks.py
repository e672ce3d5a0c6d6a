"""Predicts what `clocks` measures, with the emulator's timing model; no GPU. Commit the record before measuring.

    python -m benchmarks predict-clocks [--machine H100] [--variants DIRECTORY ...] [--after RECORD] [--commit HASH]

DIRECTORIES are those of `bench_clocks`, with the objects and PTX that `build_aot` leaves in them (--keep-ptx); a line
`tile_kv N` in DIRECTORY/changes.txt says how many keys a tile of the changed kernel has. --after: what the model says
of calls that RECORD, of `bench_clocks`, has measured, at the SM clock that each ran at; not a prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
from pathlib import Path
from typing import Any

from tsmla.identity.arch import Arch
from tsmla_emulator.run.host.compile import Compiled
from tsmla_emulator.run.host.link import link
from tsmla_emulator.time.band import band
from tsmla_emulator.time.machines import MACHINES, Value
from tsmla_emulator.time.problem import PrefillTraced, Shape, traced

from . import published
from .clock_cases import CASES, LATER_CASES, VARIANT_SHAPE, variant_of
from .runner import command, existing

BESIDE = ("beside_fma", "beside_alu", "beside_mufu")
"""Contention that the control in the measuring run may show to be none; `without_contention` is the prediction for
that."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", choices=MACHINES, default="H100")
    parser.add_argument("--variants", type=existing, nargs="*", default=[], metavar="DIRECTORY")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "modelled")
    parser.add_argument("--after", type=existing, metavar="RECORD")
    parser.add_argument("--no-band", action="store_true", help="no least and most: a tenth of the time")
    parser.add_argument("--no-cases", action="store_true", help="variants only")


def run(options: argparse.Namespace) -> None:
    measured = json.loads(options.after.read_text()) if options.after else None
    machine = MACHINES[options.machine]
    with_band = not measured and not options.no_band
    cases: dict[str, Any] = {}
    variants: dict[str, Any] = {}
    for case in () if options.no_cases else (*CASES, *LATER_CASES):
        if measured and case.name not in measured["cases"]:
            continue
        found = traced(case.symbol, Shape(*case.shape), machine, _built)
        cases[case.name] = _said(found, _at(machine, measured and measured["cases"][case.name]["ghz"]), with_band)
        print(case.name, cases[case.name], flush=True)
    for directory in options.variants:
        at = _at(machine, measured and measured["variants"][directory.name]["ghz"])
        variants[directory.name] = _said(_variant(directory), at, with_band)
        print(directory.name, variants[directory.name], flush=True)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    record = {
        "modelled": True,
        "after": options.after and options.after.name,
        "machine": {field.name: _value(getattr(machine, field.name)) for field in dataclasses.fields(machine)},
        "date": now,
        "command": command(),
        "commit": options.commit,
        "cases": cases,
        "variants": variants,
    }
    stamp = now[:19].replace(":", "").replace("-", "")
    path = options.results / f"clocks-{'after' if measured else 'modelled'}-{options.machine.lower()}-{stamp}.json"
    path.write_text(published.text_of(record))
    print(path)


def _at(machine: Any, ghz: float | None) -> Any:
    """Return the machine at a clock that was measured."""
    return machine if ghz is None else dataclasses.replace(machine, clock=Value(1000 * ghz, "measured in that run"))


def _said(found: Any, machine: Any, with_band: bool) -> dict[str, Any]:
    modelled = found.model(machine)
    least, most = band(found, machine) if with_band else (modelled.clocks + modelled.launch,) * 2
    alone = {name: dataclasses.replace(getattr(machine, name), value=1.0) for name in BESIDE}
    without = found.model(dataclasses.replace(machine, **alone))
    return {
        "clocks": round(modelled.clocks + modelled.launch),
        "without_contention": round(without.clocks + without.launch),
        "least": round(least),
        "most": round(most),
        "per_tile": round(modelled.per_tile, 1),
        "details": {k: round(v, 1) for k, v in modelled.details.items()},
    }


def _built(variant: Any) -> Compiled:
    """Return the kernel as the build of this checkout left it."""
    return _compiled(Path(__file__).parent.parent / "build" / "cmake" / "objs", variant.symbol())


def _compiled(directory: Path, symbol: str) -> Compiled:
    kept = directory / ".compiled"
    return Compiled(link(kept / f"{symbol}.o"), kept / f"{symbol}.ptx", symbol)


def _variant(directory: Path) -> PrefillTraced:
    changes = directory / "changes.txt"
    stated = re.search(r"tile_kv (\d+)", changes.read_text()) if changes.exists() else None
    tile_kv = int(stated[1]) if stated else None
    changed = variant_of(directory)
    compiled = lambda variant: _compiled(directory, variant.symbol())  # noqa: E731
    return PrefillTraced(changed, Shape(*VARIANT_SHAPE), Arch.SM90A.sms, compiled, tile_kv=tile_kv)


def _value(value: Any) -> Any:
    return value.value if hasattr(value, "source") else value
