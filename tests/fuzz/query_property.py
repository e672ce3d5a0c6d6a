"""mla_quantize_q is right, whatever the case: every number of its results, and no byte of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tsmla

from .cache_property import judge_snapmla, random_rows
from .guarded import Guarded, strides
from .places import Place
from .query_case import QueryCase

_RESULTS = {"nope_out": (512, torch.float8_e4m3fn), "rope_out": (64, torch.bfloat16), "scale_out": (1, torch.float32)}


def check(case: QueryCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    rows = drawn(case)
    with place.running(case.schedule):
        memory, given = case.manner.arrange(lambda: arranged(case, rows))
        results = [tensor.cpu() for tensor in case.manner.call(place, tsmla.mla_quantize_q, memory, given)]
        for name, guarded in memory.items():
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if name in _RESULTS else None
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    results[2] = results[2][..., None]
    for (name, (width, dtype)), got in zip(_RESULTS.items(), results, strict=True):
        assert got.dtype == dtype and got.shape == (*case.outer, width), f"{name} is {got.dtype} of {tuple(got.shape)}"
    nope, rope, scales = (got.reshape(len(rows), got.shape[-1]) for got in results)
    for index, row in enumerate(rows):
        codes = nope[index].view(torch.uint8).numpy()
        judge_snapmla(row, codes, rope[index], np.asarray(scales[index]), case.rounded, f"row {index}")


def drawn(case: QueryCase) -> torch.Tensor:
    """[rows, 576] on the CPU."""
    return random_rows(case.batch * case.q_len * case.heads, torch.bfloat16, case.values, case.seed)


def arranged(case: QueryCase, rows: torch.Tensor) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    pieces = [rows] if len(case.layouts) == 1 else list(rows.split((512, 64), -1))
    memory, tensors = {}, []
    for index, (piece, layout) in enumerate(zip(pieces, case.layouts, strict=True)):
        memory[f"query[{index}]"] = _laid_out(case, piece.shape[1], piece.dtype, layout, piece)
        tensors.append(memory[f"query[{index}]"].tensor)
    given: dict[str, Any] = {"query": tensors[0] if len(tensors) == 1 else tuple(tensors)}
    for (name, (width, dtype)), layout in zip(_RESULTS.items(), case.outs, strict=True):
        if layout != "new":
            memory[name] = _laid_out(case, width, dtype, layout, None)
            given[name] = memory[name].tensor[..., 0] if name == "scale_out" else memory[name].tensor
    return memory, {**given, "power_of_two_scales": case.rounded, "enable_pdl": case.pdl}


def _laid_out(case: QueryCase, width: int, dtype: torch.dtype, layout: str, content: torch.Tensor | None) -> Guarded:
    """[..., width] of the case; where it has three outer dimensions, the first two lie as one would."""
    token, head, last = strides(layout, (case.batch * case.q_len, case.heads, width), dtype.itemsize)
    outer = (token, head, last) if case.packed else (case.q_len * token, token, head, last)
    shape = (*case.outer, width)
    return Guarded(shape, dtype, outer, None if content is None else content.reshape(shape))
