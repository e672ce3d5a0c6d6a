"""mla_kv_pack_quantize_fp8: joins and quantises K and V for an FP8 prefill."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import ArgumentError, TsmlaError
from ..identity.call import PACK
from ..identity.support import PACK_OUT_DTYPES
from ..identity.variant import PackVariant
from ..loading import resolve
from . import checks, examine, traced, written
from .checks import LARGEST_FLOAT32
from .written import Served

_OPERATOR = PACK.name
_kind = examine.kind_of(PACK)
_FP8_DTYPES = {torch_dtype: ours for torch_dtype, ours in checks.TORCH_DTYPES.items() if ours in PACK_OUT_DTYPES}
_MAX_ROWS = 2**30
"""Most tokens x heads: the kernel counts rows in 32 bits; addresses are 64-bit."""


@written.from_table(PACK)
def mla_kv_pack_quantize_fp8(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_scale_inv: float = 1.0,
    v_scale_inv: float = 1.0,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    enable_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise K and V for an FP8 prefill in one pass over memory, from the parts that projections produce.

    K is fp8(cat(k_nope, k_pe broadcast over heads) * k_scale_inv), V is fp8(v * v_scale_inv). Each element is widened
    to float32, multiplied once, clamped to the finite range of `fp8_dtype` and rounded to nearest even; NaN stays NaN.
    No tokens or no heads launch nothing.

    Args:
        k_nope: [tokens, heads, d_nope], bf16 or fp16. Here and for k_pe, v, k_out and v_out, strided views are fine
            (k_nope and v are usually slices of one tensor): last dimension contiguous, base address and outer strides
            multiples of 16 bytes.
        k_pe: [tokens, 1, d_rope] or [tokens, d_rope], k_nope's dtype; shared by all heads.
        v: [tokens, heads, d_v], k_nope's dtype.
        k_scale_inv, v_scale_inv: Python numbers that multiply K and V (the reciprocals of the dequantisation scales);
            finite in float32.
        k_out: [tokens, heads, d_nope + d_rope] of `fp8_dtype` to write into.
        v_out: [tokens, heads, d_v] of `fp8_dtype` to write into.
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.

    Returns:
        (k_out, v_out), contiguous where they were not given.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU, dtype or head dimensions.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        return registered.calls["pack"](*written.parameters())
    if not (
        type(k_scale_inv) is type(v_scale_inv) is float
        and -LARGEST_FLOAT32 <= k_scale_inv <= LARGEST_FLOAT32
        and -LARGEST_FLOAT32 <= v_scale_inv <= LARGEST_FLOAT32
    ):
        k_scale_inv, v_scale_inv = checks.each(
            checks.scale, _OPERATOR, k_scale_inv=k_scale_inv, v_scale_inv=v_scale_inv
        )
    tensors, options = written.tensors(), written.options()
    try:
        tokens, heads, _ = shape = k_nope.shape
        kind = _kind(tensors, shape, options, tokens * heads <= _MAX_ROWS)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options))
        if k_out is None:
            k_out = served.empty.new_empty(tokens, heads, served.d_k)
        if v_out is None:
            v_out = served.empty.new_empty(tokens, heads, served.d_v)
        if tokens and heads:
            served.kernel(*written.arguments(served))
        else:  # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(tensors, options)
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options)  # raises if an argument is wrong, and says which
        raise
    return k_out, v_out


def _examined(tensors: tuple, options: tuple) -> Served:
    """Check everything about a call, and return what serves it: the widths of K and V, too, and an empty tensor of
    their dtype."""
    call = written.given(PACK, tensors, options)
    examination = examine.Examination(PACK, tensors)
    sizes = examination.sizes
    checks.torch_dtype(_OPERATOR, "fp8_dtype", call.fp8_dtype, _FP8_DTYPES)
    dims = sizes["d_nope"], sizes["d_rope"], sizes["d_v"]
    variant = PackVariant(examination.arch, examination.dtype, _FP8_DTYPES[call.fp8_dtype], *dims)
    examination.check(variant)
    if sizes["tokens"] * sizes["heads"] > _MAX_ROWS:
        raise ArgumentError(
            f"{_OPERATOR}: k_nope has {sizes['tokens']} tokens x {sizes['heads']} heads; at most {_MAX_ROWS} rows fit "
            "one call"
        )
    empty = call.k_nope.new_empty(0, dtype=call.fp8_dtype)
    return written.served(PACK, variant, call, {}, empty=empty, d_k=variant.d_nope + variant.d_rope, d_v=variant.d_v)


traced.offer(PACK, mla_kv_pack_quantize_fp8, dtype_given="fp8_dtype")
