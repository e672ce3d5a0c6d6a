"""tsmla_decode of chosen keys (sparse attention) in emulation against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
import tsmla
from chosen_reference import check_chosen, in_two_tensors, make_chosen
from decode_reference import LATENT, ROPE, Sight, check, judge, make_problem, merged, run
from decode_rows import check_scaled, make_scaled
from emulated_archs import KERNELS, SMS
from tsmla.identity.arch import Arch
from tsmla.identity.row_format import ROWS
from tsmla.operators.checks import TORCH_DTYPES
from tsmla.problems.lists import NOWHERE
from tsmla_emulator.run.host import memory
from tsmla_emulator.run.host.tensor import EmulatedTensor

DTYPES = [torch_dtype for torch_dtype, ours in TORCH_DTYPES.items() if ours in Arch.SM90A.facts.gathered_dtypes]
ROWS_WITH_SCALES = [name for name in Arch.SM90A.facts.gathered_rows if ROWS[name].scales]

pytestmark = [pytest.mark.archs(*KERNELS), pytest.mark.processors(SMS)]

CASES = {
    "a list that ends in a tile": ((2, 1), 16, 150, {}),
    "one key": ((3,), 8, 1, {"outside": 0.0}),
    "lists of their own lengths": ((8,), 16, 260, {"lengths": [0, 1, 63, 64, 127, 128, 130, 257]}),
    "a length beyond the list, and one below 0": ((2,), 16, 70, {"lengths": [100, -3]}),
    "several tokens of a request": ((2, 3), 24, 96, {"lengths": [5, 96, 0, 33, 64, 65]}),
    "a row tile and a row": ((1, 1), 65, 128, {}),
    "128 heads": ((2, 1), 128, 70, {}),
    "64 heads, a list of one tile of a pair": ((2,), 64, 128, {"lengths": [128, 66]}),
    "one head": ((3,), 1, 129, {}),
    "pages of 69 keys": ((2,), 16, 200, {"page_size": 69}),
    "pages of one key, without gaps": ((2,), 16, 100, {"pages": 333, "page_size": 1, "page_gap": 0}),
    "a long list": ((1,), 16, 1500, {}),
    "nearly all outside": ((3,), 16, 192, {"outside": 0.97}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_against_float64(gpu, case):
    shape, heads, top_k, more = case
    check_chosen(make_chosen(shape, heads, top_k, output_scale=0.5, **more))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(gpu, dtype):
    check_chosen(make_chosen((3,), 16, 200, dtype, lengths=[200, 64, 3]))
    check_chosen(make_chosen((1, 2), 80, 330, dtype))


@pytest.mark.parametrize("row", ROWS_WITH_SCALES)
@pytest.mark.parametrize("heads", [8, 16, 40, 128])
def test_rows_with_scales(gpu, row, heads):
    check_chosen(make_chosen((4,), heads, 200, row=row, lengths=[200, 64, 0, 3], output_scale=0.5))


@pytest.mark.parametrize("row", ROWS_WITH_SCALES)
@pytest.mark.parametrize("heads", [16, 64])
def test_long_lists_of_rows_with_scales(gpu, row, heads):
    check_chosen(make_chosen((2,), heads, 900, row=row, page_size=69))


SCALED_HEADS = pytest.mark.parametrize("heads", [8, 40, 70])
"""Heads for which rows with a scale each have kernels of their own: few rows and more on Hopper; on Blackwell, single
CTAs and pairs."""


@SCALED_HEADS
def test_every_kind_of_list_of_rows_with_a_scale_each(gpu, heads):
    """Lists of nothing, that begin with nothing, with wild indices, of one key; lengths of all kinds. Rows and scales
    that no list names are NaN."""
    lists = torch.randint(0, 700, (8, 260))
    lists[0] = -1
    lists[1, :140] = -1
    lists[2, ::2] = torch.tensor(NOWHERE).repeat(44)[:130]
    lists[3] = 77
    lists[4, 1:] = 12 * 64
    lengths = [260, 260, 300, 63, 1, 0, -3, 129]
    chosen = make_chosen((8,), heads, 260, row="snapmla", indices=lists, lengths=lengths, power_of_two=False)
    check_chosen(chosen, enable_pdl=True)


@SCALED_HEADS
@pytest.mark.parametrize("key_factor, query_factor", [(1e-36, 1e36), (1e30, 1e-30)])
def test_scales_of_any_magnitude(gpu, heads, key_factor, query_factor):
    """The first keys of a list decide what its scales are taken relative to, whatever stands before them."""
    lists = torch.randint(0, 700, (2, 200))
    lists[0, :150] = -1
    more = {"softmax_scale": 1 / (24 * key_factor * query_factor), "power_of_two": False, "output_scale": 0.5}
    factors = {"key_factor": key_factor, "query_factor": query_factor}
    check_chosen(make_chosen((2,), heads, 200, row="snapmla", indices=lists, page_size=69, **factors, **more))


@SCALED_HEADS
def test_scales_of_zero_and_nan(gpu, heads):
    """A key with the scale 0 counts as hidden, as one that is not there does; NaN spoils those that chose it only."""
    chosen = make_chosen((2,), heads, 100, row="snapmla", indices=torch.arange(200).view(2, 100))
    scales = chosen.kv_cache[2]
    scales[0, 0] = scales[0, 50] = 0.0
    out, lse = tsmla.tsmla_decode(**chosen.arguments())
    without = chosen.indices.clone()
    without[0, 0] = without[0, 50] = -1
    other, other_lse = tsmla.tsmla_decode(**chosen.arguments(indices=without))
    assert torch.equal(out, other) and torch.equal(lse, other_lse)
    scales[0, 50] = torch.nan
    spoilt, _ = tsmla.tsmla_decode(**chosen.arguments())
    assert spoilt[0].isnan().all() and torch.equal(spoilt[1], out[1])


@SCALED_HEADS
def test_all_keys_in_order_give_the_bits_of_a_dense_call_with_a_scale_each(gpu, heads):
    dense = make_scaled([200, 200], 1, heads, page_size=64, sight=Sight(causal=False), power_of_two=False)
    out, lse = run(dense.problem, **dense.arguments())
    keys = torch.arange(200)
    indices = dense.problem.block_tables.cpu()[:, keys // 64] * 64 + keys % 64
    chosen = {**dense.problem.arguments(**dense.arguments()), "indices": indices.int().to("cuda")[:, None]}
    one, its_lse = tsmla.tsmla_decode(**chosen | dict.fromkeys(("block_tables", "seq_lens", "max_seq_len")))
    assert torch.equal(one, out) and torch.equal(its_lse, lse)


def test_a_bf16_query_of_rows_with_a_scale_each(gpu):
    """Its quantised rows give the same bits."""
    chosen = make_chosen((2, 1), 16, 70, row="snapmla")
    pieces = tsmla.mla_quantize_q(chosen.alone.query)
    quantised = chosen.arguments(query=tuple(x.clone() for x in pieces))
    out, lse = tsmla.tsmla_decode(**quantised)
    one, its_lse = tsmla.tsmla_decode(**chosen.arguments(query=chosen.alone.query))
    assert torch.equal(one, out) and torch.equal(its_lse, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rope_pieces_in_a_tensor_of_their_own(gpu, dtype):
    for shape, heads, page_size in (((3,), 16, 64), ((2,), 80, 1)):
        chosen = make_chosen(shape, heads, 200, dtype, lengths=[200, 64, 3][: shape[0]], page_size=page_size, pages=200)
        check_chosen(chosen, kv_cache=in_two_tensors(chosen.kv_cache))


def test_indices_outside_of_the_cache_anywhere(gpu):
    """In front, in the middle and everywhere; for whole tiles too."""
    indices = torch.randint(0, 700, (5, 400))
    indices[0, :140] = NOWHERE[0]
    indices[1, 64:300] = NOWHERE[2]
    indices[2] = NOWHERE[1]
    indices[3, 1:] = 12 * 64
    indices[4, :-1] = 2**31 - 2
    check_chosen(make_chosen((5,), 16, 400, indices=indices))


def far_apart(cache: torch.Tensor) -> torch.Tensor:
    """Return a copy of a cache of two pages, the second of which ends less than 8 KiB before 32 GiB. Between them there
    is no memory."""
    first, second = (page.contiguous() for page in cache)
    stride = (2**35 - second.nbytes) // 4096 * 4096 - 4096  # memory is mapped in pages of 4 KiB
    block, near = memory.allocate(first.nbytes)
    _, far = memory.allocate(second.nbytes, block.address + stride)
    for buffer, page in ((near, first), (far, second)):
        plain = torch.frombuffer(buffer, dtype=torch.uint8)
        plain.copy_(page.view(torch.uint8).cpu().flatten())
    whole = (ctypes.c_ubyte * (stride + second.nbytes)).from_address(block.address)
    whole.buffers = near, far  # which free their memory where nobody holds them
    strides = stride // cache.element_size(), *first.stride()
    tensor = torch.frombuffer(whole, dtype=torch.uint8).view(cache.dtype).as_strided(cache.shape, strides)
    return tensor.as_subclass(EmulatedTensor)


FAR = {
    "bf16": (16, {}),
    "bf16, more than 64 rows": (80, {}),
    "e4m3": (16, {"dtype": torch.float8_e4m3fn}),
    "fp8_ds_mla": (16, {"row": "fp8_ds_mla"}),
    "fp8_ds_mla, a row tile": (64, {"row": "fp8_ds_mla"}),
    "fp8_ds_mla, pairs of CTAs": (128, {"row": "fp8_ds_mla"}),
    "snapmla": (16, {"row": "snapmla"}),
}


@pytest.mark.parametrize("heads, more", FAR.values(), ids=FAR)
def test_pages_that_reach_over_32_gib(gpu, heads, more):
    """Places of rows are 32-bit numbers of 16 bytes, and become addresses of 64."""
    chosen = make_chosen((2,), heads, 150, pages=2, **more)
    cache = chosen.kv_cache
    check_chosen(chosen, kv_cache=tuple(map(far_apart, cache)) if isinstance(cache, tuple) else far_apart(cache))


def test_a_key_chosen_many_times(gpu):
    check_chosen(make_chosen((2,), 16, 300, indices=torch.full((2, 300), 77)))


@pytest.mark.parametrize("heads, top_k", [(16, 128), (16, 65), (7, 2048)])
def test_the_kernel_of_few_rows_begins_where_there_are_more_tiles_than_sms(gpu, heads, top_k):
    """Lists of as many tiles as there are SMs, and of more: on Hopper, bf16 rows then have another kernel."""
    tokens = max(1, SMS * 64 // top_k)
    for more in (0, 1):
        check_chosen(make_chosen((tokens + more,), heads, top_k, pages=80))


def test_sinks(gpu):
    sinks = torch.randn(16, device="cuda")
    check_chosen(make_chosen((3,), 16, 100, lengths=[0, 1, 100], sinks=sinks, lse_includes_sink=True))


def test_batch_invariance(gpu):
    chosen = make_chosen((4,), 16, 500)
    out, lse = check_chosen(chosen, batch_invariant=True)
    for token in range(4):
        own = slice(token, token + 1)
        alone = chosen.arguments(
            query=chosen.query[own], indices=chosen.indices[own], out=None, lse=None, batch_invariant=True
        )
        one, its_lse = tsmla.tsmla_decode(**alone)
        assert torch.equal(one, out[own]) and torch.equal(its_lse, lse[own])


@pytest.mark.parametrize("heads, dtype", [(24, DTYPES[0]), (16, DTYPES[2])], ids=str)
def test_all_keys_in_order_give_the_bits_of_a_dense_call(gpu, heads, dtype):
    """Work is dealt alike, and sums are in the same order, wherever both run the same kernel. Chosen bf16 rows have one
    of their own for up to 16 rows, on Hopper, and for up to 64, on Blackwell."""
    if gpu.arch != Arch.SM90A and dtype == DTYPES[0]:
        heads = 70
    dense = make_problem([200, 200], 1, heads, dtype, page_size=64, sight=Sight(causal=False))
    out, lse = run(dense)
    keys = torch.arange(200)
    indices = dense.block_tables.cpu()[:, keys // 64] * 64 + keys % 64
    chosen = {**dense.arguments(), "indices": indices.int().to("cuda")[:, None]}
    one, its_lse = tsmla.tsmla_decode(**chosen | dict.fromkeys(("block_tables", "seq_lens", "max_seq_len")))
    assert torch.equal(one, out) and torch.equal(its_lse, lse)


def test_ranks_that_own_some_of_the_slots_merge(gpu):
    """Context parallelism is in the lists: what another rank has is no key of this one's."""
    chosen = make_chosen((3,), 16, 200, lengths=[200, 5, 0])
    parts = []
    for rank in range(2):
        mine = torch.where(chosen.indices % 2 == rank, chosen.indices, -1)
        parts.append(tsmla.tsmla_decode(**chosen.arguments(indices=mine)))
    out, lse = merged(parts)
    judge(chosen.alone, out.to(torch.bfloat16)[:, None], lse.float()[:, None])


def test_programmatic_dependent_launch_gives_the_same_bits(gpu):
    chosen = make_chosen((3,), 16, 500)
    out, lse = check_chosen(chosen)
    other, its_lse = tsmla.tsmla_decode(**chosen.arguments(enable_pdl=True))
    assert torch.equal(other, out) and torch.equal(its_lse, lse)


SMALL_PAGES = {
    "pages of one key": ([70, 0, 200], 1, 16, Sight(), 1),
    "causal, pages of two": ([66, 3, 130], 3, 8, Sight(), 2),
    "a window, pages of four": ([200, 30], 4, 8, Sight(window_left=70), 4),
    "full, pages of eight": ([70, 129], 2, 40, Sight(causal=False), 8),
    "other numbers of tokens": ([150, 70, 9], [2, 0, 5], 12, Sight(), 4),
}


@pytest.mark.parametrize("case", SMALL_PAGES.values(), ids=SMALL_PAGES.keys())
def test_pages_of_fewer_than_16_keys(gpu, case):
    """Keys of a dense cache are gathered, too, where a page holds fewer than a copy brings."""
    lengths, q_len, heads, sight, page_size = case
    check(make_problem(lengths, q_len, heads, page_size=page_size, sight=sight))


@pytest.mark.parametrize(
    "lengths, q_len, heads, sight, page_size",
    [
        ([70, 0, 200], 1, 16, Sight(), 1),
        ([150, 70, 9], [2, 0, 5], 12, Sight(), 2),
        ([200, 30], 4, 4, Sight(window_left=70), 4),
        ([70, 129], 2, 40, Sight(causal=False), 8),
    ],
)
def test_pages_of_fewer_than_16_keys_with_a_scale_each(gpu, lengths, q_len, heads, sight, page_size):
    check_scaled(make_scaled(lengths, q_len, heads, page_size, sight=sight, power_of_two=False))


@pytest.mark.parametrize("heads", [5, 16])
def test_visible_lengths_of_keys_in_small_pages_with_a_scale_each(gpu, heads):
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    check_scaled(make_scaled([190, 66], 3, heads, 4, visible=visible, sight=Sight(causal=False)))


def test_ranks_and_eight_bits_of_keys_in_small_pages(gpu):
    sight = Sight(window_left=300, cp_world=2, cp_rank=1, cp_interleave=16)
    check(make_problem([190, 66], 3, 16, page_size=2, causal_seqs=[380, 130], sight=sight))
    check(make_problem([190, 66], 3, 16, torch.float8_e4m3fn, page_size=8, causal_seqs=[380, 130], sight=sight))


def test_visible_lengths_of_keys_in_small_pages(gpu):
    visible = torch.tensor([[3, 200, 130], [0, 64, 65]], dtype=torch.int32, device="cuda")
    check(make_problem([190, 66], 3, 16, page_size=4, visible=visible, sight=Sight(causal=False)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_cache_of_two_tensors(gpu, dtype):
    """Without indices: rows of pages are gathered because their pieces lie apart."""
    problem = make_problem([190, 0, 66], 3, 16, dtype)
    check(problem, kv_cache=in_two_tensors(problem.kv_cache))


def test_visible_lengths_of_a_pack_whose_cache_is_two_tensors(gpu):
    visible = torch.tensor([3, 200, 130, 0, 64, 65, 7], dtype=torch.int32, device="cuda")
    problem = make_problem([190, 66], [2, 4], 16, visible=visible, sight=Sight(causal=False))
    check(problem, kv_cache=in_two_tensors(problem.kv_cache))


@pytest.mark.parametrize("form", ["pages of 4", "two tensors"])
def test_a_cache_without_pages_has_no_keys(gpu, form):
    """Entries of the table are 0, the place of the page that stands for such a cache."""
    columns = (LATENT + ROPE,) if form == "pages of 4" else (LATENT, ROPE)
    tensors = tuple(torch.zeros(0, 4, width, dtype=torch.bfloat16, device="cuda") for width in columns)
    problem = make_problem([5, 8], 1, 16, page_size=4)
    tables = torch.zeros_like(problem.block_tables)
    out, lse = run(problem, kv_cache=tensors if len(tensors) > 1 else tensors[0], block_tables=tables)
    assert not out.any() and (lse == -torch.inf).all()
