"""What a user's machine compiles when nothing shipped matches is what ships: the same PTX, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tsmla.variant import Arch, Dtype, PrefillVariant

from build_aot.build import build

VARIANT = PrefillVariant(Arch.SM100A, Dtype.E4M3, Dtype.BF16, 192, 128, causal=True, lse=True)
JIT = """
import json, sys
from tsmla import jit
from tsmla.variant import variant_from_dict
jit._compile(variant_from_dict(json.loads(sys.argv[1])))
"""


def test_ptx_of_jit_and_aot(tmp_path):
    build([VARIANT], tmp_path / "objs", 1, keep_ptx=True)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    environment = {**os.environ, "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(dumps)}
    command = [sys.executable, "-c", JIT, json.dumps(VARIANT.to_dict())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (dumped,) = dumps.glob("*.ptx")
    ptx = (tmp_path / "objs" / "ptx" / f"{VARIANT}.ptx").read_bytes()
    assert b".entry" in ptx and dumped.read_bytes().rstrip(b"\0") == ptx

