"""torch.ops.tsmla: the operators as torch.compile and torch.export see them.

Each is a public function that returns nothing and writes into the results that it is given:

    tsmla::pack(Tensor k_nope, Tensor k_pe, Tensor v, Tensor(a!) k_out, Tensor(b!) v_out, ScalarType fp8_dtype, *,
                float k_scale_inv=1.0, float v_scale_inv=1.0, bool enable_pdl=False) -> ()

Schemas are written from the functions' parameters and the tables of `call`, which say what tensors are: results,
scratch memory, or inputs that may be left out. An LSE is computed where one is given to write into. An argument that
may be a tuple has names for its second and third tensor: `query_pe` and `query_scales` beside `query`. merge_into
becomes `merges`: whether `out` and `lse` hold an earlier result.

Modules of operators `offer` their functions here. Importing `registered` registers all that are offered, and whatever
is offered later; only traced calls do so, since it takes some 10 ms for each. While TorchDynamo traces a public
function, it calls the entry of `calls`, which makes the results that are not given and calls the operator. Sizes may be
symbols: nothing compares them. Operators are registered by `Library.define` and `impl`, because those of
`torch.library.custom_op` take ten times as long per call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..identity import call
from ..identity.call import Argument, LeftOut, Operator
from . import checks, examine

NAMESPACE = __package__.rpartition(".")[0]
"""The operators' namespace in torch.ops: "tsmla", or the name that Hugging Face's `kernels` loads this package
under."""
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),  # kernels rely on callers' strides
)
_SCHEMA_TYPES = {"torch.Tensor": "Tensor", "int": "SymInt", "torch.dtype": "ScalarType"}


calls: dict[str, Callable[..., Any]] = {}
"""Family of an operator that is registered -> what its public function calls while it is traced, with all its arguments
in their order."""
_offered: list[Callable[[], None]] = []
_registers = False

_Size = int | tuple[tuple[str, int], ...]


class _Result(NamedTuple):
    """A result of an operator, and how it is made where callers give none.

    sizes: numbers, and sums of sizes of tensors: (tensor's name, dimension counted from the last). None where one
        follows from no tensor: the function then makes the result before its traced call.
    packed_sizes: the same for a call whose query tokens are packed.
    dtype: as the table has it.
    flag: the parameter that asks for it.
    """

    name: str
    sizes: tuple[_Size, ...] | None
    packed_sizes: tuple[_Size, ...] | None
    dtype: str
    flag: str


def schema(operator: Operator, function: Callable[..., Any], not_read: Mapping[str, Any]) -> str:
    """Return the operator's text for `Library.define`. What has a default there is given by keyword."""
    tensors = {argument.given: argument for argument in operator.given}
    flags = {_flag(argument) for argument in operator.given}
    aliases = iter("abcdefgh")
    required, optional = [], []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in not_read or name in flags:
            continue
        if name == "merge_into":
            optional.append("bool merges=False")
            continue
        kind, _, others = parameter.annotation.partition(" | ")
        may_be_none = others.endswith("None")
        kind, argument = _SCHEMA_TYPES.get(kind, kind), tensors.get(name)
        if argument and (argument.written or argument.scratch):
            kind += f"({next(aliases)}!)"
        always_made = argument is not None and argument.left_out is LeftOut.MADE and not argument.only_with
        if parameter.default is parameter.empty or isinstance(parameter.default, torch.dtype) or always_made:
            nullable = "?" if may_be_none and parameter.default is parameter.empty else ""
            required.append(f"{kind}{nullable} {name}")
        else:
            optional.append(f"{kind}{'?' if may_be_none else ''} {name}={parameter.default}")
    optional += [f"Tensor? {name}=None" for names in _others(operator).values() for name in names]
    return f"{operator.variant.family}({', '.join((*required, '*', *optional))}) -> ()"


def _others(operator: Operator) -> dict[str, tuple[str, ...]]:
    """Return the arguments that may be tuples, with the operator's names for their second and third tensors."""
    others: dict[str, tuple[str, ...]] = {}
    for argument in operator.given:
        name, bracket, _ = argument.given.partition("[")
        if bracket:
            own = f"{name}_pe" if argument.name.endswith("_pe") else argument.name
            others[name] = (*others.get(name, ()), own)
    return others


def _flag(argument: Argument) -> str:
    """The parameter that asks for a result; "" for what needs no asking."""
    return f"return_{argument.only_with}" if argument.only_with else ""


def _results(operator: Operator) -> tuple[_Result, ...]:
    """The results of an operator, in the order in which its function returns them."""
    places: dict[str, tuple[str, int]] = {}
    for argument in operator.given:
        if argument.left_out is LeftOut.REFUSED:
            for shape in (argument.shape, argument.packed_shape):
                for index, size in enumerate(shape):
                    places.setdefault(str(size), (argument.given, index - len(shape)))

    def size_of(size: str | int) -> _Size:
        known = call.extent(size, operator.known)
        return tuple(places[term] for term in str(size).split(" + ")) if known is None else known

    def sizes_of(shape: tuple[int | str, ...]) -> tuple[_Size, ...] | None:
        try:
            return tuple(size_of(size) for size in shape)
        except KeyError:
            return None

    return tuple(
        _Result(
            argument.given, sizes_of(argument.shape), sizes_of(argument.packed_shape), argument.dtype, _flag(argument)
        )
        for argument in operator.given
        if argument.written and argument.left_out is LeftOut.MADE
    )


def _extent(tensor: torch.Tensor, dimension: int) -> int:
    """A size of a tensor; 0 where it has too few dimensions, which the operator refuses when it runs."""
    return tensor.shape[dimension] if tensor.ndim >= -dimension else 0


def offer(
    operator: Operator,
    function: Callable[..., Any],
    *,
    dtype_given: str = "",
    dtypes: Mapping[torch.dtype, torch.dtype] | None = None,
    not_read: Mapping[str, Any] | None = None,
    earlier: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> None:
    """Have an operator registered by its public function, now or when `registered` is imported.

    dtype_given: the parameter that says the results' dtype. dtypes: what it is otherwise, by the first tensor's.
    not_read: parameters that the operator does without, and what the function gets for them.
    earlier: what checks merge_into, out and lse, and returns the tensors of the first.
    """
    given = operator, function, dtype_given, dtypes or {}, not_read or {}, earlier
    _offered.append(functools.partial(_register, *given))
    if _registers:
        register_offered()


def register_offered() -> None:
    """Register what was offered, and from now on at once what will be."""
    global _registers
    _registers = True
    while _offered:
        _offered.pop()()


def _register(
    operator: Operator,
    function: Callable[..., Any],
    dtype_given: str,
    dtypes: Mapping[torch.dtype, torch.dtype],
    not_read: Mapping[str, Any],
    earlier: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None,
) -> None:
    """Define an operator, and put into `calls` what a traced call of its public function calls."""
    name, first, results = operator.variant.family, operator.given[0].given, _results(operator)
    others = _others(operator)
    _library.define(schema(operator, function, not_read), tags=_TAGS)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    positional = tuple(x.name for x in overload._schema.arguments if not x.kwarg_only)
    keywords = tuple(x.name for x in overload._schema.arguments if x.kwarg_only)
    parameters = tuple(inspect.signature(function).parameters)

    def run(*given: Any, **options: Any) -> None:
        whole = {**dict(zip(positional, given, strict=True)), **options, **not_read}
        for name, names in others.items():
            if behind := [tensor for other in names if (tensor := whole.pop(other, None)) is not None]:
                whole[name] = whole[name], *behind
        if whole.pop("merges", False):
            whole["merge_into"] = whole.pop("out"), whole.pop("lse", None)
        function(**whole)

    def fake(*given: Any, **options: Any) -> None:
        """There are no shapes to infer. A compiled graph asks `run` for no gradient, so it is refused here."""
        for argument, value in (*zip(positional, given, strict=True), *options.items()):
            if isinstance(value, torch.Tensor):
                checks.no_gradient(operator.name, argument, value)

    for device in ("CUDA", "CPU"):  # on a CPU for the error
        _library.impl(name, run, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)

    def traced(*arguments: Any) -> Any:
        given = dict(zip(parameters, arguments, strict=True))
        for name, names in others.items():
            counts = call.tuples_of(operator, name)
            found = examine.pieces(operator.name, name, given[name], *counts)
            given |= zip((name, *names), found, strict=True)
        if earlier and given["merge_into"] is not None:
            given["out"], given["lse"] = earlier(given["merge_into"], given["out"], given["lse"])
            given["merges"] = True
        source = given[first]
        packed = source.ndim == len(operator.given[0].packed_shape)
        returned = []
        for result in results:
            asked, found = not result.flag or given[result.flag], given[result.name]
            if found is None and asked:
                dtype = given.get(dtype_given) or dtypes.get(source.dtype, source.dtype)
                dtype = getattr(torch, result.dtype, dtype)
                sizes = result.packed_sizes if packed else result.sizes
                assert sizes is not None
                shape = [
                    size if isinstance(size, int) else sum([_extent(given[name], index) for name, index in size])
                    for size in sizes
                ]
                found = given[result.name] = source.new_empty(shape, dtype=dtype)
            if asked:
                returned.append(found)
        overload(*[given[name] for name in positional], **{name: given[name] for name in keywords if name in given})
        return tuple(returned) if len(returned) > 1 else returned[0] if returned else None

    calls[name] = traced
