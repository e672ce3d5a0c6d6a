"""Which query tiles the CTAs of a prefill take, and how many KV tiles each of them visits."""

from __future__ import annotations

from typing import Any

L2_SECTION_BYTES = 24 * 2**20
"""As parts/tile_scheduler.py has it."""
SINGLE_TILES = 4
"""As sm90/prefill/tasks.py has it."""
SINGLE_SHARE = {128: 4, 192: 8}
"""Likewise."""
SHORT_KEYS = 4096
"""Likewise."""


def query_tiles_of(variant: Any) -> int:
    """At most, of one CTA (sm90/prefill/geometry.py)."""
    if variant.arch.value != "sm_90a":
        return 1
    return 4 if variant.d_v > 128 or variant.dtype.bits == 8 else 1


def keys_of_tile(variant: Any) -> int:
    """Keys of a KV tile (geometry.py of sm90/prefill and sm100/prefill)."""
    if variant.arch.value != "sm_90a":
        return 128
    if variant.dtype.bits == 8:
        return 96
    return 80 if variant.d_v > 128 else 128


def rows_of_tile(variant: Any) -> int:
    """Rows of a query tile, or of both of a CTA (geometry.py of sm90/prefill and sm100/prefill)."""
    if variant.arch.value != "sm_90a":
        return 256
    return 192 if variant.dtype.bits == 8 and variant.d_v <= 128 else 128


def kv_tiles(variant: Any, shape: Any, processors: int, rows: int, tile_kv: int) -> list[list[int]]:
    """Of each CTA, in the order in which they start, the KV tiles of its query tiles; these have `rows` rows, KV tiles
    `tile_kv` keys. Heads whose tiles are all dealt out several at a time come first, a head's last tile beside its
    first; then longest first within the heads whose keys fit in L2 together (parts/tile_scheduler.py)."""
    v, s = variant, shape
    row_bytes = (v.d_qk + v.d_v) * v.dtype.bits // 8
    count = -(-s.queries // rows)
    most, many = _deal(variant, shape, processors, rows, row_bytes)

    def visited(tile: int) -> int:
        seen = s.keys
        if v.causal:
            seen = min(s.keys, s.keys - s.queries + min((tile + 1) * rows, s.queries))
        return -(-max(seen, 0) // tile_kv)

    pairs = [count - 1 - place // 2 if place % 2 == 0 else place // 2 for place in range(count)]
    found: list[int] = []
    for _ in range(s.sequences):
        paired = min(max(most * many - len(found), 0) // count, s.heads)
        found += [visited(tile) for tile in pairs] * paired
        section = min(max(L2_SECTION_BYTES // (s.keys * row_bytes), 1), s.heads)
        for first in range(paired, s.heads, section):
            for tile in reversed(range(count)):
                found += [visited(tile)] * min(section, s.heads - first)
    several = [found[first : first + most] for first in range(0, most * many, most)]
    return several + [[tiles] for tiles in found[most * many :]]


def _deal(variant: Any, shape: Any, processors: int, rows: int, row_bytes: int) -> tuple[int, int]:
    """The first `many` CTAs take `most` query tiles (`deal_of` of sm90/prefill/tasks.py)."""
    s, limit = shape, query_tiles_of(variant)
    tiles = s.heads * (s.sequences * s.queries // rows)
    if limit == 1:
        head_by_head = variant.arch.value == "sm_90a" and s.keys <= SHORT_KEYS
        return 1, max(tiles - SINGLE_TILES * processors, 0) if head_by_head else 0
    kv_bytes = s.sequences * s.keys * s.heads * row_bytes
    fitting = [n for n in (2, limit) if n * kv_bytes * processors <= L2_SECTION_BYTES * tiles]
    most = max(fitting, default=1)
    alone = SINGLE_TILES * processors
    if variant.dtype.bits == 8:
        alone = min(alone, max(tiles // SINGLE_SHARE[rows], processors))
        if most > 3 and 2 * rows < s.queries <= 3 * rows:
            most = 3
    return most, max(tiles - alone, 0) // most
