"""mla_write_cache and mla_read_cache are right, whatever the case: every number of a row, and no other byte changes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
import tsmla
from tsmla.checks import TORCH_DTYPE_OF
from tsmla.variant import Dtype

from .cache_case import CacheCase
from .guarded import Guarded
from .places import Place
from .reference_cache import E4M3, stored

_WIDTHS = {"bf16": 1152, "fp16": 1152, "e4m3": 576, "fp8_ds_mla": 656, "snapmla": 512}
_APART = {"rope_cache": (128, torch.bfloat16), "scale_cache": (4, torch.float32)}


def check(case: CacheCase, place: Place) -> None:
    """Write the keys, judge the cache, and read it back where that is under test. Raises AssertionError, and what the
    operators and the emulator raise."""
    keys, count = drawn(case), case.pages * case.page
    own = [(token, slot) for token, slot in enumerate(case.slots) if 0 <= slot < count]
    with place.running(case.schedule):
        memory, tensors = arranged(case)
        rows = Guarded(tuple(keys.shape), keys.dtype, (584, 1), keys)
        slots = torch.tensor(case.slots, dtype=torch.int32 if case.narrow else torch.int64).cuda()
        scaled = {"power_of_two_scales": case.rounded} if case.format in ("fp8_ds_mla", "snapmla") else {}
        tsmla.mla_write_cache(
            rows.tensor[:, :512], rows.tensor[:, 512:], slots, **tensors, format=case.format, scale=case.scale,
            enable_pdl=case.pdl, **scaled,
        )  # fmt: skip
        torch.cuda.synchronize()
        written = torch.zeros(count, dtype=torch.bool)
        written[[slot for _, slot in own]] = True
        for name, guarded in memory.items():
            may_change = written.view(case.pages, case.page, 1).expand(guarded.tensor.shape)
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
        assert not rows.changed(), "kv_c and k_pe: changed"
        held = {name: guarded.tensor.cpu().reshape(count, -1) for name, guarded in memory.items()}
        for token, slot in own:
            _judge_row(case, keys[token], {name: x[slot] for name, x in held.items()}, f"token {token}, slot {slot}")
        if case.family == "read_cache":
            _check_read(case, tensors, held, slots)


def drawn(case: CacheCase) -> torch.Tensor:
    """[tokens, 576] on the CPU."""
    generator = torch.Generator().manual_seed(case.seed)
    dtype, shape = TORCH_DTYPE_OF[Dtype(case.dtype)], (len(case.slots), 576)
    if case.values == "any bits":
        return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(dtype)
    keys = torch.randn(shape, generator=generator)
    if case.values == "spread":
        keys = torch.ldexp(keys, torch.randint(-14, 14, shape, generator=generator))
    elif case.values == "one outlier" and len(keys):
        keys[case.seed % len(keys), case.seed % 576] *= 5000
    elif case.values == "tiny":
        keys = torch.ldexp(keys, torch.tensor(-130 if dtype is torch.bfloat16 else -20))
    elif case.values == "zeros":
        keys[:, :512] = 0
    return keys.to(dtype)


def arranged(case: CacheCase) -> tuple[dict[str, Guarded], dict[str, torch.Tensor]]:
    """The cache's memory, in bytes, and its tensors."""
    first = TORCH_DTYPE_OF[Dtype(case.format)] if case.format in ("bf16", "fp16") else E4M3
    if first is E4M3 and case.as_bytes:
        first = torch.uint8
    parts = {"cache": (_WIDTHS[case.format], first), **(_APART if case.format == "snapmla" else {})}
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
    if case.format in ("bf16", "fp16"):
        assert torch.equal(cache.view(torch.int16), key.view(torch.int16)), f"{where}: not the bits that were given"
        return
    wanted = stored(key.float().numpy(), case.format, case.scale, case.rounded)
    codes = cache[: len(wanted["codes"])].numpy()
    wrong = (codes != wanted["codes"]) & ~((codes & 0x7F == 0x7F) & (wanted["codes"] == 0x7F))
    if wrong.any():
        at = int(np.argmax(wrong))
        found, right = codes[at], wanted["codes"][at]
        raise AssertionError(f"{where}: column {at}, {float(key[at])}, has code {found:#x} instead of {right:#x}")
    if case.format == "fp8_ds_mla":
        assert torch.equal(cache[528:].view(torch.int16), key[512:].view(torch.int16)), f"{where}: rope"
        scales = cache[512:528].clone().view(torch.float32)
    elif case.format == "snapmla":
        rope, right = held["rope_cache"].view(torch.bfloat16), torch.from_numpy(wanted["rope"]).bfloat16()
        alike = (rope.view(torch.int16) == right.view(torch.int16)) | (rope.isnan() & right.isnan())
        assert alike.all(), f"{where}: rope part"
        scales = held["scale_cache"].view(torch.float32)
    else:
        return
    right = wanted["scales"]
    assert np.array_equal(scales.numpy(), right), f"{where}: scales {scales.tolist()} instead of {right}"


def _check_read(case: CacheCase, tensors: dict[str, Any], held: dict[str, torch.Tensor], slots: torch.Tensor) -> None:
    count, dtype = case.pages * case.page, TORCH_DTYPE_OF[Dtype(case.dtype)]
    given: dict[str, Any] = {"indices": slots}
    places = [slot if 0 <= slot < count else -1 for slot in case.slots]
    if case.requests:
        given, places = _tables(case)
    out = Guarded((len(places), 576), dtype, (592, 1))
    tsmla.mla_read_cache(
        kv_c=out.tensor[:, :512], k_pe=out.tensor[:, 512:], **tensors, **given, format=case.format, scale=case.scale,
        enable_pdl=case.pdl,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not out.changed(torch.ones(len(places), 576, dtype=torch.bool)), "bytes around what is read changed"
    got = out.tensor.cpu()
    for row, place in enumerate(places):
        right = torch.zeros(576, dtype=dtype)
        if place >= 0:
            right = _restored({name: x[place] for name, x in held.items()}, case, dtype)
        alike = (got[row].view(torch.int16) == right.view(torch.int16)) | (got[row].isnan() & right.isnan())
        assert alike.all(), f"row {row}, slot {place}: {int((~alike).sum())} of 576 elements are wrong"


def _tables(case: CacheCase) -> tuple[dict[str, torch.Tensor], list[int]]:
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
    return {name: x.int().cuda() for name, x in given.items()}, [*places, -1]


def _restored(held: dict[str, torch.Tensor], case: CacheCase, dtype: torch.dtype) -> torch.Tensor:
    """What one row's bytes are read as."""
    cache = held["cache"].contiguous()
    if case.format in ("bf16", "fp16"):
        return cache.view(dtype)
    numbers = cache[: 576 if case.format == "e4m3" else 512].view(E4M3).float()
    if case.format == "e4m3":
        return (numbers * torch.tensor(case.scale)).to(dtype)
    if case.format == "snapmla":
        rope, scale = held["rope_cache"].contiguous().view(torch.bfloat16), held["scale_cache"].contiguous()
        return (torch.cat([numbers, rope.float()]) * scale.view(torch.float32)).to(dtype)
    scales = cache[512:528].clone().view(torch.float32).repeat_interleave(128)
    return torch.cat([(numbers * scales).to(dtype), cache[528:].clone().view(torch.bfloat16)])
