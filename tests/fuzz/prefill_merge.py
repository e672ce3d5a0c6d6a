"""tsmla_prefill that continues from an earlier result, whatever the case: what it gives alone, and the earlier result,
weighted by their LSEs in float64."""

from __future__ import annotations

import math
from typing import Any

import torch
import tsmla

from .guarded import Guarded, strides
from .prefill_case import PrefillCase
from .reference_attention import LEAST

_SHARE = 2.0**-16
"""What a share may be off: exponentials and logarithms of float32."""


def check(case: PrefillCase, inputs: tuple[torch.Tensor, ...], given: dict[str, Any], owned: torch.Tensor) -> None:
    """Run the call without sinks, and then with an earlier result. owned: query rows of sequences."""
    plain = {name: value for name, value in given.items() if name not in ("out", "lse", "lse_base")}
    alone = tsmla.tsmla_prefill(**{**plain, "sinks": None})
    new, new_lse = (tensor.cpu().double() for tensor in alone)
    old, old_lse = _earlier(case, new_lse)
    layout = "contiguous" if case.out == "new" else case.out
    shape = (case.tokens_q, case.heads, case.d_v)
    out = Guarded(shape, case.written, strides(layout, shape, case.written.itemsize), old, 16 * case.offset)
    lse_strides = (1, case.tokens_q) if case.heads_first else (case.heads, 1)
    lse = Guarded(shape[:2], torch.float32, lse_strides, old_lse, 4 * case.offset)
    tsmla.tsmla_prefill(**plain, merge_into=(out.tensor, lse.tensor))
    torch.cuda.synchronize()
    for name, guarded in (("merge_into[0]", out), ("merge_into[1]", lse)):
        may_change = owned.view(-1, *[1] * (guarded.tensor.dim() - 1)).expand(guarded.tensor.shape)
        wrong = guarded.changed(may_change)
        assert not wrong, f"{name}: {wrong}"
    got, got_lse = out.tensor.cpu()[owned].double(), lse.tensor.cpu()[owned].double()
    parts = [x[owned].double() for x in (new, new_lse, old, old_lse)]
    _judge(case, got, got_lse, *parts)


def _earlier(case: PrefillCase, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An earlier result: LSEs near the call's, anywhere, or none, and NaN in outputs without keys."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    kind = torch.randint(0, 4, lse.shape, generator=generator)
    near = torch.where(lse.isfinite(), lse, 0.0) + 3 * torch.randn(lse.shape, generator=generator)
    anywhere = 100 * torch.randn(lse.shape, generator=generator)
    earlier = torch.where(kind == 0, -math.inf, torch.where(kind == 1, anywhere, near)).float()
    out = torch.randn((*lse.shape, case.d_v), generator=generator)
    return torch.where(earlier == -math.inf, math.nan, out.permute(2, 0, 1)).permute(1, 2, 0).to(case.written), earlier


def _judge(
    case: PrefillCase,
    got: torch.Tensor,
    got_lse: torch.Tensor,
    new: torch.Tensor,
    new_lse: torch.Tensor,
    old: torch.Tensor,
    old_lse: torch.Tensor,
) -> None:
    lse = torch.logaddexp(new_lse, old_lse)
    shares = [torch.exp(x - lse).nan_to_num(0.0)[..., None] for x in (new_lse, old_lse)]
    old = torch.where(shares[1] == 0, 0.0, old)
    keeps = torch.ones_like(lse)
    if case.sinks is not None:
        sinks = torch.tensor(case.sinks).double()
        keeps = torch.sigmoid(torch.where(lse == -math.inf, 0.0, lse - sinks))
        lse = torch.logaddexp(lse, sinks) if case.lse_includes_sink else lse
    keeps = keeps[..., None]
    want = keeps * (shares[0] * new + shares[1] * old)
    whole = shares[0] * new.abs() + shares[1] * old.abs()
    mass = keeps * whole
    least = torch.where(keeps == 1, 0.0, LEAST) * (1 + whole)  # float32 has no factors, and no products, below that
    step = torch.finfo(case.written)
    lost = step.eps / 2 * (keeps * shares[0] * new.abs() + want.abs())  # `new` and the result are rounded
    bound = 1.01 * lost + _SHARE * mass + 2 * step.smallest_normal * step.eps + 2.0**-110 * old.abs() + least
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} merged outputs are not finite"
    excess = ((got - want).abs() - bound).max() if got.numel() else torch.zeros(())
    assert excess <= 0, f"a merged output is off by {float(excess):.3g} more than may be"
    empty = lse == -math.inf
    assert torch.equal(got_lse == -math.inf, empty), "a merged LSE is -inf, or is not"
    off = (got_lse - lse)[~empty].abs() - (1e-5 + 2e-6 * lse[~empty].abs())
    assert not (off > 0).any(), f"a merged LSE is off by {float(off.max()):.3g} more than may be"
    if case.sinks is None:
        for alone, other, what in ((new, old_lse, "new"), (old, new_lse, "earlier")):
            left = other == -math.inf
            assert torch.equal(got[left], alone[left]), f"a row with no other keys is not as the {what} one"
