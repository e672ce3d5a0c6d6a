"""What operators and faces do with callers' tensors besides launching kernels: they write to none of them once a kernel
is launched, and launch the same in every mode of torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from launches import ROOM, distinct
from refusing import Recorder
from torch.utils._python_dispatch import TorchDispatchMode
from tsmla import (
    mla_kv_pack_quantize_fp8,
    mla_quantize_q,
    mla_read_cache,
    mla_write_cache,
    tsmla_decode,
    tsmla_key_mask,
    tsmla_prefill,
    tsmla_sparse_prefill,
)
from tsmla.compat import flash_mla, flashinfer, tokenspeed_mla
from tsmla.loading import resolve

HEADS, PAGES, PAGE, WIDTH, TOKENS = 4, 10, 32, 6, 6
BF16, F32 = torch.bfloat16, torch.float32


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu")


def nan(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device="cpu")


def decode_inputs(packed: bool = False, **changes: Any) -> dict[str, Any]:
    outer = (TOKENS,) if packed else (3, 2)
    given = {
        "query": distinct(*outer, HEADS, 576),
        "kv_cache": distinct(PAGES, PAGE, 576),
        "workspace_buffer": ROOM,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.arange(3 * WIDTH, dtype=torch.int32).view(3, WIDTH) % PAGES,
        "seq_lens": ints(3, 100, 2),
        "max_seq_len": 150,
        **({"cum_seq_lens_q": ints(0, 1, 4, 5), "max_q_len": 3} if packed else {}),
    }
    return {**given, **changes}


def prefill_inputs(**changes: Any) -> dict[str, Any]:
    given = {
        "query": distinct(5, HEADS, 192),
        "key": distinct(7, 2, 192),
        "value": distinct(7, 2, 128),
        "seq_lens": None,
        "cum_seq_lens": ints(0, 3, 7),
        "max_seq_len": 4,
        "batch_size": 2,
        "softmax_scale": 0.1,
        "cum_seq_lens_q": ints(0, 3, 4),
    }
    return {**given, **changes}


Call = Callable[[], Any]


def decode(packed: bool = False, **changes: Any) -> Call:
    shape = (TOKENS,) if packed else (3, 2)
    results = {"out": nan(*shape, HEADS, 512, dtype=BF16), "lse": nan(HEADS, *shape).movedim(0, -1)}
    given = {**decode_inputs(packed), **results, "softmax_scale": 0.1, **changes}
    return lambda: tsmla_decode(**given)


def prefill(**changes: Any) -> Call:
    given = prefill_inputs(**changes)
    return lambda: tsmla_prefill(**given)


def trtllm(packed: bool, *shape: int) -> Call:
    out = nan(*((TOKENS,) if packed else (3, 2)), HEADS, 512, dtype=BF16)
    given = {**decode_inputs(packed), "lse": nan(*shape, HEADS), "out": out, "qk_nope_head_dim": 128}
    return lambda: flashinfer.trtllm_batch_decode_with_kv_cache_mla(**given, return_lse=True, return_lse_base="basee")


def lists(*q_ends: int) -> dict[str, torch.Tensor]:
    """What a plan is made of: page lists, and where query tokens end."""
    return {
        "qo_indptr": ints(*q_ends),
        "kv_indptr": ints(0, 1, 5, 6),
        "kv_indices": ints(*range(6)),
        "kv_len_arr": ints(3, 100, 2),
    }


def plan(wrapper: flashinfer.BatchMLAPagedAttentionWrapper, lists: dict[str, torch.Tensor]) -> None:
    wrapper.plan(
        **lists,
        num_heads=HEADS,
        head_dim_ckv=512,
        head_dim_kpe=64,
        page_size=PAGE,
        causal=True,
        sm_scale=0.1,
        q_data_type=BF16,
        kv_data_type=BF16,
    )


def wrapper(*plans: dict[str, torch.Tensor], before: int, **options: Any) -> Call:
    """A wrapper of which `before` plans have been made, and all others are made together with the run."""
    planned = flashinfer.BatchMLAPagedAttentionWrapper(ROOM, **options)
    given = {
        "query": distinct(TOKENS, HEADS, 576),
        "kv_cache": distinct(PAGES, PAGE, 576),
        "lse": nan(TOKENS, HEADS),
        "out": nan(TOKENS, HEADS, 512, dtype=BF16),
    }
    for each in plans[:before]:
        plan(planned, each)

    def call() -> Any:
        for each in plans[before:]:
            plan(planned, each)
        return planned.run(**given, return_lse=True, return_lse_base_on_e=True)

    return call


def ragged() -> Call:
    given, results = prefill_inputs(), {"out": nan(5, HEADS, 128, dtype=BF16), "lse": nan(5, HEADS)}
    lengths = given["cum_seq_lens_q"], given["cum_seq_lens"]
    return lambda: flashinfer.trtllm_ragged_attention_deepseek(
        given["query"],
        given["key"],
        given["value"],
        None,
        None,
        3,
        4,
        0.1,
        1.0,
        None,
        2,
        -1,
        *lengths,
        None,
        True,
        True,
        **results,
    )


def flash() -> Call:
    given = decode_inputs()
    cache = given["kv_cache"].unsqueeze(2)
    return lambda: flash_mla.flash_mla_with_kvcache(
        given["query"], cache, given["block_tables"], given["seq_lens"], 512, None
    )


def tokenspeed(function: Call, **given: Any) -> Call:
    return lambda: function(**given, return_lse=True)


def write(dtype: torch.dtype, **rotation: Any) -> Call:
    rows, cache = (distinct(TOKENS, 512), distinct(TOKENS, 64)), nan(PAGES, PAGE, 576, dtype=BF16)
    slots = ints(*range(TOKENS), dtype=dtype)
    if rotation:
        rotation |= {"cos_sin_cache": distinct(20, 64, dtype=F32), "rope_interleaved": True}
    return lambda: mla_write_cache(*rows, slots, cache, format="bf16", **rotation)


def read(**places: torch.Tensor) -> Call:
    cache, rows = distinct(PAGES, PAGE, 576), (nan(TOKENS, 512, dtype=BF16), nan(TOKENS, 64, dtype=BF16))
    return lambda: mla_read_cache(cache, *rows, format="bf16", **places)


def pack() -> Call:
    given = distinct(5, HEADS, 128), distinct(5, 64), distinct(5, HEADS, 128)
    results = [nan(5, HEADS, width).to(torch.float8_e4m3fn) for width in (192, 128)]
    return lambda: mla_kv_pack_quantize_fp8(*given, k_out=results[0], v_out=results[1])


def quantize() -> Call:
    query = distinct(3, 2, HEADS, 576)
    return lambda: mla_quantize_q(query)


def sparse(**results: torch.Tensor) -> Call:
    query, rows, indices = distinct(TOKENS, HEADS, 576), distinct(40, 576), ints(*range(18)).view(TOKENS, 3)
    return lambda: tsmla_sparse_prefill(query, rows, indices, 0.1, **results)


def sparse_flash() -> Call:
    query, rows, indices = distinct(TOKENS, HEADS, 576), distinct(40, 1, 576), ints(*range(18)).view(TOKENS, 1, 3)
    return lambda: flash_mla.flash_mla_sparse_fwd(query, rows, indices, 0.1)


def mask() -> Call:
    indices, lengths, out = ints(*range(18)).view(TOKENS, 3), ints(*range(TOKENS)), ints(*range(12)).view(TOKENS, 2)
    return lambda: tsmla_key_mask(indices, 40, topk_length=lengths, out=out)


EVEN, UNEVEN = (0, 2, 4, 6), (0, 1, 4, 6)
CALLS: dict[str, Callable[[], Call]] = {
    "decode": lambda: decode(lse_base=math.e),
    "a pack": lambda: decode(True, lse_base=math.e),
    "64-bit lengths": lambda: decode(True, seq_lens=ints(3, 100, 2, dtype=torch.int64)),
    "a cache without pages": lambda: decode(kv_cache=distinct(0, PAGE, 576)),
    "a table without columns": lambda: decode(block_tables=torch.zeros(3, 0, dtype=torch.int32)),
    "prefill": lambda: prefill(out=nan(5, HEADS, 128, dtype=BF16), lse=nan(HEADS, 5).T),
    "prefill, base 2": lambda: prefill(lse=nan(5, HEADS), lse_base=2),
    "merging": lambda: prefill(merge_into=(nan(5, HEADS, 128, dtype=BF16), nan(5, HEADS))),
    "pack": pack,
    "write": lambda: write(torch.int64),
    "write, 32-bit slots and positions": lambda: write(torch.int32, positions=ints(*range(TOKENS))),
    "read": lambda: read(indices=ints(*range(TOKENS))),
    "read by tables": lambda: read(block_tables=torch.zeros(2, 3, dtype=torch.int32), cum_seq_lens=ints(0, 3, 6)),
    "quantised query": quantize,
    "sparse prefill": lambda: sparse(out=nan(TOKENS, HEADS, 512, dtype=BF16), lse=nan(HEADS, TOKENS).T),
    "key mask": mask,
    "tokenspeed_mla decode": lambda: tokenspeed(
        tokenspeed_mla.tokenspeed_mla_decode, **decode_inputs(out=nan(3, 2, HEADS, 512, dtype=BF16), softmax_scale=0.1)
    ),
    "tokenspeed_mla prefill": lambda: tokenspeed(
        tokenspeed_mla.tokenspeed_mla_prefill, **prefill_inputs(out=nan(5, HEADS, 128, dtype=BF16))
    ),
    "trtllm decode": lambda: trtllm(False, TOKENS),
    "trtllm decode, nested LSE": lambda: trtllm(False, 3, 2),
    "trtllm decode of a pack": lambda: trtllm(True, TOKENS),
    "wrapper": lambda: wrapper(lists(*EVEN), before=1),
    "wrapper, planned at once": lambda: wrapper(lists(*UNEVEN), before=0),
    "wrapper, planned again": lambda: wrapper(lists(*UNEVEN), lists(*EVEN), before=1, use_cuda_graph=True),
    "ragged": ragged,
    "FlashMLA": flash,
    "FlashMLA's sparse prefill": sparse_flash,
}
every_call = pytest.mark.parametrize("make", CALLS.values(), ids=CALLS.keys())


class _Made(TorchDispatchMode):
    """Keeps every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = [ROOM]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.tensors += [result] if isinstance(result, torch.Tensor) else []
        return result


class _Writes(TorchDispatchMode):
    """Lists the operations that write into the memory of some tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for argument, value in zip(func._schema.arguments, [*args, *(kwargs or {}).values()], strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._memory:
                self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def writes_behind_the_kernel(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Call]) -> list:
    """The operations of torch with which a call writes to its caller's tensors once it has launched a kernel."""
    with _Made() as made:
        call = make()
    with contextlib.ExitStack() as stack:
        writes = _Writes(made.tensors)

        def kernel_of(variant):
            kernel = recorder(variant)

            def launch(*arguments):
                kernel(*arguments)
                stack.enter_context(writes)

            return launch

        monkeypatch.setattr(resolve, "kernel", kernel_of)
        call()
    assert recorder.launches
    return writes.found


@every_call
def test_nothing_but_kernels_writes_results(recorder: Recorder, monkeypatch, make):
    """Kernels leave rows of no request alone. What else follows would not, and would fail where a buffer was made in
    inference mode."""
    assert writes_behind_the_kernel(recorder, monkeypatch, make) == []


def test_an_operation_behind_a_kernel_is_noticed(recorder: Recorder, monkeypatch):
    def make() -> Call:
        lse = nan(3, 2, HEADS)
        call = decode(lse=lse)
        return lambda: (call(), lse.transpose(0, 1).mul_(0.5))

    assert writes_behind_the_kernel(recorder, monkeypatch, make) == ["aten.mul_.Tensor"]


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "inference mode": torch.inference_mode,
    "float64 by default": lambda: _default_dtype(torch.float64),
    "float16 by default": lambda: _default_dtype(torch.float16),
    "another device by default": lambda: torch.device("meta"),
}


@every_call
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_modes_of_torch_change_no_launch(recorder: Recorder, make, mode):
    """With "meta" as the default device, what is not told where to be has no memory."""
    launches = []
    for used_in in (contextlib.nullcontext, mode):
        call = make()
        resolve.forget()
        recorder.launches.clear()
        with used_in():
            call()
        launches.append(recorder.launches[:])
    _same(*launches)


@every_call
def test_tensors_of_inference_mode_are_like_others(recorder: Recorder, make):
    """Engines warm up in inference mode and may serve outside of it."""
    launches = []
    for made_in in (contextlib.nullcontext, torch.inference_mode):
        with made_in():
            call = make()
        recorder.launches.clear()
        call()
        launches.append(recorder.launches[:])
    _same(*launches)


def _same(got: list[tuple], want: list[tuple]) -> None:
    """Assert that launches are of arguments that a kernel could not tell apart, but for where they are."""
    assert len(got) == len(want) > 0
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            if hasattr(b, "__dlpack__"):
                a, b = (x if isinstance(x, torch.Tensor) else torch.from_dlpack(x) for x in (a, b))
                assert (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
            else:
                assert a == b
