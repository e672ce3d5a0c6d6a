"""The command `tsmla`: what is installed, whether it works here, and a small run. Every command works without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from ..errors import ArgumentError, LibraryError, TsmlaError
from ..identity.arch import Arch
from ..identity.variant import FAMILIES, Variant
from ..loading import gpu, image, loader, manifest, settings, toolchain
from . import kernel_table
from .variant_text import METAVAR, variant_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit status: 0 good, 1 not good, 2 wrong use; raises SystemExit(2) for words that
    are no command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # paths and settings may hold bytes that are not text
    try:
        try:
            options = _parser().parse_args(arguments)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)  # nothing here needs it
                return options.run(options)
        finally:
            if sys.stdout is not None:  # it is None when it was closed before the start
                sys.stdout.flush()
    except ArgumentError as error:
        return _complain(str(error), 2)
    except TsmlaError as error:
        return _complain(str(error), 1)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        _discard_output()
        return 0
    except OSError as error:
        _discard_output()
        return _complain(str(error) if error.filename else f"the output cannot be written: {error}", 1)


def _complain(text: str, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"tsmla: {text}", file=sys.stderr)
    return status


def _discard_output() -> None:
    """Send what is still to be written nowhere, so that the interpreter does not fail to write it when it ends."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tsmla", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name, run, text, *shared):
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        if "arch" in shared:
            added.add_argument("--arch", choices=[a.value for a in Arch], help="GPU architecture; default this GPU's")
        if "family" in shared:
            words = f"operators, of {', '.join(FAMILIES)}; default all"
            added.add_argument("--family", choices=list(FAMILIES), nargs="+", metavar="FAMILY", help=words)
        if "variant" in shared:
            words = "a kernel, in the place of --arch and --family, such as family=pack,arch=sm_90a,...; repeatable"
            added.add_argument("--variant", action="append", default=[], metavar=METAVAR, help=words)
        if "json" in shared:
            added.add_argument("--json", action="store_true", help="print JSON")
        return added

    command("show-config", _show_config, "print versions, places, GPU, conventions and settings")
    text = "exit 0 if every operator, or every --variant, runs from a precompiled library, else 1"
    probe = command("probe", _probe, text, "arch", "family", "json", "variant")
    probe.epilog = "A kernel in the compile cache is not precompiled: another machine would have to compile it."
    text = "print which kernels the installed libraries hold; a dash stands where an operator has no such choice"
    listed = command("list", _list, text, "arch", "family", "json")
    listed.add_argument("--resources", action="store_true", help="name each, with its registers, shared memory, ...")
    inspect = command("inspect", _inspect, "print what a library says about itself", "json")
    inspect.add_argument("path", type=Path, metavar="PATH")
    text = "check that libraries were built from the installed sources, their hashes, symbols and signatures; load them"
    verify = command("verify", _verify, text)
    verify.add_argument("path", type=Path, nargs="?", metavar="DIRECTORY", help="default: the installed libraries")
    verify.add_argument(
        "--emulated",
        nargs="*",
        metavar="SYMBOL",
        help="instead run these kernels (all when none is named) in the emulator, which must be installed",
    )
    text = "with --emulated: run the machine code of the installed libraries, which is what GPUs run, not PTX"
    verify.add_argument("--machine-code", action="store_true", help=text)
    text = "resolve kernels now, compiling into the cache if need be"
    command("warmup", _warmup, text + "; by default those of installed libraries", "arch", "family", "variant")
    text = "call every operator on small inputs and print each result's error against float64"
    shown = command("demo", _demo, text)
    shown.epilog = f"Where there is no GPU, it runs in the emulator, for {Arch.SM90A}."
    test = command("selftest", _selftest, "run every kernel of this GPU on edge cases", "family", "json")
    test.add_argument("--full", action="store_true", help="every edge, and 100 repetitions that must agree bit for bit")
    test.add_argument("--kernel", nargs="+", default=[], metavar="SYMBOL", help="only these")
    text = "in the emulator, which must be installed"
    for runs in (shown, test):
        runs.add_argument("--emulated", choices=[a.value for a in Arch], help=text)
    return parser


def _show_config(options: argparse.Namespace) -> int:
    try:
        runtime = str(loader.runtime_library())
    except TsmlaError as error:
        runtime = str(error)
    major = gpu.driver_cuda_major()
    facts = {
        "tsmla": _version("tsmla"),
        "torch": _version("torch"),
        **toolchain.versions(),
        "python": platform.python_version(),
        "host": platform.machine(),
        "gpu": gpu.current_arch()[1],
        "driver": f"CUDA {major}" if major else "none",
        "runtime library": runtime,
        "libraries": str(toolchain.shipped_libraries()),
        "cache": _cache(),
        "prefill LSE": "natural log, [tokens, heads]; a row without keys gives output 0 and LSE -inf",
        "decode LSE": "base 2, [batch, q_len, heads]; a row without keys gives output 0 and LSE -inf",
    }
    _table([(name, value) for name, value in facts.items()])
    print()
    now = settings.current()
    rows = [("variable", "accepted", "default", "now", "meaning")]
    for s in settings.SETTINGS:
        rows.append((s.name, s.accepted, s.default, now.get(s.name, "-"), s.meaning))
        if s.alias:
            rows.append((s.alias, "", "", now.get(s.alias, "-"), f"older name of {s.name}, for prefill"))
    _table(rows)
    return 0


def _cache() -> str:
    try:
        return str(settings.cache_dir())
    except TsmlaError as error:
        return str(error)


def _probe(options: argparse.Namespace) -> int:
    from ..loading.status import binary_status, variant_status

    if options.variant:
        statuses = [variant_status(variant) for variant in _named_variants("probe", options)]
        good = all(status.available for status in statuses)
        if options.json:
            print(json.dumps({"ok": good, "variants": [status.to_dict() for status in statuses]}, indent=2))
        else:
            print(*statuses, sep="\n")
        return 0 if good else 1
    status = binary_status(options.arch)
    asked = options.family or list(FAMILIES)
    good = all(status.families[name].available for name in asked)
    if options.json:
        print(json.dumps({"ok": good, "asked": asked, **status.to_dict()}, indent=2))
    else:
        print(status)
    return 0 if good else 1


def _list(options: argparse.Namespace) -> int:
    kernels = _installed(options)
    if options.json:
        print(json.dumps([kernel.to_dict() for kernel in kernels], indent=2))
        return 0
    if options.resources:
        _table([(kernel.variant.symbol(), _resources(kernel)) for kernel in kernels])
    else:
        _table(kernel_table.rows(kernel.variant for kernel in kernels))
    print(f"{len(kernels)} kernels")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    said = image.read_image(options.path).manifest
    if options.json:
        print(said.to_json(), end="")
        return 0
    made = ", ".join(f"{name} {number}" for name, number in sorted(said.toolchain.items()))
    _table(
        [
            ("family", said.family),
            ("architecture", f"{said.arch} ({said.arch.gpus})"),
            ("host", said.host),
            ("needs", f"nvidia-cutlass-dsl >= {said.min_runtime}"),
            ("made with", made),
            ("sources", said.source_digest),
        ]
    )
    for kernel in said.kernels:
        print(f"{kernel.variant.symbol()}: {_resources(kernel)}\n    {kernel.signature}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    if options.emulated is not None:
        if options.path is not None:
            raise ArgumentError(
                f"verify: --emulated compiles kernels anew and reads no library, so {options.path} cannot be verified "
                "with it; give DIRECTORY or --emulated, and symbols after --emulated"
            )
        from .emulated import verify_emulated

        libraries = toolchain.shipped_libraries() if options.machine_code else None
        return 0 if verify_emulated(options.emulated, libraries) else 1
    if options.machine_code:
        raise ArgumentError("verify: --machine-code says what --emulated runs; give both")
    from .verify import verify_directory

    directory = options.path or toolchain.shipped_libraries()
    results = verify_directory(directory)
    for result in results:
        print(f"{result.file}: {result.problem or f'{result.kernels} kernels ok'}")
    bad = sum(bool(result.problem) for result in results)
    print(f"{directory}: {len(results)} libraries, {bad} with a problem")
    return 1 if bad else 0


def _warmup(options: argparse.Namespace) -> int:
    from ..operators.prepare import warmup

    variants = _named_variants("warmup", options)
    if not variants:
        options.arch = options.arch or gpu.current_arch()[0]
        if options.arch is None:
            raise ArgumentError(f"warmup: {gpu.current_arch()[1]}; name --arch ({', '.join(Arch)}) or --variant")
        variants = [kernel.variant for kernel in _installed(options)]
        if not variants:
            directory = toolchain.shipped_libraries()
            held = manifest.read_directory(directory).names
            families = f"{' or '.join(options.family)} " if options.family else ""
            raise LibraryError(f"warmup: {directory} has no {families}library for {options.arch}; it holds: {held}")
    for variant, step in warmup(variants).items():
        print(f"{variant.symbol()}: {step}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from .demo import demo

    return demo(options.emulated)


def _selftest(options: argparse.Namespace) -> int:
    from .selftest.command import Asked, selftest

    return selftest(Asked(options.full, options.json, options.emulated, options.family or (), options.kernel))


def _installed(options: argparse.Namespace) -> list[manifest.Kernel]:
    """Return the kernels of the installed libraries that --arch and --family let through."""
    libraries = [record.manifest for record in manifest.read_directory(toolchain.shipped_libraries()).libraries]
    return [
        kernel
        for library in libraries
        for kernel in library.kernels
        if options.arch in (None, library.arch) and library.family in (options.family or FAMILIES)
    ]


def _named_variants(command: str, options: argparse.Namespace) -> list[Variant]:
    """Return the variants of --variant, or refuse them beside --arch or --family, which cannot narrow them."""
    if options.variant and (options.arch or options.family):
        raise ArgumentError(f"{command}: --variant names architecture and family itself; leave --arch and --family out")
    try:
        return [variant_of(text) for text in options.variant]
    except ArgumentError as error:
        raise ArgumentError(f"{command}: {error}") from None


def _resources(kernel: manifest.Kernel) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(kernel.resources.items()) if value)


def _version(distribution: str) -> str:
    return toolchain.installed_version(distribution) or "not installed"


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
