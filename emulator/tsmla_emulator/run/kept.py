"""Keeps what is read of kernels in the user's cache, so that each is read once and not in every process.

What is kept has a file of its own, named by the digest of what it was made of and of the sources that made it. One that
nobody took for `core.build.UNUSED_DAYS` goes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
import pickle
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import machine
from .core.build import cache_directory, drop_unused
from .ptx.model import Entry, Module, NotImplementedInstruction
from .ptx.program import Program, build_program

_READ_LATER = ("registers", "instructions", "labels")
"""Fields of an entry that only messages and searches ask for."""


def made_of(content: bytes, make: Callable[[], Any]) -> Any:
    """Return what `make` returned for this content, in this process or an earlier one. Nothing else may decide it."""
    path = cache_directory() / "kept" / hashlib.sha256(_makers() + content).hexdigest()[:32]
    with contextlib.suppress(OSError, zlib.error, pickle.UnpicklingError, EOFError):
        found = pickle.loads(zlib.decompress(path.read_bytes()))
        os.utime(path)
        return found
    made = make()
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_unused(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(zlib.compress(pickle.dumps(made), 1))
        os.replace(file.name, path)
    return made


def module_of(text: str) -> Module:
    """Return a PTX text as a module with its entries' programs, unless one of them cannot be encoded. Raises what
    `machine.parse` does.

    Registers, instructions and labels are read from the text when somebody asks for them: kernels run without.
    """
    kept = made_of(text.encode(), lambda: _encoded(text))
    if kept is None:
        return machine.parse(text)
    target, version, parts = kept
    module = Module(target, version, {}, text)
    unread = _Unread(text)
    for fields, encoded in parts:
        entry = _KeptEntry.__new__(_KeptEntry)
        entry.__dict__.update(fields, _unread=unread)
        module.entries[entry.name] = entry
        module.programs[entry.name] = Program(entry, *encoded)
    return module


def _encoded(text: str) -> Any:
    """What runs of a text: its target, its version, and each entry's plain fields and program. None where an
    instruction cannot be encoded, which whoever runs it is told."""
    module, parts = machine.parse(text), []
    try:
        for entry in module.entries.values():
            program = vars(build_program(entry)).items()
            fields = {name: value for name, value in vars(entry).items() if name not in _READ_LATER}
            parts.append((fields, [value for name, value in program if name != "entry"]))
    except NotImplementedInstruction:
        return None
    return module.target, module.version, parts


class _Unread:
    """A text of which nobody may ask for more than its programs."""

    def __init__(self, text: str):
        self._text = text

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        return machine.parse(self._text).entries


class _KeptEntry(Entry):
    _unread: _Unread

    def __getattr__(self, name: str) -> Any:
        if name not in _READ_LATER:
            raise AttributeError(name)
        read = self._unread.entries[self.name]
        self.__dict__.update({name: getattr(read, name) for name in _READ_LATER})
        return self.__dict__[name]

    def __deepcopy__(self, memo: dict) -> Entry:
        """A copy that can be changed, as that of any entry."""
        return copy.deepcopy(Entry(**{name: getattr(self, name) for name in Entry.__dataclass_fields__}), memo)


@functools.cache
def _drop_unused(directory: Path) -> None:
    """Once in a process."""
    drop_unused(directory.iterdir())


@functools.cache
def _makers() -> bytes:
    """A digest of the sources that read PTX and libraries."""
    here = Path(__file__)
    digest = hashlib.sha256()
    for path in (here, here.with_name("host") / "capture.py", *sorted(here.with_name("ptx").glob("*.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()
