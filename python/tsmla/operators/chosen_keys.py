"""`tsmla_decode` of chosen keys (sparse attention): each query token becomes a request whose page table lists its keys,
in pages of one."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

import torch

from ..errors import ArgumentError, TsmlaError
from ..identity.call import DECODE
from . import checks
from .capture import is_capturing
from .checks import LARGEST_INT

_OPERATOR = DECODE.name
_MOST_BYTES = 2**35
"""Bytes of a cache that places of rows reach: they are 32-bit numbers of vectors of 16 bytes."""
_LEAST_KEPT = 1 << 14
_every_key: dict[tuple[torch.device, int], torch.Tensor] = {}
"""GPU and number of query tokens, in powers of two -> lengths beyond those of any list."""
_WITHOUT = {
    **dict.fromkeys(("block_tables", "seq_lens", "max_seq_len"), (None, "indices take its place")),
    **dict.fromkeys(
        ("cum_seq_lens_q", "max_q_len"),
        (None, "each query token has its own list, whichever request it is of; a pack is a query [tokens, heads, ..]"),
    ),
    **dict.fromkeys(
        ("causal_seqs", "local_visible_lens"), (None, "a query token sees the keys of its list and no others")
    ),
    "window_left": (-1, "a query token sees the keys of its list and no others"),
    "cp_world": (1, "on each rank, indices are slots of its own cache, and -1 for keys of other ranks"),
}
"""Arguments that indices leave no meaning -> what they must be beside these, and why."""


class Requests(NamedTuple):
    """A call of chosen keys as one of requests of one query token each.

    shape: of the query tokens, [batch, q_len] or [tokens].
    """

    query: Any
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    out: torch.Tensor | None
    lse: torch.Tensor | None
    shape: torch.Size


def as_requests(query: Any, indices: Any, topk_length: Any, out: Any, lse: Any, *others: Any) -> Requests:
    """Return the requests of a call. others: arguments that indices leave no meaning, in the order of `_WITHOUT`."""
    for (name, (accepted, why)), value in zip(_WITHOUT.items(), others, strict=True):
        if value is not accepted:
            _refuse_beside_indices(name, value, accepted, why)
    latent = query[0] if type(query) is tuple and query else query
    try:
        shape = latent.shape[:-2]
        if latent.ndim not in (3, 4) or indices.ndim != len(shape) + 1 or indices.shape[:-1] != shape:
            _refuse_shapes(latent, indices)
        tokens, top_k = math.prod(shape), indices.shape[-1]
        return Requests(
            tuple(_one_token(x, shape) for x in query) if type(query) is tuple else _one_token(query, shape),
            indices if len(shape) == 1 else indices.reshape(tokens, top_k),
            _lengths(topk_length, shape, tokens, indices),
            max(1, top_k),
            _result(out, "out", shape),
            _result(lse, "lse", shape),
            shape,
        )
    except TsmlaError:
        raise
    except Exception:
        named = {"query": latent, "indices": indices, "topk_length": topk_length, "out": out, "lse": lse}
        for name, tensor in named.items():
            if name in ("query", "indices") or tensor is not None:
                checks.stored(_OPERATOR, name, tensor)
        raise


def _refuse_beside_indices(name: str, value: Any, accepted: int | None, why: str) -> None:
    """Refuse an argument that indices leave no meaning, unless it is another spelling of the accepted integer."""
    if accepted is None or checks.integer(_OPERATOR, name, value, -LARGEST_INT, LARGEST_INT) != accepted:
        given = f"is {checks.spelled(value)}" if isinstance(value, int) else "is given"
        raise ArgumentError(f"{_OPERATOR}: {name} {given} beside indices; it must be {accepted}: {why}")


def _refuse_shapes(query: Any, indices: Any) -> NoReturn:
    for name, tensor in (("query", query), ("indices", indices)):
        checks.stored(_OPERATOR, name, tensor)
    given = list(query.shape)
    if query.ndim not in (3, 4):
        wanted = "[batch, q_len, heads, columns] or [tokens, heads, columns]"
        raise ArgumentError(f"{_OPERATOR}: query has shape {given}; with indices it must be {wanted}")
    wanted = f"[{', '.join(map(str, given[:-2]))}, top_k]"
    raise ArgumentError(
        f"{_OPERATOR}: indices has shape {list(indices.shape)}; it must be {wanted}, a list for each query token of "
        f"query {given}"
    )


def _one_token(piece: Any, shape: torch.Size) -> Any:
    """View rows [.., heads, columns], or scales [.., heads], of query tokens as those of requests of one token."""
    if len(shape) == 2 and piece.shape[:2] == shape:
        return piece.reshape(math.prod(shape), 1, *piece.shape[2:])
    return piece.unsqueeze(1) if len(shape) == 1 else piece


def _lengths(given: Any, shape: torch.Size, tokens: int, indices: torch.Tensor) -> torch.Tensor:
    if given is None:
        return _all(tokens, indices)
    if given.shape == shape:
        return given.contiguous().view(tokens) if len(shape) == 2 else given
    if len(shape) == 2 and given.shape == shape[:1]:
        return given[:, None].expand(shape).contiguous().view(tokens)
    checks.stored(_OPERATOR, "topk_length", given)
    wanted = f"{list(shape)}, or {list(shape[:1])} for lists of one length" if len(shape) == 2 else f"{list(shape)}"
    raise ArgumentError(f"{_OPERATOR}: topk_length has shape {list(given.shape)}; it must be {wanted}")


def _all(tokens: int, indices: torch.Tensor) -> torch.Tensor:
    """Return lengths beyond any list's, on the lists' GPU. They are kept for good, so that calls launch nothing more
    and graphs may refer to them; what is made while a CUDA graph is captured belongs to the graph, and is not."""
    device = indices.device
    kept = _every_key.get((device, size := max(_LEAST_KEPT, 1 << (max(tokens, 1) - 1).bit_length())))
    if kept is None:
        if is_capturing():
            return torch.full((tokens,), LARGEST_INT, dtype=torch.int32, device=device)
        checks.stored(_OPERATOR, "indices", indices)
        # A copy from the CPU is waited for: later calls may be on other streams.
        kept = torch.full((size,), LARGEST_INT, dtype=torch.int32, device="cpu").to(device)
        if checks.has_memory(kept):  # what a FakeTensorMode makes is of no use to later calls
            _every_key[device, size] = kept
    return kept[:tokens]


def _result(given: Any, name: str, shape: torch.Size) -> Any:
    """View a result that the caller gives as one of requests of one token each."""
    if given is None:
        return None
    if given.shape[: len(shape)] != shape:
        checks.stored(_OPERATOR, name, given)
        raise ArgumentError(
            f"{_OPERATOR}: {name} has shape {list(given.shape)}; its query tokens must be query's, {list(shape)}"
        )
    try:
        return given.view(math.prod(shape), 1, *given.shape[len(shape) :])
    except RuntimeError:
        checks.stored(_OPERATOR, name, given)
        raise ArgumentError(
            f"{_OPERATOR}: {name} has shape {list(given.shape)} and strides {given.stride()}; with indices, its first "
            "two dimensions must lie in memory as one"
        ) from None


def as_given(shape: torch.Size, callers: tuple, made: tuple) -> tuple[torch.Tensor | None, ...]:
    """Return the caller's results, and those that were made for requests of one token each with the dimensions of the
    query tokens."""
    return tuple(
        given if x is None or given is not None else x.view(*shape, *x.shape[2:])
        for given, x in zip(callers, made, strict=True)
    )


def none_counts(lists: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and lengths of a call whose query tokens see nothing, from requests' lists [tokens, top_k]."""
    return lists.unsqueeze(1), lists.new_zeros(len(lists))


def in_words_of_lists(error: ArgumentError) -> ArgumentError:
    """Say in an error about shapes why these have other dimensions than the caller's."""
    if " has shape " not in str(error):
        return error
    return type(error)(f"{error} (with indices, each query token counts as a request of one token)")


def check_cache(name: str, cache: torch.Tensor) -> None:
    """Refuse a cache [pages, page_size, columns], or [pages, 1, page_size, columns], whose rows cannot be found one by
    one: pages without rows, or more bytes than places count."""
    *outer, page_size, columns = cache.shape
    if page_size == 0:
        raise ArgumentError(f"{_OPERATOR}: {name} has pages of 0 keys; they must have at least one")
    pages = outer[0]
    elements = max(pages - 1, 0) * cache.stride(0) + (page_size - 1) * cache.stride(-2) + columns
    if (reach := elements * cache.element_size()) >= _MOST_BYTES:
        raise ArgumentError(
            f"{_OPERATOR}: {name} reaches over {reach} bytes from its first key to its last; where keys are "
            f"found one by one, it must be less than {_MOST_BYTES} (32 GiB)"
        )
