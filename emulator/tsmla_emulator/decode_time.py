"""How long a Blackwell decode of e4m3 takes at least, from the plan and published rates; not a measurement.

    python -m tsmla_emulator.decode_time

A call takes START_US and the longer of two: its keys, read from HBM once, at HBM's rate; and what the busiest part
(CTA or pair) does, one segment after the other. A segment costs FIRST_SEGMENT_US, or NEXT_SEGMENT_US behind another,
and each of its KV tiles the longer of its MMAs at the full rate and its bytes at what an SM can draw. Where keys are
split, COMBINE_US are added, and partial results (35 MB at most) go to HBM once, at its rate, because L2 writes them
back some time, and come from L2, which holds 126 MB, at what all SMs draw. Not counted: bubbles between products, bank
conflicts, uneven HBM channels, clocks below the boost clock.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from tsmla.plan import PARTIAL_ROW, cut, deal_of, plan_decode, row_tiling, segments
from tsmla.support import LATENT_DIM, ROPE_DIM
from tsmla.variant import Arch, DecodeVariant, Dtype

from .rates import RATES, blackwell_mma

if TYPE_CHECKING:
    from tsmla_kernels.parts.precision import PartialRows

ARCH = Arch.SM100A
VARIANT = DecodeVariant(ARCH, Dtype.E4M3, Dtype.BF16, lse=False)
START_US = 4.0
"""Launch, tensor maps, tensor memory: what kernels of this kind are seen to take on Hopper, not measured here."""
FIRST_SEGMENT_US, NEXT_SEGMENT_US = 3.0, 1.5
"""Page table, query and first keys from memory (about 1.5 us), first softmax, output; loads run ahead over segments."""
COMBINE_US = 2.5
"""A dependent launch, whose start hides behind the attention kernel."""
SM_BYTES_PER_CLOCK = 64
"""What an SM draws from L2 at most, as on earlier GPUs; an assumption."""
HBM = {
    "best read rate measured on a B200": 7.26e12,
    "what the published leader reached at 16 requests, all of its time counted": 5.16e12,
}
PEER_PARTIAL_ROW_BYTES = PARTIAL_ROW * 4
PEER_SOLO_CLOCKS = 1504.0
"""tokenspeed-mla 2.0.4's MMAs of 64 rows on 128 keys, by `profile`."""
PUBLISHED_US = {
    (16, 4, 81920, 4): 47.8, (16, 4, 81920, 8): 76.6, (16, 4, 81920, 16): 146.3,
    (32, 4, 81920, 4): 49.5, (32, 4, 81920, 8): 80.4, (32, 4, 81920, 16): 148.1,
    (128, 1, 8192, 1): 15.7, (128, 1, 8192, 32): 52.4, (128, 1, 8192, 64): 78.2,
    (128, 4, 8192, 1): 18.7, (128, 4, 8192, 32): 132.0, (128, 4, 8192, 64): 261.0,
}  # fmt: skip
"""e4m3 on a B200, (heads, q_len, keys, batch): 80K TokenSpeed's plot, 8K the better of trtllm-gen and cute-dsl in
FlashInfer issue 2805."""


SHAPES = tuple(itertools.product((16, 32, 128), (1, 4), (8192, 81920)))
"""(heads, q_len, keys)."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROBLEMS = tuple((*shape, batch) for shape in SHAPES for batch in BATCHES)


def partial_row_bytes(variant: DecodeVariant, rows: int) -> int:
    """Of a partial result in a call of `rows` query rows, as the variant's kernels keep it: the output, its LSE, and
    what takes out by how much the output is lifted."""
    return _partial_rows(variant, rows).row_bytes(LATENT_DIM)


def _partial_rows(variant: DecodeVariant, rows: int) -> PartialRows:
    from tsmla_kernels.sm90.decode import forms  # with the compiler
    from tsmla_kernels.sm100.decode.geometry import DecodeGeometry

    if variant.arch is Arch.SM90A:
        return forms.partial_rows_of(variant, rows)
    return DecodeGeometry.few(variant).partial_rows


def tile_clocks(arch: Arch, rows: int, element_bytes: int) -> float:
    """Tensor clocks of one KV tile on each SM that works on it."""
    deal = deal_of(arch, rows)
    pair = deal.sms == 2
    score, value = (
        blackwell_mma(deal.row_tile, columns, pair, True, ws=not pair) for columns in (deal.tile_kv, LATENT_DIM // 2)
    )
    score_steps = (LATENT_DIM + ROPE_DIM) * element_bytes // 32
    return score_steps * score + 2 * deal.tile_kv * element_bytes // 32 * value


def least_us(heads: int, q_len: int, keys: int, batch: int, hbm: float) -> float:
    """The model's time of one call, every request with `keys` keys."""
    rows = heads * q_len
    deal = deal_of(ARCH, rows)
    plan = plan_decode(ARCH, RATES[ARCH].processors, batch, q_len, heads, keys)
    tiling = row_tiling(rows, deal.row_tile)
    lengths = [-(-keys // deal.tile_kv)] * batch
    line = cut(deal, tiling, plan.parts, plan.slots, lengths)
    tiles = [[length] * tiling.row_tiles for length in lengths]
    done = [list(segments(deal, tiling, line, lengths, tiles, part)) for part in range(plan.parts)]
    partials = sum(s.slot >= 0 for part in done for s in part) * min(rows, deal.row_tile)
    loaded = LATENT_DIM + ROPE_DIM if deal.sms == 1 else (2 * LATENT_DIM + ROPE_DIM) // 2
    clocks = max(tile_clocks(ARCH, rows, 1), deal.tile_kv * loaded / SM_BYTES_PER_CLOCK)
    partial_bytes = partials * partial_row_bytes(VARIANT, rows)
    return _time([[s.tiles for s in part] for part in done], clocks, batch * keys, partial_bytes, hbm)


def equal_splits_us(heads: int, q_len: int, keys: int, batch: int, hbm: float) -> float:
    """The same model when every request is cut into as many equal splits as tokenspeed-mla 2.0.4 chooses
    (`_get_split_kv_and_workspace_size`), one CTA of 64 rows or a pair of 128 for each, on tiles of 128 keys."""
    processors, tile_kv = RATES[ARCH].processors, 128
    rows = heads * q_len
    ctas, row_tile, clocks = (1, 64, PEER_SOLO_CLOCKS) if rows <= 64 else (2, 128, tile_clocks(ARCH, rows, 1))
    row_tiles, tiles, places = -(-rows // row_tile), -(-keys // tile_kv), processors // ctas
    splits = max(1, processors // batch // (row_tiles * ctas))
    if ctas == 1:
        splits = -(-tiles // -(-tiles // min(tiles, splits)))
    each = -(-tiles // min(splits, 64 if ctas == 1 else 32))
    splits = -(-tiles // each)
    busiest = [each] * -(-batch * row_tiles * splits // places)
    clocks = max(clocks, tile_kv * (2 * LATENT_DIM + ROPE_DIM) / ctas / SM_BYTES_PER_CLOCK)
    partial_bytes = batch * splits * rows * PEER_PARTIAL_ROW_BYTES if splits > 1 else 0
    return _time([busiest], clocks, batch * keys, partial_bytes, hbm)


def _time(parts: list[list[int]], tile: float, keys: int, partial_bytes: int, hbm: float) -> float:
    """us, from the KV tiles of each part's segments, a tile's clocks, keys of all requests, bytes of partial results.
    """
    per_tile = tile / RATES[ARCH].clock
    busiest = max(NEXT_SEGMENT_US * len(part) + sum(part) * per_tile for part in parts)
    attend = FIRST_SEGMENT_US + max(busiest - NEXT_SEGMENT_US, keys * (LATENT_DIM + ROPE_DIM) / hbm * 1e6)
    l2 = RATES[ARCH].processors * SM_BYTES_PER_CLOCK * RATES[ARCH].clock * 1e6
    return START_US + attend + (COMBINE_US + partial_bytes * (1 / hbm + 1 / l2) * 1e6 if partial_bytes else 0.0)


def main() -> None:
    print("us, ours / tokenspeed-mla 2.0.4's splits in the same model, and in brackets what is published")
    for what, rate in HBM.items():
        times = {problem: (least_us(*problem, rate), equal_splits_us(*problem, rate)) for problem in PROBLEMS}
        ratios = [ours / theirs for ours, theirs in times.values()]
        print(f"\nHBM at {rate / 1e12:g} TB/s: {what}\n")
        print(f"| heads, q_len, keys |{'|'.join(f' B={batch} ' for batch in BATCHES)}|\n|{'---|' * (1 + len(BATCHES))}")
        for shape in SHAPES:
            cells = []
            for batch in BATCHES:
                ours, theirs = times[(*shape, batch)]
                published = PUBLISHED_US.get((*shape, batch))
                cells.append(f" {ours:.1f} / {theirs:.1f} " + (f"({published}) " if published else ""))
            heads, q_len, keys = shape
            print(f"| {heads}, {q_len}, {keys // 1024}K |{'|'.join(cells)}|")
        above = sum(ratio > 1 for ratio in ratios)
        print(f"\n{above} of {len(ratios)} above; {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}")


if __name__ == "__main__":
    main()
