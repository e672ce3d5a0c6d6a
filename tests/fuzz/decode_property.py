"""tsmla_decode is right, whatever the case: results, bytes that nobody may change, and bytes that nobody may read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla.identity.support import LATENT_DIM
from tsmla.problems.sums import weight_dtype

from .chosen_case import ChosenCase
from .decode_case import LSES, QUERIES, DecodeCase
from .decode_inputs import Inputs, drawn, rounds_keys, scored_as
from .guarded import Guarded, Memory, contiguous
from .places import Place
from .reference_attention import Cores, Rows, attend, judge, judge_extreme, precision, tells_apart, with_sinks


def check(case: DecodeCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    inputs, packed = drawn(case, place.arch), case.ends_q is not None
    with place.running(case.schedule, case.processors):
        memory, given = case.manner.arrange(lambda: arranged(case, inputs))
        result = case.manner.call(place, tsmla.tsmla_decode, memory, given)
        out, lse = (tensor.cpu() for tensor in result) if case.lse else (result.cpu(), None)
        for name, guarded in memory.items():
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if name == "workspace" else None
            if name in ("out", "lse"):
                outer = guarded.tensor.shape[: 1 if packed else 2]
                may_change = torch.zeros(math.prod(outer), dtype=torch.bool)
                may_change[case.computed] = True
                may_change = may_change.view(*outer, *[1] * (guarded.tensor.ndim - len(outer)))
                may_change = may_change.expand(guarded.tensor.shape)
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    numbers = inputs.query.numbers
    assert out.dtype == case.written and out.shape == (*numbers.shape[:-1], LATENT_DIM)
    in_16_bits = place.arch == "sm_90a" and (case.torch_dtype == torch.bfloat16 or case.rows_apart)
    given_precision = precision(weight_dtype(Arch(place.arch), case.torch_dtype), out.dtype, in_16_bits)
    arch, scored = place.with_sums(case.schedule), scored_as(case, rounds_keys(case, place.arch))
    parts, right, flat_out = [], [], out.flatten(0, -2)
    for request in range(case.batch):
        own, keys = case.query_tokens(request), inputs.keys[request]
        seen = (case.seen(request) & keys.counted).repeat_interleave(case.heads, 0)
        if not own:
            continue
        at = torch.arange(own.start * case.heads, own.stop * case.heads)
        spoilt = (seen & keys.spoiling).any(-1)  # NaN beside any sink, +inf too; of such rows' LSEs nothing is said
        assert flat_out[at[spoilt]].isnan().all(), f"request {request}: rows are not NaN, but a scale is"
        at, seen = at[~spoilt], seen[~spoilt]
        right.append(at)
        scales = None if inputs.query.scales is None else inputs.query.scales.flatten()[at]
        cores, query, rows = None if arch is None else Cores(arch, scored, scales), numbers.flatten(0, -2), keys.numbers
        parts.append(attend(query[at], rows, rows[:, :LATENT_DIM], seen, case.softmax_scale, cores, keys.scales))
    if not parts:
        return
    at = torch.cat(right)
    if lse is not None:
        assert lse.shape == out.shape[:-1]
        lse = lse.flatten()[at].double() * (math.log(2) if case.lse_base == 2 else 1)
    sinks = None if case.sinks is None else torch.tensor(case.sinks)[at % case.heads]
    expected = with_sinks(Rows.joined(parts), sinks, case.lse_includes_sink)
    judged = judge if tells_apart(expected) and not case.extreme else judge_extreme
    judged(expected, flat_out[at], lse, case.output_scale, given_precision)


def arranged(case: DecodeCase, inputs: Inputs) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    memory = Memory(case.offset)
    put, space = memory.put, memory.space

    def lengths(name: str, values: tuple[int, ...], wide: bool) -> torch.Tensor:
        content = torch.tensor(values, dtype=torch.int64 if wide else torch.int32)
        return put(name, content, offset=content.element_size() * case.offset)

    table_strides = (case.width + case.table_gap, 1)
    *outer, heads, _ = inputs.query.numbers.shape
    batch, q_len, packed = case.batch, case.q_len, case.ends_q is not None
    size = tsmla.decode_workspace_size(batch, q_len, heads, case.max_seq_len, varies=packed) + case.spare
    visible = None
    if case.visible is not None and packed:
        content = torch.tensor(case.visible[0], dtype=torch.int32)
        visible = put("local_visible_lens", content, (1 + case.visible_gap,))
    elif case.visible is not None:
        content = torch.tensor(case.visible, dtype=torch.int32).reshape(batch, q_len)
        visible = put("local_visible_lens", content, (q_len + case.visible_gap, 1))
    total, lse = case.causal_seqs, None
    if case.lse_layout:
        order, gap = LSES[case.lse_layout]
        shape = (*outer, heads)
        dims = [dim - packed for dim in order if dim >= packed]
        lse = space("lse", shape, torch.float32, ordered(torch.Size(shape), dims, 1 + gap), 4 * case.offset)
    sinks = None if case.sinks is None else put("sinks", torch.tensor(case.sinks))
    return memory, {
        "query": tensors if len(tensors := put_query(case, inputs.query.given, put)) > 1 else tensors[0],
        "kv_cache": tensors if len(tensors := put_cache(case, inputs.cache, put)) > 1 else tensors[0],
        "workspace_buffer": space("workspace", (size,), getattr(torch, case.workspace)),
        "kv_lora_rank": LATENT_DIM,
        "qk_rope_head_dim": case.rope,
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
        "lse": lse,
        "lse_base": case.lse_base,
        "sinks": sinks,
        "lse_includes_sink": case.lse_includes_sink,
        "batch_invariant": case.batch_invariant,
        "cum_seq_lens_q": lengths("cum_seq_lens_q", case.ends_q, case.wide_q) if packed else None,
        "max_q_len": q_len if packed else None,
    }


def put_query(
    case: DecodeCase | ChosenCase, given: tuple[torch.Tensor, ...], put: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The query, or its pieces, where the case has them."""
    layouts = QUERIES[case.query]
    pieces, scales = given[:2], given[2:]
    found = []
    packed = 4 - pieces[0].ndim
    for name, piece, (order, gap) in zip(("query", "q_pe"), pieces, layouts * 2, strict=False):
        strides = ordered(piece.shape[:-1], [dim - packed for dim in order if dim >= packed], piece.shape[-1] + gap)
        found.append(put(name, piece, (*strides, 1), 16 * case.offset))
    for scale in scales:
        layout, dims = case.scaling.query_scales, list(range(scale.ndim))
        dims = [dims[-1], *dims[:-1]] if layout == "heads first" else dims
        strides = ordered(scale.shape, dims, 3 if layout == "gaps" else 1)
        if layout == "one for all heads":
            found.append(put("query_scales", scale[..., :1]))
        else:
            found.append(put("query_scales", scale, strides))
    return tuple(found)


def ordered(shape: torch.Size, order: list[int], innermost: int) -> tuple[int, ...]:
    """Strides of a tensor whose dimensions lie in this order, the last of them so many elements from one to the
    next."""
    strides = [0] * len(shape)
    for dim in reversed(order):
        strides[dim] = innermost
        innermost *= shape[dim]
    return tuple(strides)


def put_cache(
    case: DecodeCase | ChosenCase, cache: dict[str, torch.Tensor], put: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The cache's tensor, or its two or three."""
    first = cache["cache"]
    if len(cache) > 1:
        return _cache_apart(case, cache, put)
    if case.apart:
        return in_two_tensors(case, first.split((LATENT_DIM, case.rope), -1), put)
    if case.rows is not None and not case.scaling.as_bytes:
        first = first.view(torch.float8_e4m3fn)
    first = first if case.cache_dims == 3 else first[:, None]
    strides = contiguous(tuple(first.shape))
    width = first.shape[-1]
    return (put("kv_cache", first, ((case.page + case.page_gap) * width, *strides[1:]), 16 * case.offset),)


def _cache_apart(
    case: DecodeCase | ChosenCase, cache: dict[str, torch.Tensor], put: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Three tensors, of which the first two may share rows."""
    latent, rope, scales = cache["cache"], cache["rope_cache"], cache["scale_cache"]
    gaps = case.scaling.places == "gaps"
    scale_strides = ((1 + 2 * gaps) * case.page + case.page_gap, 1 + 2 * gaps)
    if case.scaling.places == "side by side":
        both = torch.cat([latent.view(torch.uint8), rope.view(torch.uint8)], -1)
        rows = put("kv_cache", both, ((case.page + case.page_gap) * 640, 640, 1), 16 * case.offset)
        first, second = rows[..., :512], rows[..., 512:].view(torch.bfloat16)
        first = first if case.scaling.as_bytes else first.view(latent.dtype)
    else:
        latent = latent.view(torch.uint8) if case.scaling.as_bytes else latent
        first, second = in_two_tensors(case, (latent, rope), put, gaps)
    return first, second, put("scale_cache", scales, scale_strides)


def in_two_tensors(
    case: Any, pieces: tuple[torch.Tensor, ...], put: Callable[..., torch.Tensor], gaps: int = 1
) -> tuple[torch.Tensor, ...]:
    """The latent and the rope pieces of rows, with so many vectors of 16 bytes between rows."""
    found = []
    for name, piece in zip(("kv_cache", "rope_cache"), pieces, strict=True):
        vector = 16 // piece.itemsize
        row = piece.shape[-1] + vector * gaps
        found.append(put(name, piece, (case.page * row + vector * case.page_gap, row, 1), 16 * case.offset))
    return tuple(found)
