"""The device deals each key once, and what its source says in Python's integers; rows see what the definition says."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from decode_deal import WORDS, check_segments, check_slots
from decode_part_kernels import FIELDS, compiled_lister
from decode_reference import Sight
from tsmla.identity.arch import Deal
from tsmla_emulator import dealt

DEAL = Deal(row_tile=64, tile_kv=64, overhead=5, least=4, split=6)
COARSE = Deal(row_tile=128, tile_kv=128, overhead=2, least=1, split=0)
DRAWING = Deal(row_tile=64, tile_kv=64, overhead=3, least=2, split=5, draw=32)
IN_STEP = Deal(row_tile=64, tile_kv=64, overhead=2, least=2, split=1, in_step=2)
SINGLE = Deal(row_tile=64, tile_kv=64, overhead=3, least=3, split=1, single=24)

CASES = {
    "one request": ([5000], 1, 16, Sight(), 24),
    "empty, short and long": ([0, 1, 700, 64, 65, 0, 3000], 3, 8, Sight(), 16),
    "as many units as workers": ([2000] * 16, 1, 16, Sight(), 16),
    "two row tiles": ([900, 12, 4000, 257], 2, 64, Sight(), 9),
    "more row tiles than a group": ([500, 90], 9, 64, Sight(), 20),
    "full": ([300, 2, 5], 4, 40, Sight(causal=False), 10),
    "window": ([3000, 500, 90], 4, 40, Sight(window_left=130), 10),
    "rank 1 of 2": ([1500, 44, 8, 0], 3, 16, Sight(cp_world=2, cp_rank=1), 12),
    "rank 2 of 4, interleave 16": ([1000, 80, 20], 5, 16, Sight(cp_world=4, cp_rank=2, cp_interleave=16), 12),
    "rank 3 of 4, window": ([2000, 30], 5, 16, Sight(window_left=500, cp_world=4, cp_rank=3, cp_interleave=4), 12),
    "equal pieces, one request empty": ([2000] * 4 + [0, 1990, 60] + [2000] * 9, 1, 16, Sight(), 66),
    "equal pieces, two row tiles": ([4000, 3900, 4090], 2, 64, Sight(window_left=3800), 25),
    "short, alone": ([760], 1, 16, Sight(), 15),
    "short, room for fewer pieces": ([760], 1, 16, Sight(), 10),
    "short, two row tiles": ([700], 2, 64, Sight(), 44),
    "short, one too many": ([760] * 3, 1, 16, Sight(), 50),
    "hundreds of requests": ([(i * 37) % 900 for i in range(300)], 1, 16, Sight(), 33),
}
MIXED = {
    "various": ([500, 90, 2000, 0, 64], [1, 17, 0, 2, 64], 16, Sight(), 20),
    "a row tile each": ([500, 90, 2000, 70], [1, 3, 4, 0], 16, Sight(), 12),
    "as many row tiles each": ([500, 90, 2000, 70], [2, 2, 0, 2], 64, Sight(), 12),
    "most has none": ([500, 90, 70], [1, 0, 2], 128, Sight(window_left=100), 9),
    "nothing at all": ([500, 90], [0, 0], 64, Sight(), 6),
    "one long request": ([1800], [130], 3, Sight(), 7),
    "groups of many": ([900, 300, 20], [40, 9, 77], 64, Sight(causal=False), 40),
    "rank 1 of 2": ([1500, 44, 8, 0], [3, 30, 1, 7], 16, Sight(cp_world=2, cp_rank=1), 12),
    "hundreds": ([(i * 37) % 900 for i in range(300)], [(1, 0, 9, 1, 5)[i % 5] for i in range(300)], 16, Sight(), 33),
    "long among short": ([1900] * 9, [1, 1, 40, 1, 1, 60, 0, 1, 7], 16, Sight(), 19),
    "two long ones, two row tiles at least": ([700, 1400, 30], [6, 40, 1], 128, Sight(), 27),
    "descending": ([300, 40, 500, 90, 700], [0, 9, 3, 12, 60, 20], 16, Sight(), 12),
    "hundreds, descending": ([100] * 150, [(i * 7) % 301 - 40 for i in range(151)], 16, Sight(), 33),
}
"""Problems with query lengths of a pack; or with cumulative ones as they are, where these are one more."""
MOST_IN_DISORDER = 7
DEALS = {"fine": DEAL, "coarse": COARSE, "drawing": DRAWING, "in step": IN_STEP, "single": SINGLE}
ROOMS = [*itertools.product(("fine", "in step"), (1000, 7, 0)), ("coarse", 7), ("drawing", 1000), ("single", 1000)]
"""Deals, and partial results that there is room for."""


@pytest.mark.archs("sm_90a")
@pytest.mark.usefixtures("values_only")
@pytest.mark.parametrize("name, room", ROOMS)
@pytest.mark.parametrize("case", [*CASES.values(), *MIXED.values()], ids=[*CASES, *MIXED])
def test_each_key_is_dealt_once_and_by_all_lanes_as_by_one(gpu, case, name, room):
    deal = DEALS[name]
    seq_lens, q_lens, heads, sight, workers = case
    batch = range(len(seq_lens))
    packed = not isinstance(q_lens, int)
    if packed:
        disordered = len(q_lens) > len(seq_lens)
        cum_q = q_lens if disordered else list(itertools.accumulate(q_lens, initial=0))
        tokens = 55 if disordered else cum_q[-1] + 2
        most = MOST_IN_DISORDER if disordered else max(*q_lens, 1)
        ends = list(itertools.accumulate((min(max(n, 0), tokens) for n in cum_q), max))
        spans = [range(a, min(b, a + most)) for a, b in itertools.pairwise(ends)]
    else:
        cum_q, most, tokens = [], q_lens, len(batch) * q_lens
        spans = [range(b * most, (b + 1) * most) for b in batch]
    rng = random.Random(len(seq_lens))
    bounds = [length if sight.cp_world == 1 else sight.cp_world * length - rng.randrange(3) for length in seq_lens]
    visible = [rng.choice([10**6, 0, 20, 500, 3]) for _ in range(tokens)]

    def seen(request: int, first: int, last: int) -> range:
        """KV tiles of query tokens, whatever `visible` hides."""
        length, q_len = seq_lens[request], len(spans[request])
        keys = [sight.keys(length, bounds[request], length, q_len, token) for token in range(first, last + 1)]
        some = [k for k in keys if k]
        if not some:
            return range(0)
        return range(min(k.start for k in some) // deal.tile_kv, -(-max(k.stop for k in some) // deal.tile_kv))

    rows = [len(span) * heads for span in spans]
    ends = [[min((r + 1) * deal.row_tile, own) for r in range(-(-own // deal.row_tile))] for own in rows]
    ranges = [[seen(b, r * deal.row_tile // heads, (end - 1) // heads) for r, end in enumerate(ends[b])] for b in batch]
    scalars = (int(sight.causal), sight.window_left, sight.cp_world, sight.cp_rank, sight.cp_interleave)
    expected = dealt.deal_out(
        deal,
        seq_lens,
        most,
        heads,
        workers,
        room,
        dealt.Sight(*scalars),
        causal_seqs=bounds,
        cum_seq_lens_q=cum_q,
        tokens=tokens,
    )
    check_segments(deal, expected.segments, ranges, spans, heads)
    check_slots(expected.segments, room, expected.records)

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    counts = torch.empty(workers, dtype=torch.int32, device="cuda")
    listed = torch.empty(workers, max(map(len, expected.segments)) + 1, len(FIELDS), dtype=torch.int32, device="cuda")
    keys = torch.empty(tokens, 2, dtype=torch.int32, device="cuda")
    written = torch.full((len(expected.records), WORDS), 0x7FC00000, dtype=torch.int32, device="cuda")
    shown = ints([visible] * len(batch)) if packed else ints(visible).view(len(batch), most)
    gpu.emulation.adopt(compiled_lister(deal, gpu.arch))(
        ints(seq_lens),
        ints(bounds),
        ints(cum_q),
        shown,
        counts,
        listed,
        keys,
        written,
        *scalars,
        most,
        heads,
        workers,
        room,
    )
    got = [[tuple(row) for row in listed[worker, : counts[worker]].tolist()] for worker in range(workers)]
    assert got == [[tuple(getattr(segment, name) for name in FIELDS) for segment in own] for own in expected.segments]
    assert written.tolist() == expected.records
    for b in batch:
        for token, place in enumerate(spans[b]):
            want = sight.keys(seq_lens[b], bounds[b], visible[place], len(spans[b]), token)
            first, end = keys[place].tolist()
            assert range(first, max(first, end)) == want or (not want and end <= first), (b, token)
