"""tsmla_decode of chosen keys is right, whatever the lists: results, bytes that nobody may change, and bytes that
nobody may read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import tsmla
from tsmla.identity.support import LATENT_DIM

from .chosen_case import LSES, ChosenCase
from .decode_case import QUERIES, SCORED
from .decode_property import in_two_tensors, ordered
from .drawing import INT32
from .guarded import Guarded, contiguous
from .places import Place
from .reference_attention import Rows, attend, judge, judge_extreme, precision, tells_apart, with_sinks


class Inputs(NamedTuple):
    """On the CPU: query [..., heads, columns], cache [pages, page, columns], lists [tokens, top_k], and the slots that
    each token's list names, in order and as often as they stand there."""

    query: torch.Tensor
    cache: torch.Tensor
    lists: torch.Tensor
    named: list[torch.Tensor]


def drawn(case: ChosenCase) -> Inputs:
    """Random lists and keys, with `unseen` in every row of the cache that no list names."""
    generator = torch.Generator().manual_seed(case.seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    shape = (case.tokens, case.top_k)
    lists = integers(0, max(1, min(case.slots, case.distinct or case.slots)), *shape)
    others = torch.tensor([*INT32, -1, case.slots, case.slots + case.page])
    outside = integers(0, 16, *shape) < case.outside
    outside[:, : case.front] = True
    lists = torch.where(outside, others[integers(0, len(others), *shape)], lists)
    for token, column, value in case.strays:
        lists[token, column] = value
    named = [own[: case.counted(token)] for token, own in enumerate(lists)]
    named = [own[(own >= 0) & (own < case.slots)] for own in named]
    cache = torch.randn(case.slots, case.columns, generator=generator) * case.magnitude
    query = torch.randn(*case.shape, case.heads, case.columns, generator=generator) * case.magnitude
    used = torch.cat([torch.zeros(0, dtype=torch.int64), *named]).unique()
    if case.values == "growing":
        cache[used, -SCORED:] *= torch.linspace(0.02, 3, len(used))[:, None]
    if case.values == "one heavy key" and len(used):
        cache[used[case.seed % len(used)], -SCORED:] *= 12
    if case.values == "uniform":
        query.zero_()
    unused = torch.ones(case.slots, dtype=torch.bool)
    unused[used] = False
    cache[unused] = math.nan if case.dtype == "e4m3" else case.unseen
    cache = cache.to(case.torch_dtype).view(case.pages, case.page, case.columns)
    return Inputs(query.to(case.torch_dtype), cache, lists.to(torch.int32), named)


def check(case: ChosenCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    inputs = drawn(case)
    with place.running(case.schedule, case.processors):
        memory, given = case.manner.arrange(lambda: arranged(case, inputs))
        result = case.manner.call(place, tsmla.tsmla_decode, memory, given)
        out, lse = (tensor.cpu() for tensor in result) if case.lse else (result.cpu(), None)
        for name, guarded in memory.items():
            written = name in ("workspace", "out", "lse")
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if written else None
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    assert out.dtype == case.written and out.shape == (*case.shape, case.heads, LATENT_DIM)
    if not case.tokens:
        return
    on_hopper = place.device and place.arch == "sm_90a"
    in_16_bits = place.arch == "sm_90a" and case.torch_dtype == torch.bfloat16
    given_precision = precision(case.torch_dtype, out.dtype, on_hopper, False, in_16_bits)
    rows, parts = inputs.cache.double().flatten(0, 1), []
    for query, named in zip(inputs.query.double().flatten(0, -3), inputs.named, strict=True):
        keys, seen = rows[named], torch.ones(case.heads, len(named), dtype=torch.bool)
        parts.append(attend(query, keys, keys[:, :LATENT_DIM], seen, case.softmax_scale, given_precision.score))
    if lse is not None:
        assert lse.shape == out.shape[:-1]
        lse = lse.flatten().double() * (math.log(2) if case.lse_base == 2 else 1)
    sinks = None if case.sinks is None else torch.tensor(case.sinks).repeat(case.tokens)
    expected = with_sinks(Rows.joined(parts), sinks, case.lse_includes_sink)
    judged = judge if tells_apart(expected, given_precision) else judge_extreme
    judged(expected, out.flatten(0, -2), lse, case.output_scale, given_precision)


def arranged(case: ChosenCase, inputs: Inputs) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    memory: dict[str, Guarded] = {}

    def put(
        name: str, content: torch.Tensor, strides: tuple[int, ...] | None = None, offset: int = 4 * case.offset
    ) -> torch.Tensor:
        memory[name] = Guarded(tuple(content.shape), content.dtype, strides, content, offset)
        return memory[name].tensor

    def space(name: str, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> Any:
        memory[name] = Guarded(shape, dtype, strides, None, 16 * case.offset)
        return memory[name].tensor

    layouts, packed = QUERIES[case.query], len(case.shape) == 1
    in_pieces = len(layouts) > 1 and case.rope
    split = inputs.query.split((LATENT_DIM, case.rope), -1) if in_pieces else (inputs.query,)
    pieces = []
    for name, piece, (order, gap) in zip(("query", "q_pe"), split, layouts, strict=False):
        dims = [dim - packed for dim in order if dim >= packed]
        strides = ordered(piece.shape[:-1], dims, piece.shape[-1] + gap)
        pieces.append(put(name, piece, (*strides, 1), 16 * case.offset))
    if case.apart:
        cache: Any = in_two_tensors(case, inputs.cache.split((LATENT_DIM, case.rope), -1), put)
    else:
        content = inputs.cache if case.cache_dims == 3 else inputs.cache[:, None]
        page = (case.page + case.page_gap) * case.columns
        cache = put("kv_cache", content, (page, *contiguous(tuple(content.shape))[1:]), 16 * case.offset)
    lists = inputs.lists.view(*case.shape, case.top_k)
    row = case.top_k + case.list_gap
    list_strides = (*(stride * row for stride in contiguous(case.shape)), 1)
    lengths = None
    if case.lengths is not None:
        content = torch.tensor(case.lengths, dtype=torch.int64 if case.wide_lengths else torch.int32)
        content = content.view(case.shape[:1] if case.by_request else case.shape)
        lengths = put("topk_length", content, offset=content.element_size() * case.offset)
    lse = None
    if case.lse_layout:
        order, gap = LSES[case.lse_layout]
        token, head = ordered(torch.Size((max(case.tokens, 1), case.heads)), list(order), 1 + gap)
        strides = (*(stride * token for stride in contiguous(case.shape)), head)
        lse = space("lse", (*case.shape, case.heads), torch.float32, strides)
    size = tsmla.decode_workspace_size(case.tokens, 1, case.heads, max(1, case.top_k)) + case.spare
    return memory, {
        "query": tuple(pieces) if len(pieces) > 1 else pieces[0],
        "kv_cache": cache,
        "workspace_buffer": space("workspace", (size,), getattr(torch, case.workspace)),
        "kv_lora_rank": LATENT_DIM,
        "qk_rope_head_dim": case.rope,
        "block_tables": None,
        "seq_lens": None,
        "max_seq_len": None,
        "softmax_scale": case.softmax_scale,
        "output_scale": case.output_scale,
        "out": None if case.out == "new" else space("out", (*case.shape, case.heads, LATENT_DIM), case.written),
        "enable_pdl": case.pdl,
        "return_lse": case.lse,
        "lse": lse,
        "lse_base": case.lse_base,
        "sinks": None if case.sinks is None else put("sinks", torch.tensor(case.sinks)),
        "lse_includes_sink": case.lse_includes_sink,
        "batch_invariant": case.batch_invariant,
        "indices": put("indices", lists, list_strides),
        "topk_length": lengths,
    }
