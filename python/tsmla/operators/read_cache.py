"""mla_read_cache: gathers keys from a paged cache and dequantises them, in one kernel."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import READ_CACHE
from ..identity.variant import ReadCacheVariant
from ..loading import resolve
from . import cache_format, examine, traced, written
from .written import Served

_OPERATOR = READ_CACHE.name
_kind = examine.kind_of(READ_CACHE)


@written.from_table(READ_CACHE)
def mla_read_cache(
    cache: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    indices: torch.Tensor | None = None,
    *,
    block_tables: torch.Tensor | None = None,
    cum_seq_lens: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    rope_cache: torch.Tensor | None = None,
    scale_cache: torch.Tensor | None = None,
    format: str,
    scale: float = 1.0,
    enable_pdl: bool = False,
) -> None:
    """Gather keys from a paged cache into kv_c and k_pe, for prefills over earlier keys.

    Keys are named in one of two ways:

    - indices: row t is slot indices[t] of the cache. Slot s is row s % page_size of page s // page_size.
    - block_tables and cum_seq_lens: rows cum_seq_lens[b] to cum_seq_lens[b + 1] - 1 are the keys of request b in their
      order, from position seq_starts[b] on. Position p is row p % page_size of page block_tables[b, p // page_size].

    An element with a scale becomes (element.float() * s) rounded to kv_c's dtype, s being `scale` or the row's own;
    others are copied. These are the numbers of vLLM's `gather_and_maybe_dequant_cache`. A row that has no key is 0: one
    whose index is negative or beyond the cache, whose position or page does not exist, or which is no request's.

    Nothing is allocated, but for a copy of 32-bit indices, and nothing waits for the GPU: calls can be captured in a
    CUDA graph. No value in a device tensor leads outside of the tensors passed.

    Args:
        cache, rope_cache, scale_cache, format, scale: a cache as `mla_write_cache` takes it.
        kv_c: [tokens, 512] to write into, bf16, or fp16 of "fp16" and "e4m3". Here and for k_pe: last dimension
            contiguous, base address and outer stride multiples of 16 bytes, so that both may be parts of rows of 576.
        k_pe: [tokens, 64] or [tokens, 1, 64] to write into, kv_c's dtype. None for the "latent_..." formats.
        indices: [tokens] int64 or int32, contiguous. int32 takes one more small launch.
        block_tables: [requests, width] int32, last dimension contiguous.
        cum_seq_lens: [requests + 1] int32, contiguous, not decreasing. Where it does decrease, each row is some
            request's or 0.
        seq_starts: [requests] int32, contiguous; 0 when left out.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, or for this dtype and format.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        return registered.calls["read_cache"](*written.parameters())
    if not cache_format.is_usual(format, scale):
        format, scale = cache_format.checked(_OPERATOR, format, scale)
    options = written.options()
    tensors = written.tensors()
    try:
        cache = cache_format.typed(cache, format)
        tensors = written.tensors()
        shape = kv_c.shape
        kind = _kind(tensors, shape, options, cache_format.is_countable(cache))
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options))
        if shape[0]:
            served.kernel(*written.arguments(served))
        else:  # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(tensors, options)
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options)  # raises if an argument is wrong, and says which
        raise
    return None


def _examined(tensors: tuple, options: tuple) -> Served:
    """Check everything about a call, and return what serves it."""
    call = written.given(READ_CACHE, tensors, options)
    examination = examine.Examination(READ_CACHE, tensors)
    row = cache_format.row_of(examination, call.format)
    _check_places(*(examination.tensors[name] is not None for name in _PLACES))
    variant = ReadCacheVariant(examination.arch, examination.dtype, row)
    examination.check(variant)
    cache_format.check_size(examination)
    return written.served(READ_CACHE, variant, call, {})


_PLACES = ("indices", "block_tables", "cum_seq_lens", "seq_starts")


def _check_places(indices: bool, tables: bool, lengths: bool, starts: bool) -> None:
    """Check that exactly one of the two ways to name rows is given, and all of it."""
    if indices and (tables or lengths or starts):
        other = _PLACES[[indices, tables, lengths, starts].index(True, 1)]
        raise ArgumentError(f"{_OPERATOR}: indices and {other} are given; rows are told by one of them only")
    if not indices and not (tables and lengths):
        missing, why = "indices", "it must be, or block_tables and cum_seq_lens"
        if tables or lengths:
            missing, other = _PLACES[2:0:-1] if tables else _PLACES[1:3]
            why = f"it goes with {other}"
        raise ArgumentError(f"{_OPERATOR}: {missing} is not given; {why}")


traced.offer(READ_CACHE, mla_read_cache)
