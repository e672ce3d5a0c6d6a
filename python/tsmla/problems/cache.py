"""Cache writes and reads of `tsmla selftest`: a case's inputs, the call that a variant serves, and what it must
give."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..identity.row_format import LARGEST_E4M3, LEAST_AMAX, LEAST_SCALE, RowFormat, format_of
from ..identity.variant import Dtype, ReadCacheVariant, WriteCacheVariant
from ..operators.checks import TORCH_DTYPE_OF
from ..operators.read_cache import mla_read_cache
from ..operators.write_cache import mla_write_cache
from .cases import CacheCase, QueryCase
from .kept import kept
from .memory import Memory, bits, surrounded
from .reference import Judged, compared

_GAP = 32
"""Elements between the rows of strided tensors: a multiple of 16 bytes in every dtype."""
_E4M3 = torch.float8_e4m3fn
_POSITIONS = 70
"""Positions that a table of cosines and sines has."""
_ROWS = "kv_c", "k_pe"
"""Tensors of rows outside of the cache, one for each piece."""
_Tensors = dict[str, torch.Tensor]


def run(variant: WriteCacheVariant | ReadCacheVariant, case: CacheCase, memory: Memory, pdl: bool) -> _Tensors:
    """Call the operator so that `variant` serves; results lie in memory of `memory`."""
    row, dtype = variant.row, TORCH_DTYPE_OF[variant.dtype]
    format = format_of(row)
    scale, slots = _scale(case, row), _slots(case)
    if isinstance(variant, WriteCacheVariant):
        cache: dict[str, Any] = _cache(case, row, memory)
        kv_c, k_pe = keys(case, dtype)
        mla_write_cache(
            kv_c,
            k_pe if row.has("rope") else None,
            slots,
            **cache,
            **(_rotation(case, dtype) if row.has("rope") else {}),
            format=format,
            scale=scale,
            enable_pdl=pdl,
            power_of_two_scales=case.power_of_two if row.scales else None,
        )
        return _pieces(cache, row)
    rows = {
        name: memory.allocate((case.tokens, piece.columns), dtype, gap=_GAP if case.strided else 0)
        for name, piece in zip(_ROWS, row.pieces, strict=False)
    }
    places = _tables(case) if case.tables else {"indices": slots}
    given: dict[str, Any] = {"k_pe": None, **_filled(case, variant), **rows, **places}
    mla_read_cache(**given, format=format, scale=scale, enable_pdl=pdl)
    return rows


def check(variant: WriteCacheVariant | ReadCacheVariant, case: CacheCase, results: _Tensors) -> Judged:
    """Compare the results of `run` with torch: equal bytes, or any NaN for a NaN."""
    return compared(results, _expected(case, variant))


def _scale(case: CacheCase, row: RowFormat) -> float:
    """Return the scale of the whole cache; 1 for a format without."""
    return case.scale if row.pieces[0].dtype is Dtype.E4M3 and row.scales is None else 1.0


@kept("write_cache", "read_cache", "quantize_q")
def _slots(case: CacheCase) -> torch.Tensor:
    """Return a slot for each token, all different. Every seventh has none, or one that the cache does not have."""
    count = case.pages * case.page
    slots = torch.randperm(count)[: case.tokens]
    nowhere = torch.tensor([-1, count, -(2**40), 2**32 + 1])
    slots[3::7] = nowhere[torch.arange(len(slots[3::7])) % len(nowhere)]
    return slots.to("cuda")


@kept("write_cache", "read_cache", "quantize_q")
def _tables(case: CacheCase) -> _Tensors:
    """Return page tables, ends and starts of the requests.

    The second of three has no rows, and the last begins at its sixth key. The last two rows are no request's, and no
    table has the page of the rows before. Of more requests, the first has no rows, and each has more than the one
    before and begins at another key; tables have pages for the rows behind them, too.
    """
    count, first = case.requests, case.tokens // 3
    ends, starts = torch.tensor([0, first, first, case.tokens - 2]), torch.tensor([0, 0, 5])
    if count > 3:
        inner = torch.arange(1, count) ** 2 * (case.tokens - 2) // count**2
        ends, starts = torch.cat([torch.tensor([0]), inner, ends[-1:]]), 3 * torch.arange(count) % 7
    width = -(-(case.tokens + 6) // case.page)
    tables = torch.arange(count * width).view(count, width) * 7 % case.pages
    if count == 3:
        tables[2, (case.tokens - 2 - first + 5) // case.page - 1 :] = case.pages
    given = {"block_tables": tables, "cum_seq_lens": ends, "seq_starts": starts}
    return {name: tensor.to("cuda", torch.int32) for name, tensor in given.items()}


def _places(case: CacheCase) -> torch.Tensor:
    """Return the slot that each row is read from; -1 where it has no key."""
    count, slots = case.pages * case.page, _slots(case)
    if not case.tables:
        return torch.where((slots >= 0) & (slots < count), slots, -1)
    tables, ends, starts = (tensor.tolist() for tensor in _tables(case).values())
    places = []
    for row in range(case.tokens):
        request = next((b for b in range(case.requests) if ends[b] <= row < ends[b + 1]), None)
        position = -1 if request is None else row - ends[request] + starts[request]
        page = case.pages if request is None else tables[request][position // case.page]
        places.append(page * case.page + position % case.page if page < case.pages else -1)
    return torch.tensor(places, device="cuda")


@kept("write_cache", "read_cache", "quantize_q")
def keys(case: CacheCase | QueryCase, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return kv_c and k_pe, or rows of a query.

    They hold all 16-bit patterns, or else normal numbers over 28 powers of two, with some rows all 0.
    """
    whole = surrounded((case.tokens, 576), dtype)
    if case.patterns:
        numbers = torch.arange(whole.numel(), device="cuda") % 2**16 - 2**15
        bits(whole).copy_(numbers.to(torch.int16).view(whole.shape))
    else:
        exponents = torch.randint(-14, 14, whole.shape, device="cuda")
        whole.copy_(torch.ldexp(torch.randn(whole.shape, device="cuda"), exponents).to(dtype))
        whole[::5, :512] = 0
    return whole[:, :512], whole[:, 512:]


@kept("write_cache", "read_cache", "quantize_q")
def _rotation(case: CacheCase, dtype: torch.dtype) -> dict[str, Any]:
    """Return what rotates rope parts, if a case has them rotated. The table lacks every ninth position."""
    if not case.rotated:
        return {}
    positions = torch.randint(_POSITIONS, (case.tokens,))
    nowhere = torch.tensor([-1, _POSITIONS, 2**32 + 1])
    positions[2::9] = nowhere[torch.arange(len(positions[2::9])) % len(nowhere)]
    angles = torch.rand(_POSITIONS, 32) * 7
    table = torch.cat([angles.cos(), angles.sin()], -1).to(dtype if case.rotated == "neighbours" else torch.float32)
    return {
        "positions": positions.to("cuda"),
        "cos_sin_cache": table.to("cuda"),
        "rope_interleaved": case.rotated == "neighbours",
    }


def rotated(
    k_pe: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, rope_interleaved: bool
) -> torch.Tensor:
    """Return rope parts [tokens, 64] turned by their positions, by the formula of `mla_write_cache`; NaN where the
    table has none."""
    if not len(cos_sin_cache):
        return torch.full_like(k_pe, math.nan)
    known = (positions >= 0) & (positions < len(cos_sin_cache))
    cos, sin = cos_sin_cache.float()[torch.where(known, positions, 0)].chunk(2, -1)
    r = k_pe.float()
    x, y = (r[:, 0::2], r[:, 1::2]) if rope_interleaved else r.chunk(2, -1)
    pairs = x * cos - y * sin, y * cos + x * sin
    turned = torch.stack(pairs, -1).flatten(1) if rope_interleaved else torch.cat(pairs, -1)
    return torch.where(known[:, None], turned, math.nan).to(k_pe.dtype)


def _cache(case: CacheCase, row: RowFormat, memory: Memory) -> _Tensors:
    """Return the tensors of a cache that nobody wrote."""
    width = row.pieces[0].columns if row.apart else row.bytes * 8 // row.pieces[0].dtype.bits
    shapes = {"cache": (width, row.pieces[0].dtype)}
    if row.apart:
        shapes["rope_cache"] = 64, row.pieces[1].dtype
    gap, rows = _GAP if case.strided else 0, case.page + case.pages_apart
    tensors = {
        name: memory.allocate((case.pages, rows, width), TORCH_DTYPE_OF[dtype], gap=gap)
        for name, (width, dtype) in shapes.items()
    }
    if row.apart:
        tensors["scale_cache"] = memory.allocate((case.pages, rows), torch.float32, gap=gap)
    return {name: tensor[:, : case.page] for name, tensor in tensors.items()}


def _pieces(cache: _Tensors, row: RowFormat) -> _Tensors:
    """Split the rows of a cache into their pieces."""
    whole = cache["cache"]
    if row.apart:
        return {"latent": whole, "rope": cache["rope_cache"], "scales": cache["scale_cache"][..., None]}
    size = whole.element_size()
    pieces = {
        piece.name: whole[..., row.offset(piece.name) // size :][..., : piece.bytes // size].view(
            TORCH_DTYPE_OF[piece.dtype]
        )
        for piece in row.pieces
    }
    if row.scales_offset is not None:
        pieces["scales"] = whole[..., row.scales_offset :][..., : 4 * row.scales_per_row].view(torch.float32)
    return pieces


def stored(case: CacheCase | QueryCase, row: RowFormat, dtype: torch.dtype) -> _Tensors:
    """Return what each token's row holds, by the formulas of `mla_write_cache`."""
    kv_c, k_pe = keys(case, dtype)
    if isinstance(case, CacheCase) and case.rotated:
        k_pe = rotated(k_pe, **_rotation(case, dtype))
    dtypes = [TORCH_DTYPE_OF[piece.dtype] for piece in row.pieces]

    def rounded(quotients: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        return (quotients.clamp(-LARGEST_E4M3, LARGEST_E4M3) if to is _E4M3 else quotients).to(to)

    if row.scales is None:
        assert isinstance(case, CacheCase)
        scale = torch.tensor(_scale(case, row), device="cuda")
        both = zip(row.pieces, (kv_c, k_pe), dtypes, strict=False)
        return {piece.name: rounded(numbers.float() / scale, to) for piece, numbers, to in both}
    latent, rope = dtypes
    blocks = kv_c.float().unflatten(1, (row.scales_per_row, -1))
    amax = blocks.abs().nan_to_num(0.0, math.inf).amax(-1)
    limit = torch.tensor(LARGEST_E4M3, device="cuda")
    scales = amax.clamp_min(LEAST_AMAX) / limit if row.scales.whole_row else (amax / limit).clamp_min(LEAST_SCALE)
    if case.power_of_two:
        fraction, exponent = torch.frexp(scales)
        above = torch.ldexp(torch.ones_like(scales), exponent - (fraction == 0.5).int())
        scales = torch.where(scales.isinf(), scales, above)
    if row.scales.whole_row:
        scales = torch.where(amax == 0, 1.0, scales)
        k_pe = rounded(k_pe.float() / scales, rope)
    return {"latent": rounded(blocks / scales[..., None], latent).flatten(1), "rope": k_pe, "scales": scales}


def _put(case: CacheCase, row: RowFormat, dtype: torch.dtype, cache: _Tensors) -> _Tensors:
    """Return the pieces of a cache after each token that has a slot was put into it."""
    slots, pieces = _slots(case), _pieces(cache, row)
    kept = (slots >= 0) & (slots < case.pages * case.page)
    page, place = slots[kept] // case.page, slots[kept] % case.page
    for name, values in stored(case, row, dtype).items():
        bits(pieces[name])[page, place] = bits(values.contiguous())[kept]
    return pieces


@kept("write_cache", "read_cache", "quantize_q")
def _filled(case: CacheCase, variant: ReadCacheVariant) -> _Tensors:
    """Return a cache to read from. Rows that no token was put into hold NaN."""
    cache = _cache(case, variant.row, Memory())
    _put(case, variant.row, TORCH_DTYPE_OF[variant.dtype], cache)
    return cache


@kept("write_cache", "read_cache", "quantize_q")
def _expected(case: CacheCase, variant: WriteCacheVariant | ReadCacheVariant) -> _Tensors:
    row, dtype = variant.row, TORCH_DTYPE_OF[variant.dtype]
    if isinstance(variant, WriteCacheVariant):
        return _put(case, row, dtype, _cache(case, row, Memory()))
    places = _places(case)
    pieces = {
        name: piece[places // case.page, places % case.page]
        for name, piece in _pieces(_filled(case, variant), row).items()
    }
    scales = pieces.pop("scales", torch.full((case.tokens, 1), _scale(case, row), device="cuda"))
    latent = pieces["latent"].float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    rows = {"kv_c": latent.flatten(1).to(dtype)}
    if row.has("rope"):
        rope = pieces["rope"].float() * (scales if row.scales is None or row.scales.whole_row else 1.0)
        rows["k_pe"] = rope.to(dtype)
    return {name: torch.where((places < 0)[:, None], 0.0, values) for name, values in rows.items()}
