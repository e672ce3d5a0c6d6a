"""How a call's tensors are checked against its operator's table (`call`), and how calls of a kind are told apart.

An operator looks up what serves a call (`resolve.calls`) under its kind. Only a call that finds nothing, that launches
nothing, or that the kernel refuses is examined, with every check and its error in our words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import checks
from .call import Argument, LeftOut, Operator, Strides, extent, fixed_sizes
from .errors import ArgumentError, UnsupportedError
from .support import why_unsupported
from .variant import Arch, Dtype, Variant


class Examination:
    """The tensors of one call, and its sizes by the names in the table, as far as they are known.

    tensors: in the table's order, None for those left out. first: what the first of them is called, if not as in the
    table. sizes: those of this call that are not the table's `known`.
    """

    def __init__(
        self,
        operator: Operator,
        tensors: Sequence[torch.Tensor | None],
        first: str = "",
        sizes: Mapping[str, int] | None = None,
    ):
        self.operator = operator
        self.tensors = {argument.given: x for argument, x in zip(operator.given, tensors, strict=True)}
        self.sizes: dict[str, int] = {**operator.known, **(sizes or {})}
        tensor: Any = tensors[0]
        self.names = {operator.given[0].given: first} if first else {}
        self.reference = self._called(operator.given[0])
        self.device = checks.cuda(operator.name, self.reference, tensor)
        self.arch: Arch = checks.arch_of(self.device)
        for argument in operator.deciding:
            self._check_place(argument)
            self._check_shape(argument)
        checks.dtype_in(operator.name, self.reference, tensor, [checks.TORCH_DTYPE_OF[d] for d in operator.dtypes])
        self.dtype: Dtype = checks.dtype_of(tensor.dtype)

    def check(self, variant: Variant) -> None:
        """Everything that a kernel relies on; the variant follows from what has been looked at already."""
        if reason := why_unsupported(variant):
            raise UnsupportedError(f"{self.operator.name}: {reason}")
        self.sizes |= fixed_sizes(variant)
        for argument in self.operator.given:
            if self.tensors[argument.given] is not None or argument.left_out is LeftOut.REFUSED:
                self._check_place(argument)
                self._check_dtype(argument, variant)
                self._check_shape(argument)
                self._check_memory(argument)

    def _called(self, argument: Argument) -> str:
        return self.names.get(argument.given, argument.given)

    def _check_place(self, argument: Argument) -> None:
        given: Any = self.tensors[argument.given]
        checks.same_device(self.operator.name, self._called(argument), given, self.reference, self.device)

    def _check_dtype(self, argument: Argument, variant: Variant) -> None:
        given: Any = self.tensors[argument.given]
        accepted = [checks.dtype_in_table(variant, name) for name in (argument.dtype, *argument.also_dtypes)]
        checks.dtype_in(self.operator.name, self._called(argument), given, accepted)

    def _check_shape(self, argument: Argument) -> None:
        """A shape of the table's; sizes that were not known are known afterwards."""
        given: Any = self.tensors[argument.given]
        shapes = [shape for shape in (argument.shape, argument.also_shape) if shape]
        wanted = [[size if (n := extent(size, self.sizes)) is None else n for size in shape] for shape in shapes]
        self.sizes |= checks.shape(self.operator.name, self._called(argument), given, *wanted)

    def _check_memory(self, argument: Argument) -> None:
        name, called, given = self.operator.name, self._called(argument), self.tensors[argument.given]
        assert given is not None
        if argument.strides is Strides.WHOLE:
            checks.contiguous(name, called, given)
        elif argument.strides is Strides.ROWS:
            checks.last_dim_contiguous(name, called, given)
        elif argument.strides is Strides.PAGES:
            checks.pages_contiguous(name, called, given)
        if argument.written:
            checks.no_overlap(name, called, given)
        if argument.strides is Strides.ANY:
            checks.address(name, called, given, argument.align)
        else:
            checks.aligned(name, called, given, argument.align)


def pieces(
    operator: str, given: str, names: tuple[str, str], tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two that callers may give for the argument called `given`."""
    wanted = f"it must be a CUDA tensor or a pair of them, {' and '.join(names)}"
    if len(tensors) != 2:
        raise ArgumentError(f"{operator}: {given} is a {type(tensors).__name__} of {len(tensors)}; {wanted}")
    first, second = tensors
    if second is None:
        raise ArgumentError(f"{operator}: {names[1]} is a NoneType; it must be a CUDA tensor")
    return first, second


def is_wide(lengths: torch.Tensor | None) -> bool:
    """Whether lengths have 64 bits."""
    return lengths is not None and lengths.dtype is torch.int64


def narrowed(lengths: torch.Tensor) -> torch.Tensor:
    """int64 lengths as int32, those that it cannot hold as the nearest that it can: the low half of each, which comes
    first."""
    lengths = lengths.clamp(0, 2**31 - 1)
    return lengths.view(torch.int32)[::2]


def kind_of(operator: Operator) -> Callable[..., tuple]:
    """A function that gives the key of a call's kind. It is written from the table (`kind_source`), so that it looks at
    each tensor as little as it must. Its parameters: the tensors in the table's order (None for those left out), the
    first one's shape, the options, and whatever else is examined.
    """
    names: dict[str, Any] = {"overlapping": checks.overlapping, "grad_enabled": torch.is_grad_enabled}
    exec(compile(kind_source(operator), f"<kinds of {operator.name}>", "exec"), names)
    return names["kind"]


def kind_source(operator: Operator) -> str:
    """The Python text of `kind_of`.

    The key tells whatever is examined, except what a kernel refuses by itself before it launches (the checks that the
    compiler generates from its signature): arguments that are no tensors, of another dtype (but not of another sign),
    device, number of dimensions or alignment, of sizes that do not belong together, without memory, or with gaps in the
    last dimension.
    """
    first, *_ = required = [x for x in operator.given if x.left_out is LeftOut.REFUSED]
    optional = [x for x in operator.given if x.left_out is not LeftOut.REFUSED]
    floats = [x for x in operator.given if not x.dtype.startswith("int")]
    others = [f"type({x.given})" for x in required[1:]]
    keyed = {field.name for field in dataclasses.fields(operator.variant)} | set(operator.keyed)
    lines, facts = [], [f"{operator.name!r}, options, fact, {first.given}.get_device(), {first.given}.dtype"]
    for argument in sorted(required, key=lambda argument: argument not in operator.deciding):
        if all(isinstance(size, int) or size in keyed or size in operator.known for size in argument.shape):
            facts.append("shape" if argument is first else f"{argument.given}.shape")
            keyed -= set(argument.shape)
        elif argument.also_shape:  # the kernel gets one of `shape`'s number of dimensions, or refuses it
            last = [argument.shape.index(size) - len(argument.shape) for size in argument.shape if size in keyed]
            facts += [f"{argument.given}.shape[{index}]" for index in last]
        elif found := [size for size in argument.shape if size in keyed]:
            sizes = [str(size) if size in found else "_" for size in argument.shape]
            lines.append(f"{', '.join(sizes)} = {'shape' if argument is first else f'{argument.given}.shape'}")
            facts.append(", ".join(map(str, found)))
            keyed -= set(found)
        facts += _facts(argument)
    facts.append(f"type({first.given}), type({first.given}) is {' is '.join(others)} or ({', '.join(others)})")
    facts.append(" or ".join(f"{x.given}.is_neg()" for x in required))
    for argument in optional:
        shape = [f"{argument.given}.shape"] if argument.left_out is LeftOut.EMPTY else []
        looked_at = [f"type({argument.given})", f"{argument.given}.is_neg()", *shape, *_facts(argument)]
        facts.append(f"{argument.given} is None or ({', '.join(looked_at)})")
    grads = [f"{'' if x in required else f'{x.given} is not None and '}{x.given}.requires_grad" for x in floats]
    facts.append(f"grad_enabled() and ({' or '.join(grads)})")
    lines = [f"{', '.join(x.given for x in operator.given)} = tensors", *lines, f"return ({', '.join(facts)})"]
    return "def kind(tensors, shape, options, fact):\n" + "".join(f"    {line}\n" for line in lines)


def _facts(argument: Argument) -> list[str]:
    """Expressions for what no kernel checks of a tensor."""
    name, found = argument.given, []
    if argument.dtype in ("out_dtype", "int32"):
        found.append(f"{name}.dtype")
    if argument.strides is Strides.PAGES:
        found.append(f"{name}.is_contiguous() or {name}.stride()")
    elif argument.strides is Strides.WHOLE and (len(argument.shape) > 1 or "int64" in argument.also_dtypes):
        found.append(f"{name}.is_contiguous()")
    elif argument.written:
        found.append(f"{name}.is_contiguous() or not overlapping({name})")
    return found
