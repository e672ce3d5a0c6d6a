"""Builds a directory of audited libraries, with its manifest, from a list of variants."""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tsmla.errors import ManifestError
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.variant import Variant
from tsmla.loading import toolchain
from tsmla.loading.manifest import (
    MANIFEST_FILE,
    SCHEMA,
    DirectoryManifest,
    Kernel,
    LibraryManifest,
    LibraryRecord,
    read_directory,
    verify_file,
    write_directory,
)

from . import link, matrix, sources
from .audit import audit_library, loading_process
from .cache import Cache
from .compile import ResultStore, assemble_one, build_key, compile_one, prepare_worker
from .errors import BuildError
from .progress import Estimate, Progress

STORE = ".compiled"
"""The directory inside the output that keeps results between runs."""
RESULT_ENDINGS = ("o", "json", "ptx", "ll.gz")


def build(
    variants: Sequence[Variant],
    out: Path,
    jobs: int,
    keep_ptx: bool = False,
    cache: Cache | None = None,
    report: Callable[[str], None] = print,
    host: str | None = None,
) -> DirectoryManifest:
    """Make `out` hold exactly the libraries of these variants.

    Raises BuildError; then `out` is as it was, or, when linking or the audit failed, has no manifest.

    jobs: worker processes.
    keep_ptx: leave each variant's PTX in `out`/ptx.
    cache: where results of other builds are taken from, and those of this one added.
    report: gets one line per step, as does `out`/.compiled/progress.txt.
    host: CPU that the libraries are for, as `platform.machine()` names it; by default this machine's. For another host,
        too, a variant is compiled once, for this machine, where it says what parameters it takes.
    """
    start = time.perf_counter()
    _check_compiler({variant.arch for variant in variants})
    here = link.host()
    host = host or here
    link.runtime_directories()
    store = store_of(out)
    store.directory.mkdir(parents=True, exist_ok=True)
    with _locked(store.directory), Progress(store.directory, report) as report:
        if cache:
            _fetch_missing(variants, store, cache, keep_ptx, report)
        with_ir = host != here
        compiled = _compile_missing(variants, store, here, jobs, keep_ptx, with_ir, cache, report)
        kernels = {variant: _must_find(store, variant) for variant in variants}
        objects = store if host == here else _assembled(kernels, store, store_of(out, host), host, jobs, report)
        made = _link_changed(kernels, objects, host, out, report)
        for each in {store.directory, objects.directory}:
            _remove_gone(each, variants)
        if keep_ptx:
            (out / "ptx").mkdir(exist_ok=True)
            for variant in variants:
                shutil.copyfile(store.ptx(variant), out / "ptx" / f"{variant}.ptx")
        report(
            f"{len(variants)} kernels in {len(made.libraries)} libraries in {out}: {compiled} compiled, "
            f"{len(variants) - compiled} reused, {time.perf_counter() - start:.1f} s"
        )
    return made


def _check_compiler(archs: set[Arch]) -> None:
    """Raise BuildError unless the compiler here is the one that libraries for all of these architectures are built
    with."""
    for arch in sorted(archs):
        if reason := toolchain.why_not_compiled(arch):
            raise BuildError(reason)
    if 13 in toolchain.installed_compilers() and (shipping := sorted(archs & {*SHIPPED_ARCHS})):
        raise BuildError(
            f"the compiler of CUDA 13 is installed, whose code needs a CUDA 13 driver: libraries for "
            f"{', '.join(shipping)} are built with that of CUDA 12. Build them in an environment without "
            f"{toolchain.CUDA_13_COMPILER}"
        )


def store_of(out: Path, host: str | None = None) -> ResultStore:
    """Return the store of what was compiled for the libraries in `out`: for this machine, or assembled from that for
    another host."""
    if host in (None, link.host()):
        return ResultStore(out / STORE, build_key(link.host()), sources.hashes())
    return ResultStore(out / STORE / host, build_key(host), sources.hashes())


def _lacks(store: ResultStore, variant: Variant, keep_ptx: bool, with_ir: bool = False) -> bool:
    if store.find(variant) is None or (keep_ptx and not store.ptx(variant).exists()):
        return True
    return with_ir and not store.ir(variant).exists()


def _fetch_missing(
    variants: Sequence[Variant], store: ResultStore, cache: Cache, keep_ptx: bool, report: Callable[[str], None]
) -> None:
    """Take what the store lacks from the cache, if it is there."""
    if cache.why_unused:
        report(f"the build cache is not used: {cache.why_unused}")
        return
    missing = [variant for variant in variants if _lacks(store, variant, keep_ptx)]
    if found := sum(cache.fetch(variant, store, keep_ptx) for variant in missing):
        report(f"{found} of {len(missing)} variants come from the build cache {cache.directory}")


def _compile_missing(
    variants: Sequence[Variant],
    store: ResultStore,
    host: str,
    jobs: int,
    keep_ptx: bool,
    with_ir: bool,
    cache: Cache | None,
    report: Callable[[str], None],
) -> int:
    """Compile what the store lacks, and for another host's objects also what lacks its IR; return how many variants
    that were."""
    missing = [variant for variant in variants if _lacks(store, variant, keep_ptx, with_ir)]
    if not missing:
        return 0
    if len(missing) < len(variants):
        report(f"{len(variants) - len(missing)} of {len(variants)} variants are unchanged")
    estimate = Estimate(missing, jobs)
    report(estimate.announcement)
    with tempfile.TemporaryDirectory(dir=store.directory) as dumps:
        pool = concurrent.futures.ProcessPoolExecutor(
            min(jobs, len(missing)),
            multiprocessing.get_context("spawn"),
            initializer=prepare_worker,
            initargs=(Path(dumps) if keep_ptx else None,),
        )
        with pool:
            running = {pool.submit(compile_one, variant, store, host): variant for variant in missing}
            for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                variant = running[future]
                try:
                    seconds = future.result()
                except Exception as error:
                    pool.shutdown(cancel_futures=True)
                    raise BuildError(f"{variant} did not compile: {type(error).__name__}: {error}") from error
                report(f"{done:3d} of {len(missing)}  {variant}  {seconds:.1f} s, {estimate.left_after(variant)}")
                if cache:
                    _keep(variant, store, cache, report)
    return len(missing)


def _keep(variant: Variant, store: ResultStore, cache: Cache, report: Callable[[str], None]) -> None:
    """Add a result to the cache. If the cache takes no more, its disk being full, the next build takes longer; this one
    does not fail."""
    try:
        cache.keep(variant, store)
    except OSError as error:
        cache.why_unused = f"{cache.directory} cannot be written to: {error}"
        report(f"the build cache is no longer used: {cache.why_unused}")


def _assembled(
    kernels: dict[Variant, Kernel],
    compiled: ResultStore,
    store: ResultStore,
    host: str,
    jobs: int,
    report: Callable[[str], None],
) -> ResultStore:
    """Return the store of another host, with all kernels in it."""
    start = time.perf_counter()
    store.directory.mkdir(exist_ok=True)
    missing = [kernel for variant, kernel in kernels.items() if store.find(variant) != kernel]

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:  # each waits for a process
        for _ in pool.map(lambda kernel: assemble_one(kernel, compiled, store, host), missing):
            pass
    if missing:
        report(f"{len(missing)} kernels assembled for {host} in {time.perf_counter() - start:.1f} s")
    return store


def _must_find(store: ResultStore, variant: Variant) -> Kernel:
    kernel = store.find(variant)
    if kernel is None:
        raise BuildError(f"{store.directory} lost {variant} while it was being built; did something else write there?")
    return kernel


def _remove_gone(directory: Path, variants: Sequence[Variant]) -> None:
    """Remove a store's results of variants that nobody builds any more; those of other builds stay."""
    known = {str(variant) for variant in (*matrix.shipped(Arch), *variants)}
    for path in directory.glob("tsmla_*"):
        symbol, _, ending = path.name.partition(".")
        if ending in RESULT_ENDINGS and symbol not in known:
            path.unlink()


def _link_changed(
    kernels: dict[Variant, Kernel], store: ResultStore, host: str, out: Path, report: Callable[[str], None]
) -> DirectoryManifest:
    """Link and audit what is not there already, remove what was not asked for, and commit the directory's manifest."""
    finished, audited_by = _finished(out), _package_digest()
    records, changed = [], []
    for name, members in matrix.libraries(tuple(kernels), host).items():
        manifest = LibraryManifest(
            schema=SCHEMA,
            family=members[0].family,
            arch=members[0].arch,
            host=host,
            min_runtime=toolchain.MIN_RUNTIME,
            toolchain=toolchain.versions(),
            source_digest=toolchain.source_digest(),
            kernels=tuple(kernels[variant] for variant in members),
        )
        stamp = store.directory / f"{name}.stamp"
        key = hashlib.sha256(f"{store.key}\n{audited_by}\n{manifest.to_json()}".encode()).hexdigest()
        record = finished.get(name)
        if record and record.manifest == manifest and stamp.exists() and stamp.read_text() == key:
            records.append(record)
        else:
            changed.append((name, members, manifest, stamp, key))
    wanted = {record.file for record in records} | {name for name, *_ in changed}
    stale = [path for path in out.glob("tsmla_*.so") if path.name not in wanted]
    if not changed and not stale and finished.keys() == wanted:
        return DirectoryManifest(SCHEMA, tuple(records))
    (out / MANIFEST_FILE).unlink(missing_ok=True)
    for path in stale:
        path.unlink()
    with loading_process() as loading:
        for name, members, manifest, stamp, key in changed:
            stamp.unlink(missing_ok=True)
            library = out / name
            objects = [store.object(variant) for variant in members]
            link.link(objects, library, host, manifest.to_json())
            audit_library(library, members, loading, host)
            stamp.write_text(key)
            records.append(LibraryRecord.of_file(library, manifest))
            report(f"{name}  {len(members)} kernels  {library.stat().st_size:,} bytes  audited")
    made = DirectoryManifest(SCHEMA, tuple(sorted(records, key=lambda record: record.file)))
    write_directory(out, made)
    return made


def _package_digest() -> str:
    """Return a hex SHA-256 over this package: a library is linked and audited again when any of it changes."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def _finished(out: Path) -> dict[str, LibraryRecord]:
    """Return the intact libraries that an earlier run finished, by file name."""
    intact = {}
    try:
        recorded = read_directory(out).libraries
    except ManifestError:
        return {}
    for record in recorded:
        try:
            verify_file(out, record)
        except ManifestError:
            continue
        intact[record.file] = record
    return intact


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One build at a time in a directory; a second waits."""
    with open(directory / "lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
