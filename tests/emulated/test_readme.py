"""The README's examples, with smaller sizes, give what float64 gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import readme
import torch


@pytest.mark.archs("sm_90a")
def test_examples(gpu):
    names: dict[str, Any] = {}
    readme.run(readme.PREFILL, names, smaller=True)
    q, kv = names["q"].cpu().double(), names["kv"].cpu().double()
    for begin, end in ((0, 700), (700, 1024)):
        own = slice(begin, end)
        check(names["out"].cpu()[own], names["lse"].cpu()[own], q[own], kv[own, :, :192], kv[own, :, 192:], 1.0)

    readme.run(readme.DECODE, names, smaller=True)
    rows = names["cache"].cpu().double().view(names["batch"], -1, 1, 576)[:, : names["keys"]]
    for b, keys in enumerate(rows.expand(-1, -1, names["heads"], -1)):
        got = names["out"].cpu()[b], names["lse"].cpu()[b]
        check(*got, names["q"].cpu().double()[b], keys, keys[..., :512], math.log(2))

    readme.run(readme.PACK, names, smaller=True)
    k = torch.cat([names["k_nope"].cpu(), names["k_pe"].cpu().expand(-1, names["heads"], -1)], -1)
    for name, expected in (("k_fp8", k), ("v_fp8", names["v"].cpu())):
        assert names[name].cpu().float().equal(expected.to(torch.float8_e4m3fn).float())


def check(out, lse, q, k, v, lse_unit):
    """Causal (bottom-right) attention of one sequence; lse_unit: the natural log of the LSE's base."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * 192**-0.5
    scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q)), -math.inf)
    torch.testing.assert_close(out.double(), torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double() * lse_unit, scores.logsumexp(-1).T, rtol=1e-4, atol=1e-4)
