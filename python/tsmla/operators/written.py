"""Writes into an operator's function what follows from its table and its parameters, when its module is imported.

    @written.from_table(PACK)
    def mla_kv_pack_quantize_fp8(k_nope, k_pe, v, ...):
        ...
        tensors, options = written.tensors(), written.options()
        ...
        served.kernel(*written.arguments(served))

What runs has in place of these calls what a person would write: tuples of local variables, and the kernel's arguments
in the table's order. So a new argument is a row of the table and a parameter, and a call takes no longer than if all
were written out. The module's source must be at hand.

The local variable of a tensor is called as the caller's argument, or, for the second and third tensor of a tuple, as
the kernel's.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from ..identity.call import Argument, LeftOut, Number, Operator
from ..identity.variant import Variant
from ..loading import resolve
from . import checks, examine, lengths

_Function = TypeVar("_Function", bound=Callable[..., Any])
_options: dict[str, dict[str, str]] = {}
"""Operator -> the options that are part of a kind of call, and their types as parameters have them."""


class Given(types.SimpleNamespace):
    """The tensors and options of a call, by the names of their local variables."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Served:
    """What serves calls of one kind, apart from their tensors, as attributes: reading one takes no longer than reading
    a local variable.

    kernel: takes what `arguments` stands for. no_NAME: what it gets for a tensor that is left out (None for one of a
    piece that the rows do not have). convert_NAME: makes a tensor the kernel's, whose integers have another size, or
    which has a dimension of 1 too many; None where it is the kernel's already. number_NAME: a number that is no
    option's own value. Others are an operator's own.
    """

    def __init__(self, kernel: Callable[..., None], **more: Any):
        self.kernel = kernel
        for name, value in more.items():
            setattr(self, name, value)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def given(operator: Operator, tensors: Sequence[Any], options: Sequence[Any]) -> Given:
    """Return a call's tensors and options by name, after checking that flags are such."""
    named = dict(zip(map(_variable, operator.given), tensors, strict=True))
    for (name, kind), value in zip(_options[operator.name].items(), options, strict=True):
        named[name] = checks.flag(operator.name, name, value) if kind == "bool" else value
    return Given(**named)


def served(operator: Operator, variant: Variant, call: Given, numbers: Mapping[str, Any], **more: Any) -> Served:
    """Return what serves calls of a kind. numbers: by name, those that are no option's own value."""
    like = getattr(call, _variable(operator.given[0]))
    for argument in operator.given:
        given = getattr(call, _variable(argument))
        if _has_stand_in(argument):
            sizes = [size if isinstance(size, int) else operator.known.get(size, 0) for size in argument.shape]
            more[f"no_{argument.name}"] = None
            if argument.taken_by(variant):
                dtype = checks.dtype_in_table(variant, argument.dtype)
                more[f"no_{argument.name}"] = examine.left_out(like, argument.absent or sizes, dtype)
        if _is_converted(operator, argument):
            more[f"convert_{argument.name}"] = None if given is None else _conversion(argument, given)
    return Served(resolve.kernel(variant), **more, **{f"number_{name}": value for name, value in numbers.items()})


def _has_stand_in(argument: Argument) -> bool:
    """Whether the kernel gets an empty tensor where callers leave one out."""
    return argument.left_out is LeftOut.EMPTY


def _is_converted(operator: Operator, argument: Argument) -> bool:
    """Whether callers may give what the kernel does not take, and a call's kind says which."""
    if argument.also_shape:
        return argument.shape[0] in operator.keyed
    return argument.dtype in ("int32", "int64") and bool(argument.also_dtypes)


def _conversion(argument: Argument, given: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what makes such a tensor the kernel's; None where it is."""
    if argument.also_shape:
        dimension = argument.also_shape.index(1)
        return (lambda x: x.squeeze(dimension)) if given.ndim != len(argument.shape) else None
    if not argument.is_copied(given.element_size()):
        return None
    return lengths.narrowed if argument.dtype == "int32" else torch.Tensor.long


def parameters() -> tuple[Any, ...]:
    """All parameters in their order."""
    _not_written()


def keywords(**instead: Any) -> dict[str, Any]:
    """All parameters by name, with other values `instead` of some."""
    _not_written()


def tensors() -> tuple[Any, ...]:
    """The call's tensors in the table's order."""
    _not_written()


def options(*also: Any) -> tuple[Any, ...]:
    """What else decides the kind of a call: options in the order of the parameters, then other local variables."""
    _not_written()


def arguments(served: Served) -> tuple[Any, ...]:
    """The kernel's arguments in the table's order."""
    _not_written()


def packed_arguments(served: Served, *ready: Any) -> tuple[Any, ...]:
    """The kernel's arguments where query tokens of all requests are packed: it takes them as one request's.

    ready: local variables that have the kernel's shape already.
    """
    _not_written()


def _not_written() -> NoReturn:
    raise TypeError("this stands for code that `from_table` writes")


def from_table(operator: Operator, without: tuple[str, ...] = ()) -> Callable[[_Function], _Function]:
    """Write an operator's arguments into its function. without: parameters that are no option, besides tensors and
    factors."""
    tensor_names = [_variable(argument) for argument in operator.given]
    factors = {x for number in operator.numbers if number.per_call for x in _names_in(number.given)}

    def write(function: _Function) -> _Function:
        declared = inspect.signature(function).parameters
        if missing := {*tensor_names, *factors}.difference(function.__code__.co_varnames):
            raise TypeError(f"{operator.name} has no parameter or variable {', '.join(sorted(missing))}")
        chosen = [name for name in declared if name not in {*tensor_names, *factors, *without}]

        def texts(name: str, call: ast.Call) -> list[str]:
            if name == "parameters":
                return list(declared)
            if name == "tensors":
                return tensor_names
            if name == "options":
                kinds = {name: declared[name].annotation for name in chosen}
                _options[operator.name] = kinds | dict.fromkeys(map(ast.unparse, call.args), "")
                return list(_options[operator.name])
            served, *ready = map(ast.unparse, call.args)
            views = _tensors(operator, served, name == "packed_arguments", ready)
            return [*views, *(_number(number, served, declared) for number in operator.numbers)]

        function.__code__ = _rewritten(function, texts, declared)
        return function

    return write


def _variable(argument: Argument) -> str:
    """The local variable that holds a tensor."""
    return argument.given if argument.given.isidentifier() else argument.name


def _names_in(expression: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(expression)) if isinstance(node, ast.Name)}


def _number(number: Number, served: str, declared: Mapping[str, inspect.Parameter]) -> str:
    """Return the expression of a number that the kernel takes: of factors, an option's own value, or what serves the
    call has it."""
    kind = declared[number.given].annotation if number.given in declared else ""
    of_option = {"bool": f"1 if {number.given} else 0", "int": number.given}
    return number.given if number.per_call else of_option.get(kind, f"{served}.number_{number.name}")


def _tensors(operator: Operator, served: str, packed: bool, ready: Sequence[str]) -> list[str]:
    """Return the expressions of the tensors that the kernel takes. served: the variable of what serves the call."""

    def of_given(argument: Argument) -> str:
        """The kernel's view of a tensor that is given."""
        name, rank = _variable(argument), len(argument.shape)
        if packed and argument.packed_shape and name not in ready:
            return f"{name}.unsqueeze(0)"
        if _is_converted(operator, argument):
            return f"({name} if (convert := {served}.convert_{argument.name}) is None else convert({name}))"
        if len(argument.also_shape) > rank:
            return f"({name} if {name}.ndim == {rank} else {name}.squeeze({argument.also_shape.index(1)}))"
        if argument.also_shape:
            return f"({name} if {name}.ndim == {rank} else {name}.unsqueeze({argument.shape.index(1)}))"
        return name

    seen = {argument.name: of_given(argument) for argument in operator.tensors}

    def tensor(index: int, argument: Argument) -> str:
        name, text = _variable(argument), seen[argument.name]
        if _has_stand_in(argument):
            return f"{served}.no_{argument.name} if {name} is None else {text}"
        if isinstance(argument.left_out, str):
            other = next(x for x in operator.tensors if x.given == argument.left_out)
            instead = seen[other.name]
            if instead != _variable(other) and operator.tensors.index(other) < index:
                instead = "taken"  # converted once
            return f"{instead} if {name} is None else {text}"
        if text != name and any(x.left_out == argument.given for x in operator.tensors[index + 1 :]):
            return f"(taken := {text})"
        always = argument.left_out is LeftOut.REFUSED and not argument.piece
        return text if text == name or always else f"None if {name} is None else {text}"

    return [tensor(index, argument) for index, argument in enumerate(operator.tensors)]


def _rewritten(
    function: Callable[..., Any], texts: Callable[[str, ast.Call], list[str]], declared: Iterable[str]
) -> types.CodeType:
    """Compile a function anew, with expressions in place of its calls of this module."""
    own = {place.__name__ for place in (parameters, tensors, options, arguments, packed_arguments)}

    def whole(node: ast.AST) -> ast.Tuple | None:
        called = node.func if isinstance(node, ast.Call) else None
        if not (isinstance(called, ast.Attribute) and ast.unparse(called.value) == "written" and called.attr in own):
            return None
        assert isinstance(node, ast.Call)
        found = ast.parse(f"({', '.join(texts(called.attr, node))},)", mode="eval").body
        assert isinstance(found, ast.Tuple)
        for part in ast.walk(found):
            ast.copy_location(part, node)
        return found

    class Writer(ast.NodeTransformer):
        def visit_Starred(self, node: ast.Starred) -> Any:
            found = whole(node.value)
            return found.elts if found else self.generic_visit(node)

        def visit_keyword(self, node: ast.keyword) -> Any:
            call = node.value
            if node.arg is not None or not isinstance(call, ast.Call) or ast.unparse(call.func) != "written.keywords":
                return self.generic_visit(node)
            instead = {keyword.arg: keyword.value for keyword in call.keywords}
            return [
                ast.copy_location(ast.keyword(name, instead.get(name) or ast.Name(name, ast.Load())), node)
                for name in declared
            ]

        def visit_Call(self, node: ast.Call) -> ast.AST:
            return whole(node) or self.generic_visit(node)

    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise ImportError(f"{code.co_filename} is missing: tsmla reads its operators' source when it is imported")
    module = ast.parse("".join(lines))
    module.body = [x for x in module.body if isinstance(x, ast.FunctionDef) and x.name == function.__name__]
    (found,) = module.body
    assert isinstance(found, ast.FunctionDef)
    found.decorator_list = []
    flags = __future__.annotations.compiler_flag
    written = ast.fix_missing_locations(Writer().visit(module))
    made = compile(written, code.co_filename, "exec", flags, dont_inherit=True)
    return next(x for x in made.co_consts if isinstance(x, types.CodeType) and x.co_name == function.__name__)
