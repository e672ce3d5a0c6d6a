"""The plan of decodes whose requests have various numbers of query tokens: every key of every row once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tsmla.identity.arch import Arch, Deal
from tsmla.identity.plan import (
    CALLERS_Q_LEN,
    DEALS,
    MAX_GROUP,
    PARTIAL_ROW,
    RECORD_BYTES,
    cut,
    cut_mixed,
    deal_of,
    mixed_segments,
    plan_decode,
    row_tiling,
    segments,
)

FINE, COARSE = Deal(64, 64, overhead=3, least=2, split=5, draw=32), Deal(128, 128, overhead=1, least=1, split=0)
IN_STEP = Deal(64, 64, overhead=2, least=2, split=1, in_step=2), Deal(64, 64, overhead=3, least=3, split=1, in_step=12)
MOST = st.sampled_from([1, 2, 3, 8, 17, 130])


@st.composite
def requests(draw):
    """(heads, max_q_len, query lengths, KV tiles)."""
    heads, most = draw(st.sampled_from([1, 3, 16, 96, 128])), draw(MOST)
    lengths = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, 90)), min_size=1, max_size=40))
    return heads, most, [q for q, _ in lengths], [n for _, n in lengths]


def tiles_of(deal: Deal, rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Of each row tile: earlier ones see less, some nothing."""
    counts = [-(-n // deal.row_tile) for n in rows]
    return [[max(n - 2 * (count - 1 - i), 0) for i in range(count)] for n, count in zip(lengths, counts, strict=True)]


def check(deal: Deal, most_rows: int, rows: list[int], lengths: list[int], parts: int, slots: int) -> None:
    tiles = tiles_of(deal, rows, lengths)
    mixed = cut_mixed(deal, most_rows, rows, parts, slots, lengths)
    assert 1 <= mixed.group <= MAX_GROUP and mixed.line.groups * mixed.group <= parts
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    used: dict[int, tuple[int, int, int]] = {}
    heads_of_records: dict[int, int] = {}
    for part in range(parts):
        for segment in mixed_segments(deal, mixed, lengths, tiles, part):
            seen = tiles[segment.request][segment.row_tile]
            covered.setdefault((segment.request, segment.row_tile), []).append(
                (segment.first, segment.first + segment.tiles)
            )
            assert segment.tiles > 0 or seen == 0, "an empty segment"
            assert (segment.slot < 0) == (segment.tiles == seen), "who has all writes the result, who has not does not"
            if segment.slot >= 0:
                assert segment.slot < slots and segment.slot not in used
                used[segment.slot] = (segment.request, segment.row_tile, segment.first)
                if segment.first == 0:
                    assert part not in heads_of_records, "a part's record is of one row tile"
                    heads_of_records[part] = segment.slot
    apart: dict[tuple[int, int], list[int]] = {}
    for slot, (request, row_tile, _) in sorted(used.items(), key=lambda item: item[1]):
        apart.setdefault((request, row_tile), []).append(slot)
    for found in apart.values():
        assert all(b - a == mixed.group for a, b in itertools.pairwise(found[1:])) and len(found) > 1, found
    assert covered.keys() == {(b, r) for b, own in enumerate(tiles) for r in range(len(own))}
    for (request, row_tile), spans in covered.items():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == tiles[request][row_tile]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


@settings(max_examples=300, deadline=None)
@given(case=requests(), deal=st.sampled_from([FINE, COARSE, *IN_STEP, *DEALS.values()]), parts=st.integers(8, 80),
       slots=st.sampled_from([0, 1, 7, 40, 1000]))  # fmt: skip
def test_every_key_of_every_row_once(case, deal: Deal, parts: int, slots: int) -> None:
    heads, most, q_lens, lengths = case
    check(deal, most * heads, [q * heads for q in q_lens], lengths, parts, slots)


@settings(max_examples=200, deadline=None)
@given(case=requests(), deal=st.sampled_from([FINE, COARSE, *IN_STEP, *DEALS.values()]), parts=st.integers(8, 80))
def test_without_room_for_partial_results_units_are_whole_and_shared_out(case, deal: Deal, parts: int) -> None:
    """No part has more than its share and one unit more."""
    heads, most, q_lens, lengths = case
    rows = [q * heads for q in q_lens]
    tiles = tiles_of(deal, rows, lengths)
    mixed = cut_mixed(deal, most * heads, rows, parts, 0, lengths)
    dealt = [list(mixed_segments(deal, mixed, lengths, tiles, part)) for part in range(parts)]
    assert all(s.slot == -1 and s.tiles == tiles[s.request][s.row_tile] for own in dealt for s in own)
    if mixed.line.unit == 0:
        assert max(sum(s.tiles + deal.overhead for s in own) for own in dealt) <= (
            mixed.line.chunk + max(lengths) + deal.overhead
        )


@settings(max_examples=200, deadline=None)
@given(case=requests(), sms=st.sampled_from([6, 132, 148]), arch=st.sampled_from([*Arch]))
def test_plans_of_batch_invariant_calls(case, sms: int, arch: Arch) -> None:
    """One deal for any number of rows, no slots, and no more workspace than other calls need."""
    heads, most, q_lens, lengths = case
    longest = max(*lengths, 1) * 64
    for varies in (False, True):
        usual, plan = (
            plan_decode(arch, sms, len(q_lens), most, heads, longest, varies, invariant) for invariant in (False, True)
        )
        assert plan.slots == 0 and plan.workspace_bytes == plan.records * RECORD_BYTES <= usual.workspace_bytes
        assert plan.row_tile == DEALS[arch].row_tile


@settings(max_examples=200, deadline=None)
@given(case=requests(), sms=st.sampled_from([6, 132, 148]), arch=st.sampled_from([*Arch]), longest=st.none() | MOST)
def test_plans_have_room_for_what_may_come(case, sms: int, arch: Arch, longest: int | None) -> None:
    """Records of all parts where requests may differ, within the callers' formula; and the device's cut fits in."""
    heads, most, q_lens, lengths = case
    rows, deal = most * heads, deal_of(arch, most * heads)
    tiles = max(*lengths, 1) if longest is None else longest
    plan = plan_decode(arch, sms, len(q_lens), most, heads, tiles * deal.tile_kv, True)
    formula = sms * heads * max(most, CALLERS_Q_LEN) * PARTIAL_ROW * 4
    if plan.records * 32 < formula:
        assert plan.workspace_bytes <= formula
    assert plan.row_tiles == 1 or plan.records == plan.parts
    assert plan.row_tiles > 1 or plan == plan_decode(arch, sms, len(q_lens), most, heads, tiles * deal.tile_kv)
    if plan.parts >= row_tiling(rows, deal.row_tile).group:
        check(deal, rows, [q * heads for q in q_lens], lengths, plan.parts, plan.slots)


@settings(max_examples=100, deadline=None)
@given(heads=st.sampled_from([3, 16, 128]), q_len=MOST, lengths=st.lists(st.integers(0, 90), min_size=1, max_size=30))
def test_one_query_length_is_cut_as_without_a_pack(heads: int, q_len: int, lengths: list[int]) -> None:
    rows = q_len * heads
    tiling = row_tiling(rows, FINE.row_tile)
    tiles = tiles_of(FINE, [rows] * len(lengths), lengths)
    mixed = cut_mixed(FINE, rows, [rows] * len(lengths), 40, 60, lengths)
    line = cut(FINE, tiling, 40, 60, lengths)
    for part in range(40):
        expected = list(segments(FINE, tiling, line, lengths, tiles, part))
        assert list(mixed_segments(FINE, mixed, lengths, tiles, part)) == expected


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("long", [64, 128, 512])
def test_long_requests_among_short_ones_occupy_the_gpu(heads: int, long: int) -> None:
    """28 requests of one query token and 4 of many: the busiest part has no more than its share and a fixed cost."""
    q_lens, lengths = [1] * 28 + [long] * 4, [512] * 32
    deal = DEALS[Arch.SM90A]
    plan = plan_decode(Arch.SM90A, 132, 32, long, heads, 32768, True)
    rows = [q * heads for q in q_lens]
    mixed = cut_mixed(deal, max(rows), rows, plan.parts, plan.slots, lengths)
    tiles = [[n] * -(-own // deal.row_tile) for n, own in zip(lengths, rows, strict=True)]
    work = [sum(s.tiles + deal.overhead for s in mixed_segments(deal, mixed, lengths, tiles, part))
            for part in range(plan.parts)]  # fmt: skip
    share = sum(deal.overhead + n for own in tiles for n in own) / plan.parts
    # A round of a request whose row tiles do not fill it leaves CTAs idle.
    assert max(work) <= 1.07 * share + deal.overhead


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("keys", [24576, 32768, 81920])
@pytest.mark.parametrize("long", [64, 128, 512])
def test_row_tiles_of_a_request_walk_its_keys_together(heads: int, keys: int, long: int) -> None:
    """Tiles of the cache that are asked for at the same time, each counted once, over those of short requests and, for
    long ones, three times theirs: those that began, those with an earlier start, and those that end."""
    tiles_each = keys // 64
    q_lens, lengths = [1] * 28 + [long] * 4, [tiles_each] * 32
    deal, rows = DEALS[Arch.SM90A], [q * heads for q in q_lens]
    plan = plan_decode(Arch.SM90A, 132, 32, long, heads, keys, True)
    mixed = cut_mixed(deal, max(rows), rows, plan.parts, plan.slots, lengths)
    tiles = [[n] * -(-own // deal.row_tile) for n, own in zip(lengths, rows, strict=True)]
    walks = [
        [(s.request, s.first + i) for s in mixed_segments(deal, mixed, lengths, tiles, part) for i in range(s.tiles)]
        for part in range(plan.parts)
    ]
    asked = sum(len({walk[step] for walk in walks if step < len(walk)}) for step in range(max(map(len, walks))))
    passes = -(-mixed.line.chunk // tiles_each)
    assert asked <= 28 * tiles_each + 4 * (passes + 2) * tiles_each
