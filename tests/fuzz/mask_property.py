"""tsmla_key_mask is right, whatever the lists: every bit of its words, and no byte of anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tsmla
from tsmla.problems.lists import random_lists

from .guarded import Guarded
from .mask_case import MaskCase
from .places import Place


def check(case: MaskCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    lists = drawn(case)
    with place.running(case.schedule):
        memory, given = case.manner.arrange(lambda: arranged(case, lists))
        got = case.manner.call(place, tsmla.tsmla_key_mask, memory, given).cpu()
        for name, guarded in memory.items():
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if name == "out" else None
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    assert got.dtype == torch.int32 and got.shape == (case.tokens, case.words)
    bits = np.unpackbits(got.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")
    for token in range(case.tokens):
        counted = lists[token, : case.counted(token)].tolist()
        wanted = sorted({key for key in counted if 0 <= key < case.keys})
        found = bits[token].nonzero()[0].tolist()
        assert found == wanted, f"token {token}: {sorted(set(found) ^ set(wanted))[:5]} differ"


def drawn(case: MaskCase) -> torch.Tensor:
    """Lists [tokens, top_k] int32 on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    lists = random_lists(
        case.tokens, case.top_k, (case.keys, 1), outside=case.outside / 16, distinct=case.distinct, generator=generator
    )
    for token, column, value in case.strays:
        lists[token, column] = value
    return lists.to(torch.int32)


def arranged(case: MaskCase, lists: torch.Tensor) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    at, memory = 4 * case.offset, dict[str, Guarded]()
    strides = (case.top_k + case.list_gap, 1)
    memory["indices"] = Guarded(tuple(lists.shape), torch.int32, strides, lists, at)
    given: dict[str, Any] = {"indices": memory["indices"].tensor, "keys": case.keys, "enable_pdl": case.pdl}
    if case.lengths is not None:
        content = torch.tensor(case.lengths, dtype=torch.int64 if case.wide_lengths else torch.int32)
        memory["topk_length"] = Guarded((case.tokens,), content.dtype, None, content, content.itemsize * case.offset)
        given["topk_length"] = memory["topk_length"].tensor
    if case.out:
        strides = (case.words + case.word_gap, 1)
        memory["out"] = Guarded((case.tokens, case.words), torch.int32, strides, None, at)
        given["out"] = memory["out"].tensor
    return memory, given
