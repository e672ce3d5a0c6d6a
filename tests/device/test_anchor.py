"""The GPU still gives what it gave when the anchor was recorded."""

from __future__ import annotations

import anchor
import numpy as np
import pytest
from tsmla.identity.arch import Arch


@pytest.mark.parametrize("case", anchor.CASES, ids=lambda case: case.name)
def test_same_results_as_recorded(case, arch):
    if arch is not Arch.SM90A:
        pytest.skip(f"the anchor was recorded on sm_90a; this GPU runs {arch}")
    before = anchor.recorded(case)
    for name, value in case.run().items():
        assert np.array_equal(value, before[name]), f"{name} differs from {before['certificate']}"
