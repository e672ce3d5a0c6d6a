"""mla_write_cache, mla_read_cache and mla_quantize_q on a GPU: every byte as PyTorch computes it, no byte anywhere
else, and the bytes of vLLM where it is installed."""

from __future__ import annotations

import math

import pytest
import torch
from cache_rows import FORMATS, SCALE, Cache, cut, difficult, restored, rounded_or_not, stored, wrongly_rotated
from tsmla import mla_quantize_q, mla_read_cache, mla_write_cache

FORMAT = pytest.mark.parametrize("format, dtype", FORMATS, ids=[f"{name}-{dtype}" for name, dtype in FORMATS])

pytestmark = pytest.mark.usefixtures("seed")


def some_slots(tokens: int, slots: int) -> torch.Tensor:
    """Different ones, a fifth of them none."""
    chosen = torch.randperm(slots, device="cuda")[:tokens]
    nowhere = torch.tensor([-1, slots, 2**32, -(2**63)], device="cuda")
    turn = torch.arange(tokens, device="cuda") % len(nowhere)
    return torch.where(torch.rand(tokens, device="cuda") < 0.2, nowhere[turn], chosen)


def same_numbers(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal bits, or both NaN, in as many columns as are wanted; the others are still NaN."""
    got, others = got[:, : want.shape[1]].contiguous(), got[:, want.shape[1] :]
    alike = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
    return bool(others.isnan().all() and alike.all())


def read(cache: Cache, rows: torch.Tensor, **given) -> None:
    kv_c, k_pe = cut(rows, cache.format)
    mla_read_cache(kv_c=kv_c, k_pe=k_pe, **cache.tensors, format=cache.format, **given)


@FORMAT
@pytest.mark.parametrize(
    "tokens, page, gaps", [(1, 64, (0, 0)), (7, 1, (16, 0)), (300, 16, (0, 16)), (5000, 64, (48, 160))]
)
def test_bytes_equal_the_formula(format, dtype, tokens, page, gaps):
    scale, pages = SCALE.get(format, 1.0), tokens // page * 2 + 2
    rows, slots = difficult(tokens, dtype), some_slots(tokens, pages * page)
    for rounded in rounded_or_not(format):
        cache, expected = (Cache(format, pages, page, *gaps, as_uint8=bool(rounded)) for _ in range(2))
        content = stored(*cut(rows, format), format, scale, rounded)
        expected.put(slots, content)
        options = {"format": format, "scale": scale, "power_of_two_scales": rounded}
        mla_write_cache(*cut(rows, format), slots, **cache.tensors, **options, enable_pdl=tokens % 2 == 0)
        assert not cache.differences(expected)
        got = torch.full_like(rows, math.nan)
        read(cache, got, indices=slots, scale=scale)
        want = restored(content, format, dtype, scale)
        want[(slots < 0) | (slots >= pages * page)] = 0
        assert same_numbers(got, want)


@FORMAT
def test_every_16_bit_pattern(format, dtype):
    patterns = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype)
    latent, rope = patterns.view(-1, 512), patterns.view(-1, 64)[:128]
    slots = torch.arange(128, device="cuda")
    for rounded in rounded_or_not(format):
        for turn in range(8):
            k_pe = patterns.view(-1, 64)[128 * turn : 128 * (turn + 1)]
            assert len(k_pe) == len(rope)
            _, k_pe = cut(torch.cat([latent, k_pe], -1), format)
            cache, expected = Cache(format, 2, 64), Cache(format, 2, 64)
            expected.put(slots, stored(latent, k_pe, format, SCALE.get(format, 1.0), rounded))
            options = {"format": format, "scale": SCALE.get(format, 1.0), "power_of_two_scales": rounded}
            mla_write_cache(latent, k_pe, slots, **cache.tensors, **options)
            assert not cache.differences(expected)


@pytest.mark.parametrize("scale", [1.0, 3e-6, 2.0**-126, 1e30])
def test_scales_of_a_whole_cache(scale):
    rows, slots = difficult(200, torch.bfloat16), torch.arange(200, device="cuda")
    cache, expected = Cache("e4m3", 4, 64), Cache("e4m3", 4, 64)
    expected.put(slots, stored(*cut(rows), "e4m3", scale))
    mla_write_cache(*cut(rows), slots, **cache.tensors, format="e4m3", scale=scale)
    assert not cache.differences(expected)


@FORMAT
def test_reading_by_page_tables(format, dtype):
    requests, page, pages = 37, 32, 500
    scale = SCALE.get(format, 1.0)
    lengths = torch.randint(0, 200, (requests,))
    starts, ends = torch.randint(0, 300, (requests,)), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tables = torch.randint(0, pages, (requests, 16))
    rows = difficult(pages * page, dtype)
    content = stored(*cut(rows, format), format, scale)
    cache = Cache(format, pages, page)
    cache.put(torch.arange(pages * page, device="cuda"), content)
    request = torch.repeat_interleave(torch.arange(requests), lengths)
    position = torch.arange(len(request)) - ends[request] + starts[request]
    slots = (tables[request, position // page] * page + position % page).cuda()
    got = torch.full((len(request) + 9, 576), math.nan, dtype=dtype, device="cuda")
    given = {"block_tables": tables, "cum_seq_lens": ends, "seq_starts": starts}
    read(cache, got, scale=scale, **{name: x.int().cuda() for name, x in given.items()})
    want = restored({name: x[slots] for name, x in content.items()}, format, dtype, scale)
    assert same_numbers(got[: len(request)], want) and not got[len(request) :, : want.shape[1]].any()


@pytest.mark.parametrize("pdl", [False, True])
def test_graph_replay_reads_new_inputs(pdl):
    rows, slots = difficult(257, torch.bfloat16), some_slots(257, 640)
    cache, got = Cache("snapmla", 10, 64), torch.empty(257, 576, dtype=torch.bfloat16, device="cuda")

    def both() -> None:
        mla_write_cache(*cut(rows), slots, **cache.tensors, format="snapmla", enable_pdl=pdl)
        read(cache, got, indices=slots, enable_pdl=pdl)

    both()  # loads the kernels before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for _ in range(3):
        rows.copy_(difficult(257, torch.bfloat16))
        slots.copy_(some_slots(257, 640))
        got.fill_(math.nan)
        graph.replay()
        want = restored(stored(*cut(rows), "snapmla"), "snapmla", torch.bfloat16)
        want[(slots < 0) | (slots >= 640)] = 0
        assert same_numbers(got, want)


@pytest.mark.parametrize("interleaved", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("format, dtype", [each for each in FORMATS if not each[0].startswith("latent_")], ids=str)
def test_rope_parts_are_rotated(format, dtype, interleaved):
    """Tables of both dtypes, positions of both widths, some that no table has."""
    tokens, slots = 1000, torch.randperm(1280, device="cuda")[:1000]
    rows, angles = difficult(tokens, dtype), torch.randn(40, 32, device="cuda") * 100
    for table_dtype, narrow in ((torch.float32, True), (dtype, False)):
        table = torch.cat([angles.cos(), angles.sin()], -1).to(table_dtype)
        positions = torch.randint(-1, 42, (tokens,), device="cuda")
        positions = positions.int() if narrow else positions
        assert not wrongly_rotated(format, 20, 64, rows, slots, positions, table, interleaved)


@pytest.mark.parametrize("rounded", [True, False])
def test_queries_are_quantised_as_keys_are(rounded):
    rows = difficult(3072, torch.bfloat16)
    nope, rope, scale = mla_quantize_q(rows.view(6, 4, 128, 576), power_of_two_scales=rounded)
    got = {"cache": nope, "rope_cache": rope, "scale_cache": scale[..., None]}
    for name, want in stored(*cut(rows), "snapmla", power_of_two=rounded).items():
        assert torch.equal(got[name].view(torch.uint8).flatten(0, -2), want), name


def of_vllm():
    from benchmarks.peers import vllm_wheel

    try:
        return vllm_wheel.cache_operators()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        pytest.skip(f"compares with vLLM's kernels: {error}")


VLLM = pytest.mark.parametrize("format, theirs", [("bf16", "auto"), ("e4m3", "fp8"), ("fp8_ds_mla", "fp8_ds_mla")])


@VLLM
def test_the_bytes_of_vllm(format, theirs):
    operators = of_vllm()
    rows, slots = difficult(1000, torch.bfloat16), some_slots(1000, 1280).clamp(-1, 1279).unique()
    rows, scale = rows[: len(slots)], SCALE.get(format, 1.0)
    ours, other = Cache(format, 20, 64, as_uint8=True), Cache(format, 20, 64, as_uint8=True)
    mla_write_cache(*cut(rows), slots, **ours.tensors, format=format, scale=scale)
    operators.concat_and_cache_mla(
        *(x.contiguous() for x in cut(rows)), other.tensors["cache"], slots, theirs, torch.tensor(scale, device="cuda")
    )
    assert not ours.differences(other)


@VLLM
def test_the_numbers_that_vllm_reads(format, theirs):
    operators = of_vllm()
    rows, scale, tokens = difficult(1280, torch.bfloat16), SCALE.get(format, 1.0), 20 * 64
    cache = Cache(format, 20, 64, as_uint8=True)
    cache.put(torch.arange(tokens, device="cuda"), stored(*cut(rows), format, scale))
    tables = torch.randperm(20, device="cuda").int().view(2, 10)
    ends = torch.tensor([0, 600, 1000], dtype=torch.int32, device="cuda")
    starts = torch.tensor([40, 128], dtype=torch.int32, device="cuda")
    ours, other = (torch.full((1000, 576), math.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    read(cache, ours, block_tables=tables, cum_seq_lens=ends, seq_starts=starts, scale=scale)
    source = cache.tensors["cache"]
    if format == "fp8_ds_mla":
        operators.cp_gather_and_upconvert_fp8_kv_cache(source, other, tables, ends, 2, starts)
    else:
        requests = torch.repeat_interleave(torch.arange(2, device="cuda"), ends.diff()).int()
        stored_as = source.view(torch.bfloat16) if format == "bf16" else source
        operators.gather_and_maybe_dequant_cache(
            stored_as, other, tables, ends, requests, 1000, theirs, torch.tensor(scale, device="cuda"), starts
        )
    assert same_numbers(ours, other)
