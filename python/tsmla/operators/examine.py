"""Checks of a call's tensors against its operator's table (`call`), and keys that tell kinds of calls apart.

An operator looks up what serves a call (`resolve.calls`) by the key of its kind. Only a call that finds nothing, that
launches nothing, or that the kernel refuses is examined, with every check and tsmla's own error texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from ..identity.arch import Arch
from ..identity.call import Argument, LeftOut, Operator, Strides, extent, fixed_sizes
from ..identity.support import why_unsupported
from ..identity.variant import Dtype, Variant
from . import checks


class Examination:
    """The tensors of one call while they are checked, and the sizes found so far, by their names in the table.

    tensors: in the table's order, None for those left out.
    called: what errors call a tensor, where that is not the table's name.
    sizes: what is known of the call's sizes before its tensors are looked at.
    packed: whether tensors have their `packed_shape`.
    """

    def __init__(
        self,
        operator: Operator,
        tensors: Sequence[torch.Tensor | None],
        called: Mapping[str, str] | None = None,
        sizes: Mapping[str, int] | None = None,
        packed: bool = False,
    ):
        self.operator = operator
        self.packed = packed
        self.tensors = {argument.given: x for argument, x in zip(operator.given, tensors, strict=True)}
        self.sizes: dict[str, int] = {**operator.known, **(sizes or {})}
        self._called = called or {}
        first = operator.given[0]
        tensor: Any = self.tensors[first.given]
        self.reference = self._name(first)
        self.device = checks.cuda(operator.name, self.reference, tensor)
        self.arch: Arch = checks.arch_of(self.device)
        for argument in operator.deciding:
            self._check_place(argument)
            self._check_shape(argument)
        if operator.dtypes:
            accepted = [checks.TORCH_DTYPE_OF[dtype] for dtype in operator.dtypes]
            checks.dtype_in(operator.name, self.reference, tensor, accepted)
            self.dtype: Dtype = checks.dtype_of(tensor.dtype)

    def check(self, variant: Variant) -> None:
        """Check everything that the kernels of a variant rely on."""
        if reason := why_unsupported(variant):
            raise UnsupportedError(f"{self.operator.name}: {reason}")
        self.sizes |= fixed_sizes(variant)
        for argument in self.operator.given:
            given = self.tensors[argument.given]
            if not argument.is_of(variant):
                if given is not None:
                    name, row = self._name(argument), getattr(variant, "row", None)
                    raise ArgumentError(
                        f"{self.operator.name}: {name} is given; rows of {row} have no {argument.piece} piece"
                    )
            elif given is not None or argument.left_out is LeftOut.REFUSED:
                self._check_place(argument)
                self._check_dtype(argument, variant)
                self._check_shape(argument)
                self._check_memory(argument, variant)

    def _name(self, argument: Argument) -> str:
        return self._called.get(argument.given, argument.given)

    def _check_place(self, argument: Argument) -> None:
        given: Any = self.tensors[argument.given]
        checks.same_device(self.operator.name, self._name(argument), given, self.reference, self.device)

    def _check_dtype(self, argument: Argument, variant: Variant) -> None:
        given: Any = self.tensors[argument.given]
        accepted = [checks.dtype_in_table(variant, name) for name in (argument.dtype, *argument.also_dtypes)]
        if accepted[0].itemsize > 1:  # bytes stand for elements of 8 bits only
            accepted = [dtype for dtype in accepted if dtype is not torch.uint8]
        follows = argument.dtype in ("dtype", "cache_dtype") and accepted[0] is checks.dtype_in_table(variant, "dtype")
        reference = self.reference if follows else ""
        checks.dtype_in(self.operator.name, self._name(argument), given, accepted, reference)

    def _check_shape(self, argument: Argument) -> None:
        """Check that a tensor has a shape of the table, and remember its sizes."""
        given: Any = self.tensors[argument.given]
        shapes = [shape for shape in (argument.shape, argument.also_shape) if shape]
        if self.packed and argument.packed_shape:
            shapes = [argument.packed_shape]
        wanted = [[size if (n := extent(size, self.sizes)) is None else n for size in shape] for shape in shapes]
        self.sizes |= checks.shape(self.operator.name, self._name(argument), given, *wanted, called=shapes)

    def _check_memory(self, argument: Argument, variant: Variant) -> None:
        """Check strides, and the alignment of what a kernel reads: integers of another size are copied for it first."""
        operator, name, given = self.operator.name, self._name(argument), self.tensors[argument.given]
        assert given is not None
        strides, align = argument.strides_for(variant), argument.align
        if argument.is_copied(given.element_size()):
            align = given.element_size()
        if strides is Strides.WHOLE:
            checks.contiguous(operator, name, given)
        elif strides is Strides.ROWS:
            checks.last_dim_contiguous(operator, name, given)
        elif strides is Strides.PAGES:
            checks.pages_contiguous(operator, name, given)
        if argument.written:
            checks.no_overlap(operator, name, given)
        if strides is Strides.ANY:
            checks.address(operator, name, given, align)
        else:
            checks.aligned(operator, name, given, align)


def pieces(operator: str, name: str, given: Any, *counts: int) -> tuple:
    """Return the tensors of an argument that may be a tuple of as many as one of `counts`, and None up to the largest
    count."""
    if type(given) is not tuple:
        return given, *(None,) * (max(counts) - 1)
    missing = [index for index, piece in enumerate(given) if piece is None and index > 0]
    if len(given) not in counts or missing:
        what = f"a tuple of {len(given)}"
        if len(given) in counts:
            what = f"a tuple without the {('second', 'third')[missing[0] - 1]} piece"
        raise ArgumentError(f"{operator}: {name} is {what}; it must be a tensor or a tuple of {_or(counts)}")
    return *given, *(None,) * (max(counts) - len(given))


def left_out(like: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Any:
    """Make the empty tensor that kernels get for one that is left out, already converted for TVM-FFI: converting one of
    torch's takes 0.1 us of a call."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(like.new_empty(shape, dtype=dtype or like.dtype))


def _or(counts: Sequence[int]) -> str:
    return " or ".join(map(str, counts))


def kind_of(operator: Operator, measured: Container[str] = ()) -> Callable[..., tuple]:
    """Make the function that returns the key of a call's kind.

    It is written from the table (`kind_source`), so that it looks at each tensor as little as it must. Its parameters:
    the tensors in the table's order (None for those left out), the first one's shape, the options, and whatever else is
    examined. measured: the tensors, by their kernel's names, whose strides themselves are examined, and not only
    whether they have gaps.
    """
    names: dict[str, Any] = {"overlapping": checks.overlapping, "grad_enabled": torch.is_grad_enabled}
    exec(compile(kind_source(operator, measured), f"<kinds of {operator.name}>", "exec"), names)
    return names["kind"]


def kind_source(operator: Operator, measured: Container[str] = ()) -> str:
    """Return the Python source of the function that `kind_of` makes.

    The key has everything that is examined, except what the kernel refuses itself before it launches, by checks that
    the compiler generates from its signature:

    - arguments that are no tensors, or have no memory;
    - another device, number of dimensions, alignment, or dtype (but not another sign);
    - sizes that do not belong together;
    - gaps in the last dimension.
    """
    first, *_ = required = _required(operator)
    optional = [x for x in operator.given if x not in required]
    floats = [x for x in operator.given if not x.dtype.startswith("int")]
    others = [f"type({x.name})" for x in required[1:]]
    fields = {field.name for field in dataclasses.fields(operator.variant)}
    keyed = named = fields.difference(operator.unkeyed) | set(operator.keyed)
    lines, facts = [], [f"{operator.name!r}, options, fact, {first.name}.get_device(), {first.name}.dtype"]
    for argument in sorted(required, key=lambda argument: -len(named.intersection(argument.shape))):
        name = argument.name
        if all(isinstance(size, int) or size in keyed or size in operator.known for size in argument.shape) or (
            argument.also_shape and argument.shape[0] in keyed
        ):
            facts.append("shape" if argument is first else f"{name}.shape")
            keyed = keyed.difference(argument.shape)
        elif argument.also_shape:  # the kernel gets one of `shape`'s number of dimensions, or refuses it
            last = [argument.shape.index(size) - len(argument.shape) for size in argument.shape if size in keyed]
            facts += [f"{name}.shape[{index}]" for index in last]
        elif found := [size for size in argument.shape if size in keyed]:
            sizes = [str(size) if size in found else "_" for size in argument.shape]
            lines.append(f"{', '.join(sizes)} = {'shape' if argument is first else f'{name}.shape'}")
            facts.append(", ".join(map(str, found)))
            keyed = keyed.difference(found)
        facts += _facts(argument, measured)
    facts.append(f"(own := type({first.name}))")
    if others:
        facts.append(f"own is {' is '.join(others)} or ({', '.join(others)})")
    facts.append(" or ".join(f"{x.name}.is_neg()" for x in required))
    rare = [x for x in optional if x.left_out is LeftOut.EMPTY]
    rarely: list[str] = []
    for argument in optional:
        own = _own_sizes(operator, argument, named) if argument in rare else []
        looked_at = ", ".join(
            (f"type({argument.name})", f"{argument.name}.is_neg()", *own, *_facts(argument, measured))
        )
        (rarely if argument in rare else facts).append(f"{argument.name} is None or ({looked_at})")
    if rare:  # most calls have none of them
        facts.append(f"{' is '.join(x.name for x in rare)} is None or ({', '.join(rarely)},)")
    grads = [f"{'' if x in required else f'{x.name} is not None and '}{x.name}.requires_grad" for x in floats]
    facts.append(f"grad_enabled() and ({' or '.join(grads)})")
    lines = [f"{', '.join(x.name for x in operator.given)} = tensors", *lines, f"return ({', '.join(facts)})"]
    return "def kind(tensors, shape, options, fact):\n" + "".join(f"    {line}\n" for line in lines)


def _required(operator: Operator) -> list[Argument]:
    return [x for x in operator.given if x.left_out is LeftOut.REFUSED and not x.piece]


def _own_sizes(operator: Operator, argument: Argument, keyed: Container[str | int]) -> list[str]:
    """Return expressions for the sizes of an optional tensor. The kernel cannot compare them with other tensors' sizes,
    because an empty tensor may stand in for this one. A size that only this tensor has may be any."""
    required = _required(operator)
    if argument.packed_shape:  # leading sizes are the first argument's, packed or not
        counted = f"{argument.name}.ndim - {sum(isinstance(size, int) for size in argument.shape)}"
        return [f"{argument.name}.ndim, {argument.name}.shape[:{counted}] == {required[0].name}.shape[:{counted}]"]
    if argument.only_where or all(size in keyed for size in argument.shape):
        return [f"{argument.name}.shape"]

    known = {size for x in required for size in x.shape}
    others = {size for x in operator.given if x is not argument for size in x.shape}.union(operator.known)
    shape = [size for size in argument.shape if size in others or " + " in str(size)]
    terms = {term for size in shape for term in str(size).split(" + ") if not term.isdigit()}
    if not terms <= known:  # a size that only arguments have which may be left out
        return [f"{argument.name}.shape"]

    def given(term: str) -> str:
        other = next((x for x in required if term in x.shape), None)
        return term if other is None else f"{other.name}.shape[{other.shape.index(term)}]"

    return [
        f"{argument.name}.shape[{index}] == {' + '.join(map(given, size.split(' + ')))}"
        for index, size in enumerate(argument.shape)
        if isinstance(size, str) and size in shape
    ]


def _facts(argument: Argument, measured: Container[str]) -> list[str]:
    """Return expressions for what no kernel checks of a tensor."""
    name, found = argument.name, []
    if argument.dtype in ("out_dtype", "int32", "int64") or "dtype" in argument.also_dtypes:
        found.append(f"{name}.dtype")
    if argument.name in measured or argument.strides is Strides.PAGES:
        found.append(f"{name}.is_contiguous() or {name}.stride()")
    elif argument.strides is Strides.WHOLE and (len(argument.shape) > 1 or argument.also_dtypes):
        found.append(f"{name}.is_contiguous()")
    elif argument.written:
        found.append(f"{name}.is_contiguous() or not overlapping({name})")
    return found
