"""Edges of every shipped kernel: barriers, arrivals and bytes, against what is known of each without its table.

A wrong count hangs a GPU, or lets a role go on too early.
"""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import tsmla_kernels
from example_variants import run_python
from tsmla_kernels.parts.edges import NOBODY, Copies, EdgeSpec, EdgeTable, Either, Role, TensorCore, Warps

from docs import pictures
from docs.pictures import VARIANTS, schedules_of

KERNELS = Path(tsmla_kernels.__file__).parent
FIRST_WITH = {
    (kernel, schedule): variant for variant in reversed(VARIANTS) for kernel, schedule in schedules_of(variant).items()
}
SCHEDULES = [
    pytest.param(variant, kernel, schedule, id=f"{variant} {kernel}")
    for (kernel, schedule), variant in FIRST_WITH.items()
]
"""Every schedule that ships, once; many variants have the same."""
LOAD = Role("load", (0,), 40)
ATTEND = Role("attend", tuple(range(4, 12)), 232)


def arrivals(variant, kernel: str) -> dict[str, tuple[int, int]]:
    """Count, for each edge, how many arrivals fill a stage and how many empty it, as counted by hand. (Of a warpgroup:
    4.)"""
    small = variant.dtype.bits == 8
    gathers = getattr(variant, "gathers", False)
    if kernel == "sm90/prefill":
        attend = 12 if small and variant.d_v == 128 else 8
        rings = {"k": (1, attend), **({"v": (1, 3), "values": (3, attend)} if small else {"v": (1, attend)})}
        return {"q": (1, 4), **rings}
    if kernel in ("sm90/decode/row64", "sm90/decode/row64 pair"):
        pieces, leave, told = (2, 4 + 4, 2 + 1 + 8 + 4) if small else (4, 4, 2 + 1 + 8)
        fills = {f"kv{piece}": (1, leave) for piece in range(pieces)}
        if kernel == "sm90/decode/row64 pair":
            told = 1 + 8 + 4
            more = (0, 3) if gathers else (3,)  # what is told of keys, and rope pieces
            fills = {f"kv{piece}": (4 + (piece in more), 2 * leave) for piece in range(pieces)}
        elif not variant.row.apart and variant.row.scales is not None:
            told = 2 + 8 + 8
            fills |= {f"ready{piece}": (4, 0) for piece in range(pieces)}
            if gathers:  # each lane, and for what is told of keys one warp
                fills |= {f"kv{piece}": (32 + (piece == 0), leave) for piece in range(pieces)}
        elif gathers:
            told = told if small else 1 + 1 + 8 + 4
            fills |= {f"landed{piece}": (32 if small else 4 * 32, 0) for piece in range(pieces)}
        else:
            fills["landed"] = (pieces, 0)
        if small:  # one warpgroup scores, two multiply values
            scales = {"scales": (1, 4)} if variant.row.apart else {}
            return {"q": (1, 4), **fills, "exchanged": (4, 8), "ends": (4, 8), "dealt": (1, told), **scales}
        return {"q": (1, 8), **fills, "referenced": (1, 0), "exchanged": (1, 0), "dealt": (1, told)}
    if kernel == "sm90/decode/row16":
        if not gathers:
            return {"kv": (1, 4), "dealt": (1, 1 + 8)}
        warps = 3 if variant.row.scales is None else 2
        tells = 0 if variant.row.apart else warps
        return {"kv": (warps * 32 + tells, 4), "dealt": (1, warps + 8)}
    if kernel == "sm100/prefill" and variant.d_v == 256:  # four softmax and four correcting warps of each of two CTAs
        return {
            "q": (1, 1),
            "ring": (1, 1),
            "scores_full": (1, 0),
            "probabilities_early": (8 + 8, 0),
            "probabilities_late": (8, 0),
            "factors_full": (4, 0),
            "output_full": (1, 0),
        }
    if kernel == "sm100/prefill":
        return {
            "q": (1, 1),
            "ring": (1, 1),
            "scores_full": (1, 0),
            "probabilities_early": (4 + 4, 0),
            "scores_read" if small else "probabilities_late": (4, 0),
            "factors_full": (4, 0),
            "output_full": (1, 0),
            **({"turns": (1, 0)} if small else {}),
        }
    pair = kernel == "sm100/decode pair"
    rows = 8 if pair else 4
    found = {"q": (1 + pair, 1), "k": (1, 1), **({"v": (2, 1)} if pair else {}), "s": (1, rows), "p": (rows, 1)}
    if variant.row.scales is not None and not variant.row.apart:
        found |= {name: (2 * rows, 1) for name in ("k", "v") if name in found}  # eight warps of each CTA convert
    found["half"] = (1, 0)
    if gathers:
        found["there"] = (1, 4)
        if variant.row.scales is None or variant.row.apart:
            # Of each CTA, one warp makes visible what lanes of four have copied.
            found |= {name: (rows // 4, 1) for name in ("k", "v") if name in found}
            found |= {"landed_keys": (64, 0), "landed_values": (64, 0)} if pair else {"landed_keys": (128, 0)}
            if not pair and variant.dtype.bits == 16:  # the four warps also bring a part of the query
                found["q"] = (1 + 4, 1)
                found |= {"rope": (1, 1), "landed_rope": (128, 0)} if variant.row.has("rope") else {}
    return {**found, "scales": (1, 4)} if variant.row.apart else found


def sizes(variant, kernel: str) -> dict[str, int]:
    """Bytes of a stage that bulk copies fill, from the variant."""
    element = variant.dtype.bits // 8
    if kernel == "sm90/prefill":
        keys = {(1, 128): 80, (1, 256): 96, (2, 128): 128, (2, 256): 80}[element, variant.d_v]
        v = keys * variant.d_v * element
        found = {"q": 64 * variant.d_qk * element, "k": keys * variant.d_qk * element, "v": v}
        return {**found, "values": 2 * v} if element == 1 else found
    if kernel in ("sm90/decode/row64", "sm90/decode/row64 pair"):
        rope = _rope_bytes(variant)
        columns = [256, 256] if element == 1 else [128, 128, 128, 128]
        if not variant.row.apart and variant.row.scales is not None:
            made = [64 * 2 * (128 + 64 * (i == 3)) for i in range(4)]
            if kernel == "sm90/decode/row64 pair":
                return {"q": 64 * 1152, **{f"kv{i}": size for i, size in enumerate(made)}}
            stored = {"kv0": 64 * (128 + 16), "kv1": 64 * (128 + 16), "kv2": 64 * 128, "kv3": 64 * 128 + 64 * rope}
            return {"q": 64 * 1152, **stored, **{f"ready{i}": size for i, size in enumerate(made)}}
        pieces = {f"kv{i}": 64 * (width * element + rope * (i == len(columns) - 1)) for i, width in enumerate(columns)}
        row = 512 * element + rope
        landed = {"landed": 64 * row}
        if variant.gathers:
            landed = {f"landed{i}": pieces[f"kv{i}"] for i in range(len(columns))}
        return {"q": 64 * row, **pieces, **landed, **_scales(variant, 64)}
    if kernel == "sm90/decode/row16":
        if variant.row.scales is None:  # half of a tile, and 16 bytes behind each row
            return {"kv": 32 * (variant.row.bytes + 16)}
        return {"kv": 64 * (640 if variant.row.apart else 656)}
    if kernel == "sm100/prefill":
        tiles = 2 if variant.d_v == 256 else 1  # of the CTAs of a pair
        return {"q": tiles * 128 * variant.d_qk * element, "ring": 128 * 64 * element}
    row = 512 * element + _rope_bytes(variant)
    lands = variant.gathers and (variant.row.scales is None or variant.row.apart)
    if kernel == "sm100/decode pair":
        cuts = {1: 1, 2: 3 if variant.row.has("rope") else 4}
        k = 128 * row // cuts[element]
        v = 64 * 512 * element
        landed = {"landed_keys": k // 2, "landed_values": v // 2} if lands else {}
        return {"q": 128 * row, "k": k, "v": v, "p": 128 * 128 * element, **landed, **_scales(variant, 128)}
    landed = {"landed_keys": 64 * row} if lands else {}
    if lands and element == 2:  # 448 columns of the query are in tensor memory; keys' ropes have a place of their own
        rope = 64 * _rope_bytes(variant)
        ropes = {"rope": rope, "landed_rope": rope} if rope else {}
        return {"q": 64 * (row - 896), "k": 64 * 1024, "landed_keys": 64 * 1024, "p": 64 * 64 * 2, **ropes}
    return {"q": 64 * row, "k": 64 * row // element, "p": 64 * 64 * element, **landed, **_scales(variant, 64)}


def _rope_bytes(variant) -> int:
    """Bytes of a row's rope piece as products read it, if it has one."""
    return 64 * (2 if variant.row.apart else variant.dtype.bits // 8) if variant.row.has("rope") else 0


def _scales(variant, keys: int) -> dict[str, int]:
    return {"scales": keys * 3 * 4} if variant.row.apart else {}


def test_every_kernel_has_a_table():
    assert {p.values[1] for p in SCHEDULES} == {
        "sm90/prefill",
        "sm90/decode/row64",
        "sm90/decode/row64 pair",
        "sm90/decode/row16",
        "sm100/prefill",
        "sm100/decode solo",
        "sm100/decode pair",
    }


@pytest.mark.parametrize(("variant", "kernel", "schedule"), SCHEDULES)
def test_arrivals(variant, kernel, schedule):
    assert {edge.name: (edge.fills, edge.leaves) for edge in schedule.edges} == arrivals(variant, kernel)


@pytest.mark.parametrize(("variant", "kernel", "schedule"), SCHEDULES)
def test_bytes(variant, kernel, schedule):
    expected = sizes(variant, kernel)
    assert {edge.name: edge.bytes for edge in schedule.edges if edge.name in expected} == expected
    copied = {edge.name for edge in schedule.edges if any(by_copies(party) for party in edge.filled_by)}
    assert copied <= set(expected), "bytes that copies announce are stated here, too"


def by_copies(party) -> bool:
    return isinstance(party, Copies) or isinstance(party, Either) and by_copies(party.one)


@pytest.mark.parametrize(("variant", "kernel", "schedule"), SCHEDULES)
def test_barriers_do_not_overlap_and_fit(variant, kernel, schedule):
    table = schedule.edges
    taken = []
    for edge in table:
        count = edge.stages * (1 if edge.emptied_by == NOBODY else 2)
        taken += range(8 * table.first_barrier(edge.name), 8 * (table.first_barrier(edge.name) + count), 8)
    assert len(set(taken)) == len(taken)
    assert sorted(taken) == list(range(0, table.bytes, 8)), "no barrier lies between"
    assert table.bytes <= table.room


@pytest.mark.parametrize(("variant", "kernel", "schedule"), SCHEDULES)
def test_roles_are_functions_that_the_kernel_calls(variant, kernel, schedule):
    """Or its stream of keys. Each warp has one role at most, and each role that an edge names is in the table."""
    folder = KERNELS / kernel.split()[0]
    files = [*(folder / name for name in ("kernel.py", "attention.py")), *(folder / "keys").glob("*.py")]
    called = {
        node.func.id
        for file in files
        if file.exists()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert {role.name for role in schedule.roles} <= called
    warps = [warp for role in schedule.roles for warp in role.warps]
    assert len(set(warps)) == len(warps) and max(warps) < schedule.threads // 32
    for edge in schedule.edges:
        assert {*edge.writers, *edge.readers} <= set(schedule.roles), edge.name


@pytest.mark.parametrize(("variant", "kernel", "schedule"), SCHEDULES)
def test_who_fills_an_edge_again_knows_that_it_is_empty(variant, kernel, schedule):
    """Where an edge is filled again and NOBODY empties it, a role that fills it waits for something that its
    readers do: there is a way back over other edges."""
    after: dict[str, set[str]] = {}
    for edge in schedule.edges:
        for writer in edge.writers:
            after.setdefault(writer.name, set()).update(role.name for role in edge.readers)
            if edge.emptied_by and not edge.once:
                for reader in edge.readers:
                    after.setdefault(reader.name, set()).update(role.name for role in (writer, *edge.through))
    for edge in schedule.edges:
        if edge.emptied_by == NOBODY:
            for reader in edge.readers:
                reached, new = set(), {reader.name}
                while new:
                    reached |= new
                    new = {name for role in new for name in after.get(role, ())} - reached
                assert reached & {role.name for role in edge.writers}, f"{reader.name} of {edge.name}"


def test_tables_can_be_read_without_the_compiler():
    done = run_python(
        "import sys; from tsmla_kernels.parts import edges; print('cutlass' in sys.modules)",
    )
    assert done.stdout.split() == ["False"], done.stderr


def test_a_table_is_laid_out_in_its_order():
    edges = (
        EdgeSpec("a", (Copies(LOAD),), (Warps(ATTEND),), 2, 64),
        EdgeSpec("b", (TensorCore(LOAD),), NOBODY, 3, 64, read_by=(ATTEND,)),
        EdgeSpec("c", (Warps(ATTEND, 2, "one half"),), (TensorCore(LOAD),), 1, 64, once=True),
    )
    table = EdgeTable(edges, 72)
    assert [table.first_barrier(edge.name) for edge in table] == [0, 4, 7] and table.bytes == 72
    assert [(edge.fills, edge.leaves) for edge in table] == [(1, 8), (1, 0), (4, 1)]
    assert table["b"] is edges[1]
    with pytest.raises(AssertionError, match="barriers take 72 bytes and have 71"):
        EdgeTable(edges, 71)
    with pytest.raises(AssertionError, match="two edges of one name"):
        EdgeTable((*edges, edges[0]), 1000)


def test_what_an_edge_must_say():
    good = EdgeSpec("a", (Copies(LOAD),), (Warps(ATTEND),), 2, 64)
    for change, text in (
        ({"stages": 0}, None),
        ({"bytes": 0}, None),
        ({"filled_by": ()}, "nobody fills a"),
        ({"emptied_by": NOBODY}, "nobody reads a"),
        ({"emptied_by": NOBODY, "read_by": (ATTEND,), "once": True}, "who would empty a"),
    ):
        with pytest.raises(AssertionError, match=text):
            dataclasses.replace(good, **change)
    for party, text in (
        (lambda: Warps(ATTEND, 2), "which share of attend"),
        (lambda: Warps(ATTEND, 3, "a third"), None),
        (lambda: Copies(LOAD, 2), "announced in 2 steps"),
        (lambda: Either(Copies(LOAD), Warps(ATTEND)), None),
    ):
        with pytest.raises(AssertionError, match=text):
            party()


def test_a_role_of_several_ctas_arrives_in_each():
    pair = dataclasses.replace(ATTEND, ctas=2)
    assert Warps(pair).arrivals == 16
    edge = EdgeSpec("p", (Warps(pair),), (TensorCore(LOAD),), 1, 64)
    assert edge.ctas == 2 and edge.fills == 16


def test_pictures_are_current(monkeypatch, tmp_path, capsys):
    """Written by `python -m docs.pictures`."""
    assert pictures.main(["--check"]) == 0
    monkeypatch.setattr(pictures, "PAGE", tmp_path / "kernels.md")
    pictures.PAGE.write_text(pictures.page().replace("attend", "attends", 1))
    assert pictures.main(["--check"]) == 1 and "python -m docs.pictures" in capsys.readouterr().out
    assert pictures.main([]) == 0 and pictures.main(["--check"]) == 0
