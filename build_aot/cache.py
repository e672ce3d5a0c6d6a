"""A cache of compiled variants that a user's builds share, whichever checkout they are in: opt in with --cache DIR.

An entry is one zip file, `SYMBOL-HASH.zip`, of a result's object, LLVM IR, PTX and description. The description says
what decided the result (sources, compilers and this package), and HASH is of that: entries are only ever added, and an
interrupted build leaves none. A variant keeps its latest `KEPT` entries, and an entry that no build took for
`UNUSED_DAYS` goes: its variant may exist no more. What lies there is linked into libraries and
run, so nothing counts that another user could have put there (`tsmla.loading.trust`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

from tsmla.identity.variant import Variant
from tsmla.loading import trust

from .compile import ResultStore

KEPT, UNUSED_DAYS = 4, 60
_DAMAGE = (OSError, ValueError, TypeError, KeyError, AttributeError, zipfile.BadZipFile)


class Cache:
    """One directory of entries, made for this user alone when it is missing.

    why_unused: the sentence that says why nothing is read from or written to it; None when it is used.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            trust.make_directory(directory)
            self.why_unused = trust.why_directory_untrusted(directory, directory)
        except OSError as error:
            self.why_unused = f"{directory} cannot be used: {error}"

    def fetch(self, variant: Variant, store: ResultStore, with_ptx: bool) -> bool:
        """Put a variant's result into the store if there is one of the store's key and sources; return whether."""
        entries = self._of(variant) if self.why_unused is None else []
        return any(self._take(entry, variant, store, with_ptx) for entry in entries)

    def keep(self, variant: Variant, store: ResultStore) -> None:
        """Add the store's result of a variant. Raises OSError when that is not possible, on a full disk for example."""
        if self.why_unused is not None:
            return
        described = store.described(variant).read_bytes()
        kept = json.loads(described)
        decides = json.dumps([kept["key"], kept["sources"]], sort_keys=True)
        entry = self.directory / f"{variant}-{hashlib.sha256(decides.encode()).hexdigest()[:32]}.zip"
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as files:
                files.writestr("result.json", described)
                files.write(store.object(variant), "result.o")
                files.write(store.ir(variant), "result.ll.gz")
                if store.ptx(variant).exists():
                    files.write(store.ptx(variant), "result.ptx")
            os.replace(temporary, entry)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        unused_since = time.time() - UNUSED_DAYS * 24 * 3600
        unused = [path for path, seconds in self._times("*").items() if seconds < unused_since]
        for old in {*self._of(variant)[KEPT:], *unused}:
            old.unlink(missing_ok=True)

    def _of(self, variant: Variant) -> list[Path]:
        """Return a variant's entries, the latest first."""
        found = self._times(f"{variant}-*")
        return sorted(found, key=found.__getitem__, reverse=True)

    def _times(self, pattern: str) -> dict[Path, float]:
        """Return entries by a pattern of their names, each with the time when it was added or last taken."""
        found = {}
        for path in self.directory.glob(f"{pattern}.zip"):
            with contextlib.suppress(OSError):  # another build may have removed it
                found[path] = path.stat().st_mtime
        return found

    def _take(self, entry: Path, variant: Variant, store: ResultStore, with_ptx: bool) -> bool:
        try:
            with trust.open_regular(entry, follow_links=False) as stream:
                if trust.why_untrusted(entry, os.fstat(stream.fileno())):
                    return False
                with zipfile.ZipFile(stream) as files:
                    if not store.accepts(json.loads(files.read("result.json"))):
                        return False
                    if with_ptx:
                        _extract(files, "result.ptx", store.ptx(variant))
                    _extract(files, "result.o", store.object(variant))
                    _extract(files, "result.ll.gz", store.ir(variant))
                    _extract(files, "result.json", store.described(variant))
            with contextlib.suppress(OSError):
                os.utime(entry)
        except _DAMAGE:
            return False
        return store.find(variant) is not None


def _extract(files: zipfile.ZipFile, name: str, target: Path) -> None:
    with files.open(name) as source, open(target, "wb") as stream:
        shutil.copyfileobj(source, stream)
