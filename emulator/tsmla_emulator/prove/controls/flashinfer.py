"""FlashInfer's fp8 attention over a window of rows and pages of compressed ones, on Blackwell (`hca_fp8`).

The package imports its compilers of CUDA and much else; of it only the modules are loaded that the kernel needs.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from typing import Any
from unittest import mock

import torch

from . import reference
from .control import Control, Package, Values, nothing

PACKAGE = Package("flashinfer-python", "0.7.4")
FP8 = Values(out=3e-2, lse=None)
WINDOW, PAGE, WIDTH = 128, 64, 512
"""Rows of a window, of a page; columns of a row."""


def _wrapper() -> Any:
    """Import the module that calls the kernel, and none of its packages' own code."""
    name = "flashinfer.cute_dsl.attention.wrappers.batch_hca"
    for parent in (name.rsplit(".", count)[0] for count in (4, 3, 2, 1)):
        found = importlib.util.find_spec(parent)
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {parent!r}")
        package = types.ModuleType(parent)
        package.__path__ = list(found.submodule_search_locations)
        sys.modules[parent] = package
    return importlib.import_module(name)


def _heavily_compressed(heads: int) -> Values:
    windows, lengths, scale = (128, 77), (300, 129), WIDTH**-0.5
    requests = len(windows)
    fp8 = torch.float8_e4m3fn
    query = (4 * torch.randn(requests, 1, heads, WIDTH, device="cuda")).to(fp8)
    recent = torch.randn(400, WIDTH, device="cuda").to(fp8)
    pages = torch.randn(20, PAGE, WIDTH, device="cuda").to(fp8)
    chosen = torch.stack([torch.randperm(len(recent))[:WINDOW] for _ in windows]).int()
    tables = torch.stack([torch.randperm(len(pages))[:6] for _ in windows]).int()
    seen = torch.tensor(lengths, dtype=torch.int32) + WINDOW
    module = _wrapper()

    with mock.patch.object(module, "require_cute_dsl_arch", nothing), mock.patch.object(torch.cuda, "device", nothing):
        out = module.cute_dsl_hca_decode(
            query,
            recent,
            pages,
            torch.empty(1 << 23, dtype=torch.int8, device="cuda"),
            chosen.to("cuda"),
            tables.to("cuda"),
            seen.to("cuda"),
            seen.to("cuda"),
            torch.tensor(windows, dtype=torch.int32).to("cuda"),
            softmax_scale=scale,
        )
    expected = []
    for request, (window, length) in enumerate(zip(windows, lengths, strict=True)):
        keys = torch.cat(
            [
                recent.cpu().double()[chosen[request, :window].long()],
                pages.cpu().double()[tables[request].long()].reshape(-1, WIDTH)[:length],
            ]
        )[:, None]
        expected.append(reference.attention(query.cpu()[request], keys, keys, scale, causal=False))
    return reference.compared(out.reshape(requests, heads, WIDTH), None, expected)


def controls() -> list[Control]:
    return [
        Control(
            f"decode, fp8, window and compressed rows, {heads} heads",
            PACKAGE,
            "sm_100a",
            functools.partial(_heavily_compressed, heads),
            FP8,
            lenient_tensor=True,
        )
        for heads in (128, 64)
    ]
