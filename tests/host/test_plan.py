"""The plan of decode as integers: every key once, nothing empty, the workspace within what callers give."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from tsmla.identity.arch import Arch, Deal
from tsmla.identity.plan import (
    CALLERS_Q_LEN,
    DEALS,
    FEW_ROWS_DEALS,
    MAX_GROUP,
    PARTIAL_ROW,
    RECORD_BYTES,
    cut,
    deal_of,
    plan_decode,
    row_tiling,
    segments,
    wide_rows,
)
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.variant import Dtype

SM_COUNTS = (132, 148, 160)
BATCHES = (1, 2, 3, 4, 7, 16, 64, 128, 131, 132, 133, 300)
HEADS = (1, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
Q_LENS = (1, 2, 3, 4, 7, 8, 16, 33)
LENGTHS = (0, 1, 127, 128, 129, 1000, 8192, 81920)
OF_FEW_ROWS = [(Arch.SM90A, False), *((arch, wide) for arch in FEW_ROWS_DEALS for wide in (False, True))]
"""Architectures, and whether caches have wide rows where that decides who takes few rows."""


def batches_of_lengths(batch: int) -> list[list[int]]:
    """Uniform batches, one long request among short ones, and mixed ones."""
    rng = random.Random(batch)
    mixed = [rng.choice(LENGTHS) for _ in range(batch)]
    spread = [rng.randrange(5000) for _ in range(batch)]
    return [*([n] * batch for n in LENGTHS), [100] * (batch - 1) + [81920], mixed, spread]


def check_deal(deal: Deal, rows: int, parts: int, slots: int, tiles: list[list[int]], lengths: list[int]) -> None:
    """Every KV tile of every row tile exactly once, no empty segment, slots within bounds and used once."""
    tiling = row_tiling(rows, deal.row_tile)
    line = cut(deal, tiling, parts, slots, lengths)
    covered: dict[tuple[int, int], list[tuple[int, int]]] = {}
    used: set[int] = set()
    for part in range(parts):
        for segment in segments(deal, tiling, line, lengths, tiles, part):
            unit = (segment.request, segment.row_tile)
            seen = tiles[segment.request][segment.row_tile]
            covered.setdefault(unit, []).append((segment.first, segment.first + segment.tiles))
            assert segment.tiles > 0 or seen == 0, "an empty segment"
            assert (segment.slot < 0) == (segment.tiles == seen), "who has all writes the result, who has not does not"
            if segment.slot >= 0:
                assert segment.slot < slots and segment.slot not in used
                used.add(segment.slot)
    assert covered.keys() == {(b, r) for b in range(len(lengths)) for r in range(tiling.row_tiles)}
    for (request, row_tile), spans in covered.items():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == tiles[request][row_tile]
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("arch", "wide", "sm_count"), [(Arch.SM90A, False, 132), (Arch.SM100A, False, 148), (Arch.SM100A, True, 160)]
)
def test_every_key_once_and_no_empty_segment(arch: Arch, wide: bool, sm_count: int) -> None:
    for batch, heads, q_len in itertools.product((1, 3, 16, 133), (1, 8, 24, 128), (1, 4, 33)):
        rows = q_len * heads
        deal = deal_of(arch, rows, wide=wide)
        tiling = row_tiling(rows, deal.row_tile)
        if wide and deal == deal_of(arch, rows):
            continue
        for seq_lens in batches_of_lengths(batch):
            plan = plan_decode(arch, sm_count, batch, q_len, heads, max(seq_lens), wide=wide)
            lengths = [-(-n // deal.tile_kv) for n in seq_lens]
            # Earlier row tiles of a causal request see up to q_len keys less.
            hidden = [max(q_len - 1 - (min((r + 1) * deal.row_tile, rows) - 1) // heads, 0)
                      for r in range(tiling.row_tiles)]  # fmt: skip
            tiles = [[-(-max(n - h, 0) // deal.tile_kv) for h in hidden] for n in seq_lens]
            check_deal(deal, rows, plan.parts, plan.slots, tiles, lengths)


@pytest.mark.parametrize("slots", [0, 1, 2, 5, 17, 1000])
@pytest.mark.parametrize("rows", [1, 64, 65, 512, 1100])
def test_any_room_for_partials_will_do(rows: int, slots: int) -> None:
    rng = random.Random(rows * slots)
    others = Deal(64, 64, overhead=0, least=1, split=0), Deal(64, 64, 3, 7, 100), Deal(64, 64, 3, 1, 9, draw=20)
    for deal in (DEALS[Arch.SM90A], *others):
        for batch, parts in ((1, 40), (5, 33), (40, 18), (9, MAX_GROUP)):
            for shortest in (0, 60, 89):
                lengths = [rng.randrange(shortest, 90) for _ in range(batch)]
                tiles = [[rng.randint(0, n) for _ in range(row_tiling(rows, 64).row_tiles)] for n in lengths]
                check_deal(deal, rows, parts, slots, tiles, lengths)


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("arch", Arch)
def test_the_workspace_stays_within_the_callers_formula(arch: Arch, sm_count: int) -> None:
    for batch, heads, q_len in itertools.product(BATCHES, HEADS, Q_LENS):
        for longest in (None, *LENGTHS):
            plan = plan_decode(arch, sm_count, batch, q_len, heads, longest)
            formula = sm_count * heads * max(q_len, CALLERS_Q_LEN) * PARTIAL_ROW * 4
            assert plan.workspace_bytes <= formula
            stored = min(plan.row_tile, q_len * heads)
            assert plan.workspace_bytes == plan.records * RECORD_BYTES + plan.slots * stored * PARTIAL_ROW * 4
            tiling = row_tiling(q_len * heads, plan.row_tile)
            assert plan.records == min(batch * tiling.rounds, plan.parts // tiling.group) * tiling.group
            assert plan.slots >= 0
            assert 1 <= plan.parts <= max(sm_count, MAX_GROUP)
            assert plan.row_tiles * plan.row_tile >= q_len * heads


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("arch", FEW_ROWS_DEALS)
def test_a_workspace_is_enough_whatever_rows_the_cache_has(arch: Arch, sm_count: int) -> None:
    """Callers who ask for its size do not say: no call of wide rows needs more of anything."""
    for batch, heads, q_len, varies in itertools.product(BATCHES, HEADS, Q_LENS, (False, True)):
        for longest, batch_invariant in itertools.product((None, *range(1, 9000, 479), 81920), (False, True)):
            shape = arch, sm_count, batch, q_len, heads, longest, varies, batch_invariant
            plan, wide = plan_decode(*shape), plan_decode(*shape, wide=True)
            assert wide.workspace_bytes <= plan.workspace_bytes and wide.parts <= plan.parts, shape
            assert (wide == plan) == (batch_invariant or q_len * heads > 64), shape


def test_wide_rows_are_those_that_products_read_in_16_bits() -> None:
    assert [wide_rows(uniform_row(dtype)) for dtype in (Dtype.BF16, Dtype.FP16, Dtype.E4M3, Dtype.E5M2)] == [
        True, True, False, False,
    ]  # fmt: skip
    assert not any(wide_rows(row) for row in ROWS.values() if row.scales)


def most_work(arch: Arch, sm_count: int, q_len: int, heads: int, seq_lens: list[int], wide: bool = False) -> float:
    """KV tiles, fixed costs included, of the busiest part."""
    deal = deal_of(arch, q_len * heads, wide=wide)
    plan = plan_decode(arch, sm_count, len(seq_lens), q_len, heads, max(seq_lens), wide=wide)
    tiling = row_tiling(q_len * heads, deal.row_tile)
    lengths = [-(-n // deal.tile_kv) for n in seq_lens]
    line = cut(deal, tiling, plan.parts, plan.slots, lengths)
    tiles = [[n] * tiling.row_tiles for n in lengths]
    return max(
        sum(s.tiles + deal.overhead for s in segments(deal, tiling, line, lengths, tiles, part))
        for part in range(plan.parts)
    )


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize(("arch", "wide"), [(Arch.SM90A, False), (Arch.SM100A, False), (Arch.SM100A, True)])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("batch", [1, 2, 4, 24, 40, 128])
@pytest.mark.parametrize("spread", [0, 1000, 38000])
def test_parts_have_equal_work(spread: int, batch: int, heads: int, arch: Arch, wide: bool, sm_count: int) -> None:
    """The busiest part has no more than its share, one more fixed cost, what saving partial results is worth, and what
    a group leaves of the SMs; or no more than it can read while memory is busy anyway."""
    rng = random.Random(batch)
    seq_lens = [rng.randrange(40000 - spread, 40001) for _ in range(batch)]
    deal = deal_of(arch, heads, wide=wide)
    groups = sm_count // deal.sms // row_tiling(heads, deal.row_tile).group
    tiles = sum(-(-n // deal.tile_kv) for n in seq_lens)
    share = max(-(-(tiles + batch * deal.overhead) // groups), deal.least)
    memory = tiles * deal.draw // (16 * groups)
    assert most_work(arch, sm_count, 1, heads, seq_lens, wide) <= max(share + deal.split, memory) + deal.overhead


def test_whole_units_where_cutting_would_not_pay() -> None:
    """128 requests of one length on 132 SMs: one each, no partial results."""
    line = cut(DEALS[Arch.SM90A], row_tiling(16, 64), 132, 10**6, [64] * 128)
    assert line.chunk == line.unit == 64


def test_equal_pieces_where_they_are_no_longer_than_chunks() -> None:
    """On 129 parts, 16 requests of one length are cut into eight pieces each, and no piece is cut again."""
    deal, tiling, lengths = DEALS[Arch.SM90A], row_tiling(16, 64), [1280] * 16
    line = cut(deal, tiling, 129, 10**6, lengths)
    assert line == (128, 160, 1280)
    tiles = [[n] for n in lengths]
    dealt = [list(segments(deal, tiling, line, lengths, tiles, part)) for part in range(129)]
    assert [len(part) for part in dealt] == [1] * 128 + [0]
    longer = cut(deal, tiling, 129, 10**6, [*lengths[1:], 2000])
    assert longer.unit == 0, "one longer request would leave parts idle"


def test_idle_parts_where_memory_is_busy_anyway() -> None:
    """64 requests on 74 pairs: whole where a pair can read what its neighbours leave, cut where it cannot. One request,
    which is cut anyway, occupies as many as equal pieces can."""
    tiling, lengths = row_tiling(128, 128), [640] * 64
    pair = DEALS[Arch.SM100A]
    assert cut(pair, tiling, 74, 10**6, lengths) == (74, 640, 640)
    assert cut(dataclasses.replace(pair, draw=16), tiling, 74, 10**6, lengths).unit == 0
    for deal in (pair, dataclasses.replace(pair, draw=16)):
        assert cut(deal, tiling, 74, 10**6, [640]) == (72, 9, 648)
    assert cut(pair, tiling, 148, 10**6, [1280] * 4) == (148, 35, 1295)


@pytest.mark.parametrize(
    ("batch", "heads", "keys", "most"),
    [
        (1, 16, 512, 1), (4, 64, 512, 1), (2, 128, 512, 1), (1, 128, 1024, 1), (2, 64, 1000, 1),
        (1, 16, 1025, 1), (1, 64, 2048, 1), (4, 64, 1024, 1), (1, 16, 8192, 1), (1, 128, 4096, 1), (8, 128, 512, 1),
        (1, 16, 8449, 3), (1, 128, 4225, 3), (16, 128, 512, 3), (1, 16, 256, 4),
    ],
)  # fmt: skip
def test_few_short_requests_are_cut_into_single_tiles(batch: int, heads: int, keys: int, most: int) -> None:
    """Where that makes no more than 132 segments; and what is as short as four tiles stays whole."""
    deal, tiling, tiles = DEALS[Arch.SM90A], row_tiling(heads, 64), [-(-keys // 64)] * batch
    plan = plan_decode(Arch.SM90A, 132, batch, 1, heads, keys)
    line = cut(deal, tiling, plan.parts, plan.slots, tiles)
    seen = [[n] * tiling.row_tiles for n in tiles]
    dealt = [s.tiles for part in range(plan.parts) for s in segments(deal, tiling, line, tiles, seen, part)]
    assert max(dealt) == most and sum(dealt) == sum(tiles) * tiling.row_tiles


@pytest.mark.parametrize(("arch", "wide"), OF_FEW_ROWS)
@pytest.mark.parametrize("heads", [16, 32])
def test_a_single_long_request_occupies_the_gpu(arch: Arch, wide: bool, heads: int) -> None:
    """All SMs but a few, or as many as read as fast as memory is."""
    rows, sm_count = 4 * heads, 132 if arch is Arch.SM90A else 148
    deal = deal_of(arch, rows, wide=wide)
    plan = plan_decode(arch, sm_count, 1, 4, heads, 81920, wide=wide)
    tiling = row_tiling(rows, deal.row_tile)
    tiles = 81920 // deal.tile_kv
    line = cut(deal, tiling, plan.parts, plan.slots, [tiles])
    seen = [[tiles] * tiling.row_tiles]
    busy = [part for part in range(plan.parts) if list(segments(deal, tiling, line, [tiles], seen, part))]
    assert deal.sms * len(busy) >= 0.95 * sm_count * 16 / deal.draw


@pytest.mark.parametrize("arch", [Arch.SM100A, Arch.SM103A])
def test_rows_that_fit_in_one_cta_do_not_take_a_pair_unless_they_are_wide(arch: Arch) -> None:
    assert (deal_of(arch, 64).sms, deal_of(arch, 65).sms) == (1, 2)
    assert plan_decode(arch, 148, 1, 4, 16).parts == 148
    assert plan_decode(arch, 148, 1, 5, 16).parts == 74
    assert deal_of(arch, 64, wide=True).sms == 2
    assert plan_decode(arch, 148, 1, 4, 16, wide=True).parts == 74


def test_row_tiles_of_a_request_run_side_by_side() -> None:
    for rows in range(1, 64 * 40, 7):
        row_tiles, group, rounds = row_tiling(rows, 64)
        assert group <= MAX_GROUP and (rounds - 1) * group < row_tiles <= rounds * group
        assert rounds == 1 or group > MAX_GROUP // 2
