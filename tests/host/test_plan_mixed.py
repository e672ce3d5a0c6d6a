"""The plan of decodes whose requests have various numbers of query tokens: every key of every row once."""

from __future__ import annotations

import pytest
from decode_deal import check, work
from hypothesis import given, settings
from hypothesis import strategies as st
from tsmla.identity.arch import Arch, Deal
from tsmla.identity.plan import (
    CALLERS_Q_LEN,
    DEALS,
    MAX_GROUP,
    PARTIAL_ROW,
    RECORD_BYTES,
    deal_of,
    plan_decode,
    row_tiling,
)
from tsmla_emulator.dealt import Sight, deal_out

FINE, COARSE = Deal(64, 64, overhead=3, least=2, split=5, draw=32), Deal(128, 128, overhead=1, least=1, split=0)
IN_STEP = Deal(64, 64, overhead=2, least=2, split=1, in_step=2), Deal(64, 64, overhead=3, least=3, split=1, in_step=12)
MOST = st.sampled_from([1, 2, 3, 8, 17, 130])


@st.composite
def requests(draw):
    """(heads, query lengths, keys): few keys of many, so that tiles begin and end anywhere."""
    heads, most = draw(st.sampled_from([1, 3, 16, 96, 128])), draw(MOST)
    lengths = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, 5800)), min_size=1, max_size=40))
    return heads, [q for q, _ in lengths], [n for _, n in lengths]


@settings(max_examples=300, deadline=None)
@given(
    case=requests(),
    deal=st.sampled_from([FINE, COARSE, *IN_STEP, *DEALS.values()]),
    workers=st.integers(8, 80),
    slots=st.sampled_from([0, 1, 7, 40, 1000]),
)
def test_every_key_of_every_row_once(case, deal: Deal, workers: int, slots: int) -> None:
    heads, q_lens, seq_lens = case
    line = check(deal, seq_lens, q_lens, heads, workers, slots).line
    group = line.own_group or line.terms.group.value
    assert 1 <= group <= MAX_GROUP and line.groups * group <= workers


@settings(max_examples=200, deadline=None)
@given(case=requests(), deal=st.sampled_from([FINE, COARSE, *IN_STEP, *DEALS.values()]), workers=st.integers(8, 80))
def test_without_room_for_partial_results_units_are_whole_and_shared_out(case, deal: Deal, workers: int) -> None:
    """No worker has more than its share and one unit more."""
    heads, q_lens, seq_lens = case
    dealt = check(deal, seq_lens, q_lens, heads, workers, 0)
    if dealt.line.unit_length == 0:
        longest = -(-max(seq_lens) // deal.tile_kv)
        assert max(work(deal, dealt)) <= dealt.line.chunk + longest + deal.overhead


@settings(max_examples=200, deadline=None)
@given(case=requests(), deal=st.sampled_from([FINE, COARSE, *IN_STEP, *DEALS.values()]), workers=st.integers(8, 80))
def test_no_worker_has_more_than_a_chunk(case, deal: Deal, workers: int) -> None:
    """Where there is room for all partial results: its positions' tiles, and a fixed cost that other positions have."""
    heads, q_lens, seq_lens = case
    dealt = deal_out(deal, seq_lens, q_lens, heads, workers, 1000)
    line = dealt.line
    assert line.chunk * line.groups >= line.total
    assert max(sum(s.tiles for s in own) for own in dealt.segments) <= line.chunk
    shares = -(-line.total // line.groups)
    if line.own_group:
        assert line.chunk == max(shares, deal.least)


@settings(max_examples=200, deadline=None)
@given(case=requests(), deal=st.sampled_from([FINE, COARSE, *IN_STEP, *DEALS.values()]), workers=st.integers(8, 80))
def test_keys_are_read_once_where_that_costs_little(case, deal: Deal, workers: int) -> None:
    """Where requests differ in row tiles, groups are of as many workers as the fewest keep busy, unless those for the
    most have little more to do each. Those are cut as if all requests had the most, where one warp deals."""
    heads, q_lens, seq_lens = case
    line = deal_out(deal, seq_lens, q_lens, heads, workers, 1000).line
    alike = deal_out(deal, seq_lens, [max(q_lens) if q else 0 for q in q_lens], heads, workers, 1000).line
    row_tiles = [-(-q * heads // deal.row_tile) for q in q_lens if q]
    if not row_tiles or min(row_tiles) == max(row_tiles):
        assert (line.own_group, line.chunk) == (0, alike.chunk)
        return
    each = [-(-n // deal.tile_kv) + deal.overhead for n, q in zip(seq_lens, q_lens, strict=True) if q]

    def chunk(group: int) -> int:
        total = sum(length * -(-tiles // group) for length, tiles in zip(each, row_tiles, strict=True))
        return max(-(-total // min(workers // group, 1000 // group // 2 + 1)), deal.least)

    few = min(*row_tiles, MAX_GROUP, workers)
    of_few, most = (few, chunk(few)), row_tiling(max(q_lens) * heads, deal.row_tile)
    if deal.in_step:
        once = most.rounds == 1 and alike.chunk <= of_few[1] + 3 * of_few[1] // (8 * few) + 1
        of_many = 0, alike.chunk
    else:
        of_many = most.group, chunk(most.group)
        little = of_few[1] // (8 * few * few)
        once = most.rounds == 1 and most.group > few and of_many[1] - of_few[1] <= little
    assert (line.own_group, line.chunk) == (of_many if once else of_few)


@pytest.mark.parametrize(
    ("q_lens", "heads", "group"),
    [
        ([8] * 40 + [2], 16, 0),
        ([8] * 30 + [2] * 10, 16, 0),
        ([8] * 10 + [2] * 30, 16, 1),
        ([8, 1] * 4, 16, 0),
        ([2] * 64 + [1], 128, 0),
        ([2] * 40 + [1] * 24, 128, 2),
        ([2, 1] * 2, 128, 0),
        ([4, 1, 1, 1] * 4, 128, 2),
        ([100] + [2] * 40, 128, 4),
    ],
)
def test_groups_of_steps_that_engines_make(q_lens: list[int], heads: int, group: int) -> None:
    plan = plan_decode(Arch.SM90A, 132, len(q_lens), max(q_lens), heads, 4105, True)
    dealt = check(DEALS[Arch.SM90A], [4105] * len(q_lens), q_lens, heads, plan.workers, plan.slots)
    assert dealt.line.own_group == group


@settings(max_examples=200, deadline=None)
@given(case=requests(), sms=st.sampled_from([6, 132, 148]), arch=st.sampled_from([*Arch]))
def test_plans_of_batch_invariant_calls(case, sms: int, arch: Arch) -> None:
    """One deal for any number of rows, no slots, and no more workspace than other calls need."""
    heads, q_lens, seq_lens = case
    most, longest = max(*q_lens, 1), max(*seq_lens, 1)
    for varies in (False, True):
        usual, plan = (
            plan_decode(arch, sms, len(q_lens), most, heads, longest, varies, invariant) for invariant in (False, True)
        )
        assert plan.slots == 0 and plan.workspace_bytes == plan.records * RECORD_BYTES <= usual.workspace_bytes
        assert plan.row_tile == DEALS[arch].row_tile


@settings(max_examples=200, deadline=None)
@given(case=requests(), sms=st.sampled_from([6, 132, 148]), arch=st.sampled_from([*Arch]), longest=st.none() | MOST)
def test_plans_have_room_for_what_may_come(case, sms: int, arch: Arch, longest: int | None) -> None:
    """Records of all workers where requests may differ, within the callers' formula; and the device's cut fits in."""
    heads, q_lens, seq_lens = case
    most = max(*q_lens, 1)
    rows, deal = most * heads, deal_of(arch, most * heads)
    keys = max(*seq_lens, 1) if longest is None else longest * deal.tile_kv
    plan = plan_decode(arch, sms, len(q_lens), most, heads, keys, True)
    formula = sms * heads * max(most, CALLERS_Q_LEN) * PARTIAL_ROW * 4
    if plan.records * RECORD_BYTES < formula:
        assert plan.workspace_bytes <= formula
    assert plan.row_tiles == 1 or plan.records == plan.workers
    assert plan.row_tiles > 1 or plan == plan_decode(arch, sms, len(q_lens), most, heads, keys)
    if plan.workers >= row_tiling(rows, deal.row_tile).group:
        check(deal, seq_lens, q_lens, heads, plan.workers, plan.slots)


@settings(max_examples=100, deadline=None)
@given(heads=st.sampled_from([3, 16, 128]), q_len=MOST, seq_lens=st.lists(st.integers(0, 5800), min_size=1))
def test_one_query_length_is_cut_as_without_a_pack(heads: int, q_len: int, seq_lens: list[int]) -> None:
    one = deal_out(FINE, seq_lens, q_len, heads, 40, 60)
    assert deal_out(FINE, seq_lens, [q_len] * len(seq_lens), heads, 40, 60).segments == one.segments


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("long", [64, 128, 512])
def test_long_requests_among_short_ones_occupy_the_gpu(heads: int, long: int) -> None:
    """28 requests of one query token and 4 of many: the busiest worker has no more than its share and a fixed cost."""
    q_lens, seq_lens, deal = [1] * 28 + [long] * 4, [32768] * 32, DEALS[Arch.SM90A]
    plan = plan_decode(Arch.SM90A, 132, 32, long, heads, 32768, True)
    dealt = check(deal, seq_lens, q_lens, heads, plan.workers, plan.slots)
    share = sum(-(-q * heads // deal.row_tile) * (512 + deal.overhead) for q in q_lens) / plan.workers
    # A round of a request whose row tiles do not fill it leaves CTAs idle.
    assert max(work(deal, dealt)) <= 1.07 * share + deal.overhead


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("keys", [24576, 32768, 81920])
@pytest.mark.parametrize("long", [64, 128, 512])
def test_row_tiles_of_a_request_walk_its_keys_together(heads: int, keys: int, long: int) -> None:
    """Tiles of the cache that are asked for at the same time, each counted once, over those of short requests and, for
    long ones, three times theirs: those that began, those with an earlier start, and those that end. All rows see all
    keys."""
    tiles_each = keys // 64
    q_lens, seq_lens, deal = [1] * 28 + [long] * 4, [keys] * 32, DEALS[Arch.SM90A]
    plan = plan_decode(Arch.SM90A, 132, 32, long, heads, keys, True)
    dealt = deal_out(deal, seq_lens, q_lens, heads, plan.workers, plan.slots, Sight(causal=0))
    walks = [[(s.request, s.first_tile + i) for s in own for i in range(s.tiles)] for own in dealt.segments]
    asked = sum(len({walk[step] for walk in walks if step < len(walk)}) for step in range(max(map(len, walks))))
    passes = -(-dealt.line.chunk // tiles_each)
    assert asked <= 28 * tiles_each + 4 * (passes + 2) * tiles_each
