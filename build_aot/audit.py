"""Audits libraries: fails the build unless each is exactly what was asked for.

- Exported symbols, the library's own manifest and the matrix agree.
- GPU code is for the right architecture, uses what the manifest says, moves registers between roles where that is
  meant, and neither spills nor touches local memory.
- Host code runs on every processor of the kind that the library is for.
- Nothing but the two runtime libraries is needed.

A library for this machine is also loaded and asked. `python -m build_aot.audit DIR` audits a finished directory.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tsmla.errors import LibraryError, ManifestError
from tsmla.identity.arch import Arch
from tsmla.identity.variant import DecodeVariant, PrefillVariant, Variant
from tsmla.loading import elf
from tsmla.loading.image import HOSTS, read_image
from tsmla.loading.loader import signature_of
from tsmla.loading.manifest import LibraryManifest, read_directory, verify_file
from tsmla_kernels.limits import registers_at_launch

from . import arm64, cubin, descriptors, link, matrix, x86
from .errors import AuditError, BuildError
from .load import load

EXPORT_PREFIX = "__tvm_ffi_"
_PAGE_BYTES = {"x86_64": 1 << 12, "aarch64": 1 << 16}
"""Host -> the largest memory page that its kernel may have; Grace's often has 64 KiB."""
_BEYOND_BASELINE = {"x86_64": x86.beyond_baseline, "aarch64": arm64.beyond_baseline}


def loading_process() -> concurrent.futures.Executor:
    """Make a process to load libraries in, started when first used: a path can be loaded only once per process."""
    return concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def audit_library(
    library: Path,
    expected: Sequence[Variant],
    loading: concurrent.futures.Executor,
    host: str = platform.machine(),
) -> LibraryManifest:
    """Check everything about a library, and return its own manifest. Raises AuditError with every problem.

    loading: a `loading_process` that has not loaded this path before.
    host: what the library is for. What its functions answer is asked only if that is this machine; libraries for other
        hosts are made of the same IR as this one's.
    """
    if problems := list(_host_problems(library, expected, host)):
        raise AuditError(str(library), problems)
    signatures = None
    try:
        manifest = read_image(library).manifest
        if host == platform.machine():
            signatures = loading.submit(_ask, library, [variant.symbol() for variant in expected]).result()
    except (LibraryError, ManifestError) as error:
        raise AuditError(str(library), [str(error)]) from error
    except (concurrent.futures.BrokenExecutor, RuntimeError, OSError, AttributeError) as error:
        raise AuditError(str(library), [f"it cannot be loaded and asked: {error}"]) from error
    if problems := [*_manifest_problems(manifest, expected, host, signatures), *gpu_problems(library, manifest)]:
        raise AuditError(str(library), problems)
    return manifest


def audit_directory(directory: Path, expected: Sequence[Variant], host: str = platform.machine()) -> None:
    """Audit every library of a finished build for a host, and check that together they are exactly `expected`. Raises
    AuditError."""
    try:
        records = {record.file: record for record in read_directory(directory).libraries}
    except ManifestError as error:
        raise AuditError(str(directory), [str(error)]) from error
    groups = matrix.libraries(expected, host)
    problems = [f"{name} should be there and is not in the manifest" for name in sorted(groups.keys() - records.keys())]
    problems += [f"{name} is in the manifest but was not asked for" for name in sorted(records.keys() - groups.keys())]
    present = {path.name for path in directory.glob("*.so")}
    problems += [f"{name} lies there but is not in the manifest" for name in sorted(present - records.keys())]
    with loading_process() as loading:
        for name in sorted(records.keys() & groups.keys()):
            try:
                verify_file(directory, records[name])
                if audit_library(directory / name, groups[name], loading, host) != records[name].manifest:
                    problems.append(f"{name} describes itself differently from the directory's manifest")
            except ManifestError as error:
                problems.append(str(error))
            except AuditError as error:
                problems += [f"{name}: {problem}" for problem in error.problems]
    if problems:
        raise AuditError(str(directory), problems)


def _host_problems(library: Path, expected: Sequence[Variant], host: str) -> Iterator[str]:
    """Yield what is wrong and can be seen without loading the library."""
    try:
        image = elf.Elf(library.read_bytes())
    except (elf.ElfError, OSError) as error:
        yield f"it is not a library: {error}"
        return
    if (machine := HOSTS.get(image.machine, f"ELF machine {image.machine}")) != host:
        yield f"its code is for {machine}, not for {host}"
        return
    symbols = image.symbols(elf.SHT_DYNSYM)
    exported = {symbol.name for symbol in symbols if symbol.section != elf.SHN_UNDEF}
    wanted = {f"{EXPORT_PREFIX}{variant}" for variant in expected}
    yield from (f"it does not export {name}, which the matrix lists" for name in sorted(wanted - exported))
    yield from (f"it exports {name}, which the matrix does not list" for name in sorted(exported - wanted))
    if host != platform.machine():  # otherwise loading it tells
        unknown = {symbol.name for symbol in symbols} - exported - link.provided(host)
        yield from (f"it needs {name}, which neither runtime library has" for name in sorted(unknown))
    needed = image.dynamic_strings(elf.DT_NEEDED)
    if sorted(needed) != sorted(link.NEEDED):
        yield f"it needs {', '.join(needed) or 'nothing'}; it must need exactly {', '.join(link.NEEDED)}"
    for alignment in image.alignments:
        if alignment % _PAGE_BYTES[host]:
            yield f"a part of it is aligned to {alignment} bytes; pages may have {_PAGE_BYTES[host]}"
    if image.dynamic_strings(elf.DT_SONAME) != [library.name]:
        yield f"its SONAME is {image.dynamic_strings(elf.DT_SONAME)}, not its file name"
    paths = ":".join(image.dynamic_strings(elf.DT_RPATH) + image.dynamic_strings(elf.DT_RUNPATH)).split(":")
    yield from (f"it searches {path}, which is not relative to itself" for path in paths if path[:7] != "$ORIGIN")
    for section in image.sections:
        if section.flags & elf.SHF_EXECINSTR:
            yield from (f"host code in {section.name}: {found}" for found in _BEYOND_BASELINE[host](section.data))


def _manifest_problems(
    manifest: LibraryManifest, expected: Sequence[Variant], host: str, signatures: dict[str, str] | None
) -> Iterator[str]:
    if manifest.host != host:
        yield f"its manifest says that it is for {manifest.host}, not for {host}"
    listed, wanted = [kernel.variant for kernel in manifest.kernels], list(expected)
    yield from (f"its manifest lacks {variant}" for variant in wanted if variant not in listed)
    yield from (
        f"its manifest lists {variant}, which the matrix does not" for variant in listed if variant not in wanted
    )
    if signatures is None:
        return
    for kernel in manifest.kernels:
        if (said := signatures.get(kernel.variant.symbol())) != kernel.signature:
            yield f"{kernel.variant} answers {said!r}, but the manifest says {kernel.signature!r}"


def gpu_problems(library: Path, manifest: LibraryManifest) -> Iterator[str]:
    """Yield what is wrong with the GPU code of a library. Objects are linked in manifest order: the n-th image is the
    n-th kernel's."""
    images = cubin.images(library)
    if len(images) != len(manifest.kernels):
        yield f"it holds {len(images)} GPU images for {len(manifest.kernels)} kernels"
        return
    for image, kernel in zip(images, manifest.kernels, strict=True):
        if (arch := cubin.arch(image)) != kernel.variant.arch:
            yield f"the GPU code of {kernel.variant} is for {arch}"
        try:
            used = cubin.resources(image)
        except BuildError as error:
            yield f"{kernel.variant}: {error}"
            continue
        if differing := [name for name in cubin.RESOURCES if kernel.resources.get(name) != used[name]]:
            said = ", ".join(f"{name} {used[name]} (manifest: {kernel.resources.get(name)})" for name in differing)
            yield f"{kernel.variant} uses {said}"
        for name in cubin.FORBIDDEN:
            if used[name]:
                yield f"{kernel.variant} has {name} = {used[name]}; it has to be 0"
        for name, meant in instructions_meant(kernel.variant).items():
            if bool(used[name]) != meant:
                yield f"{kernel.variant} has {name} = {used[name]}; it has to be {'above ' * meant}0"
        if 0 < used["wgmma"] <= used["wgmma_waits"]:
            yield f"{kernel.variant} waits for each of its {used['wgmma']} wgmma: ptxas has serialised them"
        for products, moved in descriptors.products(image):
            if 2 * moved > products:
                yield f"{kernel.variant} computes descriptors of {moved} of {products} wgmma in vector registers"
        for one in cubin.each_kernel(image):
            if one["setmaxnreg"] and one["registers"] != (all_have := registers_at_launch(one["threads"])):
                yield f"{kernel.variant} starts with {one['registers']} registers; its roles share {all_have} a thread"


def instructions_meant(variant: Variant) -> dict[str, bool]:
    """Return resource -> whether the variant's code is meant to hold such instructions; those left open are not listed.

    ptxas drops every setmaxnreg of a kernel when it does not know its registers at launch, and says so where nobody
    reads it (NVIDIA/cutlass issue 3406).
    """
    attention, hopper = isinstance(variant, PrefillVariant | DecodeVariant), variant.arch is Arch.SM90A
    converts = isinstance(variant, DecodeVariant) and variant.row.scales is not None and not variant.row.apart
    brings_keys = converts or isinstance(variant, DecodeVariant) and variant.gathers
    moves_registers = attention and (hopper or brings_keys or isinstance(variant, PrefillVariant))
    meant = {"wgmma": attention and hopper, "tcgen05_mma": attention and not hopper, "setmaxnreg": moves_registers}
    if isinstance(variant, PrefillVariant):
        meant["tcgen05_mma_2cta"] = not hopper and variant.d_v == 256  # tensor memory of a CTA holds one such output
    return meant


def _ask(library: Path, symbols: Sequence[str]) -> dict[str, str]:
    """Return each function's signature. Runs in a process of its own."""
    module = load(library)
    return {symbol: signature_of(module.get_function(symbol)) for symbol in symbols}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_aot.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory of libraries with its manifest.json")
    matrix.add_arguments(parser)
    asked = parser.parse_args()
    try:
        expected = matrix.chosen(asked)
        audit_directory(asked.directory, expected, asked.host or link.host())
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{asked.directory}: {len(expected)} kernels are what they have to be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
