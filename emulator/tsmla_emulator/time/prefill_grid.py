"""The grid of a prefill: which query tiles its CTAs take, and how many KV tiles each of them visits."""

from __future__ import annotations

from typing import Any

from tsmla.identity.arch import Arch
from tsmla.identity.dtype import bytes_of
from tsmla_kernels.prefill.tile_bounds import ALIKE, L2_SECTION_BYTES, SIDE_BY_SIDE
from tsmla_kernels.sm90.prefill.geometry import (
    FOLLOWING,
    LONG_KEYS,
    SHORT_KEYS,
    SINGLE_SHARE,
    SINGLE_TILES,
    PrefillGeometry,
)
from tsmla_kernels.sm100.prefill.geometry import SECTION_HEADS
from tsmla_kernels.sm100.prefill.geometry import PrefillGeometry as BlackwellGeometry

from ..prove.calls.prefill import has_kernel_of_long_sequences


def hopper_geometry(variant: Any) -> PrefillGeometry | None:
    """Return the sizes of a Hopper prefill; None for other architectures'."""
    return PrefillGeometry.of(variant) if variant.arch is Arch.SM90A else None


def query_tiles_of(variant: Any) -> int:
    """Return the most query tiles that one CTA takes."""
    geometry = hopper_geometry(variant)
    return geometry.tasks if geometry else 1


def ctas_of(variant: Any) -> int:
    """Return the CTAs that compute query tiles together."""
    return 1 if hopper_geometry(variant) else BlackwellGeometry.of(variant).plan.ctas


def keys_of_tile(variant: Any) -> int:
    """Return the keys of a KV tile."""
    return (hopper_geometry(variant) or BlackwellGeometry.of(variant)).tile_kv


def rows_of_tile(variant: Any) -> int:
    """Return the rows of a query tile, or of all query tiles of a CTA or pair that run together."""
    if geometry := hopper_geometry(variant):
        return geometry.tile_q
    return BlackwellGeometry.of(variant).rows_together


def kv_tiles(variant: Any, shape: Any, processors: int, rows: int, tile_kv: int) -> list[list[int]]:
    """Return the KV tiles of each CTA's query tiles, in the order in which CTAs start.

    Query tiles have `rows` rows, KV tiles `tile_kv` keys.
    """
    v, s = variant, shape
    count = -(-s.queries // rows)
    tiles = s.heads * s.sequences * count
    several = dealt(v, s, processors, rows)
    paired = sum(map(len, several))

    def visited(tile: int) -> int:
        seen = s.keys
        if v.causal:
            seen = min(s.keys, s.keys - s.queries + min((tile + 1) * rows, s.queries))
        return -(-max(seen, 0) // tile_kv)

    one = _follow(v, s) and all(len(own) == 1 for own in several)
    found = [visited(tile) for tile in _order(v, s, count, paired, one)]
    return [[found[number] for number in own] for own in several] + [[found[n]] for n in range(paired, tiles)]


def dealt(variant: Any, shape: Any, processors: int, rows: int) -> list[list[int]]:
    """Return the numbers of the query tiles of each CTA that may take several, in the order in which CTAs start.

    The CTAs behind have one tile each.
    """
    v, s = variant, shape
    count = -(-s.queries // rows)
    if _follow(v, s):
        return _following(v, s, processors, rows)
    if not _far_apart(v, s):
        return []
    return _strided(PrefillGeometry.of(v), v.causal, count, s.heads * s.sequences * count, processors)


def _follow(variant: Any, shape: Any) -> bool:
    """Whether the query tiles of a CTA have consecutive numbers."""
    geometry = hopper_geometry(variant)
    short = SHORT_KEYS * (2 if shape.queries >= shape.keys else 1)
    return geometry is not None and geometry.policy.follows_if_long and bool(shape.keys > short)


def _far_apart(variant: Any, shape: Any) -> bool:
    """Whether the query tiles of a CTA, if it has several, have numbers a round of CTAs apart."""
    alone = has_kernel_of_long_sequences(variant) and shape.keys > LONG_KEYS
    return variant.arch is Arch.SM90A and not alone and not _follow(variant, shape)


def _order(variant: Any, shape: Any, count: int, dealt: int, one: bool) -> list[int]:
    """Return query tiles of all heads, `count` of each, in the order of their numbers (prefill/tile_scheduler.py).

    - First come heads whose tiles have numbers below `dealt`: a head's last tile beside its first.
    - The other heads are in sections: heads whose keys fit in L2 together, or SECTION_HEADS heads in Blackwell's causal
      kernels. Within a section, the longest tiles come first.
    - Where tiles of fewer rows take less time, and others are alike, heads come in batches instead, with those tiles
      last; all heads do if each CTA has `one` tile.
    """
    s, geometry = shape, hopper_geometry(variant)
    short_last = geometry is not None and geometry.policy.short_last and s.queries % geometry.tile_q != 0
    in_batches = short_last and count > 1 and s.keys > ALIKE * s.queries
    section_bytes = L2_SECTION_BYTES * (2 if _far_apart(variant, s) else 1)
    section = min(max(section_bytes // (s.keys * _row_bytes(variant)), 1), s.heads)
    if variant.arch is not Arch.SM90A and variant.causal:
        section = min(SECTION_HEADS, s.heads)
    if in_batches:
        section = max(SIDE_BY_SIDE // count, 1)
    found: list[int] = []
    for _ in range(s.sequences):
        paired = 0 if in_batches and one else min(max(dealt - len(found), 0) // count, s.heads)
        for _ in range(paired):
            begin = len(found)
            found += [count - 1 - n // 2 if (begin + n) % 2 == 0 else n // 2 for n in range(count)]
        for first in range(paired, s.heads, section):
            heads = min(section, s.heads - first)
            if in_batches:
                found += list(range(count - 1)) * heads + [count - 1] * heads
            else:
                found += [tile for tile in reversed(range(count)) for _ in range(heads)]
    return found


def _strided(geometry: PrefillGeometry, causal: bool, count: int, tiles: int, processors: int) -> list[list[int]]:
    """Return the tiles of each CTA where they are far apart, as `deal_of` and `numbers_of` of sm90/prefill/tasks.py
    find them.

    Those functions are traced, and deal on the device. The same arithmetic stands here in plain integers; a test
    compares the two.
    """
    most = geometry.tasks
    stride = max(processors // 2 * 2, 2)
    rounds = max(tiles - processors // 2, 0) // stride
    if causal:
        most, rounds, stride = _of_unlike_tiles(geometry, count, tiles, processors)
    return [
        [n * stride + (lane ^ n - begin & 1) for n in range(begin, min(begin + most, rounds))]
        for begin in range(0, rounds, most)
        for lane in range(stride)
    ]


def _of_unlike_tiles(geometry: PrefillGeometry, count: int, tiles: int, processors: int) -> tuple[int, int, int]:
    """Return, for causal kernels, tiles of a CTA, rounds, and CTAs of a round, as sm90/prefill/tasks.py finds them."""
    most = geometry.tasks
    whole = count * (1 + count % 2)
    stride = processors // whole * whole
    alone = processors + processors // 2
    alike = 16 * stride >= 15 * processors
    if not alike:
        stride = max(processors // 2 * 2, 2)
    rounds = tiles // stride
    left = tiles - rounds * stride
    if rounds > most or ((rounds % 2 or left) and (rounds < 2 or 4 * left < 3 * stride)):
        if rounds > most and not alike:
            most, alone = (2, alone) if geometry.keys_fill_l2 else (most, alone + processors)
        rounds = max(tiles - alone, 0) // stride
    elif left == 0 and stride < processors and count > most and 4 * rounds > 3 * most:
        rounds -= 1
    return most, rounds, stride


def _following(variant: Any, shape: Any, processors: int, rows: int) -> list[list[int]]:
    """Return the tiles of each CTA where they have consecutive numbers, as sm90/prefill/tasks.py finds them."""
    s = shape
    tiles = s.heads * (s.sequences * s.queries // rows)
    kv_bytes = s.sequences * s.keys * s.heads * _row_bytes(variant)
    fitting = [n for n in FOLLOWING if n * kv_bytes * processors <= L2_SECTION_BYTES * tiles]
    most = max(fitting, default=1)
    alone = min(SINGLE_TILES * processors, max(tiles // SINGLE_SHARE, processors))
    return [list(range(n * most, n * most + most)) for n in range(max(tiles - alone, 0) // most)]


def _row_bytes(variant: Any) -> int:
    """Return the bytes of a key and its value."""
    return bytes_of(variant.dtype.bits, variant.d_qk + variant.d_v)
