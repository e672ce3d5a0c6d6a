"""The tables of arguments: what derives from them, and that operators and kernels keep to them."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import tsmla
from emulated_archs import KERNELS
from example_variants import DECODE, KEY_MASK, MASKED, PACK, PREFILL, QUANTIZE_Q, READ_CACHE, WRITE_CACHE
from launches import SMS, processors
from odd_tensors import far_apart
from refusing import refusing
from tsmla.identity.arch import Arch
from tsmla.identity.call import OPERATORS, Argument, LeftOut, Number, Operator, Strides, extent, fixed_sizes
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import Dtype, Variant
from tsmla.loading import resolve
from tsmla.operators import checks, examine
from tsmla_kernels import registry

VARIANTS = (PREFILL, MASKED, DECODE, PACK, WRITE_CACHE, READ_CACHE, QUANTIZE_Q, KEY_MASK)
APART_ROWS = {"row": ROWS["snapmla"]}
DECODE_APART = dataclasses.replace(DECODE, dtype=Dtype.E4M3, **APART_ROWS)
FORMS = (
    *((variant, False) for variant in VARIANTS),
    (DECODE, True),
    (READ_CACHE, True),
    (DECODE_APART, False),
    (DECODE_APART, True),
    (QUANTIZE_Q, True),
    (dataclasses.replace(WRITE_CACHE, **APART_ROWS), False),
    (dataclasses.replace(READ_CACHE, **APART_ROWS), True),
)
"""Variants, and whether query tokens of all requests lie one behind the other, or keys are told by page tables."""
SIZES = {
    "tokens_q": 5, "tokens_kv": 7, "heads_q": 4, "heads_kv": 2, "batch_size": 3, "batch": 3, "requests": 3, "q_len": 2,
    "heads": 6, "pages": 10, "page_size": 64, "width": 4, "bytes": 1 << 24, "tokens": 5, "d_query": 128, "d_key": 128,
    "query_columns": 512, "row_width": 656, "max_positions": 9, "cos_sin_columns": 64,
    "mask_words": 2, "top_k": 7,
}  # fmt: skip
NUMBERS: dict[str, dict[str, Any]] = {
    "prefill": {"softmax_scale": 0.125, "k_scale": 2.0, "v_scale": 3.0, "output_scale": 5.0, "batch_size": 3,
                "max_seq_len": 7, "seq_lens": None, "lse_includes_sink": True, "return_lse": True,
                "is_causal": True},
    "decode": {"softmax_scale": 0.25, "output_scale": 3.0, "causal_mask": True, "window_left": 9, "cp_world": 1,
               "cp_rank": 0, "cp_interleave_size": 16, "lse_includes_sink": True, "max_seq_len": 300,
               "batch_invariant": True, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "pack": {"k_scale_inv": 2.0, "v_scale_inv": 3.0},
    "write_cache": {"scale": 1.0, "power_of_two_scales": True, "rope_interleaved": True, "enable_pdl": True},
    "read_cache": {"scale": 1.0, "enable_pdl": True},
    "quantize_q": {"power_of_two_scales": True, "enable_pdl": True},
    "key_mask": {"keys": 64, "enable_pdl": True},
}  # fmt: skip
APART: dict[str, dict[str, Any]] = {
    "decode": {"sinks": None, "cp_world": 4, "cp_rank": 2, "lse_includes_sink": False, "batch_invariant": False}
}
"""Arguments that do not go together with others, and whose numbers differ from theirs."""
PACKED = {"max_q_len": 2}
TOGETHER = {"positions", "cos_sin_cache", "rope_interleaved"}
"""Arguments of which a call has all or none."""
PARTS, Q_LEN, PROCESSORS = "the plan's (`plan_decode`)", "max_q_len, or query's q_len", "the GPU's SMs"
ENTRY_KEYS = "1 with indices, else kv_cache's page_size"


@pytest.fixture
def launches(monkeypatch) -> list[tuple]:
    """What kernels were launched with, where CPU tensors pass for those of a GPU, and every kernel checks its own."""
    found: list[tuple] = []

    def kernel(variant: Variant):
        return lambda *arguments: (refusing(variant)(*arguments), found.append(arguments))

    monkeypatch.setattr(resolve, "kernel", kernel)
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(checks, "arch_of", lambda device: Arch.SM90A)
    processors(monkeypatch)
    return found


def operator_of(variant: Variant) -> Operator:
    return OPERATORS[variant.family]


def function_of(variant: Variant):
    return getattr(tsmla, operator_of(variant).name)


def tensor_of(variant: Variant, argument: Argument, packed: bool = False, **sizes: int) -> torch.Tensor:
    named = packed and argument.packed_shape or argument.shape
    shape = [extent(size, {**SIZES, **fixed_sizes(variant), **sizes}) for size in named]
    return torch.zeros(shape, dtype=checks.dtype_in_table(variant, argument.dtype))


def given_in(variant: Variant, packed: bool) -> list[Argument]:
    """The tensors of a call's form."""
    without = {
        ("decode", False): {"cum_seq_lens_q"},
        ("read_cache", True): {"indices"},
        ("read_cache", False): {"block_tables", "cum_seq_lens", "seq_starts"},
    }.get((variant.family, packed), set())
    if variant.family == "prefill" and not variant.masked:
        without = {"key_mask"}
    if variant.family in ("decode", "read_cache", "write_cache") and not variant.row.apart:
        without = {*without, "query_scales", "rope_cache", "scale_cache"}
    return [a for a in operator_of(variant).given if a.name not in without]


def format_of(variant: Variant) -> str:
    """The name of a cache's rows; "" where an operator asks for none."""
    return next((name for name, row in ROWS.items() if "cache" in variant.family and variant.row == row), "")


def call_of(variant: Variant, packed: bool = False) -> dict[str, Any]:
    """A right call with every tensor that can be given, by the table's names for them: `paired` makes arguments."""
    results = [argument for argument in operator_of(variant).given if argument.written]
    flags = {f"return_{argument.only_with}": True for argument in results if argument.only_with}
    tensors = {a.given: tensor_of(variant, a, packed) for a in given_in(variant, packed)}
    more = PACKED if packed and variant.family == "decode" else {}
    format = {"format": format_of(variant)} if format_of(variant) else {}
    return {**tensors, **NUMBERS[variant.family], **flags, **more, **format}


def results_of(given: dict[str, Any]) -> list[torch.Tensor]:
    names = ("out", "lse", "k_out", "v_out", "nope_out", "rope_out", "scale_out")
    return [given[name] for name in names if name in given]


def paired(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments, of which some are two of the table's tensors."""
    found = {name: value for name, value in given.items() if "[" not in name}
    for name, value in given.items():
        first = name.partition("[")[0]
        if first != name and value is not None:
            found[first] = (*(found[first] if type(found[first]) is tuple else (found[first],)), value)
    return found


def test_sizes() -> None:
    assert extent(576, {}) == extent("512 + 64", {}) == extent("a + 64", {"a": 512}) == 576
    assert extent("a", {}) is extent("a + 1", {}) is extent("1 + a", {"b": 1}) is None
    assert extent("a", {"a": 0}) == 0


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_tensor_is_a_parameter_of_the_operator(variant) -> None:
    operator, parameters = operator_of(variant), inspect.signature(function_of(variant)).parameters
    for argument in operator.given:
        name = argument.given.partition("[")[0]
        required = parameters[name].default is inspect.Parameter.empty and name == argument.given
        assert required == (argument.left_out is LeftOut.REFUSED)
        assert isinstance(argument.left_out, LeftOut) or argument.left_out in parameters
    names = [argument.name for argument in operator.arguments]
    assert len(set(names)) == len(names)
    fields = {field.name for field in dataclasses.fields(variant)}
    assert {a.only_with for a in operator.arguments if isinstance(a, Argument)} <= fields | {""}


@pytest.mark.parametrize("arch", Arch)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kernels_take_what_the_table_says(variant, arch) -> None:
    variant = dataclasses.replace(variant, arch=arch)
    made = registry.recipe(variant)
    table = operator_of(variant).arguments
    assert list(inspect.signature(made.entry.__call__).parameters) == [*(x.name for x in table), "stream"]
    assert len(made.arguments) == len(table) + 1
    sizes = {}
    for argument, fake in zip(table, made.arguments, strict=False):
        if isinstance(argument, Number):
            assert type(fake.value) is type(argument.neutral)
            continue
        if not argument.taken_by(variant):
            assert fake is None
            continue
        for size, symbol in zip(argument.shape, fake.shape, strict=True):
            known = extent(size, fixed_sizes(variant))
            key = (argument.name if argument.left_out is LeftOut.EMPTY else "", size)
            assert symbol == known if known is not None else sizes.setdefault(key, symbol) is symbol
    assert len(set(map(id, sizes.values()))) == len(sizes), "sizes of other names share a symbol"


@pytest.mark.parametrize("variant, packed", FORMS, ids=str)
def test_operators_launch_in_the_order_of_the_table(variant, packed, launches) -> None:
    whole = call_of(variant, packed)
    for given in (whole, {**whole, **APART.get(variant.family, {})}) * 2:
        results = function_of(variant)(**paired(given))
        results = (results,) if isinstance(results, torch.Tensor) else results or ()
        assert all(got is want for got, want in zip(results, results_of(given), strict=True))
        launch = launches.pop()
        for argument, got in zip(operator_of(variant).arguments, launch, strict=True):
            if isinstance(argument, Argument):
                if not argument.given:
                    assert (got is None) is not argument.taken_by(variant), argument.name
                    continue
                want = given.get(argument.given)
                if packed and argument.packed_shape and argument.taken_by(variant):
                    assert got.data_ptr() == want.data_ptr() and got.shape[1:] == want.shape, argument.name
                    continue
                if want is None and argument.taken_by(variant):
                    got, want = torch.from_dlpack(got).numel(), 0
                assert got is want or got == want, argument.name
            elif argument.given == PARTS:
                assert got > 0
            elif argument.given == Q_LEN:
                assert got == SIZES["q_len"]
            elif argument.given == ENTRY_KEYS:
                assert got == SIZES["page_size"]
            elif argument.given == PROCESSORS:
                assert got == SMS
            else:
                want = math.prod(given.get(factor, argument.neutral) for factor in argument.given.split(" * "))
                assert got == want and type(got) is type(argument.neutral), argument.name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_tensors_are_left_out_as_the_table_says(variant, launches) -> None:
    operator = operator_of(variant)
    for argument in operator.given:
        if argument.name == "indices" or argument.only_where or argument not in given_in(variant, False):
            continue  # what must be given for it; what nobody may give
        if argument.name == "key_mask":  # without it, another kernel serves
            continue
        without = TOGETHER if argument.given in TOGETHER else {argument.given}
        given = {name: value for name, value in call_of(variant).items() if name not in without}
        if argument.left_out is LeftOut.REFUSED:
            named = rf"^{operator.name}: {argument.given}(\[0\])? is a NoneType; it must"
            with pytest.raises(tsmla.ArgumentError, match=named):
                function_of(variant)(**paired({**given, argument.given: None}))
            continue
        if argument.given.endswith("[1]"):
            first = operator.given[operator.given.index(argument) - 1]
            whole = sum(x.shape[-1] for x in (given[first.given], tensor_of(variant, argument)))
            given[first.given] = tensor_of(variant, first, **{str(first.shape[-1]): whole})
        function_of(variant)(**paired(given))
        got = launches[-1][operator.arguments.index(argument)]
        if isinstance(argument.left_out, str):
            assert got is given[argument.left_out]
        else:
            got = torch.from_dlpack(got)
            assert (got.numel() == 0) == (argument.left_out is LeftOut.EMPTY)
            assert got.dtype == checks.dtype_in_table(variant, argument.dtype)


class Subclass(torch.Tensor):
    pass


SPOILED = {
    "negated": torch._neg_view,
    "on meta": lambda tensor: tensor.to("meta"),
    "more dimensions": lambda tensor: tensor[None],
    "gaps": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    "unsigned": lambda tensor: tensor.view(torch.uint32 if tensor.dtype == torch.int32 else torch.uint16),
    "float64": lambda tensor: tensor.double(),
    "longer": lambda tensor: torch.cat((tensor, tensor)),
}
ANY_ARE_RIGHT = {("workspace", "longer"), ("kv_cache", "longer"), ("cache", "longer"), ("cos_sin", "longer")}


@pytest.mark.parametrize("arch", [*map(Arch, KERNELS)])
@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("variant, packed", FORMS, ids=str)
def test_wrong_tensors_are_named_first_and_later(variant, packed, how, arch, launches, monkeypatch) -> None:
    """On the first call of a kind, and after a right one. What is said in full, `test_*_refusals` know."""
    monkeypatch.setattr(checks, "arch_of", lambda device: arch)
    right = call_of(variant, packed)
    for argument, seen in itertools.product(given_in(variant, packed), (False, True)):
        resolve.forget()
        if seen:
            function_of(variant)(**paired(right))
        launches.clear()
        wrong = {**right, argument.given: SPOILED[how](right[argument.given])}
        apart = {"rope_cache", "kv_cache[1]"} & {*right}
        alone = argument.name not in ("cache", "kv_cache") or not apart  # whose sizes are the cache's
        if alone and (argument.name, how) in ANY_ARE_RIGHT or (how, argument.strides) == ("gaps", Strides.ANY):
            function_of(variant)(**paired(wrong))
        else:
            named = rf"^{operator_of(variant).name}: \w+(\[[012]\])? (is|has|requires) "
            with pytest.raises(tsmla.ArgumentError, match=named):
                function_of(variant)(**paired(wrong))
            assert launches == []


RESTRIDED = {
    "gaps between rows": lambda x: x.new_zeros(*x.shape[:-1], x.shape[-1] + 16)[..., : x.shape[-1]],
    "gaps between pages": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]] if x.ndim > 1 else x,
    "the last dimension first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "the first dimension last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
    "one row for all": lambda x: x[:1].expand(x.shape),
    "far apart": lambda x: far_apart(x, 2**36),
}


@pytest.mark.parametrize("how", RESTRIDED)
@pytest.mark.parametrize("page_size", [64, 8])
@pytest.mark.parametrize(
    "variant, packed, in_two",
    [*((*form, False) for form in FORMS), (DECODE, False, True), (DECODE, True, True)],
    ids=str,
)
def test_strides_are_judged_alike_first_and_later(variant, packed, in_two, page_size, how, launches, monkeypatch):
    """Tensors that differ from those of a right call in their strides alone: accepted both times, or refused both times
    in the same words."""
    monkeypatch.setitem(SIZES, "page_size", page_size)
    right = call_of(variant, packed)
    if in_two:
        right["kv_cache"], right["kv_cache[1]"] = (x.contiguous() for x in right["kv_cache"].split([512, 64], -1))

    def judged(name: str = "") -> str:
        changed = {name: RESTRIDED[how](right[name])} if name else {}
        try:
            function_of(variant)(**paired({**right, **changed}))
        except tsmla.ArgumentError as error:
            return re.sub("0x[0-9a-f]+", "ADDRESS", str(error))
        launches.clear()  # what failed tests print must have memory
        return "accepted"

    for name, tensor in right.items():
        if isinstance(tensor, torch.Tensor):
            resolve.forget()
            first = judged(name)
            resolve.forget()
            assert judged() == "accepted"
            assert judged(name) == first, name


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_kinds_tell_calls_apart(variant) -> None:
    operator = operator_of(variant)
    kind = examine.kind_of(operator)
    tensors = [tensor_of(variant, argument) for argument in operator.given]
    first = kind(tensors, tensors[0].shape, (), True)
    assert first == kind([tensor.clone() for tensor in tensors], tensors[0].shape, (), True)
    others = [kind(tensors, tensors[0].shape, (1,), True), kind(tensors, tensors[0].shape, (), False)]
    for index, argument in enumerate(operator.given):
        for made in (torch._neg_view(tensors[index]), tensors[index].as_subclass(Subclass), None):
            if made is not None or argument.left_out is not LeftOut.REFUSED:
                changed = [*tensors[:index], made, *tensors[index + 1 :]]
                others.append(kind(changed, tensors[0].shape, (), True))
    assert first not in others


def test_the_page_is_current() -> None:
    """`python docs/arguments.py` writes it."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "arguments.py"))
    assert script["PAGE"].read_text() == script["page"]()
