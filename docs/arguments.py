"""Writes docs/reference/arguments.md from the tables in `tsmla.identity.call`: `python docs/arguments.py`."""

from __future__ import annotations

from pathlib import Path

from tsmla.identity.call import OPERATORS, Argument, LeftOut, Number, Operator, Strides

PAGE = Path(__file__).parent / "reference" / "arguments.md"
_INTRODUCTION = """\
# Arguments

What each kernel takes, in its order, and what callers may give for it. What arguments mean is in the operators'
docstrings. `docs/arguments.py` writes this page from the tables in `python/tsmla/identity/call.py`; kernels' signatures
and the operators' checks follow from them, too.

Sizes such as `d_qk` that are fields of a variant (what a kernel is compiled for) are fixed; all others are free. One
name is one size within a table. *dtype* is the inputs' and *out_dtype* the output's; `python/tsmla/identity/support.py`
says which exist. Addresses, and strides that are free, are multiples of the alignment in bytes, except that the stride
of a dimension of one element means nothing. Tensors that a call writes may share no memory with others that it takes;
nobody checks that. After these arguments every kernel takes a CUDA stream.

A query or key may be given in two pieces, as a tuple. They are two tensors here: `key[1]` is the second, and `key` the
first, or the whole where one tensor is given. So d_query and d_key are d_qk for a whole and 128 for a first piece;
query_columns are 576 or 512. Rows without a rope piece have a row_width and query_columns of 512, and their kernels get
None for what belongs to it. Cache and query of a decode may be tuples of three (SnapMLA's rows: latent pieces, rope
pieces, scales), with a row_width of 512 instead of 576; other kernels get None for what only such calls have. A cache
of two tensors (latent pieces, rope pieces) has a row_width of 512, too. One of DeepSeek's rows has a row_width of 656
and a *cache_dtype* of e4m3 (or uint8, the same bits), while query and *rope_dtype* are bf16.

A decode with `indices`, its callers' lists of keys [batch, q_len, top_k] or [tokens, top_k], is a call of as many
requests as there are query tokens, of one token each: the lists are `block_tables` [requests, width], `topk_length` is
`seq_lens`, and an entry names one key (`entry_keys`) instead of a page."""


def page() -> str:
    """Return the page's text."""
    return "\n\n".join((_INTRODUCTION, *(_section(operator) for operator in OPERATORS.values()))) + "\n"


def _section(operator: Operator) -> str:
    head = ("kernel's", "caller's", "shape", "dtype", "strides", "alignment", "when left out")
    rows = [head, ("---",) * len(head)]
    for argument in operator.arguments:
        rows.append(_number(argument) if isinstance(argument, Number) else _tensor(operator, argument))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## `{operator.name}`\n\n{table}"


def _number(number: Number) -> tuple[str, ...]:
    kind = "float32" if isinstance(number.neutral, float) else "int32"
    given = number.given if " " in number.given.replace(" * ", "*") else f"`{number.given}`"
    return f"`{number.name}`", given, "number", kind, "", "", ""


def _tensor(operator: Operator, argument: Argument) -> tuple[str, ...]:
    named = [shape for shape in (argument.shape, argument.also_shape, argument.packed_shape) if shape]
    shapes = [f"[{', '.join(str(operator.known.get(str(size), size)) for size in shape)}]" for shape in named]
    dtypes = [name if name[-1].isdigit() else f"*{name}*" for name in (argument.dtype, *argument.also_dtypes)]
    outer = len(argument.shape) > 1 and argument.strides in (Strides.ROWS, Strides.PAGES)
    aligned = f"{argument.align}{', outer strides too' if outer and argument.align > 4 else ''}"
    if argument.only_with:
        left_out = "made if asked for" if argument.written else "None"
    elif argument.only_where:
        left_out = "None"
    else:
        left_out = argument.left_out.value if isinstance(argument.left_out, LeftOut) else f"`{argument.left_out}`"
    return (
        f"`{argument.name}`",
        f"`{argument.given}`" if argument.given else "made by the operator",
        " or ".join(shapes),
        " or ".join(dtypes),
        argument.strides.value,
        aligned,
        left_out,
    )


if __name__ == "__main__":
    PAGE.write_text(page())
