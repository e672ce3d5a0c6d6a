"""mla_write_cache and mla_read_cache in emulation: every byte as PyTorch computes it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cache_rows import FORMATS, SCALE, Cache, cut, difficult, restored, rounded_or_not, stored, wrongly_rotated
from emulated_archs import KERNELS
from tsmla import mla_read_cache, mla_write_cache

pytestmark = pytest.mark.archs(*KERNELS)
FORMAT = pytest.mark.parametrize("format, dtype", FORMATS, ids=[f"{name}-{dtype}"[:15] for name, dtype in FORMATS])


def some_slots(tokens: int, slots: int) -> torch.Tensor:
    """Different ones, with some that are none."""
    chosen = torch.randperm(slots)[:tokens]
    nowhere = torch.tensor([-1, slots, -(2**31), 2**31, 2**32 + 3, -(2**63), 2**63 - 1])
    places = range(2, tokens, 4)
    chosen[2::4] = torch.tensor([int(nowhere[i % len(nowhere)]) for i, _ in enumerate(places)], dtype=torch.int64)
    return chosen.cuda()


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, or both NaN."""
    return bool(((got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())).all())


@FORMAT
def test_bytes_of_difficult_rows(gpu, format, dtype):
    """Strided inputs, pages of five rows with gaps between rows and pages, slots that are none, and back."""
    scale = SCALE.get(format, 1.0)
    rows = difficult(26, dtype)
    slots = some_slots(len(rows), 45)
    for rounded in rounded_or_not(format):
        cache, expected = (Cache(format, 9, 5, 16, 48, as_uint8=bool(rounded)) for _ in range(2))
        content = stored(*cut(rows, format), format, scale, rounded)
        expected.put(slots, content)
        options = {"format": format, "scale": scale, "power_of_two_scales": rounded}
        mla_write_cache(*cut(rows, format), slots, **cache.tensors, **options)
        assert not cache.differences(expected)
        whole = torch.full((len(rows), 584), float("nan"), dtype=dtype, device="cuda")
        mla_read_cache(
            cache.tensors["cache"],
            *cut(whole, format),
            slots,
            format=format,
            scale=scale,
            **{name: x for name, x in cache.tensors.items() if name != "cache"},
        )
        want = restored(content, format, dtype, scale)
        want[(slots < 0) | (slots >= 45)] = 0
        width = want.shape[1]
        assert same_numbers(whole[:, :width].contiguous(), want) and whole[:, width:].isnan().all()


@pytest.mark.parametrize("tokens, pages, page", [(1, 1, 1), (5, 3, 64), (64, 70, 1)])
def test_sizes_narrow_slots_and_dependent_launch(gpu, tokens, pages, page):
    rows = difficult(tokens, torch.bfloat16)
    slots = some_slots(tokens, pages * page).clamp(-(2**31), 2**31 - 1).int()
    cache, expected = Cache("fp8_ds_mla", pages, page), Cache("fp8_ds_mla", pages, page)
    expected.put(slots.long(), stored(*cut(rows), "fp8_ds_mla"))
    mla_write_cache(rows[:, :512], rows[:, None, 512:], slots, **cache.tensors, format="fp8_ds_mla", enable_pdl=True)
    assert not cache.differences(expected)


def test_rows_of_one_tensor_may_hold_both_pieces(gpu):
    """SnapMLA's latent and rope pieces in rows of 640 bytes."""
    rows, slots = difficult(12, torch.bfloat16), torch.arange(12).cuda()
    whole = torch.zeros(3, 4, 640, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(4, 3, device="cuda").T
    mla_write_cache(
        *cut(rows), slots, whole[..., :512], whole[..., 512:].view(torch.bfloat16), scales, format="snapmla"
    )
    content = stored(*cut(rows), "snapmla")
    assert torch.equal(whole.view(12, 640), torch.cat([content["cache"], content["rope_cache"]], -1))
    assert torch.equal(scales.reshape(12, 1), content["scale_cache"].view(torch.float32))


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("format, dtype", [FORMATS[0], FORMATS[3], FORMATS[5]], ids=["bf16", "e4m3", "snapmla"])
def test_rope_parts_are_rotated(gpu, format, dtype, interleaved):
    """Tables rotate them: of both dtypes with gaps between rows, positions of both widths, some that no table has."""
    rows = difficult(26, dtype)
    slots = torch.randperm(45)[: len(rows)].cuda()
    angles = torch.randn(40, 32) * 100
    for table_dtype, narrow in ((torch.float32, True), (dtype, False)):
        table = torch.full((40, 72), math.nan, dtype=table_dtype, device="cuda")[:, :64]
        table.copy_(torch.cat([angles.cos(), angles.sin()], -1))
        positions = torch.randint(0, 40, (len(rows),)).cuda()
        positions[3::9], positions[5::9] = -1, 40
        positions = positions.int() if narrow else positions
        assert not wrongly_rotated(format, 9, 5, rows, slots, positions, table, interleaved)


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("rows", [0, 1])
def test_tables_of_hardly_any_position(gpu, rows):
    table = torch.randn(2, 64, dtype=torch.bfloat16, device="cuda")[:rows].as_strided((rows, 64), (3, 1))
    keys, slots, positions = difficult(3, torch.bfloat16), torch.arange(3).cuda(), torch.tensor([0, 1, 0]).cuda()
    assert not wrongly_rotated("bf16", 1, 3, keys, slots, positions, table, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_by_scales_of_all_sizes(gpu, dtype):
    """Quotients are not divisions there (`tsmla_kernels.cache.quotient`), but have the same bits."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).cuda()
    rows = torch.cat([numbers, numbers[: 114 * 576 - len(numbers)]]).view(114, 576)
    slots = torch.arange(114).cuda()
    for scale in (2.0**-126, 3.7e-38, 1e-30, 0.37, 1.0, 2 - 2.0**-23, 448.0, 3e9, 2.0**64, 1e30, 1.5 * 2.0**127):
        cache, expected = Cache("e4m3", 1, 114), Cache("e4m3", 1, 114)
        expected.put(slots, stored(*cut(rows), "e4m3", scale))
        mla_write_cache(*cut(rows), slots, **cache.tensors, format="e4m3", scale=scale)
        assert not cache.differences(expected), scale


def tables_of(ends, starts, tables, pages, page):
    """The slot of each row, -1 where it has none, one by one."""
    slots = []
    for row in range(ends[-1] + 3):
        requests = [b for b, (first, end) in enumerate(itertools.pairwise(ends)) if first <= row < end]
        slot = -1
        if requests:
            position = row - ends[requests[0]] + starts[requests[0]]
            own = tables[requests[0]]
            if 0 <= position < len(own) * page and 0 <= own[position // page] < pages:
                slot = own[position // page] * page + position % page
        slots.append(slot)
    return torch.tensor(slots)


@FORMAT
def test_reading_by_page_tables(gpu, format, dtype):
    """Requests without rows, that start anywhere, that have pages which do not exist; rows that are no request's."""
    pages, page, scale = 7, 4, SCALE.get(format, 1.0)
    cache = Cache(format, pages, page)
    content = stored(*cut(difficult(pages * page, dtype), format), format, scale)
    cache.put(torch.arange(pages * page).cuda(), content)
    ends, starts = [0, 6, 6, 7, 18, 25], [1, 0, 11, 9, -2]
    tables = [[3, 0, 6, 1], [5, 5, 5, 5], [2, 4, 6, 7], [-1, 0, 5, 2**31 - 1], [1, -(2**31), 6, 3]]
    slots = tables_of(ends, starts, tables, pages, page)
    given = {"block_tables": tables, "cum_seq_lens": ends, "seq_starts": starts}
    whole = torch.full((len(slots), 576), float("nan"), dtype=dtype, device="cuda")
    kv_c, k_pe = cut(whole, format)
    mla_read_cache(
        kv_c=kv_c,
        k_pe=None if k_pe is None else k_pe[:, None],
        **cache.tensors,
        format=format,
        scale=scale,
        enable_pdl=True,
        **{name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in given.items()},
    )
    want = restored({name: x[slots.clamp_min(0).cuda()] for name, x in content.items()}, format, dtype, scale)
    want[(slots < 0).cuda()] = 0
    assert (slots >= 0).sum() == 14 and same_numbers(whole[:, : want.shape[1]].contiguous(), want)


@pytest.mark.archs("sm_90a")
@pytest.mark.parametrize("ends", [[5, 3, 9, -7, 4], [-(2**31), 2**31 - 1], [2**31 - 1, -(2**31), 0], [0], [3, 3, 3]])
def test_lengths_that_are_none_lead_nowhere(gpu, ends):
    """Each row is a key of a request that has it, or 0: where lengths do not decrease, that request's."""
    pages, page, requests = 3, 4, len(ends) - 1
    cache = Cache("bf16", pages, page)
    content = stored(*cut(difficult(pages * page, torch.bfloat16)), "bf16")
    cache.put(torch.arange(pages * page).cuda(), content)
    keys = restored(content, "bf16", torch.bfloat16).cpu()
    nothing, found = torch.zeros_like(keys[0]), 0
    anywhere = torch.randint(-(2**31), 2**31 - 1, (requests,))
    at_its_row = (torch.tensor(ends[:-1], dtype=torch.int64) + torch.randint(-1, 2, (requests,))).clamp(
        -(2**31), 2**31 - 1
    )
    for starts in (anywhere, at_its_row):
        tables = torch.stack([torch.randint(0, 3, (requests,)), torch.randint(-1, 4, (requests,))], 1)
        given = {"block_tables": tables, "cum_seq_lens": torch.tensor(ends), "seq_starts": starts}
        whole = torch.full((9, 576), math.nan, dtype=torch.bfloat16, device="cuda")
        given = {name: x.int().cuda() for name, x in given.items()}
        mla_read_cache(cache.tensors["cache"], *cut(whole), format="bf16", **given)
        for row, got in enumerate(whole.cpu()):
            may_be = []
            for request, (first, end) in enumerate(itertools.pairwise(ends)):
                if first <= row < end:
                    position = row - first + int(starts[request])
                    at = int(tables[request, position // page]) if 0 <= position < 2 * page else -1
                    may_be.append(keys[at * page + position % page] if 0 <= at < pages else nothing)
            found += any(same_numbers(got, one) for one in may_be if one is not nothing)
            may_be += [nothing] if not may_be or ends != sorted(ends) else []
            assert any(same_numbers(got, one) for one in may_be), row
    assert found or ends != [-(2**31), 2**31 - 1]


@pytest.mark.archs("sm_90a")
def test_nothing_to_do(gpu):
    for pages, tokens in ((0, 3), (2, 0)):
        cache = Cache("snapmla", pages, 4)
        rows = difficult(tokens, torch.bfloat16)
        slots = torch.arange(tokens, device="cuda")
        mla_write_cache(*cut(rows), slots, **cache.tensors, format="snapmla")
        mla_read_cache(kv_c=rows[:, :512], k_pe=rows[:, 512:], indices=slots, **cache.tensors, format="snapmla")
        assert tokens == 0 or (rows == 0).all()
