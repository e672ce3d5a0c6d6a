"""mla_write_cache: quantises keys and scatters them into a paged cache, in one kernel."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import WRITE_CACHE
from ..identity.row_format import RowFormat
from ..identity.support import ROPE_DIM
from ..identity.variant import WriteCacheVariant
from ..loading import resolve
from . import cache_format, checks, examine, traced, written
from .written import Served

_OPERATOR = WRITE_CACHE.name
_kind = examine.kind_of(WRITE_CACHE)


@written.from_table(WRITE_CACHE)
def mla_write_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    rope_cache: torch.Tensor | None = None,
    scale_cache: torch.Tensor | None = None,
    *,
    format: str,
    scale: float = 1.0,
    power_of_two_scales: bool | None = None,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    rope_interleaved: bool | None = None,
    enable_pdl: bool = False,
) -> None:
    """Write the key of token t into slot slot_mapping[t] of a paged cache.

    Slot s is row s % page_size of page s // page_size. What a row then holds, bit for bit, is in terms of PyTorch, with
    c = kv_c[t].float() and r = k_pe[t].float():

    - "bf16", "fp16": c and r as they are given. "latent_bf16", "latent_fp16": c alone.
    - "e4m3": e4m3(c / scale), e4m3(r / scale). "latent_e4m3": e4m3(c / scale) alone.
    - "fp8_ds_mla", DeepSeek's 656 bytes: for each 128 columns b of c, s = max(amax(b) / 448, 2 ** -126) and
      e4m3(b / s); then the four s as float32; then r as bf16, as it is given.
    - "snapmla": s = max(amax(c), 1e-26) / 448, but 1 where amax(c) is 0; e4m3(c / s) in `cache`, bf16(r / s) in
      `rope_cache`, s in `scale_cache`.

    e4m3(x) is x.clamp(-448, 448).to(torch.float8_e4m3fn). amax(x) is the largest magnitude of those that are not NaN, 0
    where all are: an element that is NaN stays NaN and leaves its row's others alone; an infinite one makes a scale
    infinite, so that finite elements of it become 0 and infinite ones NaN. With power_of_two_scales, s is the smallest
    power of two that is not below the one above. "bf16", "fp16", "e4m3" and "fp8_ds_mla" rows are the bytes of vLLM's
    `concat_and_cache_mla` (csrc/cache_kernels.cu); "snapmla" rows follow SnapMLA's formulas
    (docs/reference/cache-formats.md).

    With positions and cos_sin_cache, r is k_pe[t] rotated by its position p, in float32, and rounded to kv_c's dtype:

    - cos, sin = cos_sin_cache[p].float().chunk(2);
    - x and y are the even and the odd elements of k_pe[t].float() where rope_interleaved, else its two halves;
    - x * cos - y * sin takes the place of x, and y * cos + x * sin that of y, each product and each sum rounded.

    With a table of kv_c's dtype, products are exact, and these are the bits of vLLM's `rotary_embedding`
    (csrc/pos_encoding_kernels.cu); with a float32 table, its compiler may leave products unrounded. A position that the
    table does not have makes r NaN.

    Nothing is allocated, but for copies of 32-bit slots and positions, and nothing waits for the GPU: calls can be
    captured in a CUDA graph. Slots of -1, and all others that the cache does not have, are skipped: no value in a
    device tensor leads outside of the tensors passed. Where several tokens have one slot, each byte of it is from one
    of them.

    Args:
        kv_c: [tokens, 512], bf16 or fp16: latent parts, normalised. Here and for k_pe, strided views are fine (both are
            usually slices of one tensor): last dimension contiguous, base address and outer strides multiples of 16
            bytes.
        k_pe: [tokens, 64] or [tokens, 1, 64], kv_c's dtype: rope parts, rotated unless positions are given. None for
            the "latent_..." formats, whose rows have none.
        slot_mapping: [tokens] int64 or int32, contiguous. int32 takes one more small launch.
        cache: [pages, page_size, width] to write into, pages of any size. Width and dtype: 576 of kv_c's dtype for
            "bf16" and "fp16"; 576 of e4m3 or uint8 for "e4m3"; 512 likewise for the "latent_..." formats; 656 of uint8
            or e4m3 for "fp8_ds_mla"; 512 of e4m3 or uint8 for "snapmla". Strides of pages and rows are free
            multiples of 16 bytes, as the address is.
        rope_cache: [pages, page_size, 64] bf16 to write into, for "snapmla" only; strides as those of cache, which it
            may share rows of 640 bytes with.
        scale_cache: [pages, page_size] float32 to write into, for "snapmla" only, any strides.
        format: "bf16", "fp16", "e4m3", "fp8_ds_mla", "snapmla", "latent_bf16", "latent_fp16" or "latent_e4m3"
            (`tsmla.identity.row_format.ROWS`); kv_c is bf16, or fp16 for "fp16", "latent_fp16" and "e4m3".
        scale: Python number; what "e4m3" and "latent_e4m3" rows are multiplied by when they are read, from 2^-126 on. 1
            for all others.
        power_of_two_scales: round scales up to powers of two, for formats with scales in or beside their rows. None:
            True for "snapmla", whose rope part is then divided exactly, and False for others.
        positions: [tokens] int64 or int32, contiguous, to rotate rope parts here. int32 takes one more small launch.
        cos_sin_cache: [any, 64] float32 or kv_c's dtype, with positions: 32 cosines and 32 sines of each position, as
            vLLM's RotaryEmbedding has them. Last dimension contiguous, address and outer stride multiples of 16 bytes.
        rope_interleaved: with positions: whether pairs are neighbours (DeepSeek's, GPT-J's) or lie in the two halves
            (GPT-NeoX's; vLLM's is_neox).
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, or for this dtype and format.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        return registered.calls["write_cache"](*written.parameters())
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
        if cos_sin_cache is not None:
            cos_sin_cache = _as_float32(cos_sin_cache)
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


def _as_float32(table: torch.Tensor) -> torch.Tensor:
    """View the rows of a table of cosines and sines as words of 32 bits, as kernels take them."""
    if table.dtype is torch.float32:
        return table
    if len(table) > 1:
        return table.view(torch.float32)
    return table.reshape(-1).view(torch.float32).view(len(table), ROPE_DIM // 2)


def _examined(tensors: tuple, options: tuple) -> Served:
    """Check everything about a call, and return what serves it."""
    call = written.given(WRITE_CACHE, tensors, options)
    examination = examine.Examination(WRITE_CACHE, tensors)
    row = cache_format.row_of(examination, call.format)
    rounds_up = _rounds_up(row, call.format, call.power_of_two_scales)
    variant = WriteCacheVariant(examination.arch, examination.dtype, row)
    examination.check(variant)
    cache_format.check_size(examination)
    rotates = call.positions is not None, call.cos_sin_cache is not None
    numbers = {
        "power_of_two_scales": int(rounds_up),
        "rope_interleaved": int(_pairs_neighbours(*rotates, call.rope_interleaved)),
    }
    return written.served(WRITE_CACHE, variant, call, numbers)


def _pairs_neighbours(positions: bool, table: bool, asked: bool | None) -> bool:
    """Whether rotated pairs are neighbours; checks that a call has all of what rotates them or nothing."""
    given = {"positions": positions, "cos_sin_cache": table, "rope_interleaved": asked is not None}
    if any(given.values()) and not all(given.values()):
        missing = next(name for name, there in given.items() if not there)
        other = next(name for name, there in given.items() if there)
        raise ArgumentError(f"{_OPERATOR}: {missing} is not given; it goes with {other}")
    return asked is not None and checks.flag(_OPERATOR, "rope_interleaved", asked)


def _rounds_up(row: RowFormat, format: str, asked: bool | None) -> bool:
    """Whether scales are rounded up to powers of two."""
    if asked is None:
        return row.apart
    asked = checks.flag(_OPERATOR, "power_of_two_scales", asked)
    if row.scales is None:
        raise ArgumentError(
            f"{_OPERATOR}: power_of_two_scales is {asked}; it must be None, because {format} rows have no scales"
        )
    return asked


traced.offer(WRITE_CACHE, mla_write_cache)
