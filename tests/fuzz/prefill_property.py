"""tsmla_prefill is right, whatever the case: results, bytes that nobody may change, and bytes that nobody may read."""

from __future__ import annotations

import math
from typing import Any

import torch
import tsmla
from tsmla.identity.arch import Arch
from tsmla.identity.support import ROPE_DIM
from tsmla.identity.variant import Dtype
from tsmla.operators.checks import TORCH_DTYPE_OF
from tsmla.problems.prefill import mask_words
from tsmla.problems.sums import weight_dtype

from . import prefill_merge
from .decode_inputs import LARGE, of_one_sign
from .guarded import Guarded, Memory, strides
from .places import Place
from .prefill_case import PrefillCase
from .reference_attention import Cores, Rows, judge, judge_extreme, precision, tells_apart, with_sinks
from .reference_prefill import sequences


def check(case: PrefillCase, place: Place) -> None:
    """Run the call and judge it. Raises AssertionError, and what the operator and the emulator raise."""
    inputs = drawn(case)
    with place.running(case.schedule, case.processors):
        memory, given = case.manner.arrange(lambda: arranged(case, inputs))
        result = case.manner.call(place, tsmla.tsmla_prefill, memory, given)
        out, lse = (tensor.cpu() for tensor in result) if case.lse else (result.cpu(), None)
        owned = torch.zeros(case.tokens_q, dtype=torch.bool)
        for queries, _ in case.spans():
            owned[queries.first : queries.end] = True
        _unchanged(memory, owned)
        if not place.device:  # what torch allocates on a GPU may hold anything
            made = (("out", out, case.out == "new"), ("lse", lse, case.heads_first is None))
            for name, new, mine in made:
                written = new is not None and mine and not new[~owned].isnan().all()
                assert not written, f"{name} was written in rows of no sequence"
        if case.merges:
            prefill_merge.check(case, inputs, given, owned)
    given_precision = precision(weight_dtype(Arch(place.arch), case.torch_dtype), out.dtype)
    assert out.dtype == case.written and out.shape == (case.tokens_q, case.heads, case.d_v)
    scale = case.softmax_scale * case.k_scale
    mask = None if case.mask is None else case.mask_bits()
    arch = place.with_sums(case.schedule)
    cores = None if arch is None else Cores(arch, case.torch_dtype)
    found = sequences(*inputs, case.spans(), case.causal, scale, cores, mask)
    if not found:
        return
    sinks = None
    if case.sinks is not None:
        sinks = torch.cat([torch.full((len(queries),), case.sinks[head]) for queries, head, _ in found])
    expected = with_sinks(Rows.joined([rows for *_, rows in found]), sinks, case.lse_includes_sink)
    at = [(slice(queries.first, queries.end), head) for queries, head, _ in found]
    got = torch.cat([out[place] for place in at])
    unit = 1.0 if case.lse_base == math.e else math.log(case.lse_base)
    got_lse = None if lse is None else torch.cat([lse[place] for place in at]).double() * unit
    judged = judge if tells_apart(expected) and not case.extreme else judge_extreme
    judged(expected, got, got_lse, case.v_scale * case.output_scale, given_precision)


def _unchanged(memory: dict[str, Guarded], owned: torch.Tensor) -> None:
    """Assert that results alone were written, and of these the rows of sequences."""
    for name, guarded in memory.items():
        shape = guarded.tensor.shape
        may_change = owned.view(-1, *[1] * (len(shape) - 1)).expand(shape) if name in ("out", "lse") else None
        wrong = guarded.changed(may_change)
        assert not wrong, f"{name}: {wrong}"


def drawn(case: PrefillCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, key and value on the CPU, with `unseen` in rows of no sequence and in keys that no query sees."""
    generator = torch.Generator().manual_seed(case.seed)
    q_owned, kv_seen = torch.zeros(case.tokens_q, dtype=torch.bool), torch.zeros(case.tokens_kv, dtype=torch.bool)
    one_head = "expanded" in case.layouts
    shapes = (case.tokens_q, case.heads), (case.tokens_kv, 1 if one_head else case.heads_kv)
    q, k = (torch.randn(*shape, case.d_qk, generator=generator) * case.magnitude for shape in shapes)
    v, firsts = torch.randn(*shapes[1], case.d_v, generator=generator), set()
    for queries, keys in case.spans():
        q_owned[queries.first : queries.end] = True
        if len(queries):
            kv_seen[keys.first : keys.end] = True
        if len(keys) and case.values == "one heavy key":
            k[keys.first + case.seed % len(keys)] *= 4
        if len(keys):
            firsts.add(keys.first)
        if case.values == "growing":
            k[keys.first : keys.end] *= torch.linspace(0.02, 1.5, len(keys))[:, None, None]
    if case.values in ("uniform", "one sign"):
        q.zero_()
    if case.values == "one sign":  # once for each key: sequences may have the same
        v = of_one_sign(v)
        v[sorted(firsts)] *= LARGE
        assert case.torch_dtype.itemsize > 1 or bool((v <= torch.finfo(case.torch_dtype).max).all())
    if case.values == "opposed":
        q, k = -q.abs(), k.abs()
    if case.rope_layouts[1]:
        k[..., case.d_nope :] = k[:, :1, case.d_nope :].clone()
    dtype = case.torch_dtype
    filler = torch.tensor(case.unseen if dtype != torch.float8_e4m3fn else math.nan)
    packs = (q_owned, q), (kv_seen, k), (kv_seen, v)
    q, k, v = (torch.where(there[:, None, None], pack, filler).to(dtype) for there, pack in packs)
    return q, *(x.expand(-1, case.heads_kv, -1) for x in (k, v))


def arranged(case: PrefillCase, inputs: tuple[torch.Tensor, ...]) -> tuple[dict[str, Guarded], dict[str, Any]]:
    """The call's memory and its arguments."""
    query, key, value = inputs
    offset, dtype = 16 * case.offset, case.torch_dtype
    memory = Memory(case.offset)

    def put(name: str, content: torch.Tensor, layout: str) -> torch.Tensor:
        layout = "contiguous" if layout == "flat" else layout
        return memory.put(name, content, strides(layout, content.shape, dtype.itemsize), offset)

    def ends(name: str, values: tuple[int, ...]) -> torch.Tensor:
        return memory.put(name, torch.tensor(values, dtype=torch.int32))

    ropes: dict[str, torch.Tensor] = {}
    query_layout, key_layout = case.rope_layouts
    if query_layout:
        query, rope = query[..., : case.d_nope], query[..., case.d_nope :]
        ropes["query"] = put("query rope", rope, query_layout)
    if key_layout:
        key, rope = key[..., : case.d_nope], key[:, :1, case.d_nope :]
        ropes["key"] = put("key rope", rope, key_layout)
        assert rope.shape[2] == ROPE_DIM
        if key_layout == "flat":
            ropes["key"] = ropes["key"][:, 0]
    given: dict[str, Any] = {"query": put("query", query, case.layouts[0])}
    if case.layouts[1] == "slices":
        both = put("key and value", torch.cat([key, value], -1), "contiguous")
        given |= {"key": both[..., : key.shape[2]], "value": both[..., key.shape[2] :]}
    elif case.layouts[1] == "expanded":
        for name, content in (("key", key), ("value", value)):
            given[name] = put(name, content[:, :1], "contiguous").expand(-1, case.heads_kv, -1)
    else:
        given |= {"key": put("key", key, case.layouts[1]), "value": put("value", value, case.layouts[2])}
    given |= {name: (given[name], rope) for name, rope in ropes.items()}
    if case.heads_first is not None:
        rows = (case.tokens_q, case.heads)
        layout = (1, case.tokens_q) if case.heads_first else (case.heads, 1)
        given["lse"] = memory.space("lse", rows, torch.float32, layout, 4 * case.offset)
    if case.out != "new":
        shape = (case.tokens_q, case.heads, case.d_v)
        layout = strides(case.out, shape, case.written.itemsize)
        given["out"] = memory.space("out", shape, case.written, layout)
    longest = max(1, case.tokens_kv)
    if case.mask is not None:
        bits = case.mask_bits()
        content = mask_words(bits)
        layout = (content.shape[1] + case.mask_gap, 1)
        given["key_mask"] = memory.put("key_mask", content, layout)
        longest = min(longest, bits.shape[1])
    return memory, {
        **given,
        "seq_lens": None,
        "cum_seq_lens": ends("cum_seq_lens", case.ends_kv),
        "max_seq_len": longest,
        "batch_size": case.batch,
        "softmax_scale": case.softmax_scale,
        "is_causal": case.causal,
        "return_lse": case.lse,
        "cum_seq_lens_q": None if case.ends_q is None else ends("cum_seq_lens_q", case.ends_q),
        "max_seq_len_q": max(1, case.tokens_q),
        "enable_pdl": case.pdl,
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        "output_scale": case.output_scale,
        "sinks": None if case.sinks is None else memory.put("sinks", torch.tensor(case.sinks)),
        "lse_includes_sink": case.lse_includes_sink,
        "lse_base": case.lse_base,
        "out_dtype": None if case.out_dtype is None else TORCH_DTYPE_OF[Dtype(case.out_dtype)],
    }
