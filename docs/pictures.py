"""Writes docs/contribute/kernels.md from the kernels' tables of roles and edges.

python -m docs.pictures [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tsmla.identity.arch import Arch
from tsmla.identity.variant import DecodeVariant, PrefillVariant, Variant
from tsmla_kernels.parts.edges import Copies, EdgeSpec, Either, LaneCopies, Role, TensorCore, roles_of
from tsmla_kernels.sm90.decode.forms import ONE_CTA, PAIR_OF_CTAS, WARP_PRODUCTS, forms_of
from tsmla_kernels.sm90.decode.row16.schedule import FewRowsSchedule
from tsmla_kernels.sm90.decode.row64.schedule import DecodeSchedule as HopperDecode
from tsmla_kernels.sm90.prefill.geometry import PrefillGeometry as HopperPrefillGeometry
from tsmla_kernels.sm90.prefill.schedule import PrefillSchedule as HopperPrefill
from tsmla_kernels.sm100.decode.geometry import DecodeGeometry as BlackwellDecodeGeometry
from tsmla_kernels.sm100.decode.schedule import DecodeSchedule as BlackwellDecode
from tsmla_kernels.sm100.prefill.schedule import PrefillSchedule as BlackwellPrefill

from build_aot.matrix import shipped

PAGE = Path(__file__).parent / "contribute" / "kernels.md"
VARIANTS = [v for v in shipped() if isinstance(v, PrefillVariant | DecodeVariant)]
"""The shipped variants whose kernels have roles and edges."""
HOPPER_PREFILL, HOPPER_DECODE, BLACKWELL_PREFILL = "sm90/prefill", "sm90/decode/row64", "sm100/prefill"
HOPPER_FEW_ROWS, HOPPER_PAIR = "sm90/decode/row16", "sm90/decode/row64 pair"
BLACKWELL_SOLO, BLACKWELL_PAIR = "sm100/decode solo", "sm100/decode pair"

SECTIONS = (
    ("Hopper prefill, 16-bit inputs", HOPPER_PREFILL, (16,)),
    ("Hopper prefill, 8-bit inputs", HOPPER_PREFILL, (8,)),
    ("Hopper prefill of heads of 256 dims, 16-bit inputs", HOPPER_PREFILL, (16,), "none", 256),
    ("Hopper prefill of heads of 256 dims, 8-bit inputs", HOPPER_PREFILL, (8,), "none", 256),
    ("Hopper decode, 16-bit cache", HOPPER_DECODE, (16,)),
    ("Hopper decode, 8-bit cache", HOPPER_DECODE, (8,)),
    ("Hopper decode, 8-bit cache with a scale for each key", HOPPER_DECODE, (8,), "apart"),
    ("Hopper decode, 8-bit cache with a scale for each key, up to 16 query rows", HOPPER_FEW_ROWS, (8,), "apart"),
    ("Hopper decode, cache of 656-byte rows, requests of more than 16 query rows", HOPPER_DECODE, (16,), "in a row"),
    ("Hopper decode, cache of 656-byte rows, multiples of 128 heads", HOPPER_PAIR, (16,), "in a row"),
    ("Hopper decode, cache of 656-byte rows, requests of up to 16 query rows", HOPPER_FEW_ROWS, (16,), "in a row"),
    ("Hopper decode of chosen keys, 16-bit cache", HOPPER_DECODE, (16,), "none, gathered"),
    ("Hopper decode of chosen keys, bf16 cache, up to 16 heads", HOPPER_FEW_ROWS, (16,), "none, gathered"),
    ("Hopper decode of chosen keys, 8-bit cache", HOPPER_DECODE, (8,), "none, gathered"),
    ("Hopper decode of chosen keys, a scale for each, more than 16 heads", HOPPER_DECODE, (8,), "apart, gathered"),
    ("Hopper decode of chosen keys, a scale for each, up to 16 heads", HOPPER_FEW_ROWS, (8,), "apart, gathered"),
    ("Hopper decode of chosen keys, 656-byte rows, more than 16 heads", HOPPER_DECODE, (16,), "in a row, gathered"),
    ("Hopper decode of chosen keys, 656-byte rows, multiples of 128 heads", HOPPER_PAIR, (16,), "in a row, gathered"),
    ("Hopper decode of chosen keys, 656-byte rows, up to 16 heads", HOPPER_FEW_ROWS, (16,), "in a row, gathered"),
    ("Blackwell prefill, 16-bit inputs", BLACKWELL_PREFILL, (16,)),
    ("Blackwell prefill, 8-bit inputs", BLACKWELL_PREFILL, (8,)),
    ("Blackwell prefill of heads of 256 dims, 16-bit and 8-bit inputs", BLACKWELL_PREFILL, (16, 8), "none", 256),
    ("Blackwell decode, 8-bit cache, up to 64 query rows", BLACKWELL_SOLO, (8,)),
    ("Blackwell decode, 16-bit cache, and 8-bit cache of more than 64 query rows", BLACKWELL_PAIR, (16, 8)),
    ("Blackwell decode with a scale for each key, up to 64 query rows", BLACKWELL_SOLO, (8,), "apart"),
    ("Blackwell decode with a scale for each key, more than 64 query rows", BLACKWELL_PAIR, (8,), "apart"),
    ("Blackwell decode, cache of 656-byte rows, up to 64 query rows", BLACKWELL_SOLO, (16,), "in a row"),
    ("Blackwell decode, cache of 656-byte rows, more than 64 query rows", BLACKWELL_PAIR, (16,), "in a row"),
    ("Blackwell decode of chosen keys, 16-bit cache, up to 64 heads", BLACKWELL_SOLO, (16,), "none, gathered"),
    ("Blackwell decode of chosen keys, 8-bit cache, up to 64 heads", BLACKWELL_SOLO, (8,), "none, gathered"),
    ("Blackwell decode of chosen keys, a scale for each, up to 64 heads", BLACKWELL_SOLO, (8,), "apart, gathered"),
    ("Blackwell decode of chosen keys, a scale for each, more than 64 heads", BLACKWELL_PAIR, (8,), "apart, gathered"),
    ("Blackwell decode of chosen keys, 656-byte rows, up to 64 heads", BLACKWELL_SOLO, (16,), "in a row, gathered"),
    ("Blackwell decode of chosen keys, 656-byte rows, more than 64 heads", BLACKWELL_PAIR, (16,), "in a row, gathered"),
    ("Blackwell decode of chosen keys, more than 64 heads", BLACKWELL_PAIR, (16, 8), "none, gathered"),
)

DOES = {
    "load": "copies queries, keys and values into shared memory, but for what another role brings",
    "widen_values": "makes float16 of 8-bit values for the second product",
    "attend": "makes probabilities, rescales outputs, writes the rows; on Hopper it issues the products, too",
    "attend_turned": "adds up values, which it widens on the way to registers, for rows as columns; writes the rows",
    "score_tiles": "scores keys, and makes probabilities, for the warpgroups that add up values",
    "clean": "writes zeros over keys that no row may see; where keys have a scale each, fills `scales`",
    "deal": "finds the CTA's share of the work and tells it to the others, a task at a time",
    "load_few": "copies tiles of keys as they are stored",
    "attend_few": "multiplies stored rows by `mma.sync`, a team of four warps every other tile",
    "convert": "makes bf16 of stored rows",
    "convert_for_both": "loads half of a tile's keys, makes bf16 of them, and writes these to both CTAs",
    "softmax": "makes probabilities of one query tile's scores, a warpgroup a tile",
    "correct": "rescales outputs and writes the rows",
    "multiply": "issues the products of scores and values",
    "load_keys": "copies queries and keys; of single CTAs, keys are also the values",
    "load_values": "copies half of the latent columns of all keys of the pair",
    "load_scales": "brings the scale of each key, its logarithm and its inverse",
    "load_queries": "copies queries",
    "gather_rope": "copies queries, and rope pieces one by one; tells which keys are there",
    "gather_rows": "copies rows, or some strips of them, one by one; with 8 bits, queries too",
    "gather_stored": "copies queries, and strips of stored rows one by one; tells which keys are there",
    "gather_keys": "copies rows one by one, which single CTAs also take for values, and 16-bit queries of these",
    "gather_values": "copies half of the latent columns of all keys of the pair, one by one",
    "gather_few": "copies stored rows, and scales that lie apart, one by one; tells which keys are there",
    "tell_rows": "hands over strips that have landed; tells which keys are there",
    "tell_scaled_rows": "hands over strips that have landed; tells which keys are there; brings scales of keys",
    "convert_keys": "loads stored rows and makes bf16 of them",
}
"""Name of a role -> what its warps do."""

BEGINNING = """\
# Kernels: who does what, and who waits for whom

The warps of a kernel have *roles*: each role runs one function. What roles hand each other, they hand over on *edges*:
an edge has a number of *stages*, places in shared memory or in tensor memory, which some roles fill and others empty,
in turn. A role that waits for an edge waits until a stage is full; a role that fills one waits until all that release
it have left the stage.

In the pictures, an arrow leads from a role that fills an edge to a role that reads it, with the number of stages. It is
dotted where the reader does not say when it has left a stage. Where 16-bit and 8-bit kernels differ in numbers only,
both are given: 16 bits / 8 bits. Prefill is shown with head dims (192, 128), where nothing else is said, and a causal
mask; decode with rows of 512 latent and 64 rope numbers. Kernels of chosen keys also serve dense calls on pages of
fewer than 16 keys and on caches in two tensors. With a key mask, a kernel
without roles lists the tiles that hold a key which some row sees (`prefill/visits.py`); prefill has the same roles.

This page is written by `python -m docs.pictures` from the tables in each kernel's `schedule.py`, which also give
barriers their places and counts, and say in words what is not a table.
"""


def schedules_of(variant: Variant) -> dict[str, Any]:
    """Return the schedule of each kernel of a variant, by the kernel's folder in tsmla_kernels and, where a folder has
    two, its kind."""
    if isinstance(variant, PrefillVariant):
        if variant.arch is Arch.SM90A:
            return {HOPPER_PREFILL: HopperPrefill.of(HopperPrefillGeometry.of(variant))}
        return {BLACKWELL_PREFILL: BlackwellPrefill.of(variant)}
    if variant.arch is Arch.SM90A:
        forms = forms_of(variant)
        found: dict[str, Any] = {HOPPER_DECODE: HopperDecode.of(forms[ONE_CTA])}
        if PAIR_OF_CTAS in forms:
            found[HOPPER_PAIR] = HopperDecode.of(forms[PAIR_OF_CTAS])
        if WARP_PRODUCTS in forms:
            found[HOPPER_FEW_ROWS] = FewRowsSchedule(forms[WARP_PRODUCTS])
        return found
    few, pair = (BlackwellDecode(of(variant)) for of in (BlackwellDecodeGeometry.few, BlackwellDecodeGeometry.pair))
    return {BLACKWELL_PAIR: pair} if few.geometry.is_pair else {BLACKWELL_SOLO: few, BLACKWELL_PAIR: pair}


def page() -> str:
    return "\n".join([BEGINNING, *(section(*each) for each in SECTIONS)])


def section(title: str, kernel: str, widths: tuple[int, ...], scales: str = "none", d_qk: int = 192) -> str:
    """Return the page's section on a kernel. scales: where a decode's cache has them, as `kind_of` says. d_qk: a
    prefill's."""
    schedules = [shown(kernel, bits, scales, d_qk) for bits in widths]
    first, tables = schedules[0], [list(schedule.edges) for schedule in schedules]
    edges = list(zip(*tables, strict=True))
    roles = list(zip(*(schedule.roles for schedule in schedules), strict=True))
    return "\n".join(
        [
            f"## {title}",
            "",
            f"Source: `kernels/tsmla_kernels/{kernel.split()[0]}/`.",
            "",
            *picture(roles, edges),
            "",
            "| role | what it does | waits for | fills | releases |",
            "| --- | --- | --- | --- | --- |",
            *(f"| {' | '.join(cells(same[0], list(first.edges)))} |" for same in roles),
            "",
        ]
    )


def cells(role: Role, edges: list[EdgeSpec]) -> list[str]:
    """Return a role's row of the table: its edges by what it does with them."""
    waits = [edge.name for edge in edges if role in edge.readers]
    fills = [edge.name + kind(role, edge) for edge in edges if role in edge.writers]
    leaves = [edge.name for edge in edges if role in roles_of(edge.emptied_by) and not edge.once]
    lists = [", ".join(names) or "-" for names in (waits, fills, leaves)]
    return [f"`{role.name}`, {warps(role)}", DOES[role.name], *lists]


def kind(role: Role, edge: EdgeSpec) -> str:
    """Return how a role fills an edge where it does not store by itself."""
    parties = [one for x in edge.filled_by for one in ((x.one, x.other) if isinstance(x, Either) else (x,))]
    of_role = [party for party in parties if party.role == role]
    copies, products = (any(isinstance(x, of) for x in of_role) for of in (Copies | LaneCopies, TensorCore))
    return " (copies)" if copies else " (MMAs)" if products else ""


def kind_of(variant: Variant) -> str:
    """Return where the scales of a decode's cache rows lie, in a word, and whether rows are gathered; of a prefill,
    "none" where it is causal and has no key mask, as the page shows it."""
    if isinstance(variant, PrefillVariant):
        return "none" if variant.causal and not variant.masked else "another"
    assert isinstance(variant, DecodeVariant)
    place = "none" if variant.row.scales is None else "apart" if variant.row.apart else "in a row"
    return f"{place}, gathered" if variant.gathers else place


def shown(kernel: str, bits: int, scales: str, d_qk: int) -> Any:
    """Return a kernel's schedule with inputs of so many bits: that of the first such variant."""
    return next(
        schedules_of(v)[kernel]
        for v in VARIANTS
        if v.dtype.bits == bits
        and kernel in schedules_of(v)
        and kind_of(v) == scales
        and (v.row.has("rope") if isinstance(v, DecodeVariant) else v.d_qk == d_qk)
    )


def both(values: Iterable[object]) -> str:
    """Return the value, or the values for 16 and for 8 bits where they differ."""
    return " / ".join(dict.fromkeys(str(value) for value in values))


def picture(roles: list[tuple[Role, ...]], edges: list[tuple[EdgeSpec, ...]]) -> list[str]:
    """Return a Mermaid flowchart. Edges between the same roles share an arrow."""
    lines = ["```mermaid", "flowchart LR"]
    ctas = max(same[0].ctas for same in roles)
    for same in roles:
        role = same[0]
        of_each = " of each CTA" if role.ctas > 1 else " of the leader" if ctas > 1 else ""
        registers = both(each.registers for each in same)
        lines.append(f'    {role.name}["{role.name}<br>{warps(role)}{of_each}<br>{registers} registers a thread"]')
    arrows: dict[tuple[str, str, str], list[str]] = {}
    for same in edges:
        edge = same[0]
        emptying = () if edge.once else roles_of(edge.emptied_by)
        label = f"{edge.name} ({both(e.stages for e in same)})"
        for writer in edge.writers:
            for reader in edge.readers:
                arrow = "-->" if reader in emptying else "-.->"
                arrows.setdefault((writer.name, arrow, reader.name), []).append(label)
    lines += [f'    {a} {arrow}|"{", ".join(labels)}"| {b}' for (a, arrow, b), labels in arrows.items()]
    return [*lines, "```"]


def warps(role: Role) -> str:
    """Return a role's warps in words, such as "warps 0, 4-11"."""
    runs: list[list[int]] = []
    for warp in role.warps:
        if runs and warp == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], warp]
        else:
            runs.append([warp, warp])
    text = ", ".join(f"{run[0]}-{run[-1]}" if run[0] < run[-1] else f"{run[0]}" for run in runs)
    return f"warp{'s' if len(role.warps) > 1 else ''} {text}"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        current = PAGE.read_text() == page()
        print(f"{PAGE.name} is as the tables say" if current else f"{PAGE.name} is old; run python -m docs.pictures")
        return int(not current)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
