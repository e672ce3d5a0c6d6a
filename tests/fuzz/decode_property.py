"""tsmla_decode is right, whatever the case: results, bytes that nobody may change, and bytes that nobody may read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import tsmla
from tsmla.support import LATENT_DIM, ROPE_DIM

from .decode_case import QUERIES, WIDTH, DecodeCase
from .guarded import Guarded, contiguous
from .places import Place
from .reference_attention import Rows, attend, judge, judge_extreme, precision, tells_apart, with_sinks
from .reference_decode import pages_of

_SPARE_PAGES = 3


class Inputs(NamedTuple):
    """On the CPU: query, cache [pages, page, 576], page table, and the keys of each request in order."""

    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    keys: list[torch.Tensor]


def check(case: DecodeCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    inputs = drawn(case)
    with place.running(case.schedule, case.processors):
        memory, given = arranged(case, inputs)
        result = tsmla.tsmla_decode(**given)
        torch.cuda.synchronize()
        out, lse = (tensor.cpu() for tensor in result) if case.lse else (result.cpu(), None)
        for name, guarded in memory.items():
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if name in ("out", "workspace") else None
            if name == "out":
                may_change = torch.zeros(may_change.flatten(0, -3).shape, dtype=torch.bool)
                may_change[computed(case)] = True
                may_change = may_change.view(guarded.tensor.shape)
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    assert out.dtype == case.written and out.shape == (*inputs.query.shape[:-1], LATENT_DIM)
    given_precision = precision(case.torch_dtype, out.dtype, place.device and place.arch == "sm_90a")
    parts = []
    tokens = computed(case)
    for request in range(case.batch):
        own = case.query_tokens(request)
        seen = case.seen(request).repeat_interleave(case.heads, 0)
        query, keys = inputs.query.flatten(0, -3)[own.start : own.stop].flatten(0, 1), inputs.keys[request]
        if not own:
            continue
        parts.append(attend(query, keys, keys[:, :LATENT_DIM], seen, case.softmax_scale, given_precision.score))
    if not parts:
        return
    if lse is not None:
        assert lse.shape == out.shape[:-1]
        lse = lse.flatten(0, -2)[tokens].double() * (math.log(2) if case.lse_base == 2 else 1)
    sinks = None if case.sinks is None else torch.tensor(case.sinks).repeat(len(tokens))
    expected = with_sinks(Rows.joined(parts), sinks, case.lse_includes_sink)
    judged = judge if tells_apart(expected, given_precision) and not case.extreme else judge_extreme
    flat_lse = None if lse is None else lse.flatten()
    judged(expected, out.flatten(0, -3)[tokens].flatten(0, 1), flat_lse, case.output_scale, given_precision)


def computed(case: DecodeCase) -> list[int]:
    """The query tokens that requests have."""
    return [token for request in range(case.batch) for token in case.query_tokens(request)]


def drawn(case: DecodeCase) -> Inputs:
    """Random keys in random pages, with `unseen` in every row of the cache that no query token sees."""
    generator = torch.Generator().manual_seed(case.seed)
    used = [-(-length // case.page) for length in case.lengths]
    common = min([case.shared, *used])
    pages = common + sum(count - common for count in used) + _SPARE_PAGES
    order = torch.randperm(pages, generator=generator).tolist()
    first, order = order[:common], order[common:]
    if case.unused is None:
        table = torch.randint(-(2**31), 2**31, (case.batch, case.width), generator=generator)
    else:
        table = torch.full((case.batch, case.width), case.unused)
    for request, count in enumerate(used):
        own = [*first, *(order.pop() for _ in range(count - common))]
        table[request, :count] = torch.tensor(own, dtype=torch.int64)
    for request, column, value in case.missing:
        table[request, column] = value
    cache = torch.randn(pages, case.page, WIDTH, generator=generator) * case.magnitude
    shape = (case.batch, case.q_len) if case.ends_q is None else (case.tokens,)
    query = torch.randn(*shape, case.heads, WIDTH, generator=generator) * case.magnitude
    seen_rows = torch.zeros(pages, case.page, dtype=torch.bool)
    places = []
    for request, length in enumerate(case.lengths):
        at = pages_of(table[request].tolist(), length, case.page)
        places.append(at)
        someone = case.seen(request).any(0).tolist()
        for key, ((page, row), seen) in enumerate(zip(at, someone, strict=True)):
            if 0 <= page < pages:
                seen_rows[page, row] |= seen
                if case.values == "growing" and (case.shared == 0 or request == 0):
                    cache[page, row, LATENT_DIM:] *= 0.02 + 3 * key / length
                if case.values == "one heavy key" and key == case.seed % length and not case.shared:
                    cache[page, row, LATENT_DIM:] *= 12
    if case.values == "uniform":
        query.zero_()
    if case.ends_q is not None:
        used_tokens = torch.zeros(case.tokens, dtype=torch.bool)
        used_tokens[computed(case)] = True
        query[~used_tokens] = math.nan
    filler = torch.tensor(math.nan if case.dtype == "e4m3" else case.unseen)
    cache = torch.where(seen_rows[..., None], cache, filler).to(case.torch_dtype)
    zero = torch.zeros(WIDTH, dtype=cache.dtype)
    keys = [
        torch.stack([cache[at] if 0 <= at[0] < pages else zero for at in request]) if request else cache[0, :0]
        for request in places
    ]
    return Inputs(query.to(case.torch_dtype), cache, table.to(torch.int32), keys)


def _query(case: DecodeCase, query: torch.Tensor, put: Callable[..., torch.Tensor], offset: int) -> tuple:
    """The query, or its pieces, where the case has them."""
    layouts = QUERIES[case.query]
    pieces = (query,) if len(layouts) == 1 else query.split((LATENT_DIM, ROPE_DIM), -1)
    found = []
    packed = 4 - query.ndim
    for name, piece, (order, gap) in zip(("query", "q_pe"), pieces, layouts, strict=False):
        strides, next_stride = [0] * (query.ndim - 1) + [1], piece.shape[-1] + gap
        for dim in reversed([dim - packed for dim in order if dim >= packed]):
            strides[dim] = next_stride
            next_stride *= piece.shape[dim]
        found.append(put(name, piece, tuple(strides), offset))
    return tuple(found)


def arranged(case: DecodeCase, inputs: Inputs) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    offset = 16 * case.offset
    memory: dict[str, Guarded] = {}

    def put(
        name: str, content: torch.Tensor, strides: tuple[int, ...] | None = None, offset: int = 4 * case.offset
    ) -> torch.Tensor:
        memory[name] = Guarded(tuple(content.shape), content.dtype, strides, content, offset)
        return memory[name].tensor

    def lengths(name: str, values: tuple[int, ...], wide: bool) -> torch.Tensor:
        content = torch.tensor(values, dtype=torch.int64 if wide else torch.int32)
        return put(name, content, offset=8 * case.offset)

    def space(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory[name] = Guarded(shape, dtype, None, None, offset)
        return memory[name].tensor

    cache = inputs.cache if case.cache_dims == 3 else inputs.cache[:, None]
    strides = contiguous(tuple(cache.shape))
    cache_strides = ((case.page + case.page_gap) * WIDTH, *strides[1:])
    table_strides = (case.width + case.table_gap, 1)
    *outer, heads, _ = inputs.query.shape
    batch, q_len, packed = case.batch, case.q_len, case.ends_q is not None
    size = tsmla.decode_workspace_size(batch, q_len, heads, case.max_seq_len, varies=packed) + case.spare
    visible = None
    if case.visible is not None and packed:
        content = torch.tensor(case.visible[0], dtype=torch.int32)
        visible = put("local_visible_lens", content, (1 + case.visible_gap,))
    elif case.visible is not None:
        content = torch.tensor(case.visible, dtype=torch.int32).reshape(batch, q_len)
        visible = put("local_visible_lens", content, (q_len + case.visible_gap, 1))
    total = case.causal_seqs
    sinks = None if case.sinks is None else put("sinks", torch.tensor(case.sinks))
    return memory, {
        "query": tensors if len(tensors := _query(case, inputs.query, put, offset)) > 1 else tensors[0],
        "kv_cache": put("kv_cache", cache, cache_strides, offset),
        "workspace_buffer": space("workspace", (size,), getattr(torch, case.workspace)),
        "kv_lora_rank": LATENT_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "block_tables": put("block_tables", inputs.table, table_strides),
        "seq_lens": lengths("seq_lens", case.seq_lens, case.wide_lengths),
        "max_seq_len": case.max_seq_len,
        "softmax_scale": case.softmax_scale,
        "output_scale": case.output_scale,
        "out": None if case.out == "new" else space("out", (*outer, heads, LATENT_DIM), case.written),
        "causal_mask": case.sight.causal,
        "window_left": case.sight.window_left,
        "enable_pdl": case.pdl,
        "return_lse": case.lse,
        "causal_seqs": None if total is None else lengths("causal_seqs", total, case.wide_causal),
        "cp_world": case.sight.cp_world,
        "cp_rank": case.sight.cp_rank,
        "cp_interleave_size": case.sight.cp_interleave,
        "min_split_kv": case.min_split_kv,
        "local_visible_lens": visible,
        "lse_base": case.lse_base,
        "sinks": sinks,
        "lse_includes_sink": case.lse_includes_sink,
        "batch_invariant": case.batch_invariant,
        "cum_seq_lens_q": lengths("cum_seq_lens_q", case.ends_q, case.wide_q) if packed else None,
        "max_q_len": q_len if packed else None,
    }
