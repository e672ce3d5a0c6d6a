"""The signature that prefill kernels of all architectures share."""

from __future__ import annotations

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from tsmla.variant import PrefillVariant

from ..parts.precision import numeric


def prefill_arguments(variant: PrefillVariant) -> tuple:
    """Fake arguments in calling order, shapes and strides symbolic: q, k, v, out, [lse], cum_seq_lens_q,
    cum_seq_lens_kv, softmax_scale, output_scale; the stream comes from the TVM-FFI environment."""

    def pack(rows, heads, dim, element):
        stride = tuple(cute.sym_int64(divisibility=128 // element.width) for _ in range(2))
        return make_fake_tensor(element, (rows, heads, dim), (*stride, 1), assumed_align=16)

    rows_q, rows_kv, heads_q, heads_kv, ends = (cute.sym_int() for _ in range(5))
    dtype, out_dtype = numeric(variant.dtype), numeric(variant.out_dtype)
    lse = make_fake_tensor(Float32, (rows_q, heads_q), (cute.sym_int64(), 1), assumed_align=4)
    cum_seq_lens = [make_fake_tensor(Int32, (ends,), (1,), assumed_align=4) for _ in range(2)]
    return (
        pack(rows_q, heads_q, variant.d_qk, dtype),
        pack(rows_kv, heads_kv, variant.d_qk, dtype),
        pack(rows_kv, heads_kv, variant.d_v, dtype),
        pack(rows_q, heads_q, variant.d_v, out_dtype),
        lse if variant.lse else None,
        *cum_seq_lens,
        Float32(1.0),
        Float32(1.0),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
