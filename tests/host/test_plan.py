"""The plan of decode as integers: every key once, nothing empty, the workspace within what callers give."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from decode_deal import check, work
from tsmla.identity.arch import Arch, Deal
from tsmla.identity.plan import (
    CALLERS_Q_LEN,
    DEALS,
    FEW_ROWS_DEALS,
    MAX_GROUP,
    PARTIAL_ROW,
    RECORD_BYTES,
    deal_of,
    plan_decode,
    row_tiling,
    wide_rows,
)
from tsmla.identity.row_format import ROWS, uniform_row
from tsmla.identity.variant import Dtype
from tsmla_emulator.dealt import deal_out

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


@pytest.mark.parametrize(
    ("arch", "wide", "sm_count"), [(Arch.SM90A, False, 132), (Arch.SM100A, False, 148), (Arch.SM100A, True, 160)]
)
def test_every_key_once_and_no_empty_segment(arch: Arch, wide: bool, sm_count: int) -> None:
    few = itertools.product((1, 3, 16), (1, 8, 24, 128), (1, 4, 33))
    for batch, heads, q_len in (*few, (133, 8, 1), (133, 24, 33), (133, 128, 4)):
        rows = q_len * heads
        deal = deal_of(arch, rows, wide=wide)
        if wide and deal == deal_of(arch, rows):
            continue
        for seq_lens in batches_of_lengths(batch):
            plan = plan_decode(arch, sm_count, batch, q_len, heads, max(seq_lens), wide=wide)
            check(deal, seq_lens, q_len, heads, plan.workers, plan.slots)


@pytest.mark.parametrize("slots", [0, 1, 2, 5, 17, 1000])
@pytest.mark.parametrize(("q_len", "heads"), [(1, 1), (64, 1), (13, 5), (512, 1), (11, 100)])
def test_any_room_for_partials_will_do(q_len: int, heads: int, slots: int) -> None:
    rng = random.Random(q_len * heads * slots)
    others = Deal(64, 64, overhead=0, least=1, split=0), Deal(64, 64, 3, 7, 100), Deal(64, 64, 3, 1, 9, draw=20)
    for deal in (DEALS[Arch.SM90A], *others):
        for batch, workers in ((1, 40), (5, 33), (40, 18), (9, MAX_GROUP)):
            for shortest in (0, 60, 89):
                seq_lens = [rng.randrange(64 * shortest, 64 * 90) for _ in range(batch)]
                check(deal, seq_lens, q_len, heads, workers, slots)


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
            assert plan.records == min(batch * tiling.rounds, plan.workers // tiling.group) * tiling.group
            assert plan.slots >= 0
            assert 1 <= plan.workers <= max(sm_count, MAX_GROUP)
            assert plan.row_tiles * plan.row_tile >= q_len * heads


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize("arch", FEW_ROWS_DEALS)
def test_a_workspace_is_enough_whatever_rows_the_cache_has(arch: Arch, sm_count: int) -> None:
    """Callers who ask for its size do not say: no call of wide rows needs more of anything."""
    for batch, heads, q_len, varies in itertools.product(BATCHES, HEADS, Q_LENS, (False, True)):
        for longest, batch_invariant in itertools.product((None, *range(1, 9000, 479), 81920), (False, True)):
            shape = arch, sm_count, batch, q_len, heads, longest, varies, batch_invariant
            plan, wide = plan_decode(*shape), plan_decode(*shape, wide=True)
            assert wide.workspace_bytes <= plan.workspace_bytes and wide.workers <= plan.workers, shape
            assert (wide == plan) == (batch_invariant or q_len * heads > 64), shape


def test_wide_rows_are_those_that_products_read_in_16_bits_and_nobody_gathers() -> None:
    dtypes = (Dtype.BF16, Dtype.FP16, Dtype.E4M3, Dtype.E5M2)
    assert [wide_rows(uniform_row(dtype), gathers=False) for dtype in dtypes] == [True, True, False, False]
    assert not any(wide_rows(uniform_row(dtype), gathers=True) for dtype in dtypes)
    assert not any(wide_rows(row, gathers=False) for row in ROWS.values() if row.scales)


def most_work(arch: Arch, sm_count: int, q_len: int, heads: int, seq_lens: list[int], wide: bool = False) -> float:
    """KV tiles, fixed costs included, of the busiest worker."""
    deal = deal_of(arch, q_len * heads, wide=wide)
    plan = plan_decode(arch, sm_count, len(seq_lens), q_len, heads, max(seq_lens), wide=wide)
    return max(work(deal, deal_out(deal, seq_lens, q_len, heads, plan.workers, plan.slots)))


@pytest.mark.parametrize("sm_count", SM_COUNTS)
@pytest.mark.parametrize(("arch", "wide"), [(Arch.SM90A, False), (Arch.SM100A, False), (Arch.SM100A, True)])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("batch", [1, 2, 4, 24, 40, 128])
@pytest.mark.parametrize("spread", [0, 1000, 38000])
def test_workers_have_equal_work(spread: int, batch: int, heads: int, arch: Arch, wide: bool, sm_count: int) -> None:
    """The busiest worker has no more than its share, one more fixed cost, what saving partial results is worth, and
    what a group leaves of the SMs; or no more than it can read while memory is busy anyway."""
    rng = random.Random(batch)
    seq_lens = [rng.randrange(40000 - spread, 40001) for _ in range(batch)]
    deal = deal_of(arch, heads, wide=wide)
    groups = sm_count // deal.sms // row_tiling(heads, deal.row_tile).group
    tiles = sum(-(-n // deal.tile_kv) for n in seq_lens)
    share = max(-(-(tiles + batch * deal.overhead) // groups), deal.least)
    memory = tiles * deal.draw // (16 * groups)
    assert most_work(arch, sm_count, 1, heads, seq_lens, wide) <= max(share + deal.split, memory) + deal.overhead


def cut(deal: Deal, tiles: list[int], heads: int, workers: int) -> tuple[int, int, int]:
    """(groups, chunk, unit length) of the line of requests of so many KV tiles, with room for any partial results."""
    line = deal_out(deal, [n * deal.tile_kv for n in tiles], 1, heads, workers, 10**6).line
    return line.groups, line.chunk, line.unit_length


RECORDED = [
    (Arch.SM90A, [5000], 1, 16, (0, 79, 1, 79, 79), 79),
    (Arch.SM90A, [8192] * 4, 1, 128, (0, 64, 8, 128, 512), 128),
    (Arch.SM90A, [700, 64, 3000, 0], 3, 32, (0, 64, 3, 48, 192), 40),
    (Arch.SM90A, [2000] * 64, 1, 16, (0, 128, 16, 32, 2048), 128),
    (Arch.SM90A, [32768] * 20, 1, 128, (0, 66, 157, 0, 10300), 170),
    (Arch.SM90A, [90, 4000] * 40, 2, 64, (0, 66, 44, 0, 2840), 196),
    (Arch.SM90A, [1000], 1, 128, (0, 16, 1, 16, 16), 32),
    (Arch.SM90A, [3000, 500], [9, 40], 128, (8, 16, 17, 0, 260), 134),
    (Arch.SM90A, [500, 90, 2000, 0, 64], [1, 17, 0, 2, 64], 16, (1, 132, 3, 0, 103), 7),
    (Arch.SM90A, [25000] * 4, 1, 128, (0, 66, 24, 0, 1576), 138),
    (Arch.SM90A, [1000] * 24, 1, 128, (0, 66, 7, 0, 456), 152),
    (Arch.SM90A, [1000] * 4, 1, 128, (0, 64, 1, 16, 64), 128),
    (Arch.SM100A, [2000] * 12, 1, 128, (0, 74, 16, 16, 192), 0),
    (Arch.SM100A, [5000] * 24, 1, 128, (0, 72, 14, 42, 1008), 72),
    (Arch.SM100A, [16384] * 20, 1, 128, (0, 74, 36, 0, 2640), 87),
    (Arch.SM100A, [32768] * 16, 1, 128, (0, 64, 64, 256, 4096), 64),
    (Arch.SM100A, [8192] * 40, 1, 16, (0, 148, 37, 0, 5440), 178),
    (Arch.SM100A, [5000], 1, 16, (0, 40, 2, 80, 80), 40),
    (Arch.SM100A, [8192] * 4, 1, 128, (0, 64, 4, 64, 256), 64),
    (Arch.SM100A, [700, 64, 3000, 0], 3, 32, (0, 48, 2, 24, 96), 15),
    (Arch.SM100A, [2000] * 64, 1, 16, (0, 128, 16, 32, 2048), 128),
    (Arch.SM100A, [32768] * 20, 1, 128, (0, 74, 71, 0, 5200), 89),
    (Arch.SM100A, [90, 4000] * 40, 2, 64, (0, 74, 23, 0, 1640), 94),
    (Arch.SM100A, [81920] * 40, 1, 16, (0, 148, 349, 0, 51520), 186),
    (Arch.SM100A, [40000] * 100, 1, 16, (0, 148, 428, 0, 63300), 245),
    (Arch.SM100A, [3000, 500], [9, 40], 128, (8, 9, 11, 0, 96), 44),
]
"""Calls (keys, query tokens, heads), each with its line (own group, groups, chunk, unit length, total) and how many
partial results it has."""


@pytest.mark.parametrize(("arch", "seq_lens", "q_lens", "heads", "line", "partials"), RECORDED)
def test_recorded_calls_are_cut_as_ever(arch: Arch, seq_lens, q_lens, heads: int, line: tuple, partials: int) -> None:
    most, varies = (q_lens, False) if isinstance(q_lens, int) else (max(q_lens), True)
    deal = deal_of(arch, most * heads)
    plan = plan_decode(arch, arch.sms, len(seq_lens), most, heads, max(seq_lens), varies)
    dealt = check(deal, seq_lens, q_lens, heads, plan.workers, plan.slots)
    assert dealt.line[2:] == line
    assert sum(segment.slot >= 0 for worker in dealt.segments for segment in worker) == partials


def test_whole_units_where_cutting_would_not_pay() -> None:
    """128 requests of one length on 132 SMs: one each, no partial results."""
    assert cut(DEALS[Arch.SM90A], [64] * 128, 16, 132)[1:] == (64, 64)


def test_equal_pieces_where_they_are_no_longer_than_chunks() -> None:
    """On 129 workers, 16 requests of one length are cut into eight pieces each, and no piece is cut again."""
    deal, lengths = DEALS[Arch.SM90A], [1280] * 16
    assert cut(deal, lengths, 16, 129) == (128, 160, 1280)
    dealt = deal_out(deal, [n * 64 for n in lengths], 1, 16, 129, 10**6)
    assert [len(worker) for worker in dealt.segments] == [1] * 128 + [0]
    *_, unit_length = cut(deal, [*lengths[1:], 2000], 16, 129)
    assert unit_length == 0, "one longer request would leave workers idle"


def test_idle_workers_where_memory_is_busy_anyway() -> None:
    """64 requests on 74 pairs: whole where a pair can read what its neighbours leave, cut where it cannot. One request,
    which is cut anyway, occupies as many as equal pieces can."""
    pair, busy = DEALS[Arch.SM100A], dataclasses.replace(DEALS[Arch.SM100A], draw=16)
    assert cut(pair, [640] * 64, 128, 74) == (74, 640, 640)
    assert cut(busy, [640] * 64, 128, 74)[2] == 0
    for deal in (pair, busy):
        assert cut(deal, [640], 128, 74) == (72, 9, 648)
    assert cut(pair, [1280] * 4, 128, 148) == (148, 35, 1295)


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
    plan = plan_decode(Arch.SM90A, 132, batch, 1, heads, keys)
    dealt = check(DEALS[Arch.SM90A], [keys] * batch, 1, heads, plan.workers, plan.slots)
    assert max(segment.tiles for worker in dealt.segments for segment in worker) == most


@pytest.mark.parametrize(("arch", "wide"), OF_FEW_ROWS)
@pytest.mark.parametrize("heads", [16, 32])
def test_a_single_long_request_occupies_the_gpu(arch: Arch, wide: bool, heads: int) -> None:
    """All SMs but a few, or as many as read as fast as memory is."""
    rows, sm_count = 4 * heads, arch.sms
    deal = deal_of(arch, rows, wide=wide)
    plan = plan_decode(arch, sm_count, 1, 4, heads, 81920, wide=wide)
    busy = sum(bool(worker) for worker in check(deal, [81920], 4, heads, plan.workers, plan.slots).segments)
    assert deal.sms * busy >= 0.95 * sm_count * 16 / deal.draw


@pytest.mark.parametrize("arch", [Arch.SM100A, Arch.SM103A])
def test_rows_that_fit_in_one_cta_do_not_take_a_pair_unless_they_are_wide(arch: Arch) -> None:
    assert (deal_of(arch, 64).sms, deal_of(arch, 65).sms) == (1, 2)
    assert plan_decode(arch, 148, 1, 4, 16).workers == 148
    assert plan_decode(arch, 148, 1, 5, 16).workers == 74
    assert deal_of(arch, 64, wide=True).sms == 2
    assert plan_decode(arch, 148, 1, 4, 16, wide=True).workers == 74


def test_row_tiles_of_a_request_run_side_by_side() -> None:
    for rows in range(1, 64 * 40, 7):
        row_tiles, group, rounds = row_tiling(rows, 64)
        assert group <= MAX_GROUP and (rounds - 1) * group < row_tiles <= rounds * group
        assert rounds == 1 or group > MAX_GROUP // 2
