"""mla_kv_pack_quantize_fp8: the K and V of an FP8 prefill from the parts that the projections produce."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import checks, resolve
from .checks import LARGEST_FLOAT32
from .errors import ArgumentError, UnsupportedError
from .support import PACK_DTYPES, PACK_OUT_DTYPES, why_unsupported
from .variant import PackVariant

_OPERATOR = "mla_kv_pack_quantize_fp8"
_ALIGNMENT = 16
"""Bytes: every load and store of the kernel is 16 bytes wide."""
_BYTES = 2
"""Of an element of each of PACK_DTYPES."""
_DTYPES = {torch_dtype: ours for torch_dtype, ours in checks.TORCH_DTYPES.items() if ours in PACK_DTYPES}
_FP8_DTYPES = {torch_dtype: ours for torch_dtype, ours in checks.TORCH_DTYPES.items() if ours in PACK_OUT_DTYPES}
_grad_enabled = torch.is_grad_enabled
_MAX_ROWS = 2**30
"""Tokens x heads: the kernel counts rows in 32 bits; addresses are 64-bit."""

Served = tuple[Callable[..., None], int, int, int, int]
"""The kernel of a call, and its tokens, heads and widths of K and V."""


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
    """fp8(cat(k_nope, k_pe broadcast over heads) * k_scale_inv) and fp8(v * v_scale_inv), in one pass over memory.

    Each element is widened to float32, multiplied once, clamped to the finite range of `fp8_dtype` and rounded to
    nearest even; NaN stays NaN. No tokens or no heads launch nothing.

    Args:
        k_nope: [tokens, heads, d_nope], bf16 or fp16. Here and for k_pe, v, k_out and v_out, strided views are
            fine (k_nope and v are usually slices of one tensor): last dimension contiguous, base address and outer
            strides multiples of 16 bytes.
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
    if type(enable_pdl) is not bool:
        enable_pdl = checks.flag(_OPERATOR, "enable_pdl", enable_pdl)
    given = (k_nope, k_pe, v, k_out, v_out, fp8_dtype, enable_pdl)
    kernel, tokens, heads, d_k, d_v = _known(*given) or _examined(*given)
    if not (
        type(k_scale_inv) is type(v_scale_inv) is float
        and -LARGEST_FLOAT32 <= k_scale_inv <= LARGEST_FLOAT32
        and -LARGEST_FLOAT32 <= v_scale_inv <= LARGEST_FLOAT32
    ):
        k_scale_inv = checks.scale(_OPERATOR, "k_scale_inv", k_scale_inv)
        v_scale_inv = checks.scale(_OPERATOR, "v_scale_inv", v_scale_inv)
    if k_out is None:
        strides = (heads * d_k, d_k, 1)
        k_out = torch.empty_strided((tokens, heads, d_k), strides, dtype=fp8_dtype, device=k_nope.device)
    if v_out is None:
        strides = (heads * d_v, d_v, 1)
        v_out = torch.empty_strided((tokens, heads, d_v), strides, dtype=fp8_dtype, device=k_nope.device)
    if tokens and heads:
        shared = k_pe if k_pe.ndim == 2 else k_pe.squeeze(1)
        kernel(k_nope, shared, v, k_out, v_out, k_scale_inv, v_scale_inv)
    return k_out, v_out


def _known(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    pdl: bool,
) -> Served | None:
    """What serves a call of a kind seen before whose tensors are plainly as `_check` wants them, in a microsecond.

    None for every other call: wrong ones, and right ones with odd strides of dimensions of size 1.
    """
    try:
        device, dtype, graded = k_nope.device, k_nope.dtype, _grad_enabled()
        tokens, heads, d_nope = k_nope.shape
        d_v = v.shape[2]
        k_token, k_head, k_dim = k_nope.stride()
        v_token, v_head, v_dim = v.stride()
        rope_shape, rope_stride = k_pe.shape, k_pe.stride()
        d_rope = rope_shape[-1]
        strides = k_token | k_head | v_token | v_head | rope_stride[0]
        addresses = k_nope.data_ptr() | v.data_ptr() | k_pe.data_ptr()
        if not (
            k_dim == v_dim == rope_stride[-1] == 1
            and (addresses | strides * _BYTES) % _ALIGNMENT == 0
            and v.shape == (tokens, heads, d_v)
            and rope_shape in ((tokens, 1, d_rope), (tokens, d_rope))
            and tokens * heads <= _MAX_ROWS
            and type(k_nope) is type(k_pe) is type(v)
            and v.dtype is dtype
            and k_pe.dtype is dtype
            and v.device == device
            and k_pe.device == device
            and not (k_nope.is_neg() or k_pe.is_neg() or v.is_neg())
            and not (graded and (k_nope.requires_grad or k_pe.requires_grad or v.requires_grad))
        ):
            return None
        for out, width in ((k_out, d_nope + d_rope), (v_out, d_v)):
            if out is not None:
                if not (
                    (out.is_contiguous() or _spaced(out))
                    and out.data_ptr() % _ALIGNMENT == 0
                    and out.shape == (tokens, heads, width)
                    and out.dtype is fp8_dtype
                    and type(out) is type(k_nope)
                    and out.device == device
                    and not (out.is_neg() or graded and out.requires_grad)
                ):
                    return None
        kernel = resolve.calls.get((_OPERATOR, device, dtype, fp8_dtype, d_nope, d_rope, d_v, pdl, type(k_nope)))
        return kernel and (kernel, tokens, heads, d_nope + d_rope, d_v)
    except Exception:  # whatever wrong arguments raise; `_examined` finds words for it
        return None


def _spaced(out: torch.Tensor) -> bool:
    """Whether the rows of an output with gaps are apart, and start at multiples of 16 bytes."""
    token, head, dim = out.stride()
    return dim == 1 and (token | head) % _ALIGNMENT == 0 and not checks.overlapping(out)


def _examined(
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
    fp8_dtype: torch.dtype,
    pdl: bool,
) -> Served:
    """What serves a call, with every check and its error; `_known` knows calls of this kind afterwards."""
    variant = _variant(k_nope, k_pe, v, fp8_dtype, pdl)
    _check(variant, k_nope, k_pe, v, k_out, v_out, fp8_dtype)
    dims = (variant.d_nope, variant.d_rope, variant.d_v)
    kind = (_OPERATOR, k_nope.device, k_nope.dtype, fp8_dtype, *dims, pdl, type(k_nope))
    kernel = resolve.kernel(variant)
    resolve.keep(kind, kernel)
    return kernel, *k_nope.shape[:2], variant.d_nope + variant.d_rope, variant.d_v


def _variant(
    k_nope: torch.Tensor, k_pe: torch.Tensor, v: torch.Tensor, fp8_dtype: torch.dtype, pdl: bool
) -> PackVariant:
    """The variant a call needs; raises when the dtypes, the GPU or the head dimensions have none."""
    device = checks.cuda(_OPERATOR, "k_nope", k_nope)
    for name, tensor in (("k_pe", k_pe), ("v", v)):
        checks.same_device(_OPERATOR, name, tensor, "k_nope", device)
    checks.ndim(_OPERATOR, "k_nope", k_nope, ("tokens", "heads", "d_nope"))
    checks.ndim(_OPERATOR, "v", v, ("tokens", "heads", "d_v"))
    if k_pe.ndim != 2:
        checks.ndim(_OPERATOR, "k_pe", k_pe, ("tokens", "1", "d_rope"))
    checks.dtype_in(_OPERATOR, "k_nope", k_nope, _DTYPES)
    checks.torch_dtype(_OPERATOR, "fp8_dtype", fp8_dtype, _FP8_DTYPES)
    variant = PackVariant(
        arch=checks.arch_of(device),
        dtype=_DTYPES[k_nope.dtype],
        out_dtype=_FP8_DTYPES[fp8_dtype],
        d_nope=k_nope.shape[-1],
        d_rope=k_pe.shape[-1],
        d_v=v.shape[-1],
        pdl=pdl,
    )
    if reason := why_unsupported(variant):
        raise UnsupportedError(f"{_OPERATOR}: {reason}")
    return variant


def _check(
    variant: PackVariant,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    v: torch.Tensor,
    k_out: torch.Tensor | None,
    v_out: torch.Tensor | None,
    fp8_dtype: torch.dtype,
) -> None:
    """Everything about the tensors that the kernel relies on and that `_variant` has not looked at."""
    tokens, heads, _ = k_nope.shape
    if tokens * heads > _MAX_ROWS:
        raise ArgumentError(
            f"{_OPERATOR}: k_nope has {tokens} tokens x {heads} heads; at most {_MAX_ROWS} rows fit one call"
        )
    rope_shape = (tokens, variant.d_rope) if k_pe.ndim == 2 else (tokens, 1, variant.d_rope)
    tensors = [
        ("k_nope", k_nope, (tokens, heads, variant.d_nope), k_nope.dtype),
        ("k_pe", k_pe, rope_shape, k_nope.dtype),
        ("v", v, (tokens, heads, variant.d_v), k_nope.dtype),
    ]
    for name, out, width in (("k_out", k_out, variant.d_nope + variant.d_rope), ("v_out", v_out, variant.d_v)):
        if out is not None:
            checks.same_device(_OPERATOR, name, out, "k_nope", k_nope.device)
            tensors.append((name, out, (tokens, heads, width), fp8_dtype))
            checks.no_overlap(_OPERATOR, name, out)
    for name, tensor, shape, dtype in tensors:
        checks.dtype_in(_OPERATOR, name, tensor, (dtype,))
        checks.shape(_OPERATOR, name, tensor, shape)
        checks.last_dim_contiguous(_OPERATOR, name, tensor)
        checks.aligned(_OPERATOR, name, tensor, _ALIGNMENT)
