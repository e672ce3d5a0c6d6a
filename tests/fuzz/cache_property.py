"""mla_write_cache and mla_read_cache are right, whatever the case: every number of a row, and no other byte changes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import tsmla
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import Dtype
from tsmla.operators.checks import TORCH_DTYPE_OF

from .cache_case import POSITIONS, CacheCase
from .guarded import Guarded
from .places import Place
from .reference_cache import numbers, rotated, stored

_APART = {"rope_cache": (128, torch.bfloat16), "scale_cache": (4, torch.float32)}


def check(case: CacheCase, place: Place) -> None:
    """Write the keys, judge the cache, and read it back where that is under test. Raises AssertionError, and what the
    operators and the emulator raise."""
    keys, count = drawn(case), case.pages * case.page
    own = [(token, slot) for token, slot in enumerate(case.slots) if 0 <= slot < count]
    with place.running(case.schedule):
        memory, tensors = case.manner.arrange(lambda: _cache(case))
        rows, given = case.manner.arrange(lambda: _write(case, keys, tensors))
        case.manner.call(place, tsmla.mla_write_cache, {**memory, **rows}, given)
        written = torch.zeros(count, dtype=torch.bool)
        written[[slot for _, slot in own]] = True
        for name, guarded in memory.items():
            may_change = written.view(case.pages, case.page, 1).expand(guarded.tensor.shape)
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
        for name, guarded in rows.items():
            assert not guarded.changed(), f"{name}: changed"
        held = {name: guarded.tensor.cpu().reshape(count, -1) for name, guarded in memory.items()}
        turned = _turned(case, keys)
        for token, slot in own:
            _judge_row(case, turned[token], {name: x[slot] for name, x in held.items()}, f"token {token}, slot {slot}")
        if case.family == "read_cache":
            _check_read(case, place, tensors, held)


def _is_latent(case: CacheCase) -> bool:
    """Whether rows of the cache have no rope part."""
    return not ROWS[case.format].has("rope")


def _columns(case: CacheCase) -> int:
    """Elements of a row that is read."""
    return 512 if _is_latent(case) else 576


def drawn(case: CacheCase) -> torch.Tensor:
    """[tokens, 576] on the CPU."""
    return random_rows(len(case.slots), TORCH_DTYPE_OF[Dtype(case.dtype)], case.values, case.seed)


def random_rows(count: int, dtype: torch.dtype, values: str, seed: int) -> torch.Tensor:
    """[count, 576] of one of VALUES."""
    generator, shape = torch.Generator().manual_seed(seed), (count, 576)
    if values == "any bits":
        return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype)
    keys = torch.randn(shape, generator=generator)
    if values == "spread":
        keys = torch.ldexp(keys, torch.randint(-14, 14, shape, generator=generator))
    elif values == "one outlier" and count:
        keys[seed % count, seed % 576] *= 5000
    elif values == "tiny":
        keys = torch.ldexp(keys, torch.tensor(-130 if dtype is torch.bfloat16 else -20))
    elif values == "zeros":
        keys[:, :512] = 0
    return keys.to(dtype)


def arranged(case: CacheCase, keys: torch.Tensor) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The memory and the arguments of the operator under test."""
    memory, tensors = _cache(case)
    if case.family == "write_cache":
        rows, given = _write(case, keys, tensors)
    else:
        rows, given, _ = _read(case, tensors)
    return {**memory, **rows}, given


def _write(case: CacheCase, keys: torch.Tensor, tensors: dict[str, Any]) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The memory of a write besides the cache, and its arguments."""
    rows = Guarded(tuple(keys.shape), keys.dtype, (584, 1), keys)
    memory = {"kv_c and k_pe": rows, "slot_mapping": _integers(case, torch.tensor(case.slots))}
    given = {
        "kv_c": rows.tensor[:, :512],
        "k_pe": None if _is_latent(case) else rows.tensor[:, 512:],
        "slot_mapping": memory["slot_mapping"].tensor,
        **tensors,
        "format": case.format,
        "scale": case.scale,
        "enable_pdl": case.pdl,
    }
    if ROWS[case.format].scales:
        given["power_of_two_scales"] = case.rounded
    if case.turn:
        positions, table = _turns(case)
        memory["positions"] = _integers(case, positions)
        given |= {
            "positions": memory["positions"].tensor,
            "cos_sin_cache": table.cuda(),
            "rope_interleaved": case.turn == "neighbours",
        }
    return memory, given


def _integers(case: CacheCase, values: torch.Tensor) -> Guarded:
    """Slots or positions, `offset` elements behind an aligned address."""
    dtype = torch.int32 if case.narrow else torch.int64
    return Guarded(tuple(values.shape), dtype, None, values.to(dtype), case.offset * dtype.itemsize)


def _turns(case: CacheCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, some of which the table of cosines and sines does not have, and the table."""
    generator = torch.Generator().manual_seed(case.seed)
    table = torch.randn(POSITIONS, 64, generator=generator)
    positions = torch.randint(-1, POSITIONS + 1, (len(case.slots),), generator=generator)
    return positions, table if case.float32_table else table.to(TORCH_DTYPE_OF[Dtype(case.dtype)])


def _turned(case: CacheCase, keys: torch.Tensor) -> torch.Tensor:
    """The keys as they are written."""
    if not case.turn:
        return keys
    positions, table = _turns(case)
    found = keys.clone()
    for key, position in zip(found, positions.tolist(), strict=True):
        if not 0 <= position < POSITIONS:
            key[512:] = float("nan")
            continue
        cos, sin = table[position].float().numpy().reshape(2, 32)
        key[512:] = torch.from_numpy(rotated(key[512:].float().numpy(), cos, sin, case.turn == "neighbours"))
    return found


def _cache(case: CacheCase) -> tuple[dict[str, Guarded], dict[str, torch.Tensor]]:
    """The cache's memory, in bytes, and its tensors."""
    row = ROWS[case.format]
    latent = row.piece("latent")
    first = torch.uint8 if latent.dtype.bits == 8 and case.as_bytes else TORCH_DTYPE_OF[latent.dtype]
    width = latent.bytes if row.apart else row.bytes
    parts = {"cache": (width, first), **(_APART if row.apart else {})}
    memory, tensors = {}, {}
    for name, (width, dtype) in parts.items():
        row = width + 16 * case.row_gap
        shape, strides = (case.pages, case.page, width), (case.page * row + 16 * case.page_gap, row, 1)
        memory[name] = Guarded(shape, torch.uint8, strides)
        tensor = memory[name].tensor.view(dtype)
        tensors[name] = tensor[..., 0] if name == "scale_cache" else tensor
    return memory, tensors


def _judge_row(case: CacheCase, key: torch.Tensor, held: dict[str, torch.Tensor], where: str) -> None:
    """One row, as its bytes lie in each tensor of the cache."""
    cache = held["cache"]
    if case.format.endswith("16"):
        assert _same(cache.view(key.dtype)[:512], key[:512], nan_as_given=True), f"{where}: not the latent bits given"
        rope = cache.view(key.dtype)[512:]
        assert _is_latent(case) or _same(rope, key[512:], not case.turn), f"{where}: rope part"
        return
    if case.format == "snapmla":
        rope, scales = held["rope_cache"].view(torch.bfloat16), held["scale_cache"].view(torch.float32)
        judge_snapmla(key, cache.numpy(), rope, scales.numpy(), case.rounded, where)
        return
    wanted = stored(key.float().numpy(), case.format, case.scale, case.rounded)
    _judge_codes(key, cache[: len(wanted["codes"])].numpy(), wanted["codes"], where)
    if "scales" in wanted:
        first, behind = ROWS[case.format].scales_offset, ROWS[case.format].offset("rope")
        assert _same(cache[behind:].view(key.dtype), key[512:], not case.turn), f"{where}: rope part"
        _judge_scales(cache[first:behind].clone().view(torch.float32).numpy(), wanted["scales"], where)


def _same(got: torch.Tensor, wanted: torch.Tensor, nan_as_given: bool) -> bool:
    """Whether 16-bit numbers have the same bits; those of NaN only where it was given."""
    alike = got.view(torch.int16) == wanted.view(torch.int16)
    return bool((alike | (not nan_as_given) & got.isnan() & wanted.isnan()).all())


def judge_snapmla(
    key: torch.Tensor, codes: np.ndarray, rope: torch.Tensor, scale: np.ndarray, rounded: bool, where: str
) -> None:
    """A row of this format, which is a key or a query."""
    wanted = stored(key.float().numpy(), "snapmla", 1.0, rounded)
    _judge_codes(key, codes, wanted["codes"], where)
    right = torch.from_numpy(wanted["rope"]).bfloat16()
    assert _same(rope, right, nan_as_given=False), f"{where}: rope part"
    _judge_scales(scale, wanted["scales"], where)


def _judge_codes(key: torch.Tensor, codes: np.ndarray, wanted: np.ndarray, where: str) -> None:
    wrong = (codes != wanted) & ~((codes & 0x7F == 0x7F) & (wanted == 0x7F))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise AssertionError(
            f"{where}: column {at}, {float(key[at])}, has code {codes[at]:#x} instead of {wanted[at]:#x}"
        )


def _judge_scales(scales: np.ndarray, wanted: np.ndarray, where: str) -> None:
    assert np.array_equal(scales, wanted), f"{where}: scales {scales} instead of {wanted}"


def _read(case: CacheCase, tensors: dict[str, Any]) -> tuple[dict[str, Guarded], dict[str, Any], list[int]]:
    """The memory of a read besides the cache, its arguments, and the slot of each row; -1 where it has none."""
    count = case.pages * case.page
    if case.requests:
        memory, places = _tables(case)
    else:
        memory = {"indices": _integers(case, torch.tensor(case.slots))}
        places = [slot if 0 <= slot < count else -1 for slot in case.slots]
    told = {name: guarded.tensor for name, guarded in memory.items()}
    out = Guarded((len(places), _columns(case)), TORCH_DTYPE_OF[Dtype(case.dtype)], (592, 1))
    given = {
        "kv_c": out.tensor[:, :512],
        "k_pe": None if _is_latent(case) else out.tensor[:, 512:],
        **tensors,
        **told,
        "format": case.format,
        "scale": case.scale,
        "enable_pdl": case.pdl,
    }
    return {**memory, "read": out}, given, places


def _check_read(case: CacheCase, place: Place, tensors: dict[str, Any], held: dict[str, torch.Tensor]) -> None:
    dtype = TORCH_DTYPE_OF[Dtype(case.dtype)]
    with torch.inference_mode(case.manner.made):
        memory, given, places = _read(case, tensors)
    case.manner.call(place, tsmla.mla_read_cache, memory, given)
    out = memory["read"]
    may_change = torch.ones(len(places), _columns(case), dtype=torch.bool)
    assert not out.changed(may_change), "bytes around what is read changed"
    got = out.tensor.cpu()
    for row, place in enumerate(places):
        right = torch.zeros(_columns(case), dtype=dtype)
        if place >= 0:
            right = numbers(case.format, {name: x[place] for name, x in held.items()}, case.scale).float().to(dtype)
        alike = (got[row].view(torch.int16) == right.view(torch.int16)) | (got[row].isnan() & right.isnan())
        assert alike.all(), f"row {row}, slot {place}: {int((~alike).sum())} of {len(alike)} elements are wrong"


def _tables(case: CacheCase) -> tuple[dict[str, Guarded], list[int]]:
    """Page tables of the requests, some of whose pages do not exist, and the slot of each row."""
    generator = torch.Generator().manual_seed(case.seed)
    requests, width = len(case.requests), 3
    tables = torch.randint(-1, case.pages + 1, (requests, width), generator=generator)
    starts = torch.randint(0, 2 * case.page, (requests,), generator=generator)
    places = []
    for rows, table, start in zip(case.requests, tables.tolist(), starts.tolist(), strict=True):
        for position in range(start, start + rows):
            page = table[position // case.page] if position // case.page < width else -1
            places.append(page * case.page + position % case.page if 0 <= page < case.pages else -1)
    ends = torch.tensor([0, *itertools.accumulate(case.requests)])
    given = {"block_tables": tables, "cum_seq_lens": ends, "seq_starts": starts}
    memory = {name: Guarded(tuple(x.shape), torch.int32, None, x.int(), 4 * case.offset) for name, x in given.items()}
    return memory, [*places, -1]
