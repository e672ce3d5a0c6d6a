"""The judgement of a kernel's results that tests of prefills and of decodes share."""

from __future__ import annotations

import torch
from tsmla.problems.reference import Attended, Tolerance


def assert_right(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    exact: Attended,
    plain: Attended,
    tolerance: Tolerance,
    factor: float = 1.0,
) -> None:
    """Assert that results are as close to float64 as `tsmla selftest` wants them (`tsmla.problems.reference.judge`): in
    each element, in each row, and all together. Here outputs may be of any magnitude, and LSEs infinite."""
    got, finfo = out.double(), torch.finfo(out.dtype)
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} outputs are not finite"
    error, plain_error, norms = got - exact.out, plain.out - exact.out, exact.out.norm(dim=-1)
    allowed = 2 * plain_error.abs().max() + finfo.eps * exact.out.abs().clamp_min(abs(factor))
    _within(error.abs(), allowed, "element")
    least = finfo.smallest_normal * finfo.eps * out.shape[-1] ** 0.5
    _within(error.norm(dim=-1), 2 * (plain_error.norm(dim=-1) + tolerance.rmse * norms) + least, "row")
    size = norms.norm().clamp_min(1e-30)
    rmse, plain_rmse = error.norm() / size, plain_error.norm() / size
    bound = tolerance.rmse + tolerance.rmse_of_plain * plain_rmse
    assert rmse <= bound, f"relative RMSE {rmse:.2e} is above {bound:.2e}; PyTorch in this dtype: {plain_rmse:.2e}"
    assert (got[norms == 0] == 0).all(), "a row without keys must give 0"
    if lse is not None:
        got_lse, finite = lse.double(), exact.lse.isfinite()
        assert torch.equal(got_lse.where(~finite, 0), exact.lse.where(~finite, 0)), (
            "a row without keys must give LSE -inf, an infinite sink inf, and no other row"
        )
        absolute, relative = tolerance.lse
        _within((got_lse - exact.lse)[finite].abs(), absolute + relative * exact.lse[finite].abs(), "LSE")


def _within(error: torch.Tensor, allowed: torch.Tensor, what: str) -> None:
    """Assert that no error is larger than what is allowed there."""
    excess = error - allowed
    if not (excess <= 0).all():
        worst = excess.argmax()
        at = [int(index) for index in torch.unravel_index(worst, excess.shape)]
        raise AssertionError(f"{what} {at} is off by {error.flatten()[worst]:.3g}, of {allowed.flatten()[worst]:.3g}")
