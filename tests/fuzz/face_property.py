"""Faces give what the operators give, bit for bit, into results that lie anywhere, and write nothing else."""

from __future__ import annotations

import math
from typing import Any

import torch
import tsmla
from tsmla.compat import flash_mla, flashinfer, tokenspeed_mla
from tsmla.identity.support import LATENT_DIM

from . import decode_property, prefill_property
from .decode_case import DecodeCase
from .face_case import OPERATOR, FaceCase
from .guarded import Guarded
from .places import Place

Result = tuple[torch.Tensor, torch.Tensor | None]


def check(case: FaceCase, place: Place) -> None:
    """Make the call by the operator and by the face, and compare. Raises AssertionError, and what both raise."""
    call = case.call
    module: Any = decode_property if isinstance(call, DecodeCase) else prefill_property
    inputs = module.drawn(call, place.arch) if isinstance(call, DecodeCase) else module.drawn(call)
    operator: Any = tsmla.tsmla_decode if isinstance(call, DecodeCase) else tsmla.tsmla_prefill
    with place.running(call.schedule, call.processors):
        _, given = module.arranged(call, inputs)
        want = _both(operator(**{**given, **_planned(case)}), call.lse)
        memory, given = call.manner.arrange(lambda: module.arranged(call, inputs))
        face = _decode if isinstance(call, DecodeCase) else _prefill
        got = _both(face(case, place, memory, given), call.lse)
        torch.cuda.synchronize()
        if case.face == "flash_mla":
            got = got[0], _with_negative_infinity(got[1])
        for name, guarded in memory.items():
            may_change = _results(case, name, guarded)
            wrong = guarded.changed(may_change)
            assert not wrong, f"{name}: {wrong}"
        tokens = call.computed if isinstance(call, DecodeCase) else _owned(call)
        shape = want[0].shape[:-1]
        for name, ours, theirs in zip(("out", "lse"), want, got, strict=True):
            if ours is None or theirs is None:
                assert ours is theirs, name
                continue
            flat = math.prod(shape[:-1]), shape[-1], *ours.shape[len(shape) :]
            ours, theirs = (x.cpu().reshape(flat)[tokens] for x in (ours, theirs))
            integers = torch.int16 if name == "out" else torch.int32
            wrong = int((ours.view(integers) != theirs.view(integers)).sum())
            assert not wrong, f"{name}: {wrong} of {ours.numel()} elements are not those of the operator"


def _planned(case: FaceCase) -> dict[str, Any]:
    """What a face makes of a decode's arguments that decide how it is cut, and so what its bits are; room for it."""
    call = case.call
    if not isinstance(call, DecodeCase) or case.face not in ("flash_mla", "wrapper"):
        return {}
    longest, changes = max(1, call.width * call.page), {}
    if case.face == "flash_mla":  # it has as much room as is needed; with more, more requests may be split
        size = tsmla.decode_workspace_size(call.batch, call.q_len, call.heads, longest)
        changes["workspace_buffer"] = torch.empty(size, dtype=torch.uint8, device="cuda")
    else:
        changes["workspace_buffer"] = _room(call)
        longest = longest if case.again else max([1, *call.lengths])
        if call.ends_q is not None:
            q_lens = [len(call.query_tokens(request)) for request in range(call.batch)]
            varies = len({*q_lens}) > 1  # else the wrapper sees requests of one query length
            changes["max_q_len"] = call.tokens if case.again and varies else max([1, *q_lens])
    return {"max_seq_len": longest, **changes}


def _room(call: DecodeCase) -> torch.Tensor:
    """A workspace for any plan."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    size = processors * call.heads * max(8, call.q_len, call.tokens) * (LATENT_DIM + 1) * 4
    return torch.empty(size + 16, dtype=torch.uint8, device="cuda")


def _both(result: Any, lse: bool) -> Result:
    return result if lse else (result, None)


def _owned(call: Any) -> list[int]:
    return [row for queries, _ in call.spans() for row in range(queries.first, queries.end)]


def _results(case: FaceCase, name: str, guarded: Guarded) -> torch.Tensor | None:
    """The elements of a call's memory that may change."""
    call, shape = case.call, guarded.tensor.shape
    if name == "workspace":
        return torch.ones(shape, dtype=torch.bool)
    if name not in ("out", "lse"):
        return None
    packed = not isinstance(call, DecodeCase) or call.ends_q is not None
    outer = shape[: 1 if packed else 2]
    rows = torch.zeros(math.prod(outer), dtype=torch.bool)
    rows[call.computed if isinstance(call, DecodeCase) else _owned(call)] = True
    return rows.view(*outer, *[1] * (len(shape) - len(outer))).expand(shape)


def _prefill(case: FaceCase, place: Place, memory: dict[str, Guarded], given: dict[str, Any]) -> Any:
    if case.face == OPERATOR:
        return case.call.manner.call(place, tsmla.tsmla_prefill, memory, given)
    if case.face == "tokenspeed_mla":
        names = ("out_dtype", "lse_base", "sinks", "lse_includes_sink", "k_scale", "v_scale", "output_scale", "lse")
        taken = {name: value for name, value in given.items() if name not in names}
        return case.call.manner.call(place, tokenspeed_mla.tokenspeed_mla_prefill, memory, taken)
    taken = {name: given[name] for name in ("query", "key", "value", "batch_size", "is_causal", "return_lse")}
    taken |= {
        "workspace_buffer": None,
        "seq_lens": None,
        "max_q_len": 1,
        "max_kv_len": 1,
        "o_sf_scale": None,
        "window_left": -1,
        "bmm1_scale": given["softmax_scale"],
        "bmm2_scale": given["v_scale"],
        "cum_seq_lens_q": given["cum_seq_lens_q"],
        "cum_seq_lens_kv": given["cum_seq_lens"],
        "enable_pdl": given["enable_pdl"],
        "out": given.get("out"),
        "lse": given.get("lse"),
    }
    return case.call.manner.call(place, flashinfer.trtllm_ragged_attention_deepseek, memory, taken)


def _decode(case: FaceCase, place: Place, memory: dict[str, Guarded], given: dict[str, Any]) -> Any:
    call = case.call
    assert isinstance(call, DecodeCase)
    if case.face == OPERATOR:
        return call.manner.call(place, tsmla.tsmla_decode, memory, given)
    if case.face == "tokenspeed_mla":
        names = ("lse", "lse_base", "sinks", "lse_includes_sink", "batch_invariant", "cum_seq_lens_q", "max_q_len")
        taken = {name: value for name, value in given.items() if name not in names}
        return call.manner.call(place, tokenspeed_mla.tokenspeed_mla_decode, memory, taken)
    if case.face == "flash_mla":
        return call.manner.call(place, _by_flash_mla, memory, given)
    if case.face == "wrapper":
        return _by_wrapper(case, place, memory, given)
    shared = ("query", "kv_cache", "workspace_buffer", "kv_lora_rank", "qk_rope_head_dim", "block_tables", "seq_lens")
    shared = (*shared, "max_seq_len", "out", "enable_pdl", "return_lse", "cum_seq_lens_q", "max_q_len")
    taken = {name: given[name] for name in shared}
    lse = given["lse"]
    if lse is not None and lse.ndim == 3 and not case.nested and lse.stride(0) == lse.shape[1] * lse.stride(1):
        lse = lse.flatten(0, 1)
    taken |= {
        "qk_nope_head_dim": 128,
        "bmm1_scale": call.softmax_scale,
        "bmm2_scale": call.output_scale,
        "lse": lse,
        "return_lse_base": "basee" if call.lse_base == math.e else "base2",
    }
    if call.sight.cp_world > 1:
        taken |= {name: given[name] for name in ("cp_world", "cp_rank")}
        taken |= {"enable_dcp": True, "causal_seqlens_kv_global": given["causal_seqs"]}
    return call.manner.call(place, flashinfer.trtllm_batch_decode_with_kv_cache_mla, memory, taken)


def _by_flash_mla(**given: Any) -> Any:
    cache = given["kv_cache"].unsqueeze(2)
    return flash_mla.flash_mla_with_kvcache(
        given["query"],
        cache,
        given["block_tables"],
        given["seq_lens"],
        LATENT_DIM,
        None,
        softmax_scale=given["softmax_scale"],
        causal=given["causal_mask"],
    )


def _with_negative_infinity(lse: Any) -> torch.Tensor:
    assert lse.is_contiguous() and not (lse == -math.inf).any(), "an empty row has +inf"
    return lse.where(lse != math.inf, -math.inf).transpose(1, 2)


def _by_wrapper(case: FaceCase, place: Place, memory: dict[str, Guarded], given: dict[str, Any]) -> Any:
    """Plan, perhaps for the second time, and run."""
    call = case.call
    assert isinstance(call, DecodeCase)
    query, lse, out = given["query"], given["lse"], given["out"]
    tokens, heads = math.prod(query.shape[:-2]), query.shape[-2]
    if lse is not None and lse.ndim == 3:
        lse = lse.flatten(0, 1) if lse.stride(0) == lse.shape[1] * lse.stride(1) else None
        if lse is None:
            memory.pop("lse")
    ends = given["cum_seq_lens_q"]
    if ends is None:
        ends = torch.arange(call.batch + 1, dtype=torch.int32, device="cpu") * call.q_len
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(_room(call), use_cuda_graph=case.again)

    def plan(seq_lens: torch.Tensor) -> None:
        wrapper.plan(
            cum_seq_lens_q=ends,
            block_tables=given["block_tables"],
            seq_lens=seq_lens,
            num_heads=heads,
            head_dim_ckv=LATENT_DIM,
            head_dim_kpe=call.rope,
            page_size=call.page,
            causal=call.sight.causal,
            sm_scale=call.softmax_scale,
            q_data_type=call.torch_dtype,
            kv_data_type=call.torch_dtype,
            enable_pdl=call.pdl,
        )

    if case.again:
        with torch.inference_mode():
            plan(given["seq_lens"].clone().zero_())
    with call.manner.modes():
        plan(given["seq_lens"])
    flat_out = None if out is None else out.view(tokens, heads, LATENT_DIM)
    taken = {
        "query": query.reshape(tokens, heads, call.columns),
        "kv_cache": given["kv_cache"],
        "out": flat_out,
        "lse": lse,
        "return_lse": call.lse,
        "return_lse_base_on_e": call.lse and call.lse_base == math.e,
    }
    with call.manner.modes():
        return wrapper.run(**taken)
