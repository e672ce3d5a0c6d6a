"""The examples run as they stand, and give what their comments say."""

from __future__ import annotations

from typing import Any

import pytest
import readme
import torch
from tsmla.identity.arch import Arch

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "e4m3": torch.float8_e4m3fn}
RESULTS = {readme.PREFILL: ("out", "lse"), readme.DECODE: ("out", "lse"), readme.PACK: ("k_fp8", "v_fp8")}


def test_examples(arch):
    names: dict[str, Any] = {}
    for example, results in RESULTS.items():
        readme.run(example, names)
        for name in results:
            shape, dtype = readme.promised(example, name)
            assert (names[name].shape, names[name].dtype) == (shape, DTYPES[dtype])
            assert names[name].float().isfinite().all()


def test_graph(arch):
    if arch is not Arch.SM90A:
        pytest.skip("the example prepares a kernel of sm_90a")
    names: dict[str, Any] = {}
    readme.run(readme.PREFILL, names)
    readme.run(readme.DECODE, names)
    longer = names["out"].clone()
    readme.run(readme.GRAPH, names)
    now = names["tsmla"].tsmla_decode(
        names["q"], names["cache"], names["workspace"], 512, 64, names["tables"], names["seq_lens"], 6400, 192**-0.5
    )
    assert names["out"].equal(now) and not now.equal(longer)
