"""Do libraries of two hosts launch the same? Their host code runs, against the emulator's double of the CUDA runtime.

    python wheels/compare_launches.py prepare DIR --host HOST --tvm-ffi LIB   link the double with what was compiled
    python wheels/compare_launches.py record DIR                     call operators, on a host or under qemu-user
    python wheels/compare_launches.py compare DIR                    grids, clusters, shared memory, parameters

`prepare` takes the objects of `python -m build_aot [--host HOST] --keep-ptx` (--objects) and a directory with the
host's libtvm_ffi.so; `record` needs that host's torch, apache-tvm-ffi and NumPy. Emulated tensors have the same
addresses in every process, so parameters and tensor maps have to agree in every byte that host code sets
(`exported_ir`).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "python"), str(ROOT / "emulator")]

import exported_ir  # noqa: E402
from tsmla.identity.arch import SHIPPED_ARCHS  # noqa: E402
from tsmla.identity.variant import Variant  # noqa: E402

if TYPE_CHECKING:
    from tsmla_emulator.run.host.compile import Compiled

OBJECTS = ROOT / "build" / "cmake" / "objs"
Launches = list[dict[str, Any]]


def cases() -> dict[str, tuple[str, Callable[[], object]]]:
    """Return name of a call -> architecture, and the call, for an emulated GPU."""
    import torch
    import tsmla

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda")

    def prefill(dtype: torch.dtype) -> None:
        kv, lengths = make(300, 2, 320, dtype=dtype), make(4, dtype=torch.int32)
        query = make(300, 4, 192, dtype=dtype)
        tsmla.tsmla_prefill(query, kv[..., :192], kv[..., 192:], None, lengths, 150, 3, 192**-0.5, return_lse=True)

    def decode(requests: int, keys: int, heads: int, dtype: torch.dtype = torch.bfloat16) -> None:
        pages = -(-keys // 64)
        workspace = make(tsmla.decode_workspace_size(requests, 2, heads), dtype=torch.int8)
        tables, lengths = make(requests, pages, dtype=torch.int32), make(requests, dtype=torch.int32)
        query, cache = make(requests, 2, heads, 576, dtype=dtype), make(requests * pages, 64, 576, dtype=dtype)
        tsmla.tsmla_decode(query, cache, workspace, 512, 64, tables, lengths, keys, 192**-0.5, return_lse=True)

    def pack() -> None:
        tsmla.mla_kv_pack_quantize_fp8(make(70, 16, 128), make(70, 1, 64), make(70, 16, 128), k_scale_inv=2.0)

    def write() -> None:
        slots = make(33, dtype=torch.int64)
        tsmla.mla_write_cache(make(33, 512), make(33, 64), slots, make(9, 64, 576), format="bf16")

    def read() -> None:
        slots = make(33, dtype=torch.int64)
        tsmla.mla_read_cache(make(9, 64, 576), make(33, 512), make(33, 64), format="bf16", indices=slots)

    return {
        **{f"prefill {arch}": (arch, lambda: prefill(torch.bfloat16)) for arch in SHIPPED_ARCHS},
        "prefill sm_100a e4m3": ("sm_100a", lambda: prefill(torch.float8_e4m3fn)),
        **{f"decode {arch}, few rows, split": (arch, lambda: decode(2, 4096, 16)) for arch in SHIPPED_ARCHS},
        **{f"decode {arch}, many rows": (arch, lambda: decode(3, 1000, 128)) for arch in SHIPPED_ARCHS},
        "decode sm_90a e4m3": ("sm_90a", lambda: decode(2, 4096, 16, torch.float8_e4m3fn)),
        **{f"write_cache {arch}": (arch, write) for arch in SHIPPED_ARCHS},
        **{f"read_cache {arch}": (arch, read) for arch in SHIPPED_ARCHS},
        "pack sm_90a": ("sm_90a", pack),
    }


def record(compiled: Callable[[Variant], Compiled]) -> dict[str, Launches]:
    """Return what each case launches. compiled: gives the files of a variant, its library linked with the double."""
    from tsmla_emulator.run import emulate as run

    found: dict[str, Launches] = {}
    for name, (arch, call) in cases().items():
        launched: list[Any] = []

        def keep(self: Any, symbol: str, module: Any, launches: list[Any], *_: Any, into: list[Any] = launched) -> None:
            into += [(symbol, launch, module.entries[launch.entry]) for launch in launches]

        with mock.patch.object(run.Emulation, "run", keep), run.emulated(arch, compiled=compiled):
            call()
        found[name] = [
            {
                "symbol": symbol,
                "entry": launch.entry,
                "grid": list(launch.grid),
                "block": list(launch.block),
                "cluster": list(launch.cluster),
                "shared_bytes": launch.shared_bytes,
                "pdl": launch.pdl,
                "parameters": [launch.params[p.offset : p.offset + p.size].hex() for p in entry.params],
            }
            for symbol, launch, entry in launched
        ]
    return found


def differences(one: Launches, other: Launches, ir: Callable[[str], str]) -> list[str]:
    """Return how two recordings of a case differ, a sentence each. ir: gives the LLVM IR of a kernel by its symbol."""
    if len(one) != len(other) or not one:
        return [f"{len(one)} launches, and {len(other)}"]
    found = []
    for index, (left, right) in enumerate(zip(one, other, strict=True)):
        names = [key for key in left if key != "parameters" and left[key] != right[key]]
        found += [f"launch {index}: {name} is {left[name]}, and {right[name]}" for name in names]
        for number, (offsets, a, b) in enumerate(
            zip(set_bytes(ir(left["symbol"]), left), left["parameters"], right["parameters"], strict=True)
        ):
            ours, theirs = bytes.fromhex(a), bytes.fromhex(b)
            wrong = [offset for offset in offsets if ours[offset] != theirs[offset]]
            found += [f"launch {index}: bytes {wrong} of parameter {number} differ"] if wrong else []
    return found


def set_bytes(ir: str, launch: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the offsets that host code sets in each parameter of a launch. Raises ValueError when the IR has no such
    launch."""
    sizes = [len(text) // 2 for text in launch["parameters"]]
    launches = [kinds for kinds in exported_ir.parameters(ir) if [exported_ir.layout(k).size for k in kinds] == sizes]
    found = [exported_ir.set_bytes(kinds) for kinds in launches]
    if not found or any(other != found[0] for other in found):
        raise ValueError(f"{launch['symbol']}: {len(found)} launches in the IR have parameters of {sizes} bytes")
    return found[0]


def prepare(directory: Path, host: str, tvm_ffi: Path, objects: Path) -> None:
    """Put each variant that a case calls into `directory`: PTX, IR, and a library for the host in the host's folder."""
    from tsmla_emulator.run import emulate as run
    from tsmla_emulator.run.host.link import DOUBLE, FLAGS

    from build_aot.build import store_of
    from build_aot.link import ZIG_TARGETS

    wanted: list[Variant] = []
    for arch, call in cases().values():
        with contextlib.suppress(_Stop), run.emulated(arch, compiled=lambda variant: _stop(wanted, variant)):
            call()
    compiled, made = store_of(objects), store_of(objects, host)
    (directory / host).mkdir(parents=True, exist_ok=True)
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", ZIG_TARGETS[host], *FLAGS, str(DOUBLE)]
    for variant in dict.fromkeys(wanted):
        if made.find(variant) is None:
            raise RuntimeError(f"{objects} has no {variant} for {host}: python -m build_aot --keep-ptx --host {host}")
        shutil.copyfile(compiled.ptx(variant), directory / f"{variant}.ptx")
        shutil.copyfile(compiled.ir(variant), directory / f"{variant}.ll.gz")
        library = str(directory / host / f"{variant}.so")
        subprocess.run([*zig, str(made.object(variant)), f"-L{tvm_ffi}", "-ltvm_ffi", "-o", library], check=True)


class _Stop(Exception):
    """Raised to end a call as soon as its variant is known."""


def _stop(wanted: list[Variant], variant: Variant) -> Any:
    wanted.append(variant)
    raise _Stop


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="wheels/compare_launches.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["prepare", "record", "compare"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--host", default=platform.machine(), help="of `prepare`; default: this machine's")
    parser.add_argument("--tvm-ffi", type=Path, help="of `prepare`: directory with the host's libtvm_ffi.so")
    parser.add_argument("--objects", type=Path, default=OBJECTS, help="of `prepare`; default %(default)s")
    asked = parser.parse_args()
    directory = asked.directory.absolute()
    if asked.step == "prepare":
        prepare(directory, asked.host, asked.tvm_ffi, asked.objects)
    elif asked.step == "record":
        from tsmla_emulator.run.host.compile import Compiled

        host = platform.machine()
        found = record(lambda v: Compiled(directory / host / f"{v}.so", directory / f"{v}.ptx", v.symbol()))
        (directory / f"{host}.json").write_text(json.dumps(found, indent=1) + "\n")
        print(f"{host}: {sum(map(len, found.values()))} launches of {len(found)} calls recorded")
    else:
        return _compare(directory)
    return 0


def _compare(directory: Path) -> int:
    one, other = (json.loads(path.read_text()) for path in sorted(directory.glob("*.json")))
    failed = one.keys() != other.keys()

    def ir(symbol: str) -> str:
        with gzip.open(directory / f"{symbol}.ll.gz", "rt") as stream:
            return stream.read()

    for name in sorted(one.keys() & other.keys()):
        found = differences(one[name], other[name], ir)
        compared = sum(len(part) for launch in one[name] for part in set_bytes(ir(launch["symbol"]), launch))
        print(f"{name}: launches {len(one[name])}, bytes compared {compared}: {'; '.join(found) or 'the same'}")
        failed |= bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
