"""Models the times of other packages' kernels, and of tsmla's beside them, with the emulator's timing model; no GPU.

    python -m benchmarks predict-peers [PART ...] [--only TEXT] [--machine-code] [--commit HASH]

Parts:

- hopper: what `bench_clocks --peer` measures.
- published: calls whose time on Blackwell somebody has published.
- prefill-bf16, prefill-e4m3, decode-bf16, decode-e4m3: kernels of tsmla and tokenspeed-mla on the same machine, for
  bf16 prefill of flash-attn-4, too. The range of their ratio goes over the band: each number that is uncertain takes
  its extreme for both.
- prefill-256-bf16, prefill-256-e4m3: the same beside flash-attn-4's kernels for heads of 256.

--machine-code: costs of all kernels from their machine code; otherwise all from PTX, never a mix. The packages must be
installed; `python -m tsmla_emulator.prove.controls` says how.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tsmla.identity.arch import Arch
from tsmla_emulator.run.machine import EmulationError
from tsmla_emulator.time import peers
from tsmla_emulator.time.band import changes, outcomes
from tsmla_emulator.time.machines import MACHINES, Machine
from tsmla_emulator.time.problem import Shape, traced

from . import published
from .clock_cases import PEER_CASES
from .runner import command, one_of

FLASH_ATTN_4, TOKENSPEED = "flash-attn-4_prefill_{}_bf16_d{}_{}", "tokenspeed-mla_{}_{}_{}_d{}"
WIDE_FLASH_ATTN_4 = "flash-attn-4_{}_{}_{}_d{}"
USE_CASES = ((1, 8192, 8192), (1, 8192, 32768), (1, 8192, 65536), (4, 512, 81920), (4, 1024, 81920))
"""UC1 to UC5 of tokenspeed-mla: sequences, queries, keys; 128 heads, e4m3, causal."""
OSS_US = (1881, 10935, 23084, 7759, 15290)
DECODES = (
    (4, 4, 81920, 16),
    (128, 1, 8192, 128),
    (16, 4, 81920, 16),
    (1, 1, 8192, 128),
    (32, 4, 8192, 128),
    (128, 1, 8192, 16),
    (4, 4, 81920, 32),
)
"""Requests, query tokens, keys and heads of decodes; the first two are modelled on B300, too."""
MACHINE_CODE = False
"""Whether the costs of all kernels are those of their machine code."""
OF_MACHINE = {gpu: str(arch) for arch in (Arch.SM100A, Arch.SM103A) for gpu in arch.facts.gpus}


@dataclasses.dataclass(frozen=True)
class Published:
    """A published time, as `us` or `tflops`, with who says so of which kernel."""

    symbol: str
    shape: tuple[int, int, int, int]
    machine: str
    source: str
    us: float | None = None
    tflops: float | None = None


def _published() -> list[Published]:
    found = []
    blog = "flash-attn-4's authors, B200 bf16 head dim 128; version and heads not the package's: "
    for sequences, length, full, causal in ((16, 2048, 1379, 1033), (4, 8192, 1507, 1401), (1, 32768, 1564, 1545)):
        for mask, said in (("full", full), ("causal", causal)):
            symbol = FLASH_ATTN_4.format("sm_100a", "128x128", mask)
            found.append(Published(symbol, (sequences, length, length, 16), "B200", blog + mask, tflops=said))
    for (sequences, queries, keys), plotted in zip(USE_CASES, OSS_US, strict=True):
        symbol = TOKENSPEED.format("prefill", "sm_100a", "e4m3", "192x128_causal")
        found.append(Published(symbol, (sequences, queries, keys, 128), "B200", "plot, open kernel", us=plotted))
    decode = TOKENSPEED.format("decode", "sm_100a", "e4m3", "512x64")
    for requests, queries, keys, heads, us in (
        (4, 4, 81920, 16, 47.8),
        (8, 4, 81920, 16, 76.6),
        (16, 4, 81920, 16, 146.3),
        (4, 4, 81920, 32, 49.5),
        (8, 4, 81920, 32, 80.4),
        (16, 4, 81920, 32, 148.1),
    ):
        found.append(Published(decode, (requests, queries, keys, heads), "B200", "plot", us=us))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = one_of(tuple(PARTS))
    parser.add_argument("parts", nargs="*", type=parts, metavar="PART", help=f"{', '.join(PARTS)}; default all")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain this")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "modelled")
    parser.add_argument("--machine-code", action="store_true", help="costs from machine code, of ours and theirs")


def run(options: argparse.Namespace) -> None:
    global MACHINE_CODE
    MACHINE_CODE = options.machine_code
    for part in options.parts or PARTS:
        cases: dict[str, Any] = {}
        for name, case in PARTS[part]().items():
            if options.only in name:
                try:
                    cases[name] = case()
                except (EmulationError, ValueError) as error:  # the others are worth having
                    cases[name] = {"of": [], "refused": str(error)}
                print(name, {key: value for key, value in cases[name].items() if "details" not in key}, flush=True)
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        names = sorted({name.split("_")[0] for case in cases.values() for name in case["of"]} - {"tsmla"})
        record = {
            "modelled": True,
            "date": now,
            "command": command(),
            "commit": options.commit,
            "machine_code": MACHINE_CODE,
            "packages": {name: importlib.metadata.version(name) for name in names},
            "cases": cases,
            "variants": {},
        }
        path = options.results / f"peers-{part}-modelled-{now[:19].replace(':', '').replace('-', '')}.json"
        path.write_text(published.text_of(record))
        print(path)


Cases = dict[str, Callable[[], dict[str, Any]]]


def _hopper() -> Cases:
    return {case.name: functools.partial(_said, case.symbol, case.shape, MACHINES["H100"]) for case in PEER_CASES}


def _with_published() -> Cases:
    return {f"{one.symbol} {Shape(*one.shape)} {one.machine}": functools.partial(_held, one) for one in _published()}


def _held(one: Published) -> dict[str, Any]:
    said = _said(one.symbol, one.shape, MACHINES[one.machine])
    published = one.us or one.tflops
    assert published
    longer = said["us"] / published if one.us else published / said["tflops"]
    unit = "us" if one.us else "tflops"
    return said | {"published": published, "unit": unit, "source": one.source, "time_over_published": round(longer, 3)}


def _beside(
    family: str,
    machine: str,
    dtype: str,
    shape: tuple[int, int, int, int],
    peer: str = TOKENSPEED,
    dims: str = "192x128",
    mask: str = "_causal",
) -> dict[str, Any]:
    arch = OF_MACHINE[machine]
    if family == "decode":
        dims, mask = "512x64", ""
    ours = f"tsmla_{family}_{arch}_{dtype}_to_bf16_d{dims}{mask}_nolse"
    theirs = peer.format(family, arch, dtype, dims) + mask
    if peer == FLASH_ATTN_4:
        theirs = peer.format(arch, dims, mask[1:])
    model = MACHINES[machine]
    first, other = _found(ours, shape, model.processors), _found(theirs, shape, model.processors)
    mine, peers_ = first.model(model), other.model(model)
    both: dict[tuple[str, float], list[float]] = {}
    tiles: dict[str, list[float]] = {}
    for key, changed in changes(model).items():
        ends = first.model(changed), other.model(changed)
        both[key] = [(end.clocks + end.launch) / changed.clock.value for end in ends]
        tiles[f"{key[0]} {key[1]:g}"] = [round(end.per_tile, 1) for end in ends]
    ratios = {key: us / peer_us for key, (us, peer_us) in both.items()}
    least, most = (pick(ratios, key=lambda key: ratios[key]) for pick in (min, max))
    return {
        "of": [ours, theirs],
        "us": round(mine.microseconds, 1),
        "peer_us": round(peers_.microseconds, 1),
        "per_tile": round(mine.per_tile, 1),
        "peer_per_tile": round(peers_.per_tile, 1),
        "ratio": round(mine.microseconds / peers_.microseconds, 3),
        "least": [round(ratios[least], 3), f"{least[0]} {least[1]:g}"],
        "most": [round(ratios[most], 3), f"{most[0]} {most[1]:g}"],
        "us_most": round(max(us for us, _ in both.values()), 1),
        "band_per_tile": tiles,
        "details": {k: round(v, 1) for k, v in mine.details.items()},
        "peer_details": {k: round(v, 1) for k, v in peers_.details.items()},
    }


def _prefill(dtype: str) -> Cases:
    return {
        f"{machine} {Shape(*shape, 128)}{name}": functools.partial(
            _beside, "prefill", machine, dtype, (*shape, 128), peer
        )
        for name, peer in (("", TOKENSPEED), (" flash-attn-4", FLASH_ATTN_4))
        for machine in ("B200", "B300")
        for shape in USE_CASES
        if dtype == "bf16" or not name
    }


def _wide_prefill(dtype: str) -> Cases:
    return {
        f"{machine} {Shape(*shape)}{mask}": functools.partial(
            _beside, "prefill", machine, dtype, shape, WIDE_FLASH_ATTN_4, "256x256", mask
        )
        for machine in ("B200", "B300")
        for mask in ("_full", "_causal")
        for shape in ((1, 8192, 8192, 64), (1, 8192, 32768, 64))
    }


def _decode(dtype: str) -> Cases:
    return {
        f"{machine} {Shape(*shape)}": functools.partial(_beside, "decode", machine, dtype, shape)
        for machine, shapes in (("B200", DECODES), ("B300", DECODES[:2]))
        for shape in shapes
    }


def _said(symbol: str, shape: tuple[int, int, int, int], machine: Machine) -> dict[str, Any]:
    found = _found(symbol, shape, machine.processors)
    modelled = found.model(machine)
    clocks = modelled.clocks + modelled.launch
    every = [clocks, *outcomes(found, machine).values()]
    said: dict[str, Any] = {
        "of": [symbol],
        "clocks": round(clocks),
        "least": round(min(every)),
        "most": round(max(every)),
        "us": round(modelled.microseconds, 1),
        "per_tile": round(modelled.per_tile, 1),
        "details": {name: round(value, 1) for name, value in modelled.details.items()},
    }
    if "prefill" in symbol:
        sequences, queries, keys, heads = shape
        pairs = queries * keys - (queries * (queries - 1) // 2 if symbol.endswith("_causal") else 0)
        flop = 2 * sum(peers.peers()[symbol].dims) * heads * sequences * pairs
        said["tflops"] = round(flop / modelled.microseconds / 1e6, 1)
    return said


def _found(symbol: str, shape: Sequence[int], processors: int) -> Any:
    """Return what the model has of a call; a prefill is emulated once for all shapes and machines."""
    if "prefill" in symbol:
        return _prefill_of(symbol, processors).at(Shape(*shape))
    return _traced(symbol, Shape(*shape), _machine_of(processors))


@functools.cache
def _prefill_of(symbol: str, processors: int) -> Any:
    return _traced(symbol, Shape(1, 1024, 1024, 1), _machine_of(processors))


def _traced(symbol: str, shape: Shape, machine: Machine) -> Any:
    return traced(symbol, shape, machine, machine_code=MACHINE_CODE)


def _machine_of(processors: int) -> Machine:
    return next(machine for machine in MACHINES.values() if machine.processors == processors)


PARTS: dict[str, Callable[[], Cases]] = {
    "hopper": _hopper,
    "published": _with_published,
    **{f"prefill-{dtype}": functools.partial(_prefill, dtype) for dtype in ("e4m3", "bf16")},
    **{f"prefill-256-{dtype}": functools.partial(_wide_prefill, dtype) for dtype in ("e4m3", "bf16")},
    **{f"decode-{dtype}": functools.partial(_decode, dtype) for dtype in ("e4m3", "bf16")},
}
