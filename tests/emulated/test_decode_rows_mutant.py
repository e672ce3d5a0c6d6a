"""A kernel that casts weight times scale to 8 bits as it is, which decodes of rows with scales must not do, fails the
gate that kernels as they are pass: against float64 on the same stored rows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from built_kernels import OBJECTS, files_in
from decode_reference import run
from decode_rows import MOST_OFF, attend_stored, make_scaled, relative
from tsmla.row_format import ROWS
from tsmla.variant import Arch, DecodeVariant, Dtype
from tsmla_emulator.host.compile import Compiled
from tsmla_emulator.host.link import link
from tsmla_emulator.run import Options, emulated

SHRUNK = 2.0**-13
"""What a kernel's probability is times, where it is cast as weight times scale: the bias of its exponent is undone, and
the scales of normal numbers (amax near 448 x 2^-7) are the unit that it left out."""
PATCHES = {
    Arch.SM90A: """
from tsmla_kernels.sm90.decode import tile
right = tile.as_operand_a
class Shrunk:
    def __init__(self, view): self.view = view
    def load(self): return self.view.load() * shrunk
tile.as_operand_a = lambda values, width: Shrunk(right(values, width))
""",
    Arch.SM100A: """
from tsmla_kernels.sm100.decode import softmax
right = softmax._store
softmax._store = lambda *given: right(*given[:4], [value * shrunk for value in given[4]], given[5])
""",
}


def mutant(variant: DecodeVariant, directory: Path) -> Compiled:
    """The kernel compiled with probabilities shrunk before they are cast."""
    obj, ptx = directory / "kernel.o", directory / "kernel.ptx"
    text = f"""
from tsmla_emulator.host import compile
from tsmla.variant import variant_from_dict
shrunk = {SHRUNK}
{PATCHES[variant.arch]}
compile._compile(variant_from_dict({variant.to_dict()!r}), {str(obj)!r}, {str(ptx)!r})
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    environment |= {
        "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_LINEINFO": "1", "CUTE_DSL_DUMP_DIR": str(directory),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return Compiled(link(obj), ptx, variant.symbol())


@pytest.mark.parametrize("arch", PATCHES, ids=str)
def test_a_cast_of_weight_times_scale_fails_the_gate(arch, tmp_path):
    variant = DecodeVariant(arch, Dtype.E4M3, Dtype.BF16, lse=True, row=ROWS["snapmla"])
    wrong = mutant(variant, tmp_path)
    kernels = {"right": (files_in(OBJECTS), 1.0), "cast": (lambda _: wrong, 1 / SHRUNK)}
    off = {}
    for name, (compiled, output_scale) in kernels.items():
        with emulated(str(arch), Options(), compiled=compiled):
            scaled = make_scaled([300, 70], 1, 16)
            out, _ = run(scaled.problem, **scaled.arguments(output_scale=output_scale))
            exact, _ = attend_stored(scaled, "exact")
            off[name] = relative(out, exact)
    assert off["right"] <= MOST_OFF < 3 * MOST_OFF < off["cast"], off
