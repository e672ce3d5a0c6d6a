"""What the compiler is told of a kernel's arguments, from the tables in `tsmla.identity.call`: fakes and host entry."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tsmla.identity.call import OPERATORS, Argument, LeftOut, Operator, Strides, extent, fixed_sizes
from tsmla.identity.variant import Variant

from .parts.precision import numeric

_FIXED = {
    "float32": cutlass.Float32, "bfloat16": cutlass.BFloat16, "float8_e4m3fn": cutlass.Float8E4M3FN,
    "int64": cutlass.Int64, "int32": cutlass.Int32, "int8": cutlass.Int8,
}  # fmt: skip


def fake_arguments(variant: Variant) -> tuple:
    """Stand-ins for a kernel's arguments in calling order; the stream comes from the TVM-FFI environment.

    Sizes that are the variant's are compiled in; every other name in the table is one symbol. A tensor that may be
    replaced by an empty one has symbols of its own. Each outer stride is a symbol of its own, too: those of an extent
    of 1 mean nothing (exporters give it any), so that kernels take strides from shapes wherever there are no gaps."""
    sizes = fixed_sizes(variant)
    symbols: dict[str, Any] = collections.defaultdict(cute.sym_int)
    arguments: list[Any] = []
    for argument in OPERATORS[variant.family].arguments:
        if not isinstance(argument, Argument):
            number = cutlass.Float32 if isinstance(argument.neutral, float) else cutlass.Int32
            arguments.append(number(argument.neutral))
        elif not argument.taken_by(variant):
            arguments.append(None)
        else:
            own = collections.defaultdict(cute.sym_int) if argument.left_out is LeftOut.EMPTY else symbols
            shape = tuple(own[size] if (known := extent(size, sizes)) is None else known for size in argument.shape)
            arguments.append(_fake_tensor(variant, argument, shape))
    return (*arguments, make_fake_stream(use_tvm_ffi_env_stream=True))


def _fake_tensor(variant: Variant, argument: Argument, shape: tuple) -> Any:
    element = _FIXED.get(argument.dtype) or numeric(getattr(variant, argument.dtype))
    strides = argument.strides_for(variant)
    known = argument.align * 8 // element.width if strides is Strides.ROWS else 1
    outer = tuple(cute.sym_int64(divisibility=known) for _ in shape[:-1])
    halves = "int64" in argument.also_dtypes  # which the operator rewrites as every second one of 32 bits
    last = cute.sym_int64() if halves or strides is Strides.ANY else 1
    return make_fake_tensor(element, shape, (*outer, last), assumed_align=argument.align)


def host_entry(operator: Operator) -> Callable[..., None]:
    """A kernel's `__call__`, for the compiler: takes the arguments under the names of the table, and hands them to the
    kernel's `launch` as one named tuple, the stream being its last."""
    names = [argument.name for argument in operator.arguments] + ["stream"]
    bundle = collections.namedtuple("Given", names)

    def __call__(self, *arguments):
        self.launch(bundle(*arguments))

    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    __call__.__signature__ = inspect.Signature(parameters)
    return cute.jit(__call__, preprocess=False)
