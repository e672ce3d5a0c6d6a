"""Lists what can be changed in a kernel: instructions that synchronise, place or bound, known by where the sources ask
for them."""

from __future__ import annotations

import collections
import dataclasses
import re

from ...run.machine import Module
from ...run.ptx.calls import place_of
from ...run.ptx.model import Source
from .actions import (
    ALWAYS_TRUE,
    B_AWAY,
    B_STRIDE,
    B_SWIZZLE,
    EARLIER,
    FEWER_BYTES,
    FEWER_REGISTERS,
    LATER,
    MORE_BYTES,
    MORE_REGISTERS,
    NEXT_BARRIER,
    NEXT_COLUMN,
    NEXT_MBARRIER,
    NEXT_ROW,
    NO_BYTES,
    OF_GLOBAL_MEMORY,
    ONE_LESS,
    ONE_MORE,
    OTHER_BOUND,
    PARITY_0,
    PARITY_1,
    PLACE_FURTHER,
    RELAXED,
    REMOVED,
    WIDER,
)

MASKS = "setp of masks"
_OF_MASKS = re.compile(r"parts/keys/visible\.(holds|meets|lacks)|mask")
"""Functions that compare keys with what a row sees."""

FAMILIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("mbarrier.try_wait", r"mbarrier\.(try|test)_wait\.", (ALWAYS_TRUE, RELAXED, NEXT_MBARRIER, PARITY_0, PARITY_1)),
    (
        "mbarrier.arrive.expect_tx",
        r"mbarrier\.arrive\.expect_tx\.",
        (REMOVED, NO_BYTES, MORE_BYTES, FEWER_BYTES, NEXT_MBARRIER),
    ),
    ("mbarrier.arrive", r"mbarrier\.arrive\.", (REMOVED, RELAXED, NEXT_MBARRIER)),
    ("mbarrier.init", r"mbarrier\.init\.", (ONE_MORE, ONE_LESS)),
    ("mbarrier.expect_tx", r"mbarrier\.expect_tx\.", (REMOVED, MORE_BYTES, FEWER_BYTES, NEXT_MBARRIER)),
    ("bar.warp.sync", r"bar\.warp\.sync", (REMOVED,)),
    ("bar.sync", r"(bar|barrier)\.(cta\.)?sync", (REMOVED, NEXT_BARRIER)),
    ("bar.arrive", r"(bar|barrier)\.(cta\.)?arrive", (REMOVED, NEXT_BARRIER)),
    ("barrier.cluster", r"barrier\.cluster\.", (REMOVED,)),
    ("fence.proxy.async", r"fence\.proxy\.async", (REMOVED, OF_GLOBAL_MEMORY)),
    ("fence.mbarrier_init", r"fence\.mbarrier_init", (REMOVED,)),
    ("wgmma.fence", r"wgmma\.fence\.", (REMOVED,)),
    ("wgmma.commit_group", r"wgmma\.commit_group\.", (REMOVED, EARLIER, LATER)),
    ("wgmma.wait_group", r"wgmma\.wait_group\.", (REMOVED,)),
    ("tcgen05.commit", r"tcgen05\.commit\.", (REMOVED, EARLIER, LATER, NEXT_MBARRIER)),
    ("tcgen05.wait::ld", r"tcgen05\.wait::ld\.", (REMOVED,)),
    ("tcgen05.wait::st", r"tcgen05\.wait::st\.", (REMOVED,)),
    ("tcgen05.fence", r"tcgen05\.fence::", (REMOVED,)),
    ("griddepcontrol.wait", r"griddepcontrol\.wait", (REMOVED,)),
    ("cp.async commit, wait, arrive", r"cp\.async\.(commit_group|wait_group|wait_all|mbarrier\.)", (REMOVED,)),
    ("cp.async.bulk.commit_group", r"cp\.async\.bulk\.commit_group", (REMOVED, EARLIER, LATER)),
    ("cp.async.bulk.wait_group", r"cp\.async\.bulk\.wait_group", (REMOVED,)),
    ("cp.async.bulk.tensor", r"cp\.async\.bulk\.tensor\.", (NEXT_ROW,)),
    ("ld, st of shared memory", r"(ld|st)\.([a-z]+\.)*shared|(ld|st)matrix\.", (PLACE_FURTHER,)),
    ("wgmma.mma_async", r"wgmma\.mma_async\.", (B_AWAY, B_STRIDE, B_SWIZZLE)),
    ("tcgen05.mma", r"tcgen05\.mma\.", (NEXT_COLUMN, WIDER, B_AWAY, B_STRIDE, B_SWIZZLE)),
    ("tcgen05.ld, st", r"tcgen05\.(ld|st)\.", (NEXT_COLUMN,)),
    ("setmaxnreg", r"setmaxnreg\.", (MORE_REGISTERS, FEWER_REGISTERS)),
    (MASKS, r"setp\.(lt|le|gt|ge|lo|ls|hi|hs)\.", (OTHER_BOUND,)),
)
"""(name, pattern of the opcodes, what is done to them); the first pattern that matches counts."""

_ORDER_ONLY = {"fence.proxy.async", "fence.mbarrier_init", "wgmma.fence", "tcgen05.fence"}


@dataclasses.dataclass(frozen=True)
class Site:
    """One instruction and what is done to it.

    A person knows it by its key: the innermost function that is not in `PARTS` ("sm90/prefill/load.load"), what that
    calls ("k.wait_full"), family and action. Unrolled loops, and functions called twice, make several of one key: this
    is number `copy` of `copies`. Where PTX does not say what led to it, family and action stand alone.
    """

    entry: str
    position: int
    function: str
    callee: str
    family: str
    action: str
    line: int
    text: str
    source: str
    copy: int = 1
    copies: int = 1

    @property
    def key(self) -> str:
        return ": ".join(part for part in (self.function, self.callee, f"{self.family} {self.action}") if part)

    @property
    def role(self) -> str:
        """File of the function, such as "sm90/prefill/load". Most roles have a file of their own."""
        return self.function.partition(".")[0] or "not known"

    @property
    def orders_only(self) -> bool:
        """Whether the change moves no value and lets nobody wait: only happens-before can see it."""
        return self.action in (RELAXED, OF_GLOBAL_MEMORY) or self.family in _ORDER_ONLY

    @property
    def label(self) -> str:
        return self.key if self.copies == 1 else f"{self.key} ({self.copy} of {self.copies})"


def sites(module: Module, entries: set[str]) -> list[Site]:
    """Return every instruction of these families, and each of their actions, of some of a module's entries, in
    order."""
    found = []
    for entry in (entry for name, entry in module.entries.items() if name in entries):
        for position, instruction in enumerate(entry.instructions):
            for name, pattern, actions in FAMILIES:
                if re.match(pattern, instruction.opcode) and (name != MASKS or _is_of_masks(instruction.source)):
                    function, callee, source = place_of(entry, position)
                    about = (instruction.line, " ".join(instruction.text.split()), source)
                    found += [Site(entry.name, position, function, callee, name, action, *about) for action in actions]
                    break
    copies = collections.Counter(site.key for site in found)
    seen: collections.Counter[str] = collections.Counter()
    numbered = []
    for site in found:
        seen[site.key] += 1
        numbered.append(dataclasses.replace(site, copy=seen[site.key], copies=copies[site.key]))
    return numbered


def _is_of_masks(at: Source | None) -> bool:
    return at is not None and any(_OF_MASKS.search(call.function) for call in at.calls)
