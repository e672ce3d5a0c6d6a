"""What a user's machine compiles when nothing shipped matches is what ships: the same PTX, byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys

JIT = """
import json, sys
from tsmla.loading import jit
from tsmla.identity.variant import variant_from_dict
jit._compile(variant_from_dict(json.loads(sys.argv[1])))
"""


def test_ptx_of_jit_and_aot(small_build, small_variants, tmp_path):
    (built, _), variant, dumps = small_build, small_variants[0], tmp_path / "dumps"
    dumps.mkdir()
    environment = {**os.environ, "CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(dumps)}
    command = [sys.executable, "-c", JIT, json.dumps(variant.to_dict())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (dumped,) = dumps.glob("*.ptx")
    ptx = (built / "ptx" / f"{variant}.ptx").read_bytes()
    assert b".entry" in ptx and dumped.read_bytes().rstrip(b"\0") == ptx
