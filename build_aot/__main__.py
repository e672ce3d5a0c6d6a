"""Command line of the ahead-of-time build: `python -m build_aot`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path

from tsmla.loading.toolchain import shipped_libraries

from . import matrix
from .build import build
from .cache import Cache
from .errors import BuildError


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m build_aot", description="Compile the shipped kernels into libraries. Needs no GPU, no nvcc."
    )
    matrix.add_arguments(parser)
    parser.add_argument(
        "--out",
        type=Path,
        default=shipped_libraries(),
        help="directory to fill; default %(default)s, where tsmla looks",
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; default %(default)s")
    parser.add_argument("--keep-ptx", action="store_true", help="leave each kernel's PTX in OUT/ptx")
    text = "share results with this user's other builds through this directory; not for wheels to publish"
    parser.add_argument("--cache", type=Path, help=text, metavar="DIR")
    asked = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # pip reads progress through a pipe
    try:
        cache = Cache(asked.cache.expanduser().absolute()) if asked.cache else None
        build(matrix.chosen(asked), asked.out.absolute(), max(1, asked.jobs), asked.keep_ptx, cache, host=asked.host)
    except BuildError as error:
        print(f"build_aot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
