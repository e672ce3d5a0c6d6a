"""Where tests take a shipped kernel's files from: the installation's build, if it is of these very sources.

A test that asks for lines of a kernel's source compiles it (`compile_for_emulation`)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "tests")]  # as pytest has them where it begins in the checkout, not in emulator/
from built_kernels import OBJECTS, files_in  # noqa: E402

BUILT = files_in(OBJECTS)
