"""A call as data: for each operator, what its kernel takes, in which order, and what callers may give for it.

From these tables derive the kernels' signatures (`tsmla_kernels.entry`), the checks of tensors and their errors
(`checks.examine`), the keys under which calls of a kind are remembered (`checks.kind_of`), the arguments of a warm-up
(`prepare`) and docs/arguments.md. Standard library only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from .support import DECODE_OUT_DTYPES, PACK_DTYPES
from .variant import DecodeVariant, Dtype, PackVariant, PrefillVariant, Variant


class Strides(enum.Enum):
    """How a tensor may lie in memory; the value says it in words."""

    WHOLE = "contiguous"
    ROWS = "last dimension contiguous"
    PAGES = "each page contiguous"
    ANY = "any strides"


class LeftOut(enum.Enum):
    """What a kernel gets for a tensor that a caller does not give, where it is not another argument."""

    REFUSED = ""
    MADE = "the operator makes one"
    EMPTY = "an empty tensor takes its place"


@dataclasses.dataclass(frozen=True)
class Argument:
    """One parameter of a kernel.

    Of a tensor, `shape` has sizes by name: those that are fields of the variant are compiled in, all others are the
    call's, and one name is one size wherever it stands. `dtype` is a field of the variant, or a torch dtype's name.
    """

    name: str
    """The kernel's. Names are part of its signature."""
    given: str
    """What callers call it."""
    shape: tuple[str | int, ...] = ()
    dtype: str = "int32"
    strides: Strides = Strides.WHOLE
    align: int = 4
    """Bytes: what its address, and its outer strides where they are free, are multiples of."""
    left_out: LeftOut | str = LeftOut.REFUSED
    """A name is the caller's argument that takes its place."""
    also_shape: tuple[str | int, ...] = ()
    """Another shape that callers may give; the operator takes away the 1 in it."""
    also_dtypes: tuple[str, ...] = ()
    """Other dtypes that callers may give."""
    only_with: str = ""
    """The variant's flag without which the kernel gets None."""
    written: bool = False

    is_tensor = True

    @property
    def rewritten(self) -> bool:
        """Whether the operator may pass 32-bit halves of 64-bit elements, which are not next to each other."""
        return "int64" in self.also_dtypes


@dataclasses.dataclass(frozen=True)
class Number:
    """One parameter of a kernel that is a number. meaning: what of the caller's arguments it is."""

    name: str
    kind: type[int] | type[float]
    meaning: str

    is_tensor = False


@dataclasses.dataclass(frozen=True)
class Operator:
    """A public function, and what its kernels take, in the order in which they take it; a stream follows.

    dtypes: those of the inputs, which the first tensor decides. keyed: sizes of the call that its checks or its plan
    look at, besides comparing them with each other.
    """

    name: str
    variant: type[Variant]
    arguments: tuple[Argument | Number, ...]
    dtypes: tuple[Dtype, ...]
    keyed: tuple[str, ...]

    @property
    def tensors(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if isinstance(argument, Argument))

    @property
    def given(self) -> tuple[Argument, ...]:
        """Tensors that callers give."""
        return tuple(argument for argument in self.tensors if not argument.only_with)

    @property
    def deciding(self) -> tuple[Argument, ...]:
        """Tensors that the variant follows from: the first, and each that is first to have a size which is a field."""
        seen: set[str | int] = set()
        fields = {field.name for field in dataclasses.fields(self.variant)}
        found = []
        for argument in self.given:
            new = (set(argument.shape) & fields) - seen
            if not found or new:
                found.append(argument)
            seen |= new
        return tuple(found)


def extent(dimension: str | int, sizes: Mapping[str, int]) -> int | None:
    """A size such as 576, "heads" or "d_nope + d_rope", where all in it is known."""
    if isinstance(dimension, int):
        return dimension
    terms = [int(term) if term.isdigit() else sizes.get(term) for term in dimension.split(" + ")]
    return None if None in terms else sum(term for term in terms if term is not None)


def fixed_sizes(variant: Variant) -> dict[str, int]:
    """The sizes that are compiled into a kernel, by the names that shapes have for them."""
    if isinstance(variant, DecodeVariant):
        return {"row_columns": variant.row.columns, "value_columns": variant.row.value_columns}
    fields = {field.name: getattr(variant, field.name) for field in dataclasses.fields(variant)}
    return {name: value for name, value in fields.items() if type(value) is int}


def _heads(name: str, given: str, rows: str, heads: str, width: str, dtype: str = "dtype", **more) -> Argument:
    """[rows, heads, width], as projections produce it and TMA reads it: views of wider tensors too."""
    return Argument(name, given, (rows, heads, width), dtype, Strides.ROWS, 16, **more)


def _factor(name: str, meaning: str) -> Number:
    return Number(name, float, meaning)


def _count(name: str, meaning: str) -> Number:
    return Number(name, int, meaning)


_ENDS = ("batch_size + 1",)
PREFILL = Operator(
    "tsmla_prefill",
    PrefillVariant,
    (
        _heads("q", "query", "tokens_q", "heads_q", "d_qk"),
        _heads("k", "key", "tokens_kv", "heads_kv", "d_qk"),
        _heads("v", "value", "tokens_kv", "heads_kv", "d_v"),
        _heads("out", "out", "tokens_q", "heads_q", "d_v", "out_dtype", left_out=LeftOut.MADE, written=True),
        Argument("lse", "return_lse", ("tokens_q", "heads_q"), "float32", only_with="lse", written=True),
        Argument("cum_seq_lens_q", "cum_seq_lens_q", _ENDS, left_out="cum_seq_lens"),
        Argument("cum_seq_lens_kv", "cum_seq_lens", _ENDS),
        _factor("softmax_scale", "softmax_scale * k_scale"),
        _factor("output_scale", "v_scale * output_scale"),
    ),
    dtypes=tuple(Dtype),
    keyed=("heads_q", "heads_kv"),
)

_BATCH = ("batch", "q_len", "heads")
DECODE = Operator(
    "tsmla_decode",
    DecodeVariant,
    (
        Argument("query", "query", (*_BATCH, "row_columns"), "dtype", align=16),
        Argument(
            "kv_cache", "kv_cache", ("pages", "page_size", "row_columns"), "dtype", Strides.PAGES, 16,
            also_shape=("pages", 1, "page_size", "row_columns"),
        ),
        Argument("block_tables", "block_tables", ("batch", "width"), strides=Strides.ROWS),
        Argument("seq_lens", "seq_lens", ("batch",), also_dtypes=("int64",)),
        Argument("causal_seqs", "causal_seqs", ("batch",), also_dtypes=("int64",), left_out="seq_lens"),
        Argument(
            "visible", "local_visible_lens", ("batch", "q_len"), strides=Strides.ANY, left_out=LeftOut.EMPTY,
        ),
        Argument("out", "out", (*_BATCH, "value_columns"), "out_dtype", align=16, left_out=LeftOut.MADE, written=True),
        Argument("lse", "return_lse", _BATCH, "float32", only_with="lse", written=True),
        Argument("workspace", "workspace_buffer", ("bytes",), "int8", align=16, also_dtypes=("uint8",)),
        _factor("softmax_scale", "softmax_scale"),
        _factor("output_scale", "output_scale"),
        _count("causal", "causal_mask"),
        _count("window_left", "window_left"),
        _count("cp_world", "cp_world"),
        _count("cp_rank", "cp_rank"),
        _count("cp_interleave", "cp_interleave_size"),
        _count("parts", "CTAs, or pairs of them, that share the work (`plan.py`)"),
    ),
    dtypes=tuple(DECODE_OUT_DTYPES),
    keyed=(*_BATCH, "pages", "page_size"),
)  # fmt: skip

PACK = Operator(
    "mla_kv_pack_quantize_fp8",
    PackVariant,
    (
        _heads("k_nope", "k_nope", "tokens", "heads", "d_nope"),
        Argument(
            "k_pe", "k_pe", ("tokens", "d_rope"), "dtype", Strides.ROWS, 16, also_shape=("tokens", 1, "d_rope")
        ),
        _heads("v", "v", "tokens", "heads", "d_v"),
        _heads(
            "k_out", "k_out", "tokens", "heads", "d_nope + d_rope", "out_dtype", left_out=LeftOut.MADE, written=True
        ),
        _heads("v_out", "v_out", "tokens", "heads", "d_v", "out_dtype", left_out=LeftOut.MADE, written=True),
        _factor("k_scale_inv", "k_scale_inv"),
        _factor("v_scale_inv", "v_scale_inv"),
    ),
    dtypes=PACK_DTYPES,
    keyed=(),
)

OPERATORS = {operator.variant.family: operator for operator in (PREFILL, DECODE, PACK)}
