"""A call as data: for each operator, what its kernels take, in which order, and what callers may give for it.

These tables decide the kernels' signatures (`tsmla_kernels.entry`), the checks of tensors and the keys under which
kinds of calls are remembered (`examine`), the arguments of a warm-up (`prepare`) and docs/reference/arguments.md.
Standard library only."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from .support import DECODE_OUT_DTYPES, LATENT_DIM, PACK_DTYPES, ROPE_DIM
from .variant import (
    DecodeVariant,
    Dtype,
    KeyMaskVariant,
    PackVariant,
    PrefillVariant,
    QuantizeQVariant,
    ReadCacheVariant,
    Variant,
    WriteCacheVariant,
)


class Strides(enum.Enum):
    """How a tensor may lie in memory; the value says it in words."""

    WHOLE = "contiguous"
    ROWS = "last dimension contiguous"
    PAGES = "pages contiguous"
    ANY = "any"


class LeftOut(enum.Enum):
    """What takes the place of a tensor that a caller leaves out, if no other argument does; the value says it in
    words."""

    REFUSED = "must be given"
    MADE = "made"
    EMPTY = "an empty tensor"


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that a kernel takes. Sizes in shapes that are fields of the variant are compiled in, all others are the
    call's; one name is one size wherever it stands.

    name: the kernel's, part of its signature. given: what callers call it; "key[1]" is the second of a pair, whose
    first is then the tensor called "key"; "query[2]" is the third of three; without it, callers do not know the tensor,
    which the operator has in a variable of the kernel's name. dtype: a field of the variant, or torch's
    name. align: its address, and free outer strides, are multiples of this many bytes. left_out: a name is the caller's
    argument that takes its place. also_shape, also_dtypes: what callers may give besides; the operator rewrites it.
    packed_shape: what callers give instead where query tokens of all requests lie one behind the other; the operator
    makes one request of them. only_with: a flag of the variant; without it the kernel gets None. only_where: a
    property of the variant's, likewise; "apart" where a row's parts always lie in separate tensors. free_strides: how
    it may lie where rows are copied one by one, or their parts lie apart. written: holds a result. scratch: written,
    too, and nothing in it outlives a call. absent: the shape of an empty tensor in its place, where the sizes that have
    names are not all 0 in that. piece: the piece of a cache row that it belongs to; kernels of rows without that piece
    get None, and callers give none."""

    name: str
    given: str
    shape: tuple[str | int, ...]
    dtype: str = "int32"
    strides: Strides = Strides.WHOLE
    align: int = 4
    left_out: LeftOut | str = LeftOut.REFUSED
    also_shape: tuple[str | int, ...] = ()
    also_dtypes: tuple[str, ...] = ()
    packed_shape: tuple[str | int, ...] = ()
    only_with: str = ""
    only_where: str = ""
    free_strides: Strides | None = None
    written: bool = False
    scratch: bool = False
    absent: tuple[int, ...] = ()
    piece: str = ""

    def taken_by(self, variant: Variant) -> bool:
        """Whether kernels of a variant take it; others get None."""
        return all(getattr(variant, name) for name in (self.only_with, self.only_where) if name) and self.is_of(variant)

    def is_of(self, variant: Variant) -> bool:
        """Whether a variant's rows have the piece that it belongs to, if it belongs to one."""
        return not self.piece or (isinstance(variant, _WithRows) and variant.row.has(self.piece))

    def is_copied(self, element_size: int) -> bool:
        """Whether kernels get a copy of a tensor with elements of this many bytes: integers of another size."""
        return f"int{8 * element_size}" in self.also_dtypes and f"int{8 * element_size}" != self.dtype

    def strides_for(self, variant: Variant) -> Strides:
        """How it lies in memory for kernels of a variant."""
        if self.free_strides and isinstance(variant, DecodeVariant) and (variant.gathers or variant.apart):
            return self.free_strides
        return self.strides


@dataclasses.dataclass(frozen=True)
class Number:
    """A number that a kernel takes. given: how it follows from the caller's arguments. neutral: the value that changes
    nothing. per_call: it may differ between calls of one kind, and `given` is the expression for it; others are options
    or follow from what makes a kind."""

    name: str
    given: str
    neutral: float | int
    per_call: bool = False


@dataclasses.dataclass(frozen=True)
class Operator:
    """A public function, and what its kernels take, in their order; a stream follows.

    dtypes: the inputs'; the first tensor decides. Empty where all that there are stand in the table. keyed: sizes of
    the call that its checks or its plan look at, besides comparing them with each other. unkeyed: fields in which no
    two variants differ, so that every kernel refuses other sizes. known: sizes that all variants share, for errors
    that come before the variant is known."""

    name: str
    variant: type[Variant]
    arguments: tuple[Argument | Number, ...]
    dtypes: tuple[Dtype, ...]
    keyed: tuple[str, ...] = ()
    unkeyed: tuple[str, ...] = ()
    known: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def tensors(self) -> tuple[Argument, ...]:
        """Tensors that kernels take."""
        return tuple(x for x in self.arguments if isinstance(x, Argument))

    @property
    def given(self) -> tuple[Argument, ...]:
        """Tensors that callers give."""
        return tuple(x for x in self.tensors if x.given)

    @property
    def numbers(self) -> tuple[Number, ...]:
        return tuple(x for x in self.arguments if isinstance(x, Number))

    @property
    def deciding(self) -> tuple[Argument, ...]:
        """Tensors that the variant follows from: the first, and each that is first to have a size which is a field."""
        fields = {field.name for field in dataclasses.fields(self.variant)}
        found: list[Argument] = []
        for argument in self.given:
            if not found or fields & set(argument.shape):
                found.append(argument)
            fields -= set(argument.shape)
        return tuple(found)


_WithRows = DecodeVariant | WriteCacheVariant | ReadCacheVariant | QuantizeQVariant


def tuples_of(operator: Operator, name: str) -> tuple[int, ...]:
    """How many tensors a tuple given for an argument may have: two, and one more where rows have scales."""
    behind = [x for x in operator.given if x.given.startswith(f"{name}[")]
    return tuple(range(2, 2 + len(behind)))


def extent(size: str | int, sizes: Mapping[str, int]) -> int | None:
    """A size such as 576, "heads" or "d_nope + d_rope"; None when something in it is not known."""
    terms = [int(term) if term.isdigit() else sizes.get(term) for term in str(size).split(" + ")]
    return None if None in terms else sum(term for term in terms if term is not None)


def fixed_sizes(variant: Variant) -> dict[str, int]:
    """The sizes that are compiled into a kernel, by the names that shapes have for them."""
    if isinstance(variant, DecodeVariant):
        row = variant.row
        sizes = {"value_columns": row.value_columns}
        if variant.apart or len(row.pieces) == 1:
            sizes["query_columns"] = row.value_columns
        return sizes if variant.rope_may_be_apart and not variant.apart else {"row_width": variant.row_width, **sizes}
    if isinstance(variant, WriteCacheVariant | ReadCacheVariant):
        return {"row_width": variant.row_width}
    fields = {field.name: getattr(variant, field.name) for field in dataclasses.fields(variant)}
    return {name: value for name, value in fields.items() if type(value) is int}


def _rows(name: str, given: str, shape: tuple[str | int, ...], dtype: str = "dtype", **more: Any) -> Argument:
    """Rows as projections produce them and tensor maps read them: slices of wider tensors too."""
    return Argument(name, given, shape, dtype, Strides.ROWS, 16, **more)


_MADE: dict[str, Any] = {"left_out": LeftOut.MADE, "written": True}
_OUT = {"dtype": "out_dtype", **_MADE}
_LSE = {"dtype": "float32", "only_with": "lse", **_MADE}
_PDL = Number("pdl", "enable_pdl", 0)

PREFILL = Operator(
    "tsmla_prefill",
    PrefillVariant,
    (
        _rows("q", "query", ("tokens_q", "heads_q", "d_query")),
        _rows("q_pe", "query[1]", ("tokens_q", "heads_q", ROPE_DIM), left_out=LeftOut.EMPTY, absent=(0, 1, ROPE_DIM)),
        _rows("k", "key", ("tokens_kv", "heads_kv", "d_key")),
        _rows("k_pe", "key[1]", ("tokens_kv", 1, ROPE_DIM), left_out=LeftOut.EMPTY, also_shape=("tokens_kv", ROPE_DIM)),
        _rows("v", "value", ("tokens_kv", "heads_kv", "d_v")),
        _rows("out", "out", ("tokens_q", "heads_q", "d_v"), **_OUT),
        Argument("lse", "lse", ("tokens_q", "heads_q"), strides=Strides.ANY, **_LSE),
        Argument("cum_seq_lens_q", "cum_seq_lens_q", ("batch_size + 1",), left_out="cum_seq_lens"),
        Argument("cum_seq_lens_kv", "cum_seq_lens", ("batch_size + 1",)),
        Argument("sinks", "sinks", ("heads_q",), "float32", left_out=LeftOut.EMPTY),
        Argument(
            "key_mask",
            "key_mask",
            ("tokens_q", "mask_words"),
            strides=Strides.ROWS,
            left_out=LeftOut.EMPTY,
            only_with="masked",
        ),
        Argument("visits", "", ("lists", "list_words"), only_with="masked", scratch=True),
        Number("softmax_scale", "softmax_scale * k_scale", 1.0, per_call=True),
        Number("output_scale", "v_scale * output_scale", 1.0, per_call=True),
        Number("lse_includes_sink", "lse_includes_sink", 0),
        Number("lse_factor", "1 / log(lse_base)", 1.0),
        Number("merges", "merge_into", 0),
        Number("causal", "is_causal", 0),
        Number("processors", "the GPU's SMs", 1),
        _PDL,
    ),
    dtypes=tuple(Dtype),
    keyed=("heads_q", "heads_kv", "d_query", "d_key"),
    unkeyed=("d_v",),
)

_BATCH, _PACK = ("batch", "q_len", "heads"), ("tokens", "heads")
_SLOTS = ("pages", "page_size")
_PAGES, _PAGES_OF_ONE = (*_SLOTS, "row_width"), ("pages", 1, "page_size", "row_width")
_INT64 = ("int64",)
_APART: dict[str, Any] = {"left_out": LeftOut.EMPTY, "only_where": "apart"}
_ROPE: dict[str, Any] = {"piece": "rope"}


def _query(rope_dtype: str = "dtype") -> tuple[Argument, Argument]:
    """Query rows, or the two pieces of them."""
    return (
        _rows("query", "query", (*_BATCH, "query_columns"), packed_shape=(*_PACK, "query_columns")),
        _rows(
            "q_pe",
            "query[1]",
            (*_BATCH, ROPE_DIM),
            rope_dtype,
            left_out=LeftOut.EMPTY,
            packed_shape=(*_PACK, ROPE_DIM),
            **_ROPE,
        ),
    )


DECODE = Operator(
    "tsmla_decode",
    DecodeVariant,
    (
        *_query("rope_dtype"),
        Argument(
            "kv_cache",
            "kv_cache",
            _PAGES,
            "cache_dtype",
            Strides.PAGES,
            16,
            also_shape=_PAGES_OF_ONE,
            free_strides=Strides.ROWS,
        ),
        Argument("block_tables", "block_tables", ("requests", "width"), strides=Strides.ROWS),
        Argument("seq_lens", "seq_lens", ("requests",), also_dtypes=_INT64),
        Argument("causal_seqs", "causal_seqs", ("requests",), also_dtypes=_INT64, left_out="seq_lens"),
        Argument("cum_seq_lens_q", "cum_seq_lens_q", ("requests + 1",), also_dtypes=_INT64, left_out=LeftOut.EMPTY),
        Argument(
            "visible",
            "local_visible_lens",
            _BATCH[:2],
            strides=Strides.ANY,
            left_out=LeftOut.EMPTY,
            packed_shape=_PACK[:1],
        ),
        Argument("sinks", "sinks", ("heads",), "float32", left_out=LeftOut.EMPTY),
        Argument("out", "out", (*_BATCH, "value_columns"), align=16, **_OUT, packed_shape=(*_PACK, "value_columns")),
        Argument("lse", "lse", _BATCH, strides=Strides.ANY, **_LSE, packed_shape=_PACK),
        Argument("workspace", "workspace_buffer", ("bytes",), "int8", align=16, also_dtypes=("uint8",), scratch=True),
        Argument("query_scales", "query[2]", _BATCH, "float32", Strides.ANY, packed_shape=_PACK, **_APART),
        _rows(
            "rope_cache",
            "kv_cache[1]",
            (*_SLOTS, ROPE_DIM),
            "rope_dtype",
            left_out=LeftOut.EMPTY,
            only_where="rope_may_be_apart",
            absent=(0, 1, ROPE_DIM),
            **_ROPE,
        ),
        Argument("scale_cache", "kv_cache[2]", _SLOTS, "float32", Strides.ANY, **_APART),
        Number("softmax_scale", "softmax_scale", 1.0, per_call=True),
        Number("output_scale", "output_scale", 1.0, per_call=True),
        Number("causal", "causal_mask", 0),
        Number("window_left", "window_left", -1),
        Number("cp_world", "cp_world", 1),
        Number("cp_rank", "cp_rank", 0),
        Number("cp_interleave", "cp_interleave_size", 1),
        Number("lse_includes_sink", "lse_includes_sink", 0),
        Number("lse_factor", "1 / log2(lse_base)", 1.0),
        Number("batch_invariant", "batch_invariant", 0),
        Number("q_len", "max_q_len, or query's q_len", 1),
        Number("entry_keys", "1 with indices, else kv_cache's page_size", 1),
        Number("workers", "the plan's (`plan_decode`)", 1),
        _PDL,
    ),
    dtypes=tuple(DECODE_OUT_DTYPES),
    keyed=(*_BATCH, "requests", "pages", "page_size"),
    known={"query_columns": LATENT_DIM + ROPE_DIM, "value_columns": LATENT_DIM},
)

PACK = Operator(
    "mla_kv_pack_quantize_fp8",
    PackVariant,
    (
        _rows("k_nope", "k_nope", ("tokens", "heads", "d_nope")),
        _rows("k_pe", "k_pe", ("tokens", "d_rope"), also_shape=("tokens", 1, "d_rope")),
        _rows("v", "v", ("tokens", "heads", "d_v")),
        _rows("k_out", "k_out", ("tokens", "heads", "d_nope + d_rope"), **_OUT),
        _rows("v_out", "v_out", ("tokens", "heads", "d_v"), **_OUT),
        Number("k_scale_inv", "k_scale_inv", 1.0, per_call=True),
        Number("v_scale_inv", "v_scale_inv", 1.0, per_call=True),
        _PDL,
    ),
    dtypes=PACK_DTYPES,
)

_INT32 = ("int32",)


def _rows_of_keys(**more: Any) -> tuple[Argument, Argument]:
    """The latent and the rope part of keys outside of a cache."""
    return (
        _rows("kv_c", "kv_c", ("tokens", LATENT_DIM), **more),
        _rows("k_pe", "k_pe", ("tokens", ROPE_DIM), also_shape=("tokens", 1, ROPE_DIM), **more, **_ROPE),
    )


def _cache(**more: Any) -> tuple[Argument, Argument, Argument]:
    """A cache of rows of any format: one tensor, or three."""
    slots, apart = ("pages", "page_size"), {"left_out": LeftOut.EMPTY, **more}
    return (
        _rows("cache", "cache", (*slots, "row_width"), "cache_dtype", also_dtypes=("uint8",), **more),
        _rows("rope_cache", "rope_cache", (*slots, ROPE_DIM), "rope_dtype", **apart, **_ROPE),
        Argument("scale_cache", "scale_cache", slots, "float32", Strides.ANY, **apart),
    )


WRITE_CACHE = Operator(
    "mla_write_cache",
    WriteCacheVariant,
    (
        *_rows_of_keys(),
        Argument("slot_mapping", "slot_mapping", ("tokens",), "int64", align=8, also_dtypes=_INT32),
        *_cache(written=True),
        Argument(
            "positions", "positions", ("tokens",), "int64", align=8, also_dtypes=_INT32, left_out=LeftOut.EMPTY, **_ROPE
        ),
        _rows(
            "cos_sin",
            "cos_sin_cache",
            ("max_positions", "cos_sin_columns"),
            "float32",
            also_dtypes=("dtype",),
            left_out=LeftOut.EMPTY,
            **_ROPE,
        ),
        Number("scale", "scale", 1.0, per_call=True),
        Number("power_of_two_scales", "power_of_two_scales", 0),
        Number("rope_interleaved", "rope_interleaved", 0),
        _PDL,
    ),
    dtypes=(Dtype.BF16, Dtype.FP16),
    known={"cos_sin_columns": ROPE_DIM},
)
READ_CACHE = Operator(
    "mla_read_cache",
    ReadCacheVariant,
    (
        *_rows_of_keys(written=True),
        *_cache(),
        Argument("indices", "indices", ("tokens",), "int64", align=8, also_dtypes=_INT32, left_out=LeftOut.EMPTY),
        Argument("block_tables", "block_tables", ("requests", "width"), strides=Strides.ROWS, left_out=LeftOut.EMPTY),
        Argument("cum_seq_lens", "cum_seq_lens", ("requests + 1",), left_out=LeftOut.EMPTY),
        Argument("seq_starts", "seq_starts", ("requests",), left_out=LeftOut.EMPTY),
        Number("scale", "scale", 1.0, per_call=True),
        _PDL,
    ),
    dtypes=(Dtype.BF16, Dtype.FP16),
)
QUANTIZE_Q = Operator(
    "mla_quantize_q",
    QuantizeQVariant,
    (
        *_query(),
        *(
            _rows(f"{name}_out", f"{name}_out", (*_BATCH, columns), dtype, packed_shape=(*_PACK, columns), **_MADE)
            for name, columns, dtype in (
                ("nope", LATENT_DIM, "float8_e4m3fn"),
                ("rope", ROPE_DIM, "bfloat16"),
            )
        ),
        Argument("scale_out", "scale_out", _BATCH, "float32", Strides.ANY, packed_shape=_PACK, **_MADE),
        Number("power_of_two_scales", "power_of_two_scales", 1),
        _PDL,
    ),
    dtypes=(Dtype.BF16,),
    keyed=("query_columns",),
    known={"query_columns": LATENT_DIM + ROPE_DIM},
)
KEY_MASK = Operator(
    "tsmla_key_mask",
    KeyMaskVariant,
    (
        Argument("indices", "indices", ("tokens", "top_k"), strides=Strides.ROWS),
        Argument("lengths", "topk_length", ("tokens",), also_dtypes=_INT64, left_out=LeftOut.EMPTY),
        Argument("mask", "out", ("tokens", "mask_words"), strides=Strides.ROWS, **_MADE),
        Number("keys", "keys", 0, per_call=True),
        _PDL,
    ),
    dtypes=(),
)

OPERATORS = {
    operator.variant.family: operator
    for operator in (PREFILL, DECODE, PACK, WRITE_CACHE, READ_CACHE, QUANTIZE_Q, KEY_MASK)
}
