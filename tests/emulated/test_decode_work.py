"""The device deals exactly what `tsmla.plan` says in plain integers, and rows see what the definition says."""

from __future__ import annotations

import random

import pytest
import torch
from decode_part_kernels import FIELDS, compiled_lister
from decode_records import WORDS, records
from decode_reference import Sight
from tsmla.plan import Deal, cut, row_tiling, segments

DEAL = Deal(row_tile=64, tile_kv=64, overhead=5, least=4, split=6)
COARSE = Deal(row_tile=128, tile_kv=128, overhead=2, least=1, split=0)
DRAWING = Deal(row_tile=64, tile_kv=64, overhead=3, least=2, split=5, draw=32)

CASES = {
    "one request": ([5000], 1, 16, Sight(), 24),
    "empty, short and long": ([0, 1, 700, 64, 65, 0, 3000], 3, 8, Sight(), 16),
    "as many units as parts": ([2000] * 16, 1, 16, Sight(), 16),
    "two row tiles": ([900, 12, 4000, 257], 2, 64, Sight(), 9),
    "more row tiles than a group": ([500, 90], 9, 64, Sight(), 20),
    "full": ([300, 2, 5], 4, 40, Sight(causal=False), 10),
    "window": ([3000, 500, 90], 4, 40, Sight(window_left=130), 10),
    "rank 1 of 2": ([1500, 44, 8, 0], 3, 16, Sight(cp_world=2, cp_rank=1), 12),
    "rank 2 of 4, interleave 16": ([1000, 80, 20], 5, 16, Sight(cp_world=4, cp_rank=2, cp_interleave=16), 12),
    "rank 3 of 4, window": ([2000, 30], 5, 16, Sight(window_left=500, cp_world=4, cp_rank=3, cp_interleave=4), 12),
    "equal pieces, one request empty": ([2000] * 4 + [0, 1990, 60] + [2000] * 9, 1, 16, Sight(), 66),
    "equal pieces, two row tiles": ([4000, 3900, 4090], 2, 64, Sight(window_left=3800), 25),
    "hundreds of requests": ([(i * 37) % 900 for i in range(300)], 1, 16, Sight(), 33),
}


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("room", [1000, 7, 0])
@pytest.mark.parametrize("deal", [DEAL, COARSE, DRAWING], ids=["fine", "coarse", "drawing"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_device_deals_as_the_plan_says(gpu, case, deal, room):
    seq_lens, q_len, heads, sight, parts = case
    rng = random.Random(len(seq_lens))
    bounds = [length if sight.cp_world == 1 else sight.cp_world * length - rng.randrange(3) for length in seq_lens]
    visible = [[rng.choice([length, max(length - 3, 0), 10**6]) for _ in range(q_len)] for length in seq_lens]

    def seen(request: int, first: int, last: int) -> range:
        """KV tiles of query tokens, whatever `visible` hides."""
        length = seq_lens[request]
        keys = [sight.keys(length, bounds[request], length, q_len, token) for token in range(first, last + 1)]
        some = [k for k in keys if k]
        if not some:
            return range(0)
        return range(min(k.start for k in some) // deal.tile_kv, -(-max(k.stop for k in some) // deal.tile_kv))

    rows, batch = q_len * heads, range(len(seq_lens))
    tiling = row_tiling(rows, deal.row_tile)
    ends = [min((r + 1) * deal.row_tile, rows) for r in range(tiling.row_tiles)]
    ranges = [[seen(b, r * deal.row_tile // heads, (end - 1) // heads) for r, end in enumerate(ends)] for b in batch]
    lengths = [len(seen(b, 0, q_len - 1)) for b in batch]
    line = cut(deal, tiling, parts, room, lengths)
    tiles = [[len(r) for r in row] for row in ranges]
    expected = [
        [(s.request, s.row_tile, ranges[s.request][s.row_tile].start + s.first, s.tiles, s.slot,
          ends[s.row_tile] - s.row_tile * deal.row_tile)
         for s in segments(deal, tiling, line, lengths, tiles, part)]
        for part in range(parts)
    ]  # fmt: skip

    def ints(values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    counts = torch.empty(parts, dtype=torch.int32, device="cuda")
    listed = torch.empty(parts, len(batch) * tiling.rounds, FIELDS, dtype=torch.int32, device="cuda")
    keys = torch.empty(len(batch), q_len, 2, dtype=torch.int32, device="cuda")
    expected_records = records(deal, tiling, line, rows, lengths, tiles, parts)
    written = torch.full((len(expected_records), WORDS), 0x7FC00000, dtype=torch.int32, device="cuda")
    scalars = (int(sight.causal), sight.window_left, sight.cp_world, sight.cp_rank, sight.cp_interleave)
    gpu.emulation.adopt(compiled_lister(deal, gpu.arch))(
        ints(seq_lens), ints(bounds), ints(visible), counts, listed, keys, written, *scalars, heads, parts, room
    )
    got = [[tuple(row) for row in listed[part, : counts[part]].tolist()] for part in range(parts)]
    compared = [(s if s[3] else (*s[:2], 0, *s[3:])) for part in got for s in part]
    assert compared == [(s if s[3] else (*s[:2], 0, *s[3:])) for part in expected for s in part]
    assert [len(part) for part in got] == [len(part) for part in expected]
    assert [words if words[0] else [0] * WORDS for words in written.tolist()] == expected_records
    for b in batch:
        for token in range(q_len):
            want = sight.keys(seq_lens[b], bounds[b], visible[b][token], q_len, token)
            first, end = keys[b, token].tolist()
            assert range(first, max(first, end)) == want or (not want and end <= first), (b, token)
