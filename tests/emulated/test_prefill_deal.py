"""Every query tile of a Hopper prefill is one CTA's, once, and the timing model's deal is the kernels' own."""

from __future__ import annotations

import tempfile

import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from hypothesis import given
from hypothesis import strategies as st
from tsmla.identity.variant import PrefillVariant
from tsmla_emulator.prove import check
from tsmla_emulator.time import prefill_grid
from tsmla_emulator.time.problem import Shape
from tsmla_kernels.prefill.tile_bounds import ALIKE, SIDE_BY_SIDE
from tsmla_kernels.prefill.tile_scheduler import Packs, query_tile, tile_bound
from tsmla_kernels.sm90.prefill.geometry import LONG_KEYS, PrefillGeometry
from tsmla_kernels.sm90.prefill.tasks import TileDeal, deal_of, numbers_of

VARIANTS = [
    check.find(f"tsmla_prefill_sm_90a_{dtype}_to_bf16_{dims}_causal_lse")
    for dtype, dims in (("bf16", "d192x128"), ("bf16", "d256x256"), ("e4m3", "d192x128"), ("e4m3", "d256x256"))
]


HEADS = st.sampled_from([1, 2, 3, 8, 16])
PROCESSORS = st.sampled_from([1, 2, 3, 7, 78, 114, 132])


class Dealer:
    """One thread for each CTA that the kernel would launch, which writes down how many tiles it has, and which."""

    def __init__(self, variant: PrefillVariant):
        self.geometry, self.causal = PrefillGeometry.of(variant), variant.causal

    @cute.jit
    def __call__(
        self, found: cute.Tensor, rows: Int32, keys: Int32, sequences: Int32, heads: Int32, processors: Int32, stream
    ):
        geometry = self.geometry
        deal = deal_of(geometry, self.causal, (rows, keys), sequences, heads, heads, processors)
        ctas = deal.ctas + heads * tile_bound(rows, sequences, geometry.tile_q) - deal.tiles
        self.kernel(found, deal, ctas).launch(grid=((ctas + 31) // 32, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, found: cute.Tensor, deal: TileDeal, ctas: Int32):
        cta = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
        if cta < ctas:
            numbers = numbers_of(deal, cta)
            found[0, cta] = numbers.count
            for task in range(numbers.count):
                found[1 + task, cta] = numbers.of(Int32(task))


class Finder:
    """One warp for each number, which writes down the head and the query tile that it stands for."""

    def __init__(self, variant: PrefillVariant):
        self.geometry = PrefillGeometry.of(variant)

    @cute.jit
    def __call__(
        self,
        found: cute.Tensor,
        ends_q: cute.Tensor,
        ends_kv: cute.Tensor,
        rows: Int32,
        keys: Int32,
        heads: Int32,
        paired: Int32,
        one: Int32,
        stream,
    ):
        self.kernel(found, ends_q, ends_kv, (rows, keys), heads, paired, one).launch(
            grid=(found.shape[1], 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, found, ends_q, ends_kv, rows: tuple[Int32, Int32], heads: Int32, paired: Int32, one: Int32):
        geometry, number = self.geometry, cute.arch.block_idx()[0]
        tile = query_tile(
            number,
            Packs(ends_q, ends_kv, rows, heads, Int32(1)),
            geometry.tile_q,
            geometry.kv_row_bytes,
            paired,
            geometry.policy.short_last,
            one=one != 0,
        )
        if cute.arch.thread_idx()[0] == 0:
            found[0, number] = tile.head
            found[1, number] = tile.tile
            found[2, number] = tile.q.start


def compiled(made, *arguments):
    options = f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_90a --dump-dir={tempfile.mkdtemp()}"
    return cute.compile(made, *arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def finder(request):
    ends = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=4)
    found = make_fake_tensor(Int32, (3, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4)
    return request.param, compiled(Finder(request.param), found, ends, ends, *[Int32(1)] * 5)


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def dealer(request):
    geometry = PrefillGeometry.of(request.param)
    ctas = cute.sym_int()
    made = make_fake_tensor(Int32, (1 + geometry.tasks, ctas), (cute.sym_int64(), 1), assumed_align=4)
    return request.param, compiled(Dealer(request.param), made, *[Int32(1)] * 5)


def dealt(deal, geometry: PrefillGeometry, rows: int, keys: int, sequences: int, heads: int, processors: int):
    """The numbers of the tiles of each CTA that is launched."""
    found = torch.full(
        (1 + geometry.tasks, heads * tile_bound(rows, sequences, geometry.tile_q)), -1, device="cuda", dtype=torch.int32
    )
    deal(found, rows, keys, sequences, heads, processors)
    ctas = [(count, own) for count, *own in found.T.tolist() if count >= 0]
    assert all(1 <= count <= geometry.tasks and set(own[count:]) <= {-1} for count, own in ctas)
    return [own[:count] for count, own in ctas]


@pytest.mark.archs("sm_90a")
def test_every_number_is_dealt_out_once(gpu, dealer):
    """Also where sequences are not of the same length, and the last numbers are of no tile."""
    variant, compiled = dealer
    geometry, deal = PrefillGeometry.of(variant), gpu.emulation.adopt(compiled)

    @given(st.integers(1, 9000), st.integers(0, 9000), st.integers(1, 20), HEADS, PROCESSORS)
    def once(rows, keys, sequences, heads, processors):
        ctas = dealt(deal, geometry, rows, keys, sequences, heads, processors)
        tiles = heads * tile_bound(rows, sequences, geometry.tile_q)
        assert sorted(number for own in ctas for number in own) == list(range(tiles))

    once()


@pytest.mark.archs("sm_90a")
def test_the_timing_model_deals_alike(gpu, dealer):
    """Sequences of one length, of which a CTA may take several tiles: longer ones have another kernel."""
    variant, compiled = dealer
    geometry, deal = PrefillGeometry.of(variant), gpu.emulation.adopt(compiled)
    most_keys = LONG_KEYS if geometry.policy.alone_if_long else 9000

    @given(st.integers(1, 5000), st.integers(1, most_keys), st.integers(1, 5), HEADS, PROCESSORS)
    def alike(queries, keys, sequences, heads, processors):
        shape = Shape(sequences, queries, keys, heads)
        several = prefill_grid.dealt(variant, shape, processors, geometry.tile_q)
        rows = sequences * queries
        ctas = dealt(deal, geometry, rows, sequences * keys, sequences, heads, processors)
        assert ctas[: len(several)] == several and all(len(own) == 1 for own in ctas[len(several) :])

    alike()


@pytest.mark.archs("sm_90a")
def test_every_query_tile_has_a_number(gpu, finder):
    """Where there are far more keys than queries, kernels whose warpgroups pass over rows that there are not have heads
    in batches: all tiles of a batch, and of these the short ones last, stand where they do in the timing model.
    Elsewhere the longest tiles come first."""
    variant, compiled = finder
    geometry, find = PrefillGeometry.of(variant), gpu.emulation.adopt(compiled)

    @given(
        st.integers(1, 900),
        st.sampled_from([1, 7, 8, 9, 100]),
        st.integers(1, 3),
        st.integers(1, 80),
        st.floats(0, 1),
        st.booleans(),
    )
    def numbered(queries, times, sequences, heads, share, one):
        count = -(-queries // geometry.tile_q)
        shape = Shape(sequences, queries, queries * times, heads)
        tiles = sequences * heads * count
        paired = int(share * tiles)
        found = torch.full((3, tiles), -1, device="cuda", dtype=torch.int32)
        ends_q, ends_kv = (
            torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * length for length in (queries, shape.keys)
        )
        find(found, ends_q, ends_kv, sequences * queries, sequences * shape.keys, heads, paired, int(one))
        head, tile, start = found.tolist()
        assert len({*zip(head, tile, start, strict=True)}) == tiles
        assert {*head} == {*range(heads)} and {*start} == {queries * n for n in range(sequences)}
        order = prefill_grid._order(variant, shape, count, paired, one)
        assert sorted(tile) == sorted(order)
        if geometry.policy.short_last and queries % geometry.tile_q and count > 1 and times > ALIKE:
            first = 0 if one else max(paired - (sequences - 1) * heads * count, 0) // count
            begin = tiles - (heads - first) * count
            assert tile[begin:] == order[begin:]
            many = max(SIDE_BY_SIDE // count, 1)
            for batch in range(first, heads, many):
                here = min(many, heads - batch)
                at = begin + (batch - first) * count
                own = head[at : at + here * count]
                assert {*own} == {*range(batch, batch + here)}
                assert own[-here:] == sorted(own[-here:]) and tile[at : at + here * count][-here:] == [count - 1] * here
        elif paired <= tiles - count:  # the last head's tiles are in no pairs: longest first
            assert tile[-1] == 0

    numbered()
