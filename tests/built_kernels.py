"""Where emulated tests take the files of a kernel from: the installation's own, or compiled now."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tsmla.identity.variant import Variant

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "emulator"))  # found here where it is not installed

if TYPE_CHECKING:
    from tsmla_emulator.run.host.compile import Compiled

OBJECTS = ROOT / "build" / "cmake" / "objs"
"""Where an editable installation leaves what it built."""


def files_in(objects: Path) -> Callable[[Variant], Compiled]:
    """The objects that the libraries in `objects` are linked from, where they are of these very sources; others are
    compiled, with line information."""
    from tsmla_emulator.run.host.compile import Compiled, compile_for_emulation
    from tsmla_emulator.run.host.link import link

    from build_aot.build import store_of

    store = store_of(objects)

    def files(variant: Variant) -> Compiled:
        if store.find(variant) is None or not store.ptx(variant).exists():
            return compile_for_emulation(variant)
        return Compiled(link(store.object(variant)), store.ptx(variant), variant.symbol())

    return files
