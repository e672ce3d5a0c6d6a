"""Measures what each cache format costs in accuracy: a float64 decode from stored rows against one from float32 keys.

`python -m docs.cache_formats` prints the table of docs/reference/cache-formats.md; a test compares the page with it.
With `--kernels` it prints the page's second table: the errors of what the operators give, in emulation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch

HEADS, KEYS, LATENT, ROPE = 16, 4096, 512, 64
Keys = tuple[torch.Tensor, torch.Tensor]


def plain(c: torch.Tensor, r: torch.Tensor) -> Keys:
    return c.bfloat16().float(), r.bfloat16().float()


def e4m3(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Return the numbers that are read back after storing x as e4m3."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def scale_of(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax(-1, keepdim=True) / 448


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale.double()))).float()


def one_scale(scale: float | None) -> Callable[[torch.Tensor, torch.Tensor], Keys]:
    """Return per-tensor e4m3 with this scale; None for the one that the largest number of all keys just fits into."""

    def stored(c: torch.Tensor, r: torch.Tensor) -> Keys:
        used = float(max(c.abs().max(), r.abs().max())) / 448 if scale is None else scale
        return e4m3(c, used), e4m3(r, used)

    return stored


def ds_mla(rounded: bool) -> Callable[[torch.Tensor, torch.Tensor], Keys]:
    def stored(c: torch.Tensor, r: torch.Tensor) -> Keys:
        blocks = c.view(KEYS, 4, 128)
        scale = scale_of(blocks)
        return e4m3(blocks, power_of_two(scale) if rounded else scale).view(KEYS, LATENT), r

    return stored


def snapmla(rounded: bool) -> Callable[[torch.Tensor, torch.Tensor], Keys]:
    def stored(c: torch.Tensor, r: torch.Tensor) -> Keys:
        scale = power_of_two(scale_of(c)) if rounded else scale_of(c)
        return e4m3(c, scale), (r / scale).bfloat16().float() * scale

    return stored


FORMATS: dict[str, Callable[[torch.Tensor, torch.Tensor], Keys]] = {
    "`bf16`": plain,
    "`e4m3`, scale 1": one_scale(1.0),
    "`e4m3`, scale of the largest": one_scale(None),
    "`fp8_ds_mla`": ds_mla(False),
    "`fp8_ds_mla`, powers of two": ds_mla(True),
    "`snapmla`": snapmla(True),
    "`snapmla`, arbitrary scales": snapmla(False),
}


def keys_of(outliers: bool, generator: torch.Generator) -> Keys:
    """Make keys of normal numbers. With outliers, one of 512 latent columns of every 64th key is 20 times as large, and
    so are all rope parts."""
    c, r = (torch.randn(KEYS, width, generator=generator) for width in (LATENT, ROPE))
    if outliers:
        c[::64, 77] *= 20
        r = r * 20
    return c, r


def decode(query: torch.Tensor, c: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the natural-log LSE of each head."""
    scores = query @ torch.cat([c, r], -1).double().T * (LATENT + ROPE) ** -0.5
    lse = scores.logsumexp(-1)
    return (scores - lse[:, None]).exp() @ c.double(), lse


def errors(outliers: bool) -> dict[str, tuple[float, float]]:
    """Return, for each format, the relative error of the outputs (by the norm of all heads) and the largest error of an
    LSE."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, LATENT + ROPE, generator=generator, dtype=torch.float64)
    c, r = keys_of(outliers, generator)
    out, lse = decode(query, c, r)
    found = {}
    for name, stored in FORMATS.items():
        rows = stored(*plain(c, r)) if "bf16" not in name else plain(c, r)  # what is written is bf16
        got, got_lse = decode(query, *rows)
        found[name] = float((got - out).norm() / out.norm()), float((got_lse - lse).abs().max())
    return found


def table() -> str:
    """Return the table of errors as Markdown."""
    usual, outlying = errors(False), errors(True)
    lines = ["| rows | output | LSE | output, outliers | LSE, outliers |", "| --- " * 5 + "|"]
    for name in FORMATS:
        lines.append(f"| {name} | " + " | ".join(f"{x:.1e}" for x in (*usual[name], *outlying[name])) + " |")
    return "\n".join(lines)


KERNELS = {
    "`bf16`": "bf16",
    "`e4m3`, scale 1, query e4m3": "e4m3",
    "`fp8_ds_mla`": "fp8_ds_mla",
    "`snapmla`": "snapmla",
}
"""Row of the second table -> the format that keys are written in."""
PAGE = 64


def of_kernels(format: str, outliers: bool) -> tuple[float, float]:
    """Return the errors of keys that `mla_write_cache` writes and `tsmla_decode` reads, on torch's current GPU, from a
    bf16 or e4m3 query."""
    import tsmla

    generator = torch.Generator().manual_seed(0)
    query = torch.randn(HEADS, LATENT + ROPE, generator=generator, dtype=torch.float64)
    c, r = keys_of(outliers, generator)
    exact, exact_lse = decode(query, c, r)
    eight, kv_c, k_pe = torch.float8_e4m3fn, c.bfloat16().cuda(), r.bfloat16().cuda()

    def room(width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(KEYS // PAGE, PAGE, width, dtype=dtype, device="cuda")

    first = {"bf16": (576, torch.bfloat16), "fp8_ds_mla": (656, eight), "e4m3": (576, eight), "snapmla": (512, eight)}
    parts: dict[str, Any] = {"cache": room(*first[format])}
    if format == "snapmla":
        parts |= {"rope_cache": room(64, torch.bfloat16), "scale_cache": room(1, torch.float32)[..., 0]}
    slots = torch.arange(KEYS).cuda()
    tsmla.mla_write_cache(kv_c, k_pe, slots, **parts, format=format)
    cache = tuple(parts.values()) if len(parts) > 1 else parts["cache"]
    given = query.to(eight if format == "e4m3" else torch.bfloat16).cuda()
    workspace = torch.empty(tsmla.decode_workspace_size(1, 1, HEADS, KEYS), dtype=torch.int8, device="cuda")
    tables = torch.arange(KEYS // PAGE, dtype=torch.int32).cuda()[None]
    out, lse = tsmla.tsmla_decode(
        given[None, None],
        cache,
        workspace,
        512,
        64,
        tables,
        torch.tensor([KEYS], dtype=torch.int32).cuda(),
        KEYS,
        (LATENT + ROPE) ** -0.5,
        return_lse=True,
        lse_base=math.e,
    )
    got, got_lse = out[0, 0].double().cpu(), lse[0, 0].double().cpu()
    return float((got - exact).norm() / exact.norm()), float((got_lse - exact_lse).abs().max())


def kernel_table(arch: str = "sm_90a") -> str:
    """Return the table of emulated kernels' errors as Markdown."""
    from tsmla_emulator.run.emulate import Options, emulated

    from tests.built_kernels import OBJECTS, files_in

    lines = ["| rows | output | LSE | output, outliers | LSE, outliers |", "| --- " * 5 + "|"]
    for name, format in KERNELS.items():
        with emulated(arch, Options(), compiled=files_in(OBJECTS)):
            found = (*of_kernels(format, False), *of_kernels(format, True))
        lines.append(f"| {name} | " + " | ".join(f"{x:.1e}" for x in found) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(kernel_table() if sys.argv[1:] == ["--kernels"] else table())
