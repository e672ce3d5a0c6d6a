"""Makes the repository's own packages (build_aot, benchmarks) and the tests' shared references importable.

tsmla and tsmla_kernels are not put on the path here: tests run what is installed, or what PYTHONPATH names.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

for directory in (ROOT, ROOT / "tests"):
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
