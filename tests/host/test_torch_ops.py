"""torch.ops.tsmla without a GPU: schemas, what torch says of them, and traced calls against the same calls in eager
mode.

CPU tensors pass for CUDA ones, and a kernel is a stand-in that fills its results from everything that it is given.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import tsmla.torch_ops
from example_variants import run_python
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launches import SMS, processors
from torch._dynamo.testing import CompileCounterWithBackend
from traced_calls import arguments, attention
from tsmla import ArgumentError
from tsmla.identity.arch import Arch
from tsmla.identity.call import (
    DECODE,
    KEY_MASK,
    OPERATORS,
    PACK,
    PREFILL,
    QUANTIZE_Q,
    READ_CACHE,
    WRITE_CACHE,
    Number,
    Operator,
)
from tsmla.identity.variant import Variant
from tsmla.loading import resolve
from tsmla.operators import checks, traced

BATCH, TOKENS, HEADS, PAGES = 2, 5, 4, 6
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCHEMAS = {
    "prefill": "tsmla::prefill(Tensor query, Tensor key, Tensor value, Tensor cum_seq_lens, SymInt batch_size, "
    "float softmax_scale, Tensor(a!) out, *, bool is_causal=True, Tensor? cum_seq_lens_q=None, bool enable_pdl=False, "
    "float k_scale=1., float v_scale=1., float output_scale=1., ScalarType? out_dtype=None, Tensor? sinks=None, "
    "bool lse_includes_sink=False, Tensor(b!)? lse=None, bool merges=False, float lse_base=2.7182818284590451, "
    "Tensor? key_mask=None, Tensor? query_pe=None, "
    "Tensor? key_pe=None) -> ()",
    "decode": "tsmla::decode(Tensor query, Tensor kv_cache, Tensor(a!) workspace_buffer, SymInt kv_lora_rank, "
    "SymInt qk_rope_head_dim, Tensor? block_tables, Tensor? seq_lens, SymInt? max_seq_len, float softmax_scale, "
    "Tensor(b!) out, *, float output_scale=1., bool causal_mask=True, SymInt window_left=-1, bool enable_pdl=False, "
    "Tensor? causal_seqs=None, SymInt cp_world=1, SymInt cp_rank=0, SymInt cp_interleave_size=1, "
    "SymInt min_split_kv=1, Tensor? local_visible_lens=None, float lse_base=2., Tensor? sinks=None, "
    "bool lse_includes_sink=False, Tensor(c!)? lse=None, Tensor? cum_seq_lens_q=None, SymInt? max_q_len=None, "
    "bool batch_invariant=False, Tensor? indices=None, Tensor? topk_length=None, "
    "Tensor? query_pe=None, Tensor? query_scales=None, Tensor? rope_cache=None, "
    "Tensor? scale_cache=None) -> ()",
    "pack": "tsmla::pack(Tensor k_nope, Tensor k_pe, Tensor v, Tensor(a!) k_out, Tensor(b!) v_out, "
    "ScalarType fp8_dtype, *, float k_scale_inv=1., float v_scale_inv=1., bool enable_pdl=False) -> ()",
    "write_cache": "tsmla::write_cache(Tensor kv_c, Tensor? k_pe, Tensor slot_mapping, Tensor(a!) cache, str format, "
    "*, Tensor(b!)? rope_cache=None, Tensor(c!)? scale_cache=None, float scale=1., bool? power_of_two_scales=None, "
    "Tensor? positions=None, Tensor? cos_sin_cache=None, bool? rope_interleaved=None, bool enable_pdl=False) -> ()",
    "read_cache": "tsmla::read_cache(Tensor cache, Tensor(a!) kv_c, Tensor(b!)? k_pe, str format, *, "
    "Tensor? indices=None, Tensor? block_tables=None, Tensor? cum_seq_lens=None, Tensor? seq_starts=None, "
    "Tensor? rope_cache=None, Tensor? scale_cache=None, float scale=1., bool enable_pdl=False) -> ()",
    "quantize_q": "tsmla::quantize_q(Tensor query, Tensor(a!) nope_out, Tensor(b!) rope_out, Tensor(c!) scale_out, *, "
    "bool power_of_two_scales=True, bool enable_pdl=False, Tensor? query_pe=None) -> ()",
    "key_mask": "tsmla::key_mask(Tensor indices, SymInt keys, Tensor(a!) out, *, Tensor? topk_length=None, "
    "bool enable_pdl=False) -> ()",
}


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Operators take CPU tensors for those of an sm_90a; the variants that were launched."""
    launched: list[Variant] = []

    def kernel(variant: Variant):
        return lambda *given: (launched.append(variant), compute(OPERATORS[variant.family], given))

    monkeypatch.setattr(resolve, "kernel", kernel)
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(checks, "arch_of", lambda device: Arch.SM90A)
    processors(monkeypatch)
    return launched


def compute(operator: Operator, given: tuple[Any, ...]) -> None:
    """Fill results, and scratch memory, with numbers that depend on every number, element and stride of the rest."""
    total, results = 0.0, []
    for place, (argument, value) in enumerate(zip(operator.arguments, given, strict=True), 1):
        if isinstance(argument, Number):
            total += place * value
        elif argument.written or argument.scratch:
            results += [value] if isinstance(value, torch.Tensor) else []  # what stands in for one is empty
        elif value is not None and (value := torch.from_dlpack(value)).numel():
            weights = torch.arange(1, value.numel() + 1, dtype=torch.float64).view(value.shape)
            strides = [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
            total += place * (float((value.double() * weights).sum()) / 1e3 + sum(strides))
    for place, result in enumerate(results):
        if result.dtype == torch.int8:
            result.fill_(int(total) % 100)
        else:
            result.copy_((torch.arange(result.numel()) % 11 + place + total % 100).view(result.shape))


def function_of(operator: Operator):
    return getattr(tsmla, operator.name)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def required(operator: Operator) -> dict[str, Any]:
    """What each call of torch.ops.tsmla's operator must have."""
    if operator is PREFILL:
        return {
            "query": random(TOKENS, HEADS, 192),
            "key": random(TOKENS, HEADS, 192),
            "value": random(TOKENS, HEADS, 256)[..., :128],
            "cum_seq_lens": ints(0, 2, TOKENS),
            "batch_size": BATCH,
            "softmax_scale": 0.5,
            "out": random(TOKENS, HEADS, 128),
        }
    if operator is DECODE:
        return {"query": random(BATCH, 1, HEADS, 576), "kv_cache": random(PAGES, 64, 576),
                "workspace_buffer": torch.zeros(SMS * HEADS * 8 * 513 * 4, dtype=torch.int8), "kv_lora_rank": 512,
                "qk_rope_head_dim": 64, "block_tables": ints(*range(PAGES)).view(BATCH, -1),
                "seq_lens": ints(100, 3), "max_seq_len": 200, "softmax_scale": 0.1,
                "out": random(BATCH, 1, HEADS, 512)}  # fmt: skip
    if operator is WRITE_CACHE:
        return {
            "kv_c": random(TOKENS, 512),
            "k_pe": random(TOKENS, 64),
            "slot_mapping": torch.arange(TOKENS),
            "cache": torch.zeros(PAGES, 64, 656, dtype=torch.uint8),
            "format": "fp8_ds_mla",
        }
    if operator is READ_CACHE:
        return {
            "cache": torch.zeros(PAGES, 64, 656, dtype=torch.uint8),
            "kv_c": random(TOKENS, 512),
            "k_pe": random(TOKENS, 64),
            "format": "fp8_ds_mla",
        }
    if operator is QUANTIZE_Q:
        return {
            "query": random(BATCH, 1, HEADS, 576),
            "nope_out": torch.empty(BATCH, 1, HEADS, 512, dtype=E4M3),
            "rope_out": random(BATCH, 1, HEADS, 64),
            "scale_out": torch.zeros(BATCH, 1, HEADS),
        }
    if operator is KEY_MASK:
        return {"indices": ints(*range(15)).view(TOKENS, 3), "keys": 40, "out": ints(*range(10)).view(TOKENS, 2)}
    return {
        "k_nope": random(TOKENS, HEADS, 128),
        "k_pe": random(TOKENS, 64),
        "v": random(TOKENS, HEADS, 128),
        "k_out": torch.empty(TOKENS, HEADS, 192, dtype=E4M3),
        "v_out": torch.empty(TOKENS, HEADS, 128, dtype=E4M3),
        "fp8_dtype": E4M3,
    }


def optional(operator: Operator) -> dict[str, Any]:
    """What it may have besides."""
    if operator is PREFILL:
        return {"cum_seq_lens_q": ints(0, 1, TOKENS), "lse": torch.zeros(TOKENS, HEADS), "sinks": torch.randn(HEADS),
                "is_causal": False, "k_scale": 2.0, "lse_includes_sink": True, "out_dtype": BF16}  # fmt: skip
    if operator is DECODE:
        return {"causal_seqs": torch.tensor([90, 7]), "local_visible_lens": torch.ones(BATCH, 1, dtype=torch.int32),
                "lse": torch.zeros(BATCH, 1, HEADS), "sinks": torch.randn(HEADS), "window_left": 5, "lse_base": 2.0,
                "lse_includes_sink": True, "output_scale": 0.5, "batch_invariant": True}  # fmt: skip
    if operator is WRITE_CACHE:
        return {
            "power_of_two_scales": True,
            "enable_pdl": True,
            "positions": torch.arange(TOKENS),
            "cos_sin_cache": torch.randn(9, 64),
            "rope_interleaved": True,
        }
    if operator is READ_CACHE:
        return {
            "block_tables": ints(*range(PAGES)).view(BATCH, -1),
            "cum_seq_lens": ints(0, 2, TOKENS),
            "seq_starts": ints(0, 70),
            "enable_pdl": True,
        }
    if operator is QUANTIZE_Q:
        return {"power_of_two_scales": False, "enable_pdl": True}
    if operator is KEY_MASK:
        return {"topk_length": torch.arange(TOKENS), "enable_pdl": True}
    return {"k_scale_inv": 2.0, "v_scale_inv": 0.25}


def fewest(operator: Operator) -> dict[str, Any]:
    """What a call must have of that, one way or another."""
    return {"indices": torch.arange(TOKENS)} if operator is READ_CACHE else {}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_schemas_are_what_callers_were_promised(operator) -> None:
    assert str(getattr(torch.ops.tsmla, operator.variant.family).default._schema) == SCHEMAS[operator.variant.family]


CALLED = {
    "query[1]": "query_pe",
    "key[1]": "key_pe",
    "query[2]": "query_scales",
    "kv_cache[1]": "rope_cache",
    "kv_cache[2]": "scale_cache",
}
"""What tensors of tuples are called in schemas."""


@pytest.mark.parametrize("family", SCHEMAS)
def test_the_page_has_the_schemas(family) -> None:
    arguments = getattr(torch.ops.tsmla, family).default._schema.arguments
    positional = [x.name for x in arguments if not x.kwarg_only]
    keywords = [f"{x.name}={x.default_value}" for x in arguments if x.kwarg_only]
    row = f"| `torch.ops.tsmla.{family}` | `({', '.join((*positional, '*', *keywords))})` |"
    assert row in (Path(__file__).parents[2] / "docs" / "start" / "integrations.md").read_text("utf-8")


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_schemas_say_what_is_written(operator) -> None:
    schema = getattr(torch.ops.tsmla, operator.variant.family).default._schema
    by_name = {argument.name: argument for argument in schema.arguments}
    for argument in operator.given:
        name = CALLED.get(argument.given, argument.given)
        assert by_name[name].is_write == (argument.written or argument.scratch)
    assert {*required(operator), *optional(operator)} <= set(by_name)
    assert not {*required(operator)} ^ {x.name for x in schema.arguments if not x.kwarg_only}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_functions_hand_on_every_argument_in_its_place(operator, monkeypatch) -> None:
    function = function_of(operator)
    module = inspect.getmodule(function)
    names = list(inspect.signature(function).parameters)
    monkeypatch.setattr(module, "is_dynamo_compiling", lambda: True)
    monkeypatch.setitem(traced.calls, operator.variant.family, lambda *given: given)
    assert function(**{name: name for name in names}) == tuple(names)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize(
    "operator", [PREFILL, DECODE, WRITE_CACHE, READ_CACHE, KEY_MASK], ids=lambda operator: operator.name
)
def test_opcheck(stand_ins, operator, data) -> None:
    chosen = data.draw(st.sets(st.sampled_from(sorted(optional(operator)))))
    if fewest(operator):
        chosen = data.draw(st.sampled_from((set(), {*optional(operator)})))
    rotates = {"positions", "cos_sin_cache", "rope_interleaved"}
    chosen = chosen | rotates if chosen & rotates else chosen
    if not {"sinks", "lse"} <= chosen:
        chosen -= {"lse_includes_sink"}
    options = {name: value for name, value in optional(operator).items() if name in chosen} or fewest(operator)
    overload = getattr(torch.ops.tsmla, operator.variant.family).default
    found = torch.library.opcheck(overload, tuple(required(operator).values()), options)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", [PACK, QUANTIZE_Q], ids=lambda operator: operator.name)
def test_opcheck_of_what_writes_fp8(stand_ins, operator) -> None:
    """torch cannot compare FP8 tensors in its other tests. `test_operators_give_what_functions_give` stands for the
    schema's."""
    tests = ("test_autograd_registration", "test_faketensor")
    overload = getattr(torch.ops.tsmla, operator.variant.family).default
    arguments = tuple(required(operator).values())
    found = torch.library.opcheck(overload, arguments, optional(operator), test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_operators_give_what_functions_give(stand_ins, operator) -> None:
    overload = getattr(torch.ops.tsmla, operator.variant.family)
    for options in (fewest(operator), optional(operator)):
        call = {**required(operator), **options}
        before = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
        written = {x.given for x in operator.given if x.written or x.scratch}
        assert overload(**call) is None
        for name, value in before.items():
            assert name in written or torch.equal(value, call[name])
        again = {**call, **{name: value for name, value in before.items() if name in written}}
        function_of(operator)(**again, **rest_of(operator, call))
        for name in written & set(call):
            assert torch.equal(as_bytes(call[name]), as_bytes(again[name]))
        assert stand_ins[-2] == stand_ins[-1] and len(stand_ins) % 2 == 0


def rest_of(operator: Operator, call: dict[str, Any]) -> dict[str, Any]:
    """What the public function must have and its operator does without."""
    lse = {"return_lse": "lse" in call} if operator in (PREFILL, DECODE) else {}
    return {**lse, **({"seq_lens": None, "max_seq_len": 9} if operator is PREFILL else {})}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


compiled_attention = CompileCounterWithBackend("aot_eager")


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    yield torch.compile(attention, fullgraph=True, backend=compiled_attention)
    torch._dynamo.reset()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(tokens=st.integers(2, 40), heads=st.integers(2, 9), batch=st.integers(2, 6))
def test_a_traced_call_gives_the_bits_of_eager_and_no_size_is_specialised(stand_ins, compiled, tokens, heads, batch):
    """One graph for the sizes of the first call, one for those that were seen to change, one more for the rest."""
    given = arguments(tokens, heads, batch, "cpu")
    want = attention(given)
    scratch = given["workspace"].clone()
    given["workspace"].zero_()
    eager = len(stand_ins)
    for got, expected in zip(compiled(given), want, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)
    assert stand_ins[eager:] == stand_ins[eager - 3 : eager]
    assert torch.equal(given["workspace"], scratch), "the workspace that was given was not the one that was used"
    assert compiled_attention.frame_count <= 4


def test_inductor_gives_the_bits_of_eager(stand_ins) -> None:
    given = arguments(7, 3, 2, "cpu")
    want = attention(given)
    torch._dynamo.reset()
    for got, expected in zip(torch.compile(attention, fullgraph=True)(given), want, strict=True):
        assert torch.equal(got, expected)


def compile(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_results_that_are_given_are_written_and_returned(stand_ins, operator) -> None:
    names = [argument.given for argument in operator.given if argument.written]
    call = {**required(operator), **optional(operator)}
    call |= rest_of(operator, call)
    traced = compile(lambda call: function_of(operator)(**call))
    results = traced(call)
    results = (results,) if isinstance(results, torch.Tensor) else results
    expected = [call[name].clone() for name in names if name in call]
    if operator in (WRITE_CACHE, READ_CACHE):
        assert results is None
        names = [name for name in names if name in call]
    for name, result in zip(names, results or [call[name] for name in names], strict=True):
        assert result is call[name]
        call[name].zero_()
    function_of(operator)(**call)
    for name, want in zip(names, expected, strict=True):
        assert torch.equal(as_bytes(call[name]), as_bytes(want)), name


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3, torch.float8_e5m2], ids=str)
def test_results_that_are_made_have_the_dtypes_of_eager(stand_ins, dtype) -> None:
    for operator in (PREFILL, DECODE):
        call = {**required(operator), **rest_of(operator, {"lse": None})}
        del call["out"]
        call = {n: x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == BF16 else x for n, x in call.items()}
        function = function_of(operator)
        want = function(**call)
        got = compile(lambda call, function=function: function(**call))(call)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    prefill = {**required(PREFILL), **rest_of(PREFILL, {}), "out": None}
    if dtype == torch.float16:
        prefill |= {name: prefill[name].half() for name in ("query", "key", "value")}
        traced = compile(lambda call: tsmla.tsmla_prefill(**call, out_dtype=dtype))
        assert traced(prefill).dtype == dtype
    if dtype.itemsize == 1:
        pack = {**required(PACK), "k_out": None, "v_out": None, "fp8_dtype": dtype}
        assert [x.dtype for x in compile(lambda call: tsmla.mla_kv_pack_quantize_fp8(**call))(pack)] == [dtype] * 2


WRONG = {
    "dimensions": ({"query": random(HEADS, 192)}, r"query has shape \[4, 192\]; it must be"),
    "dtype": ({"query": torch.zeros(TOKENS, HEADS, 192)}, "query is torch.float32; accepted: "),
    "another dtype": ({"out_dtype": torch.float16}, "out_dtype is torch.float16 but out is torch.bfloat16"),
    "scale": ({"softmax_scale": -1.0}, "softmax_scale is -1.0"),
    "batch": ({"batch_size": 7}, "cum_seq_lens has shape"),
    "an LSE's dtype": ({"lse": torch.zeros(TOKENS, HEADS, dtype=BF16)}, "lse is torch.bfloat16; accepted: "),
    "a gradient": ({"key": random(TOKENS, HEADS, 192).requires_grad_()}, "key requires a gradient"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(stand_ins, change, message) -> None:
    """The operator names them when it runs; what is refused while tracing comes in torch's own exceptions, which quote
    ours."""
    call = {**required(PREFILL), **rest_of(PREFILL, {}), **change}
    with pytest.raises(Exception, match=f"tsmla_prefill: {message}"):
        compile(lambda call: tsmla.tsmla_prefill(**call))(call)
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {message}"):
        tsmla.tsmla_prefill(**call)
    assert stand_ins == []
    operator = {name: value for name, value in call.items() if name not in rest_of(PREFILL, {})}
    with pytest.raises(ArgumentError, match=f"^tsmla_prefill: {message}"):
        torch.ops.tsmla.prefill(**operator)


@pytest.mark.parametrize("operator", [PREFILL, DECODE], ids=lambda operator: operator.name)
def test_a_given_lse_is_written_without_being_asked_for(stand_ins, operator) -> None:
    call = {**required(operator), **rest_of(operator, {})}
    call |= {"return_lse": False, "lse": torch.zeros(call["out"].shape[:-1])}
    written = []
    for run in (function_of(operator), compile(lambda **call: function_of(operator)(**call))):
        call["lse"].fill_(torch.nan)
        assert run(**call) is call["out"] or run is not function_of(operator)
        written.append(call["lse"].clone())
    assert torch.equal(*written) and bool(written[0].isfinite().all())
    assert [variant.lse for variant in stand_ins] == [True] * 2


def in_pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor[..., :128], tensor[..., 128:]


def test_pairs_and_earlier_results_pass_through(stand_ins) -> None:
    """A traced call hands on the second tensors of pairs, and whether there is an earlier result."""
    call = {**required(PREFILL), "seq_lens": None, "max_seq_len": 9}
    call["query"], (key, key_pe) = in_pieces(call["query"]), in_pieces(call["key"])
    call["key"] = key, key_pe[:, 0]
    earlier = call.pop("out"), torch.randn(TOKENS, HEADS)
    want = [x.clone() for x in tsmla.tsmla_prefill(**call, return_lse=True, merge_into=earlier)]
    assert tsmla.tsmla_prefill(**call, return_lse=True)[0].ne(want[0]).any(), "the kernel is not told of the merge"
    for returned in (True, False):
        for result in earlier:
            result.fill_(torch.nan)
        function = compile(lambda call, returned=returned: tsmla.tsmla_prefill(**call, return_lse=returned))
        got = function({**call, "merge_into": earlier})
        assert all(a is b for a, b in zip(got, earlier, strict=True)) if returned else got is earlier[0]
        assert all(torch.equal(a, b) for a, b in zip(earlier, want, strict=True))
    with pytest.raises(Exception, match="tsmla_prefill: query is a tuple of 3; it must be a tensor or a tuple of 2"):
        compile(lambda call: tsmla.tsmla_prefill(**call))({**call, "query": (key, key, key)})


@pytest.mark.parametrize("shape", [(BATCH, 3), (TOKENS,)], ids=["requests", "packed"])
def test_chosen_keys_pass_through(stand_ins, shape) -> None:
    """Lists of keys take the place of page tables and lengths, which are None then."""
    count = torch.Size(shape).numel()
    call = {**required(DECODE), "query": random(*shape, HEADS, 576), "out": random(*shape, HEADS, 512)}
    call |= {name: None for name in ("block_tables", "seq_lens", "max_seq_len")}
    call |= {"indices": ints(*range(count * 7)).view(*shape, 7), "topk_length": ints(*range(count)).view(shape)}
    lse = torch.zeros(*shape, HEADS)
    operator = torch.ops.tsmla.decode.default
    positional = [call[name] for name in required(DECODE)]
    options = {"indices": call["indices"], "topk_length": call["topk_length"], "lse": lse}
    assert set(torch.library.opcheck(operator, tuple(positional), options).values()) == {"SUCCESS"}
    del call["out"]
    want = tsmla.tsmla_decode(**call, return_lse=True)
    got = compile(lambda call: tsmla.tsmla_decode(**call, return_lse=True))(call)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and torch.equal(one, other)
    assert all(variant.gathers for variant in stand_ins)
    other = {**call, "topk_length": call["topk_length"] + 1000}
    assert not torch.equal(want[0], tsmla.tsmla_decode(**other)), "the kernel is not told of the lengths"


@pytest.mark.parametrize("chooses", [False, True], ids=["page tables", "lists of keys"])
def test_a_cache_of_two_tensors_passes_through(stand_ins, chooses) -> None:
    """A traced call hands on the rope pieces that lie in a tensor of their own."""
    pair = random(PAGES, 64, 512), random(PAGES, 64, 64)
    call = {**required(DECODE), "kv_cache": pair}
    lists = {"indices": ints(*range(BATCH * 7)).view(BATCH, 1, 7)} if chooses else {}
    call |= {**dict.fromkeys(("block_tables", "seq_lens", "max_seq_len")), **lists} if chooses else {}
    operator = torch.ops.tsmla.decode.default
    positional = [pair[0] if name == "kv_cache" else call[name] for name in required(DECODE)]
    options = {**lists, "rope_cache": pair[1]}
    assert set(torch.library.opcheck(operator, tuple(positional), options).values()) == {"SUCCESS"}
    del call["out"]
    want = tsmla.tsmla_decode(**call, return_lse=True)
    got = compile(lambda call: tsmla.tsmla_decode(**call, return_lse=True))(call)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert all(variant.gathers for variant in stand_ins)
    other = {**call, "kv_cache": (pair[0], pair[1] + 1)}
    assert not torch.equal(want[0], tsmla.tsmla_decode(**other)), "the kernel is not told of the rope pieces"
    with pytest.raises(Exception, match="tsmla_decode: kv_cache is a tuple of 1; it must be a tensor or a tuple of 2"):
        compile(lambda call: tsmla.tsmla_decode(**call))({**call, "kv_cache": pair[:1]})


def test_tensors_on_a_cpu_are_named() -> None:
    with pytest.raises(ArgumentError, match="^tsmla_prefill: query is on cpu; it must be a CUDA tensor"):
        torch.ops.tsmla.prefill(**required(PREFILL))


def test_export_keeps_the_operator_and_its_sizes(stand_ins) -> None:
    class Attention(torch.nn.Module):
        def forward(self, query, key, value, ends):
            return tsmla.tsmla_prefill(query, key, value, None, ends, 9, BATCH, 0.5, return_lse=True)

    names = ("query", "key", "value", "cum_seq_lens")
    given = [required(PREFILL)[name] for name in names]
    tokens = {0: torch.export.Dim("tokens")}
    program = torch.export.export(Attention(), tuple(given), dynamic_shapes=(tokens, tokens, tokens, None), strict=True)
    assert [node.target for node in program.graph.nodes].count(torch.ops.tsmla.prefill.default) == 1
    longer = [torch.cat([x, x]) if x.ndim == 3 else x for x in given]
    longer[2] = torch.cat([longer[2], longer[2]], -1)[..., :128]
    for got, want in zip(program.module()(*longer), Attention()(*longer), strict=True):
        assert torch.equal(got, want)


def test_eager_calls_import_neither_the_operators_nor_dynamo() -> None:
    script = """
import sys, tsmla
tsmla.tsmla_prefill, tsmla.tsmla_decode, tsmla.mla_kv_pack_quantize_fp8, tsmla.mla_write_cache, tsmla.mla_read_cache
absent = {"tsmla.torch_ops", "tsmla.operators.registered", "torch._dynamo"}
print("tsmla.operators.prefill" in sys.modules, *(absent & set(sys.modules)))
"""
    assert run_python(script).stdout.split() == ["True"]
