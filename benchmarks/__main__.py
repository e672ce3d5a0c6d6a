"""Measures operators on a GPU, compares them with other libraries, predicts times, and writes pages from the records.

`python -m benchmarks COMMAND --help` says what a command measures and which options it has.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
import textwrap
from pathlib import Path

COMMANDS = {
    "prefill": "bench_prefill",
    "prefill-pieces": "bench_prefill_pieces",
    "prefill-masked": "bench_prefill_masked",
    "prefill-chosen": "bench_prefill_chosen",
    "prefill-crossover": "bench_prefill_crossover",
    "decode": "bench_decode",
    "decode-rows": "bench_decode_rows",
    "decode-chosen": "bench_decode_chosen",
    "counters": "counters",
    "pack": "bench_pack",
    "cache": "bench_cache",
    "cold-start": "cold_start",
    "host-time": "host_time",
    "compare-libraries": "compare_libraries",
    "engine-tokens": "engines.tokens",
    "engine-throughput": "engines.throughput",
    "engine-host-time": "engines.host_time",
    "engine-start": "engines.start",
    "engine-sglang": "engines.sglang",
    "clocks": "bench_clocks",
    "phases": "bench_phases",
    "microbench": "microbench.measure",
    "predict-clocks": "predict_clocks",
    "predict-chosen": "predict_chosen",
    "predict-peers": "predict_peers",
    "definitions": "definitions.write",
    "report": "report",
}
"""Name -> module, which has `add_arguments(parser)` and `run(options)`, whose result is the exit status."""


def main(arguments: list[str]) -> int:
    """Run one command. Only its module is imported, since each imports what it measures."""
    if not arguments or arguments[0] not in COMMANDS:
        listed = "\n".join(f"  {name:18} {_summary(module)}" for name, module in COMMANDS.items())
        wanted = not arguments or arguments[0] in ("-h", "--help")
        problem = "" if wanted else f"there is no command {arguments[0]!r}\n\n"
        print(f"{problem}{__doc__}\n{listed}", file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    name, *rest = arguments
    module = importlib.import_module(f"benchmarks.{COMMANDS[name]}")
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(rest)) or 0


def _summary(module: str) -> str:
    """Return the first sentence of a module's docstring, read without importing it."""
    source = Path(__file__).parent.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
    said = ast.get_docstring(ast.parse(source)) or ""
    return textwrap.shorten(said.partition(".\n")[0], 98, placeholder=" ...")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
