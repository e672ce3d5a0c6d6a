"""How long a Blackwell decode takes at least, from the plan and published rates; not a measurement.

    python -m tsmla_emulator.decode_time

A part (CTA or pair) does its segments one after the other. A segment costs SEGMENT_US, and each of its KV tiles the
longer of its MMAs at the full rate and its bytes at the part's share of HBM; row tiles of a request that run side by
side read them once. Partial results are written and read once at the HBM rate. START_US is added to every call,
COMBINE_US where something was split. Not counted: bubbles between products, bank conflicts, uneven HBM channels, clocks
below the boost clock.
"""

from __future__ import annotations

import argparse
import itertools

from tsmla.plan import PARTIAL_ROW, cut, deal_of, plan_decode, row_tiling, segments
from tsmla.support import LATENT_DIM, ROPE_DIM
from tsmla.variant import Arch

from .cost import RATES, blackwell_mma

START_US = 4.0
"""Launch, tensor maps, tensor memory: what kernels of this kind are seen to take on Hopper, not measured here."""
SEGMENT_US = 3.0
"""Page table, query and first keys from memory (about 1.5 us), first softmax, output."""
COMBINE_US = 2.5
"""A dependent launch, whose start hides behind the attention kernel."""
HBM = {
    "best read rate measured on a B200": 7.26e12,
    "what the published leader reached at 16 requests, all of its time counted": 5.16e12,
}
PUBLISHED_US = {
    (16, 4, 81920, 4): 47.8, (16, 4, 81920, 8): 76.6, (16, 4, 81920, 16): 146.3,
    (32, 4, 81920, 4): 49.5, (32, 4, 81920, 8): 80.4, (32, 4, 81920, 16): 148.1,
    (128, 1, 8192, 1): 15.7, (128, 1, 8192, 32): 52.4, (128, 1, 8192, 64): 78.2,
    (128, 4, 8192, 1): 18.7, (128, 4, 8192, 32): 132.0, (128, 4, 8192, 64): 261.0,
}  # fmt: skip
"""e4m3 on a B200, (heads, q_len, keys, batch): 80K TokenSpeed's plot, 8K the better of trtllm-gen and cute-dsl in
FlashInfer issue 2805."""


def tile_clocks(arch: Arch, rows: int, element_bytes: int) -> float:
    """Tensor clocks of one KV tile on each SM that works on it."""
    deal = deal_of(arch, rows)
    pair = deal.sms == 2
    score, value = (
        blackwell_mma(deal.row_tile, columns, pair, True, ws=not pair) for columns in (deal.tile_kv, LATENT_DIM // 2)
    )
    score_steps = (LATENT_DIM + ROPE_DIM) * element_bytes // 32
    return score_steps * score + 2 * deal.tile_kv * element_bytes // 32 * value


def least_us(
    heads: int, q_len: int, keys: int, batch: int, element_bytes: int, hbm: float, arch: Arch = Arch.SM100A
) -> float:
    """The model's time of one call, every request with `keys` keys."""
    rates = RATES[arch.value]
    rows = heads * q_len
    deal = deal_of(arch, rows)
    plan = plan_decode(arch, rates.processors, batch, q_len, heads, keys)
    tiling = row_tiling(rows, deal.row_tile)
    lengths = [-(-keys // deal.tile_kv)] * batch
    line = cut(deal, tiling, plan.parts, plan.slots, lengths)
    tiles = [[length] * tiling.row_tiles for length in lengths]
    done = [list(segments(deal, tiling, line, lengths, tiles, part)) for part in range(plan.parts)]
    # Parts of a group walk the same keys.
    readers = sum(map(bool, done)) / tiling.group
    read = deal.tile_kv * (LATENT_DIM + ROPE_DIM) * element_bytes / (hbm / readers) * 1e6
    tile = max(read, tile_clocks(arch, rows, element_bytes) / rates.clock)
    busiest = max(sum(SEGMENT_US + s.tiles * tile for s in part) for part in done)
    partials = sum(s.slot >= 0 for part in done for s in part) * min(rows, deal.row_tile) * PARTIAL_ROW * 4
    return START_US + busiest + (COMBINE_US + 2e6 * partials / hbm if partials else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--element-bytes", type=int, choices=(1, 2), default=1, help="1: e4m3, 2: bf16 and fp16")
    element_bytes = parser.parse_args().element_bytes
    print("\n".join(f"{rate / 1e12:g} TB/s: {what}" for what, rate in HBM.items()))
    at_least = "".join(f" us at {rate / 1e12:g} TB/s |" for rate in HBM.values())
    print(f"| heads | q_len | keys | B |{at_least} published, us |")
    print("|---" * (5 + len(HBM)) + "|")
    for heads, q_len, keys in itertools.product((16, 32, 128), (1, 4), (8192, 81920)):
        for batch in (1, 2, 4, 8, 16, 32, 64):
            times = [least_us(heads, q_len, keys, batch, element_bytes, rate) for rate in HBM.values()]
            known = PUBLISHED_US.get((heads, q_len, keys, batch)) if element_bytes == 1 else None
            cells = [f"{time:.1f}" for time in times] + [f"{known:g}" if known else "-"]
            print(f"| {heads} | {q_len} | {keys} | {batch} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
