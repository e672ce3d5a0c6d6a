"""tsmla_decode and tsmla_sparse_prefill of chosen keys are right, whatever the lists: results, bytes that nobody may
change, and bytes that nobody may read."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import tsmla
from decode_rows import rounds
from tsmla.identity.arch import Arch
from tsmla.identity.support import LATENT_DIM
from tsmla.problems.lists import named_slots, random_lists, union_of
from tsmla.problems.sums import weight_dtype

from .chosen_case import LSES, ChosenCase
from .decode_case import SCORED
from .decode_inputs import LARGE, Keys, Queries, cache_of, numbers_of, of_one_sign, query_of, scored_as
from .decode_property import ordered, put_cache, put_query
from .guarded import Guarded, Memory, contiguous
from .places import Place
from .reference_attention import Cores, Rows, attend, judge, judge_extreme, precision, tells_apart, with_sinks


class Inputs(NamedTuple):
    """On the CPU: query, tensors of the cache by name, lists [tokens, top_k], and the keys that each token's list
    names, in order and as often as they stand there."""

    query: Queries
    cache: dict[str, torch.Tensor]
    lists: torch.Tensor
    keys: list[Keys]


def drawn(case: ChosenCase, arch: str) -> Inputs:
    """Random lists and keys, with `unseen` in every row of the cache that no list names. The keys' numbers are those
    that kernels of `arch` read."""
    generator = torch.Generator().manual_seed(case.seed)

    lists = random_lists(
        case.tokens, case.top_k, (case.pages, case.page),
        outside=case.outside / 16, front=case.front, distinct=case.distinct, generator=generator,
    )  # fmt: skip
    for token, column, value in case.strays:
        lists[token, column] = value
    named = named_slots(lists, case.slots, [case.counted(token) for token in range(case.tokens)])
    cache = torch.randn(case.slots, case.columns, generator=generator) * case.magnitude
    query = torch.randn(*case.shape, case.heads, case.columns, generator=generator) * case.magnitude
    used = union_of(named)
    if case.values == "growing":
        cache[used, -SCORED:] *= torch.linspace(0.02, 3, len(used))[:, None]
    if case.values == "one heavy key" and len(used):
        cache[used[case.seed % len(used)], -SCORED:] *= 12
    if case.values == "one sign":
        cache = of_one_sign(cache / case.magnitude)
        cache[union_of([own[:1] for own in named])] *= LARGE
    if case.values in ("uniform", "one sign"):
        query.zero_()
    unused = torch.ones(case.slots, dtype=torch.bool)
    unused[used] = False
    cache[unused] = math.nan if case.dtype == "e4m3" else case.unseen
    places = [[divmod(slot, case.page) for slot in own.tolist()] for own in named]
    stored = cache_of(case, cache.view(case.pages, case.page, case.columns), places, generator)
    numbers = numbers_of(case, stored, _rounds_keys(case, arch)).flatten(0, 1)
    scales = stored["scale_cache"].flatten().double() if case.rows_apart else None
    keys = [
        Keys(numbers[own], None if scales is None else scales[own], torch.ones(len(own), dtype=torch.bool))
        for own in named
    ]
    return Inputs(query_of(case, query), stored, lists.to(torch.int32), keys)


def _rounds_keys(case: ChosenCase, arch: str) -> bool:
    """Whether 656-byte rows are rounded to bf16 before they are multiplied."""
    return case.batch_invariant or rounds(arch, case.heads)


def check(case: ChosenCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    inputs = drawn(case, place.arch)
    with place.running(case.schedule, case.processors):
        memory, given = case.manner.arrange(lambda: arranged(case, inputs))
        operator = tsmla.tsmla_sparse_prefill if case.prefill else tsmla.tsmla_decode
        result = case.manner.call(place, operator, memory, as_prefill(given) if case.prefill else given)
        out, lse = (tensor.cpu() for tensor in result) if case.lse else (result.cpu(), None)
        for name, guarded in memory.items():
            written = name in ("workspace", "out", "lse")
            may_change = torch.ones(guarded.tensor.shape, dtype=torch.bool) if written else None
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
    assert out.dtype == case.written and out.shape == (*case.shape, case.heads, LATENT_DIM)
    if not case.tokens:
        return
    in_16_bits = place.arch == "sm_90a" and (case.torch_dtype == torch.bfloat16 or case.rows_apart)
    given_precision = precision(weight_dtype(Arch(place.arch), case.torch_dtype), out.dtype, in_16_bits)
    arch, scored = place.with_sums(case.schedule), scored_as(case, _rounds_keys(case, place.arch))
    parts, tokens, flat_out = [], [], out.flatten(0, -3)
    for token, (query, keys) in enumerate(zip(inputs.query.numbers.flatten(0, -3), inputs.keys, strict=True)):
        if keys.scales is not None and (keys.counted & keys.spoiling).any():
            assert flat_out[token].isnan().all(), f"token {token}: not NaN, but a scale is"
            continue
        tokens.append(token)
        seen, rows = keys.counted.expand(case.heads, -1), keys.numbers
        scales = None if inputs.query.scales is None else inputs.query.scales.flatten(0, -2)[token]
        cores = None if arch is None else Cores(arch, scored, scales)
        parts.append(attend(query, rows, rows[:, :LATENT_DIM], seen, case.softmax_scale, cores, keys.scales))
    if not parts:
        return
    if lse is not None:
        assert lse.shape == out.shape[:-1]
        lse = lse.flatten(0, -2)[tokens].flatten().double() * (math.log(2) if case.lse_base == 2 else 1)
    sinks = None if case.sinks is None else torch.tensor(case.sinks).repeat(len(tokens))
    expected = with_sinks(Rows.joined(parts), sinks, case.lse_includes_sink)
    judged = judge if tells_apart(expected) else judge_extreme
    judged(expected, flat_out[tokens].flatten(0, 1), lse, case.output_scale, given_precision)


_OF_DECODE = ("kv_cache", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len")


def as_prefill(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of tsmla_sparse_prefill that mean what those of tsmla_decode do. Pages of one key become rows."""

    def rows(cache: torch.Tensor) -> torch.Tensor:
        return cache[:, 0] if cache.ndim == 3 and cache.shape[1] == 1 else cache

    cache = given["kv_cache"]
    kv = tuple(map(rows, cache)) if type(cache) is tuple else rows(cache)
    return {"kv": kv} | {name: value for name, value in given.items() if name not in _OF_DECODE}


def arranged(case: ChosenCase, inputs: Inputs) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    memory = Memory(case.offset)
    put, space = memory.put, memory.space
    query, cache = put_query(case, inputs.query.given, put), put_cache(case, inputs.cache, put)
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
        "query": query if len(query) > 1 else query[0],
        "kv_cache": cache if len(cache) > 1 else cache[0],
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
