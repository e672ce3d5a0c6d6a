"""The vLLM plug-in's sparse attention, on metadata as vLLM makes it, against attention over each token's own keys."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
import types

import pytest
import torch
from mla_layer import Problem
from stand_in_kernels import rows, scaled_fp8_quant
from tsmla.identity.arch import Arch
from tsmla.identity.plan import plan_decode
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant, Dtype, KeyMaskVariant, PrefillVariant, ReadCacheVariant
from tsmla.integrations.shared import ready as shared_ready
from tsmla.integrations.vllm import PREFILL, SPARSE, layer, masked, name_in, options, prompts, ready, served, sparse
from tsmla.integrations.vllm import prefill as vllm_prefill
from tsmla.integrations.vllm.prefill import TsmlaPrefill
from tsmla.integrations.vllm.sparse_builder import TsmlaSparseMetadataBuilder
from tsmla.problems.pages import page_tables, put_keys
from tsmla.problems.rows import numbers_in, stored_as
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

PAGE, SCALE = 16, 0.1
LAYER = types.SimpleNamespace(_q_scale_float=0.5, _k_scale_float=0.25)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CONVERTED_BY = ["vllm", "plugin"] if sparse._VLLM_CONVERTS else ["plugin"]
"""Who turns positions into rows of the cache: vLLM 0.33, or the plug-in for vLLM 0.26."""


@pytest.fixture(params=CONVERTED_BY)
def converted_by(request, monkeypatch) -> str:
    monkeypatch.setattr(sparse, "_VLLM_CONVERTS", request.param == "vllm")
    return request.param


@dataclasses.dataclass
class Batch:
    """Query tokens of requests, in a cache whose other rows, and the rows between its pages, are NaN.

    chosen: positions [tokens, top_k] of each token's keys, -1 behind them; one stands twice.
    """

    keys: list[torch.Tensor]
    requests: list[int]
    chosen: torch.Tensor

    @classmethod
    def drawn(cls, lengths: list[int], requests: list[int], top_k: int, counts: list[int]) -> Batch:
        chosen = torch.full((len(requests), top_k), -1, dtype=torch.int32)
        for token, (request, count) in enumerate(zip(requests, counts, strict=True)):
            chosen[token, :count] = torch.randint(0, lengths[request], (count,), dtype=torch.int32)
        return cls([torch.randn(n, 576).to(BF16) for n in lengths], requests, chosen)

    def stored(self, gap: int = 0, owned: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cache and its page table. gap: rows between pages. owned: the keys of this rank."""
        owned = self.keys if owned is None else owned
        table, pages = page_tables([len(own) for own in owned], PAGE, spare_pages=1, spare_columns=1, unused=0)
        pool = torch.full((pages, PAGE + gap, owned[0].shape[1]), math.nan, dtype=BF16)
        put_keys(pool[:, :PAGE], table, owned)
        return pool[:, :PAGE], table

    def metadata(self, table: torch.Tensor, interleave: int = 1) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            req_id_per_token=torch.tensor([*self.requests, 0, 0], dtype=torch.int32),
            block_table=table,
            block_size=PAGE,
            cp_kv_cache_interleave_size=interleave,
            num_decode_tokens=len(self.requests),
        )

    def expected(self, q: torch.Tensor, scale: float = SCALE, out_scale: float = 1.0) -> torch.Tensor:
        """Attention of every token in turn, q [tokens, heads, 576], over the keys of its list."""
        outs = []
        for query, request, positions in zip(q.double(), self.requests, self.chosen.long(), strict=True):
            own = self.keys[request][positions[positions >= 0]].double()
            outs.append(out_scale * rows(scale * query @ own.T, own[:, :512])[0])
        return torch.stack(outs)


def close(got: torch.Tensor, want: torch.Tensor, atol: float = 4e-3) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1.5e-2, atol=atol)


def some() -> Batch:
    """Decodes, a request of several tokens, a token that chose nothing and one that chose all that it may."""
    return Batch.drawn([5, 70, 33], [0, 1, 1, 1, 2], 24, [3, 24, 0, 7, 23])


@pytest.mark.parametrize("heads", [1, 3, 128])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("gap", [0, 3])
def test_each_token_sees_the_keys_it_chose(kernels, make_sparse, converted_by, heads, joined, gap):
    batch = some()
    cache, table = batch.stored(gap)
    parts = torch.randn(heads, 5, 512).to(BF16).transpose(0, 1), torch.randn(5, heads + 1, 64).to(BF16)[:, :heads]
    q = torch.cat(parts, -1)
    impl = make_sparse(batch.chosen, heads=heads)
    out, lse = impl.forward_mqa(q if joined else parts, cache, batch.metadata(table), LAYER)
    assert lse is None and out.shape == (5, heads, 512) and out.dtype == BF16
    assert kernels.asked == [DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, True, gathers=True)]
    close(out, batch.expected(q))
    assert (out[2] == 0).all()


def test_an_fp8_cache_has_the_layers_scales(kernels, make_sparse, converted_by):
    batch = some()
    batch.keys = [own.to(E4M3).to(BF16) for own in batch.keys]
    cache, table = batch.stored()
    q = torch.randn(5, 2, 576).to(E4M3)
    out, _ = make_sparse(batch.chosen, cache="fp8").forward_mqa(q, cache.to(E4M3), batch.metadata(table), LAYER)
    close(out, batch.expected(q.float(), SCALE * 0.5 * 0.25, 0.25))


def test_queries_for_it_are_quantised_in_parts_where_vllm_would_join_them_first(
    kernels, make_sparse, converted_by, uncompiled
):
    batch, scaled = some(), types.SimpleNamespace(_q_scale=torch.tensor(0.5), **vars(LAYER))
    cache, table = batch.stored()
    impl, metadata = make_sparse(batch.chosen, cache="fp8"), batch.metadata(table)
    parts = torch.randn(2, 5, 512).to(BF16).transpose(0, 1), torch.randn(5, 2, 64).to(BF16)
    out, _ = impl.forward_mqa(parts, cache.to(E4M3), metadata, scaled)
    joined, _ = scaled_fp8_quant(torch.cat(parts, -1).flatten(1), scaled._q_scale)
    same, _ = impl.forward_mqa(joined.view(5, 2, 576), cache.to(E4M3), metadata, scaled)
    assert out.equal(same) and out.any()


@pytest.mark.parametrize("gap", [0, 2])
def test_rows_of_656_bytes(kernels, make_sparse, converted_by, gap):
    batch = some()
    cache, table = of_656_bytes(batch, gap)
    impl = make_sparse(batch.chosen, cache="fp8_ds_mla")
    assert not impl.supports_quant_query_input
    q = torch.randn(5, 2, 576).to(BF16)
    out, _ = impl.forward_mqa(q, cache, batch.metadata(table), LAYER)
    assert kernels.asked == [FROM_ROWS]
    close(out, batch.expected(q), atol=0.03)


def of_656_bytes(batch: Batch, gap: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of such rows, those that nobody has 0xFF, and its page table; the batch's keys become what it holds."""
    row = ROWS["fp8_ds_mla"]
    batch.keys = [numbers_in(row, stored_as(row, own)).to(BF16) for own in batch.keys]
    cache, table = batch.stored(gap)
    pool = torch.full((len(cache), PAGE + gap, 656), 255, dtype=torch.uint8)
    pool[:, :PAGE] = stored_as(row, cache).view(torch.uint8)
    return pool[:, :PAGE], table


def with_prompts(batch: Batch, table: torch.Tensor, decodes: int) -> types.SimpleNamespace:
    """vLLM's metadata where all requests but the first ones are prompts."""
    metadata = batch.metadata(table)
    metadata.num_decodes, metadata.num_prefills = decodes, len(batch.keys) - decodes
    metadata.num_decode_tokens = sum(request < decodes for request in batch.requests)
    metadata.num_actual_tokens = len(batch.requests)
    metadata.lengths = torch.tensor([len(own) for own in batch.keys], dtype=torch.int32)
    metadata.prompts = prompts.of(metadata)
    return metadata


ROW = ROWS["fp8_ds_mla"]
FROM_BF16 = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, True, gathers=True)
FROM_ROWS = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, True, ROW, gathers=True)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("decodes", [0, 2])
def test_prompts_over_rows_of_656_bytes_are_decoded_from_bf16(kernels, make_sparse, converted_by, decodes, joined):
    """Prompts that fill pages and that do not, whose tokens chose nothing or their last key; decodes read the rows."""
    lengths = [5, 70, 33, 3 * PAGE, 1][0 if decodes else 2 :]
    requests = [*([0, 1, 1] if decodes else []), *(decodes + n for n in (0, 0, 0, 1, 2))]
    batch = Batch.drawn(lengths, requests, 24, [3, 24, 1, 3, 24, 0, 7, 23, 2][-len(requests) :])
    batch.chosen[-2, 0] = 3 * PAGE - 1
    cache, table = of_656_bytes(batch, gap=2)
    heads = prompts.MOST_HEADS_THAT_DECODE + 1
    impl = make_sparse(batch.chosen, heads=heads, cache="fp8_ds_mla")
    parts = torch.randn(len(requests), heads, 512).to(BF16), torch.randn(len(requests), heads, 64).to(BF16)
    q = torch.cat(parts, -1)
    out, lse = impl.forward_mqa(q if joined else parts, cache, with_prompts(batch, table, decodes), LAYER)
    close(out, batch.expected(q), atol=0.03)
    assert lse is None and out.dtype == BF16
    assert kernels.asked == [ReadCacheVariant(Arch.SM90A, Dtype.BF16, ROW), *[FROM_ROWS] * bool(decodes), FROM_BF16]


def test_keys_are_read_where_tokens_are_many_enough_and_memory_is():
    def read(tokens: int, *keys: int) -> int:
        given = {"num_decodes": 1, "num_prefills": len(keys), "num_decode_tokens": 2, "num_actual_tokens": 2 + tokens}
        lengths, table = torch.tensor([10**9, *keys]), torch.zeros(1, dtype=torch.int32)
        found = prompts.of(types.SimpleNamespace(**given, lengths=lengths, block_table=table, block_size=64))
        return 0 if found is None else found.rows

    assert read(129, 129 * 256) == 129 * 256 and read(129, 129 * 256 + 1) == 0
    assert read(200, 1, 64, 65) == 64 + 64 + 128
    most = masked.MOST_BYTES // 1152 // 64 * 64
    assert read(8192, most) == most and read(8192, most + 1) == read(8192, most - 64, 65) == 0
    assert read(0) == 0


def test_rows_of_prompts_are_told_on_the_host_whatever_device_is_torch_s_default():
    given = {"num_decodes": 1, "num_prefills": 2, "num_decode_tokens": 1, "num_actual_tokens": 9, "block_size": 4}
    lengths, table = torch.tensor([7, 9, 4]), torch.zeros(1, dtype=torch.int32)
    with torch.device("meta"):
        found = prompts.of(types.SimpleNamespace(**given, lengths=lengths, block_table=table))
    assert found.pages[1:].tolist() == [[0, 1, 2], [3, 4, 5]] and found.starts.tolist() == [0, 12, 16]


@pytest.mark.parametrize("given", [{"heads": 16}, {"cache": "auto"}, {"ranks": 2}, {"invariant": True}], ids=str)
def test_prompts_are_decoded_as_they_are_stored(make_sparse, config, monkeypatch, given):
    """Where few heads have a faster kernel, rows are bf16, others have some of the keys, or bits must not depend on the
    batch."""
    config.parallel_config.decode_context_parallel_size = given.pop("ranks", 1)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", given.pop("invariant", False), raising=False)
    assert not make_sparse(**{"heads": 64, "cache": "fp8_ds_mla", **given})._reads_prompts


@pytest.mark.skipif(512 not in served.SHAPES, reason="tsmla has no rows without rope")
@pytest.mark.parametrize("joined", [True, False])
def test_rows_without_rope(kernels, make_sparse, converted_by, joined):
    """vLLM gives an empty rope part with the query; under context parallelism it joins the two."""
    batch = some()
    batch.keys = [own[:, :512] for own in batch.keys]
    cache, table = batch.stored(gap=2)
    parts = torch.randn(5, 2, 512).to(BF16), torch.randn(5, 2, 0).to(BF16)
    impl = make_sparse(batch.chosen, qk_rope_head_dim=0, qk_nope_head_dim=192)
    out, _ = impl.forward_mqa(parts[0] if joined else parts, cache, batch.metadata(table), LAYER)
    close(out, batch.expected(parts[0]))


@pytest.mark.parametrize("world, interleave", [(2, 1), (4, 16), (3, 4)])
def test_ranks_of_context_parallelism_merge_to_the_whole(kernels, make_sparse, converted_by, world, interleave):
    """With the base that the implementation declares, as vLLM merges. One token's keys are all on one rank, one chose
    nothing."""
    batch = Batch.drawn([5, 70], [0, 1, 1, 1], 24, [3, 24, 1, 0])
    q = torch.randn(4, 2, 576).to(BF16)
    outs, lses = [], []
    for rank in range(world):
        owned = [k[torch.arange(len(k)) // interleave % world == rank] for k in batch.keys]
        cache, table = batch.stored(1, owned)
        impl = make_sparse(batch.chosen)
        impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = world, rank, True
        out, lse = impl.forward_mqa(q, cache, batch.metadata(table, interleave), LAYER)
        assert lse is not None and lse.shape == (4, 2) and not out.isnan().any()
        outs.append(out.double())
        lses.append(lse.double() * (1.0 if impl.lse_base_on_e else math.log(2)))
    assert torch.stack(lses)[:, 2].isneginf().sum() == 2 * (world - 1)
    assert torch.stack(lses)[:, 3].isneginf().all()
    weights = torch.softmax(torch.stack(lses), 0).nan_to_num(0.0)
    close((weights[..., None] * torch.stack(outs)).sum(0), batch.expected(q))


@pytest.mark.skipif("vllm" not in CONVERTED_BY, reason="this vLLM calls no such method")
def test_rows_that_no_slot_has_are_hidden(kernels, make_sparse):
    """In front, in the middle, behind the count; rows between pages are counted by vLLM, and nobody names them."""
    batch = some()
    cache, _ = batch.stored(gap=3)
    rows_of_memory = (len(cache) - 1) * (PAGE + 3) + PAGE
    indices = torch.tensor([[-1, 0, rows_of_memory, PAGE + 3 + 1, -(2**31), 2**31 - 1, 0, 1]], dtype=torch.int32)
    cache[:2] = torch.randn(2, PAGE, 576).to(BF16)
    q = torch.randn(1, 2, 576).to(BF16)
    out, _ = make_sparse()._forward_mqa_kernel(
        q, cache, indices, torch.tensor([7], dtype=torch.int32), layer=LAYER, block_size=PAGE, is_decode=True
    )
    own = torch.stack((cache[0, 0], cache[1, 1], cache[0, 0])).double()
    close(out, rows(SCALE * q[0].double() @ own.T, own[:, :512])[0][None])


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("rope", [64, 0])
def test_what_the_operator_is_asked(kernels, make_sparse, monkeypatch, wanted, rope):
    """Batch invariance as vLLM wants it, and no rope piece of models that have none."""
    asked = []
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", wanted, raising=False)
    monkeypatch.setattr(sparse, "tsmla_decode", lambda *given, **named: asked.append((given, named)) or given[0])
    batch = some()
    cache, table = batch.stored()
    impl = make_sparse(batch.chosen)
    impl.qk_rope_head_dim = rope
    q = torch.randn(5, 2, 512).to(BF16), torch.randn(5, 2, rope).to(BF16)
    impl.forward_mqa(q, cache, batch.metadata(table), LAYER)
    (query, _, _, *dims), named = asked[0]
    assert query is (q if rope else q[0]) and dims[:2] == [512, rope] and named["batch_invariant"] is wanted


@pytest.mark.parametrize("style", ["old", "new_style"])
@pytest.mark.usefixtures("vllm_ops")
def test_short_prompts_are_prefilled_as_dense_ones(kernels, config, make_sparse, style):
    problem = Problem([21, 0, 9, 40], [3, 4, 1, 7])
    row = ROWS["fp8_ds_mla"]
    problem.cache = stored_as(row, problem.cache).view(torch.uint8)
    for keys, context in zip(problem.keys, problem.contexts, strict=True):
        keys[:context] = numbers_in(row, stored_as(row, keys[:context]))
    impl = make_sparse(weight=problem.weight, cache="fp8_ds_mla")
    problem.check(problem.run(impl, prefill(config), getattr(problem, style)(12)))
    assert ReadCacheVariant(Arch.SM90A, Dtype.BF16, row) in kernels.asked
    assert KeyMaskVariant(Arch.SM90A) not in kernels.asked


def prefill(config) -> TsmlaPrefill:
    return TsmlaPrefill(
        num_heads=2, scale=0.07, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        vllm_config=config,
    )  # fmt: skip


TABLE = "_MASKED_MHA_THRESHOLDS"
"""Where vLLM 0.33 finds which backends have masked prefills; vLLM 0.26 does not ask."""


@pytest.fixture
def masks(monkeypatch, config) -> dict:
    """All that lets vLLM ask for masks, on an H200 whose kernels need no loading; returns vLLM's table."""
    table: dict = {}
    monkeypatch.setattr(mla_attention, TABLE, table, raising=False)
    monkeypatch.setattr(masked, "masked_kernels", lambda *variants: None)
    monkeypatch.setattr(ready, "arch", lambda: Arch.SM90A)
    monkeypatch.setattr(layer, "decode_kernels", lambda *given, **named: None)
    monkeypatch.setattr(layer, "_RESERVES_WHEN_PROFILED", True)
    monkeypatch.setattr(vllm_prefill, "prefill_kernels", lambda *given: None)
    config.attention_config.mla_prefill_backend = types.SimpleNamespace(get_path=lambda: PREFILL)
    config.parallel_config.tensor_parallel_size = 8
    config.model_config.hf_text_config = types.SimpleNamespace(index_topk=2048)
    return table


def name() -> str:
    return name_in(AttentionBackendEnum, SPARSE)


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("cut", ["new_style", "packed"])
@pytest.mark.usefixtures("vllm_ops", "masks")
def test_longer_prompts_are_prefilled_with_masks(kernels, config, make_sparse, cut, cache):
    """Prompts with and without context, chunks of one request and of several, tokens that chose nothing."""
    problem = Problem([21, 0, 9, 40, 50], [3, 4, 1, 37, 2])
    if cache == "fp8_ds_mla":
        row = ROWS[cache]
        problem.cache = stored_as(row, problem.cache).view(torch.uint8)
        for keys, context in zip(problem.keys, problem.contexts, strict=True):
            keys[:context] = numbers_in(row, stored_as(row, keys[:context]))
    impl = make_sparse(problem.choose(11), weight=problem.weight, cache=cache)
    problem.check(problem.run(impl, prefill(config), getattr(problem, cut)(36)))
    prefills = {asked for asked in kernels.asked if isinstance(asked, PrefillVariant)}
    assert prefills == {PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, False, True, masked=True)}
    assert (ReadCacheVariant(Arch.SM90A, Dtype.BF16, ROWS["fp8_ds_mla"]) in kernels.asked) == (cache != "auto")


@pytest.mark.usefixtures("vllm_ops", "masks")
def test_masked_prompts_without_context(kernels, config, make_sparse):
    problem = Problem([0, 0], [40, 33])
    problem.check(problem.run(make_sparse(problem.choose(11), weight=problem.weight), prefill(config), None))


@pytest.mark.usefixtures("vllm_ops", "masks")
def test_masked_prompts_in_fp8(kernels, config, make_sparse):
    config.attention_config.use_prefill_query_quantization = True
    problem = Problem([21, 40], [40, 3])
    out = problem.run(make_sparse(problem.choose(11), weight=problem.weight), prefill(config), problem.packed(36))
    problem.check(out, rtol=0.2, atol=0.15)
    assert PrefillVariant(Arch.SM90A, Dtype.E4M3, Dtype.BF16, 192, 128, False, True, masked=True) in kernels.asked


@pytest.mark.usefixtures("vllm_ops", "masks")
def test_masks_leave_tokens_of_no_request_alone(kernels, config, make_sparse):
    """Drafts that the GPU leaves out, behind the prompts."""
    config.speculative_config = types.SimpleNamespace(enable_adaptive_verification=True, num_speculative_tokens=3)
    problem = Problem([21, 9], [3, 14])
    impl = make_sparse(problem.choose(11), weight=problem.weight)
    context = problem.packed(36)
    problem.q, tokens = torch.cat((problem.q, torch.full((2, 2, 192), math.nan, dtype=BF16))), len(problem.q)
    problem.keys.append(torch.full((2, 576), math.nan, dtype=BF16))
    problem.contexts.append(0)
    out = problem.run(impl, prefill(config), context)
    assert (out[tokens:] == 0).all()
    problem.keys.pop()
    problem.check(out)


def test_vllm_is_told_where_masks_pay(masks, make_sparse):
    assert make_sparse(heads=16).masked_mha_available
    assert make_sparse(heads=64, qk_nope_head_dim=192, v_head_dim=256).masked_mha_available
    assert masks == {
        (192, 128): {name(): {8: masked.where_it_pays(16, (192, 128), 2048)}},
        (256, 256): {name(): {8: masked.where_it_pays(64, (256, 256), 2048)}},
    }


@pytest.mark.parametrize("heads, keys", [(8, 93_750), (16, 46_875), (64, 11_718), (128, 11_718)])
def test_a_mask_pays_up_to_more_keys_for_fewer_heads(heads, keys):
    """For up to 64 heads a list costs the same; a mask costs what its heads do. With context, the least number of
    tokens grows with the keys."""
    without, context = masked.where_it_pays(heads, (192, 128), 2048)
    assert without == ((keys, 0),)
    assert [tokens for _, tokens in context] == [147, 440, 1320, 3080]
    assert [round(most / keys, 3) for most, _ in context] == [0.125, 0.25, 0.375, 0.437]
    assert masked.where_it_pays(heads, (192, 128), 512)[0][0][0] == keys // 4


def test_vllms_own_masks_take_no_memory(monkeypatch):
    vllms = TsmlaSparseMetadataBuilder.__base__
    monkeypatch.setattr(vllms, "__init__", lambda self, *given: setattr(self, "topk_mask_workspace", object()))
    monkeypatch.setattr(vllms, "_init_reorder_batch_threshold", lambda self, *given, **named: None, raising=False)
    assert TsmlaSparseMetadataBuilder(None, [], None, torch.device("cpu")).topk_mask_workspace is None


def without_table(config, monkeypatch):
    monkeypatch.delattr(mla_attention, TABLE)


def under_context_parallelism(config, monkeypatch):
    config.parallel_config.decode_context_parallel_size = 2


def beside_another_prefill(config, monkeypatch):
    config.attention_config.mla_prefill_backend = types.SimpleNamespace(get_path=lambda: "other.Class")


def batch_invariant(config, monkeypatch):
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)


def on_a_gpu_without_the_kernel(config, monkeypatch):
    monkeypatch.setattr(masked, "why_unsupported", lambda variant: f"no {variant.symbol()}" if variant.masked else None)


REFUSALS = [
    (without_table, "vLLM 0.33 does"),
    (under_context_parallelism, "it does with a size of 1"),
    (beside_another_prefill, "name TSMLA as the mla_prefill_backend"),
    (batch_invariant, "it is without VLLM_BATCH_INVARIANT"),
    (on_a_gpu_without_the_kernel, "no tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_masked"),
]


@pytest.mark.parametrize("change, reason", REFUSALS)
def test_prompts_are_decoded_where_masks_cannot_be_had(masks, config, make_sparse, monkeypatch, caplog, change, reason):
    change(config, monkeypatch)
    masked._log.cache_clear()
    with caplog.at_level(logging.INFO, "tsmla"):
        assert not make_sparse().masked_mha_available
        assert not make_sparse().masked_mha_available
    assert len(caplog.messages) == 1 and reason in caplog.text and masks == {}


def test_dims_that_were_not_measured_are_decoded(masks, make_sparse):
    assert not make_sparse(qk_nope_head_dim=64).masked_mha_available and masks == {}


@pytest.mark.usefixtures("vllm_ops", "kernels")
def test_a_mask_that_was_not_offered_is_refused(config, make_sparse):
    problem = Problem([0], [20])
    with pytest.raises(NotImplementedError, match="sparse_mla_force_mqa in vLLM's attention config"):
        problem.run(make_sparse(problem.choose(11), weight=problem.weight), prefill(config), None)


def test_masks_are_as_large_as_the_memory_that_is_counted_for_them(masks, make_sparse):
    impl = make_sparse(torch.zeros(1, 2048, dtype=torch.int32))

    def fits(tokens: list[int], chunks: list[int]) -> bool:
        context = types.SimpleNamespace(chunks=[types.SimpleNamespace(max_seq_len=n) for n in chunks])
        given = {"max_query_len": max(tokens), "query_lens_cpu": torch.tensor(tokens)}
        return impl.masked_mha_workspace_fits(
            types.SimpleNamespace(chunked_context=context if chunks else None, **given)
        )

    assert fits([16384], []) and fits([16384], [65536, 1]) and fits([8192, 8192], [65536])
    assert not fits([16384], [65537]) and not fits([16384, 1], [65536]) and not fits([32768], [])


@pytest.mark.usefixtures("kernels")
def test_kernels_for_masks_are_loaded_and_their_memory_counted(monkeypatch, masks, make_sparse):
    loaded: list = []
    monkeypatch.setattr(masked, "masked_kernels", lambda *variants: loaded.extend(variants))
    impl = make_sparse(cache="fp8_ds_mla")
    masked_prefill = PrefillVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, 192, 128, False, True, masked=True)
    assert loaded == [masked_prefill, KeyMaskVariant(Arch.SM90A)]
    made: list = []
    monkeypatch.setattr(torch, "empty", lambda *size, **named: made.append((size, named["dtype"])))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    impl.reserve_workspace()
    assert made == [((masked.MOST_BYTES,), torch.int8)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_the_reserved_workspace_does_for_every_batch(heads):
    most = ready.workspace_bytes(heads, 1, torch.device("cuda"))
    draw = random.Random(heads)
    for _ in range(300):
        tokens, longest = int(2 ** draw.uniform(0, 14)), int(2 ** draw.uniform(0, 12))
        assert plan_decode(Arch.SM90A, 132, tokens, 1, heads, longest).workspace_bytes <= most


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads", [2, 64])
def test_kernels_are_loaded_when_a_layer_is_made(monkeypatch, make_sparse, heads):
    """That of bf16 rows, too, and the memory for them counted, where prompts are read into such."""
    loaded, made = [], []
    monkeypatch.setattr(ready, "arch", lambda: Arch.SM90A)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(shared_ready, "warmup", lambda variants: loaded.extend(variants))
    monkeypatch.setattr(shared_ready, "_loaded", set())
    monkeypatch.setattr(torch, "empty", lambda *size, **named: made.append((size, named["dtype"])))
    make_sparse(cache="fp8_ds_mla", heads=heads).reserve_workspace()
    assert set(loaded) == {FROM_ROWS, ReadCacheVariant(Arch.SM90A, Dtype.BF16, ROW), *[FROM_BF16] * (heads > 16)}
    assert set(made) == ({((masked.MOST_BYTES,), torch.int8)} if heads > 16 else set())


def test_layers_that_cannot_be_served_are_refused(make_sparse):
    with pytest.raises(NotImplementedError, match="not 256 and 64"):
        make_sparse(kv_lora_rank=256)
    with pytest.raises(NotImplementedError, match="without a sliding window"):
        make_sparse(window=100)


@pytest.mark.parametrize("adaptive", [True, False, None])
def test_graphs_are_replayed_with_other_lengths_where_drafts_are_left_out_on_the_gpu(config, adaptive):
    if adaptive is not None:
        config.speculative_config = types.SimpleNamespace(enable_adaptive_verification=adaptive)
    wanted = options.decode_threshold() if adaptive else None
    assert TsmlaSparseMetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) == wanted


def test_the_promises():
    assert TsmlaSparseMetadataBuilder._cudagraph_support.name == "UNIFORM_BATCH"
    impl = sparse.TsmlaSparseImpl
    assert impl.is_sparse and impl.can_return_lse_for_decode and impl.supports_dcp and impl.lse_base_on_e is False
    assert impl.supports_mtp_with_cp_non_trivial_interleave_size
