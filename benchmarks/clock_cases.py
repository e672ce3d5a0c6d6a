"""Calls that the timing model predicts and `bench_clocks` measures, under the same names. Needs no GPU."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from tsmla.identity.variant import PrefillVariant
from tsmla.loading.manifest import read_directory


@dataclasses.dataclass(frozen=True)
class ClockCase:
    """One call. shape: sequences x queries x keys x heads; of decode, requests x query tokens x keys x heads."""

    family: str
    dtype: str
    mask: str
    shape: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        return f"{self.family} {self.dtype} {self.mask} {'x'.join(map(str, self.shape))}"

    @property
    def symbol(self) -> str:
        """Symbol of the variant on Hopper that runs it: prefill with LSE, decode without, as `bench_prefill` and
        `bench_decode`."""
        if self.family == "prefill":
            out = "bf16" if self.dtype in ("e4m3", "e5m2") else self.dtype
            return f"tsmla_prefill_sm_90a_{self.dtype}_to_{out}_d192x128_{self.mask}_lse"
        return f"tsmla_decode_sm_90a_{self.dtype}_to_bf16_d512x64_nolse"


@dataclasses.dataclass(frozen=True)
class PeerCase:
    """One call of another package's kernel; `symbol` as the timing model names it, shape as for `ClockCase`."""

    symbol: str
    shape: tuple[int, int, int, int]

    @property
    def package(self) -> str:
        return self.symbol.split("_")[0]

    @property
    def name(self) -> str:
        return f"{self.symbol} {'x'.join(map(str, self.shape))}"

    @property
    def causal(self) -> bool:
        return self.symbol.endswith("_causal")

    @property
    def dims(self) -> tuple[int, int]:
        """Dims of query and key, and of value."""
        found = re.search(r"_d(\d+)x(\d+)_", self.symbol)
        assert found
        return int(found[1]), int(found[2])


def _cases(family: str, *rows: tuple[Any, ...]) -> tuple[ClockCase, ...]:
    return tuple(ClockCase(family, dtype, mask, shape) for dtype, mask, *sizes in rows for shape in [tuple(sizes)])


CASES = (
    *_cases(
        "prefill",
        ("bf16", "full", 1, 8192, 8192, 128),
        ("bf16", "full", 1, 8192, 32768, 128),
        ("bf16", "causal", 1, 8192, 8192, 128),
        ("bf16", "causal", 1, 8192, 32768, 128),
        ("bf16", "causal", 4, 1024, 81920, 128),
        ("bf16", "causal", 1, 1024, 1024, 128),
        ("e4m3", "full", 1, 8192, 8192, 128),
        ("e4m3", "full", 1, 8192, 32768, 128),
        ("e4m3", "causal", 1, 8192, 8192, 128),
        ("e4m3", "causal", 1, 8192, 32768, 128),
        ("e4m3", "causal", 4, 1024, 81920, 128),
    ),
    *_cases(
        "decode",
        ("bf16", "causal", 128, 1, 4096, 16),
        ("bf16", "causal", 128, 1, 8192, 16),
        ("bf16", "causal", 4, 4, 81920, 16),
        ("bf16", "causal", 1, 1, 8192, 16),
        ("bf16", "causal", 128, 2, 4096, 64),
        ("bf16", "causal", 128, 1, 8192, 128),
        ("e4m3", "causal", 128, 1, 8192, 16),
        ("e4m3", "causal", 4, 4, 81920, 16),
        ("e4m3", "causal", 128, 1, 4096, 64),
        ("e4m3", "causal", 128, 1, 8192, 128),
    ),
)
LATER_CASES = (
    *_cases(
        "prefill",
        ("bf16", "full", 2, 4096, 16384, 128),
        ("bf16", "causal", 1, 16384, 16384, 128),
        ("bf16", "causal", 8, 512, 8192, 128),
        ("bf16", "causal", 2, 2048, 2048, 128),
        ("e4m3", "full", 2, 4096, 16384, 128),
        ("e4m3", "causal", 1, 16384, 16384, 128),
        ("e4m3", "causal", 8, 1024, 8192, 128),
        ("e4m3", "causal", 2, 2048, 2048, 128),
    ),
    *_cases(
        "decode",
        ("bf16", "causal", 64, 1, 16384, 16),
        ("bf16", "causal", 32, 4, 8192, 32),
        ("bf16", "causal", 8, 1, 65536, 128),
        ("e4m3", "causal", 64, 1, 16384, 16),
        ("e4m3", "causal", 32, 4, 8192, 32),
        ("e4m3", "causal", 8, 1, 65536, 128),
        ("e4m3", "causal", 16, 2, 32768, 64),
    ),
)
"""Calls that were first measured after the model had learnt to read machine code."""
_FLASH_ATTN_4 = "flash-attn-4_prefill_sm_90a_bf16"
PEER_CASES = (
    PeerCase(f"{_FLASH_ATTN_4}_d128x128_full", (16, 2048, 2048, 16)),
    PeerCase(f"{_FLASH_ATTN_4}_d128x128_full", (4, 8192, 8192, 16)),
    PeerCase(f"{_FLASH_ATTN_4}_d128x128_full", (1, 32768, 32768, 16)),
    PeerCase(f"{_FLASH_ATTN_4}_d128x128_causal", (4, 8192, 8192, 16)),
    PeerCase(f"{_FLASH_ATTN_4}_d128x128_causal", (1, 32768, 32768, 16)),
    PeerCase(f"{_FLASH_ATTN_4}_d192x128_full", (1, 8192, 8192, 128)),
    PeerCase(f"{_FLASH_ATTN_4}_d192x128_causal", (1, 8192, 8192, 128)),
    PeerCase(f"{_FLASH_ATTN_4}_d192x128_causal", (1, 8192, 32768, 128)),
)
"""Calls of 32K tokens and 16 heads, as flash-attn-4's authors time it, and calls at tsmla's shapes."""
VARIANT_SHAPE = (1, 8192, 8192, 128)
"""Shape at which changed kernels of a prefill without mask are timed."""


def variant_of(directory: Path) -> PrefillVariant:
    """Return the one variant whose changed kernel a directory of `build_aot` holds."""
    (library,) = read_directory(directory).libraries
    (kernel,) = library.manifest.kernels
    assert isinstance(kernel.variant, PrefillVariant), kernel.variant
    return kernel.variant
