"""Compare the machine code of two builds: the proof that a restructuring changed no kernel.

    python -m build_aot.compare OLD NEW

OLD and NEW are directories that `python -m build_aot --keep-ptx --out DIRECTORY` filled, of two states of a checkout.
Compared are the instructions and constants of each kernel's GPU functions, whatever these are called; line information
and names are left out. ptxas gives large Blackwell kernels other machine code from one run to the next: where PTX is
the same, the kernel is the same. Exit status 1 where a kernel changed, or is in one build only.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tsmla.loading.elf import SHT_DYNSYM, Elf

from . import cubin
from .audit import EXPORT_PREFIX
from .build import STORE
from .errors import BuildError

SAME, SAME_PTX, CHANGED = "the same machine code", "other machine code of the same PTX", "changed"
OLD_ONLY, NEW_ONLY = "in the old build only", "in the new build only"
UNCHANGED = (SAME, SAME_PTX)


def compared(old: Path, new: Path) -> dict[str, str]:
    """Symbol -> how that kernel differs, one of the words above, for every kernel of either build.

    Raises BuildError where a directory holds no build's results.
    """
    before, after = _symbols(old), _symbols(new)
    found = {}
    for symbol in sorted(before | after):
        if symbol not in after or symbol not in before:
            found[symbol] = OLD_ONLY if symbol in before else NEW_ONLY
        elif machine_code(old / STORE / f"{symbol}.o") == machine_code(new / STORE / f"{symbol}.o"):
            found[symbol] = SAME
        else:
            files = [directory / STORE / f"{symbol}.ptx" for directory in (old, new)]
            kept = [anonymous(file.read_text("utf-8")) for file in files if file.exists()]
            found[symbol] = SAME_PTX if len(kept) == 2 and kept[0] == kept[1] else CHANGED
    return found


def machine_code(obj: Path) -> str:
    """Hex SHA-256 over the instructions and constants of all GPU functions in an object, independent of names."""
    digests = sorted(hashlib.sha256(part).hexdigest() for image in cubin.images(obj) for part in _functions(image))
    if not digests:
        raise BuildError(f"{obj} holds no GPU code")
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _functions(image: Elf) -> Iterator[bytes]:
    """The bytes of each GPU function: its instructions, and the constants that belong to it."""
    for section in image.sections:
        if section.name.startswith(".text."):
            name = section.name.removeprefix(".text.")
            own = [s for s in image.sections if s.name.startswith(".nv.constant") and s.name.endswith(f".{name}")]
            yield section.data + b"".join(s.data for s in sorted(own, key=lambda s: s.name))


def anonymous(ptx: str) -> str:
    """PTX without comments, its mangled names replaced by numbers in the order in which they come."""
    names: dict[str, str] = {}
    text = re.sub(r"\s*//.*|\s+$", "", ptx, flags=re.MULTILINE)
    return re.sub(r"\b\w*(?:cutlass|tsmla)\w*", lambda found: names.setdefault(found[0], f"name{len(names)}"), text)


def _symbols(directory: Path) -> set[str]:
    """The kernels in a directory's libraries; results of other kernels may lie beside them."""
    found = {
        symbol.name.removeprefix(EXPORT_PREFIX)
        for library in directory.glob("tsmla_*.so")
        for symbol in Elf(library.read_bytes()).symbols(SHT_DYNSYM)
        if symbol.name.startswith(f"{EXPORT_PREFIX}tsmla_")
    }
    if not found:
        raise BuildError(f"{directory} holds no libraries: python -m build_aot --keep-ptx --out {directory}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser("python -m build_aot.compare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    try:
        found = compared(options.old, options.new)
    except BuildError as error:
        print(f"build_aot.compare: {error}", file=sys.stderr)
        return 2
    for symbol, how in found.items():
        if how not in UNCHANGED:
            print(f"{symbol}: {how}")
    print(f"{len(found)} kernels: {', '.join(f'{count} {how}' for how, count in Counter(found.values()).items())}")
    return 0 if set(found.values()) <= set(UNCHANGED) else 1


if __name__ == "__main__":
    sys.exit(main())
