"""NaN in a key reaches every query that sees it, wherever in a tile the key lies."""

from __future__ import annotations

import math

import decode_reference
import prefill_reference
import pytest
import torch
import tsmla
from emulated_archs import KERNELS, PREFILLS, SMS

pytestmark = [
    pytest.mark.archs(*KERNELS),
    pytest.mark.processors(SMS),
    pytest.mark.usefixtures("values_only"),
]
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.archs(*PREFILLS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill(gpu, dtype, causal):
    """Head h has it in one element of its key h, so all columns of a tile have their turn."""
    keys, queries = 140, 3
    problem = prefill_reference.make_problem([queries], [keys], keys, keys, 192, 128, dtype, "cuda")
    for head in range(keys):
        problem.key[head, head, torch.randint(192, ())] = math.nan
    out, lse = tsmla.tsmla_prefill(
        problem.query,
        problem.key,
        problem.value,
        None,
        problem.cum_seq_lens_kv,
        keys,
        1,
        problem.softmax_scale,
        causal,
        True,
        problem.cum_seq_lens_q,
    )
    last_seen = torch.arange(queries)[:, None] + (keys - queries if causal else keys)
    sees = (torch.arange(keys) <= last_seen).to(out.device)
    assert out[sees].isnan().all(), f"heads {(~out.isnan().all(-1) & sees).any(0).nonzero().flatten().tolist()}"
    assert lse[sees].isnan().all()
    assert causal == (not sees.all())


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(gpu, dtype, heads):
    """Request r has it in key 2 r or the one behind."""
    requests, keys = 67, 134
    rows = [torch.randn(keys, 576, device="cuda").to(dtype) for _ in range(requests)]
    for request, own in enumerate(rows):
        own[2 * request + torch.randint(2, ()), torch.randint(576, ())] = math.nan
    problem = decode_reference.make_problem([keys] * requests, 1, heads, dtype, rows=rows)
    out, lse = decode_reference.run(problem)
    assert out.isnan().all(), f"requests {(~out.isnan()).flatten(1).any(1).nonzero().flatten().tolist()}"
    assert lse.isnan().all()
