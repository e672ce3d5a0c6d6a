"""Key masks of `tsmla selftest`: a case's lists, the call that a variant serves, and what it must give."""

from __future__ import annotations

import torch

from ..identity.key_mask import MASK_BITS, words_for
from ..identity.variant import KeyMaskVariant
from ..operators.key_mask import tsmla_key_mask
from .cases import MaskCase
from .kept import kept
from .lists import NOWHERE, named_slots, random_lists
from .memory import Memory, surrounded
from .prefill import mask_words
from .reference import Judged, compared

_GAP = 3
"""Elements between the rows of strided lists and words."""
_PASS, _UNCOUNTED = 131072, 77
"""Keys that the kernel has in shared memory at a time, and one whose index does not count."""


def run(variant: KeyMaskVariant, case: MaskCase, memory: Memory, pdl: bool) -> dict[str, torch.Tensor]:
    """Call the operator; the result lies in memory of `memory`."""
    indices, _ = _problem(case)
    gap = _GAP if case.strided else 0
    if case.strided:
        given = surrounded((case.tokens, case.top_k + gap), torch.int32)[:, : case.top_k].copy_(indices)
    else:
        given = indices.clone()  # with nothing behind it
    out = memory.allocate((case.tokens, words_for(case.keys)), torch.int32, gap=gap)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda") if case.lengths else None
    return {"mask": tsmla_key_mask(given, case.keys, topk_length=lengths, out=out, enable_pdl=pdl)}


def check(variant: KeyMaskVariant, case: MaskCase, results: dict[str, torch.Tensor]) -> Judged:
    """Compare the result of `run` with torch: equal words."""
    return compared(results, {"mask": _problem(case)[1]})


@kept("key_mask")
def _problem(case: MaskCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a case's lists, and the words that they must become."""
    indices = random_lists(case.tokens, case.top_k, (case.keys, 1), outside=case.outside, distinct=case.distinct)
    if case.edges:
        last = case.keys - 1
        edges = torch.tensor([0, -1, last, last + 1, _PASS - 1, _PASS, NOWHERE[1], NOWHERE[2]])
        indices[:] = -1
        for own, length in zip(indices, case.lengths, strict=True):
            own[length - len(edges) : length] = edges
            own[length] = _UNCOUNTED
    words = []
    for named in named_slots(indices, case.keys, case.lengths or None):
        bits = torch.zeros(1, words_for(case.keys) * MASK_BITS, dtype=torch.bool)
        bits[0, named] = True
        words.append(mask_words(bits))
    return indices.int().to("cuda"), torch.cat(words).to("cuda")
