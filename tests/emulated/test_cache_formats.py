"""docs/reference/cache-formats.md: the errors of kernels are those that emulated ones have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.cache_formats import KERNELS, of_kernels

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "cache-formats.md").read_text("utf-8")
TABLE = PAGE[PAGE.index("## Errors of the kernels") : PAGE.index("## Decode of")]

pytestmark = pytest.mark.archs("sm_90a")


@pytest.mark.parametrize("name", KERNELS)
def test_errors_without_outliers(gpu, name):
    (row,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", TABLE, re.MULTILINE)
    output, lse, *_ = (float(cell) for cell in row.split("|"))
    assert of_kernels(KERNELS[name], False) == pytest.approx((output, lse), rel=0.1)
