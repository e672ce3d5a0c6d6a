"""Argument checks shared by the operators. Each raises ArgumentError with operator, argument, given and accepted."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from ..errors import ArgumentError, UnsupportedError
from ..identity.arch import SHIPPED_ARCHS, Arch
from ..identity.variant import Dtype, Variant

TORCH_DTYPES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: Dtype.BF16,
    torch.float16: Dtype.FP16,
    torch.float8_e4m3fn: Dtype.E4M3,
    torch.float8_e5m2: Dtype.E5M2,
}
TORCH_DTYPE_OF: dict[Dtype, torch.dtype] = {ours: theirs for theirs, ours in TORCH_DTYPES.items()}

SMALLEST_FLOAT32, LARGEST_FLOAT32 = 2.0**-126, 2.0**127 * (2 - 2.0**-23)
"""The smallest and the largest positive normal float32."""
LARGEST_INT = 2**31 - 1
"""The largest int32: kernels read lengths, counts and numbers of tokens as such."""
LARGEST_SCORES_FACTOR = 1024.0
"""Upper bound of the factor that scores are multiplied by; models have factors below 1. Kernels subtract a row's
maximum from its scaled scores in float32, so scores beyond 2 ** 23 have lost their fractions by then."""


def dtype_in_table(variant: Variant, name: str) -> torch.dtype:
    """Return the torch dtype that a word in an operator's table (`call`) means: a field of the variant, or torch's own
    name."""
    ours = getattr(variant, name, None)
    return getattr(torch, name) if ours is None else TORCH_DTYPE_OF[ours]


_arch_by_index: dict[int, Arch] = {}


def arch_of(device: torch.device) -> Arch:
    """The architecture whose kernels a CUDA device runs; cached per device index."""
    index = torch.cuda.current_device() if device.index is None else device.index
    arch = _arch_by_index.get(index)
    if arch is None:
        capability = torch.cuda.get_device_capability(index)
        arch = Arch.from_capability(*capability)
        if arch is None:
            known = ", ".join(f"{a} ({a.gpus})" for a in SHIPPED_ARCHS)
            raise UnsupportedError(
                f"GPU {index} is {torch.cuda.get_device_name(index)} with compute capability "
                f"{capability[0]}.{capability[1]}; tsmla has kernels for {known}"
            )
        _arch_by_index[index] = arch
    return arch


def dtype_of(dtype: torch.dtype) -> Dtype:
    """Return tsmla's name of a torch dtype; `dtype_in` is the check that also names the argument."""
    found = TORCH_DTYPES.get(dtype)
    if found is None:
        raise ArgumentError(f"{dtype} is not a dtype that tsmla's kernels know; they know {listed(TORCH_DTYPES)}")
    return found


def cuda(operator: str, name: str, tensor: torch.Tensor) -> torch.device:
    """Check that a tensor is on a CUDA device and passes `stored`; return the device."""
    device = stored(operator, name, tensor, "a CUDA tensor")
    if not tensor.is_cuda:
        raise ArgumentError(f"{operator}: {name} is on {device}; it must be a CUDA tensor")
    return device


def same_device(operator: str, name: str, tensor: torch.Tensor, reference: str, device: torch.device) -> None:
    """Check that a tensor passes `stored` and is on `device`, where the argument called `reference` is."""
    if stored(operator, name, tensor, f"a tensor on {device}") != device:
        raise ArgumentError(
            f"{operator}: {name} is on {tensor.device} but {reference} is on {device}; all tensors must share a device"
        )


def stored(operator: str, name: str, tensor: torch.Tensor, wanted: str = "a tensor") -> torch.device:
    """Check that a tensor's elements are what its memory holds at its strides, and that no gradient is asked of it;
    return its device.

    Kernels read and write memory, and know nothing of what torch would do to it on the way. wanted: what the argument
    must be, in words.
    """

    def refuse(given: str, fix: str) -> NoReturn:
        raise ArgumentError(f"{operator}: {name} {given}; it must be {wanted} {fix}")

    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{operator}: {name} is a {type(tensor).__name__}; it must be {wanted}")
    if tensor.is_nested:
        refuse("is a nested tensor", f"of one shape ({name}.values() has the rows of all)")
    if tensor.layout is not torch.strided:
        refuse(f"has the layout {tensor.layout}", f"of layout torch.strided (pass {name}.to_dense())")
    if tensor.is_quantized:
        refuse("is a quantised tensor", f"of plain numbers (pass {name}.dequantize() or {name}.int_repr())")
    if tensor.is_neg():
        refuse("is a view that torch negates when it is read", f"that memory holds (pass {name}.resolve_neg())")
    if tensor.is_conj():
        refuse("is a view that torch conjugates when it is read", f"that memory holds (pass {name}.resolve_conj())")
    if not tensor.is_meta and not has_memory(tensor):
        refuse(f"is a {type(tensor).__name__} without memory", "that torch neither traces, nor transforms, nor freed")
    no_gradient(operator, name, tensor, wanted)
    return tensor.device


def no_gradient(operator: str, name: str, tensor: torch.Tensor, wanted: str = "a tensor") -> None:
    """Check that no gradient is asked of a tensor."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{operator}: {name} requires a gradient, and none is computed here; it must be {wanted} that requires "
            f"none (pass {name}.detach(), or call under torch.no_grad() or torch.inference_mode())"
        )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has an address. Fake ones, wrappers of torch.func, wrapping subclasses and those whose storage
    was freed have none."""
    try:
        fake = tensor.untyped_storage().device.type == "meta"
        return not fake and (tensor.numel() == 0 or tensor.data_ptr() != 0)
    except RuntimeError:
        return False


def shape(
    operator: str,
    name: str,
    tensor: torch.Tensor,
    *accepted: Sequence[int | str],
    called: Sequence[Sequence[int | str]] = (),
) -> dict[str, int]:
    """Check that a tensor has one of the accepted shapes, and return the sizes of the dimensions that are given by
    name: a name accepts any size.

    called: the shapes with names for sizes that other arguments have decided, for the error text.
    """
    for expected in accepted:
        sizes = list(zip(expected, tensor.shape, strict=False))
        if len(expected) == tensor.ndim and all(isinstance(want, str) or want == size for want, size in sizes):
            return {want: size for want, size in sizes if isinstance(want, str)}
    wanted, meant = (" or ".join(map(_shape, shapes)) for shapes in (accepted, called))
    why = f", which is {meant}" if meant not in ("", wanted) else ""
    raise ArgumentError(f"{operator}: {name} has shape {_shape(tensor.shape)}; it must be {wanted}{why}")


def dtype_in(
    operator: str, name: str, tensor: torch.Tensor, accepted: Iterable[torch.dtype], reference: str = ""
) -> None:
    """Check that a tensor has one of the accepted torch dtypes. reference: the argument that decides which, if any."""
    if tensor.dtype not in accepted:
        why = f" (as {reference})" if reference else ""
        raise ArgumentError(f"{operator}: {name} is {tensor.dtype}; accepted: {listed(accepted)}{why}")


def last_dim_contiguous(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's last dimension has stride 1. The outer strides are free."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ArgumentError(
            f"{operator}: {name} has strides {tuple(tensor.stride())}; its last dimension must have stride 1 "
            f"(pass {name}.contiguous())"
        )


def contiguous(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is row-major without gaps."""
    if not tensor.is_contiguous():
        raise ArgumentError(
            f"{operator}: {name} has shape {_shape(tensor.shape)} and strides {tuple(tensor.stride())}; "
            "it must be contiguous"
        )


def pages_contiguous(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Check that no page of a tensor [..., page_size, width] has gaps. The stride between pages is free."""
    width = tensor.shape[-1]
    if tensor.stride()[-2:] != (width, 1):
        raise ArgumentError(
            f"{operator}: {name} has strides {tuple(tensor.stride())}; the rows of a page must follow each other "
            f"without gaps (last strides {width}, 1); the stride between pages is free"
        )


def no_overlap(operator: str, name: str, tensor: torch.Tensor) -> None:
    """Check that no two elements of a tensor to write into share memory."""
    if overlapping(tensor):
        raise ArgumentError(
            f"{operator}: {name} has shape {_shape(tensor.shape)} and strides {tuple(tensor.stride())}, so some of its "
            "elements share memory; each one that is written needs its own (pass one that torch.empty made, say)"
        )


def overlapping(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor share memory.

    Also True where a dimension's elements lie between another's without sharing any, which only `as_strided` makes.
    """
    span = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride < span:
                return tensor.numel() > 0
            span += (extent - 1) * stride
    return False


def address(operator: str, name: str, tensor: torch.Tensor, multiple: int) -> None:
    """Check that a tensor's address is a multiple of `multiple` bytes."""
    if tensor.data_ptr() % multiple:
        raise ArgumentError(
            f"{operator}: {name} starts at address {tensor.data_ptr():#x}; it must be aligned to {multiple} bytes "
            f"({name}.clone() is)"
        )


def aligned(operator: str, name: str, tensor: torch.Tensor, multiple: int) -> None:
    """Check that a tensor's address, and its outer strides in bytes, are multiples of `multiple` bytes."""
    address(operator, name, tensor, multiple)
    size = tensor.element_size()
    for stride, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True):
        if extent > 1 and stride * size % multiple:
            raise ArgumentError(
                f"{operator}: {name} has strides {tuple(tensor.stride())} of {size}-byte elements; the outer strides "
                f"must be multiples of {multiple} bytes ({multiple // size} elements; those of {name}.contiguous() are)"
            )


def torch_dtype(operator: str, name: str, given: torch.dtype, accepted: Iterable[torch.dtype]) -> None:
    """Check that a dtype given as an argument is one of the accepted."""
    if not isinstance(given, torch.dtype):
        raise ArgumentError(f"{operator}: {name} is a {type(given).__name__}; accepted: {listed(accepted)}")
    if given not in accepted:
        raise ArgumentError(f"{operator}: {name} is {given}; accepted: {listed(accepted)}")


def number(operator: str, name: str, value: float) -> float:
    """Check that an argument is a number of Python or NumPy, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        _refuse_type(operator, name, value, "number")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(
            f"{operator}: {name} is {spelled(value)}, beyond what a float holds; it must be finite in float32 "
            f"(up to {LARGEST_FLOAT32:.3g})"
        ) from None


def scale(operator: str, name: str, value: float) -> float:
    """Check that an argument is a number that is finite in float32, and return it as a float."""
    value = number(operator, name, value)
    if not -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32:
        raise ArgumentError(f"{operator}: {name} is {value}; it must be finite in float32")
    return value


def is_scores_factor(value: float) -> bool:
    """Whether a number is in the range that kernels accept for the factor of scores."""
    return SMALLEST_FLOAT32 <= value <= LARGEST_SCORES_FACTOR


def refuse_scores_factor(operator: str, given: str) -> NoReturn:
    """Raise the error for a factor of scores out of range. given: the argument and its value, in words."""
    raise ArgumentError(
        f"{operator}: {given} must be from {SMALLEST_FLOAT32:.3g} (the smallest normal float32) to "
        f"{LARGEST_SCORES_FACTOR:.0f}"
    )


def equals_one_of(operator: str, name: str, value: object, *accepted: float) -> bool:
    """Whether an argument, which must be a number, equals one of those accepted.

    Its type may be any of numbers, complex ones and decimals too. A call finds what served an earlier one by equal
    options (`kind_of`), so an equal number passes after a right call, and must pass alone.
    """
    if not isinstance(value, numbers.Number):
        _refuse_type(operator, name, value, "number")
    try:
        return value in accepted
    except ArithmeticError:  # a decimal that is a signalling NaN
        return False


def _refuse_type(operator: str, name: str, value: object, wanted: str) -> NoReturn:
    raise ArgumentError(
        f"{operator}: {name} is a {type(value).__name__}; it must be a Python {wanted} "
        "(reading a tensor here would wait for the GPU)"
    )


def lse_base(operator: str, value: float) -> None:
    """Refuse a base of log-sum-exps that is neither 2 nor e."""
    if not equals_one_of(operator, "lse_base", value, 2.0, math.e):
        raise ArgumentError(f"{operator}: lse_base is {spelled(value)}; accepted: 2 and math.e")


def integer(operator: str, name: str, value: int, lowest: int, highest: int) -> int:
    """Check that an argument is an integer of Python or NumPy in a range, and return it as an int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse_type(operator, name, value, "integer")
    if not lowest <= value <= highest:
        raise ArgumentError(f"{operator}: {name} is {spelled(value)}; it must be from {lowest} to {highest}")
    return int(value)


def flag(operator: str, name: str, value: bool) -> bool:
    """Check that an argument is True or False, or a number that equals one of them, and return it as a bool."""
    numpy_bool = type(value).__name__ in ("bool", "bool_")  # the name depends on NumPy's version
    is_number = isinstance(value, numbers.Number)
    if not (numpy_bool or is_number and equals_one_of(operator, name, value, False, True)):
        raise ArgumentError(f"{operator}: {name} is {spelled(value)}; it must be True or False")
    return bool(value)


def each(check: Callable[..., Any], operator: str, *limits: int, **values: Any) -> Iterator[Any]:
    """Run one check on each of some named arguments, and yield what it returns, in their order."""
    return (check(operator, name, value, *limits) for name, value in values.items())


def spelled(value: object) -> str:
    """Return an argument as error texts print it: a number or a short string itself, the type of anything else."""
    if isinstance(value, numbers.Rational):
        long = max(abs(int(value.numerator)), int(value.denominator)) > 10**20
        return "a number of more than 20 digits" if long else str(value)
    if isinstance(value, float):
        return str(value)
    return reprlib.repr(value) if isinstance(value, str) else f"a {type(value).__name__}"


def listed(values: Iterable[object]) -> str:
    """Return values as error texts list what is accepted."""
    return ", ".join(str(value) for value in values)


def _shape(sizes: Iterable[int | str]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"
