"""FlashInfer's prefill of ragged packs, computed by `tsmla_prefill`."""

from __future__ import annotations

import torch

from ...errors import ArgumentError, UnsupportedError
from ...operators import checks
from ...operators.prefill import tsmla_prefill
from .. import translate

_FACE = "trtllm_ragged_attention_deepseek"
_NAMES = {
    "softmax_scale": "bmm1_scale",
    "v_scale": "bmm2_scale",
    "cum_seq_lens": "cum_seq_lens_kv",
    "sinks": "attention_sinks",
}


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    o_sf_scale: float | None,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: torch.Tensor | None = None,
    kv_seq_lens_cpu: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    skip_all_rows_active_check: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tsmla_prefill` with FlashInfer's arguments and results; shapes and dtypes are in its docstring.

    Args:
        query, key, value: [tokens, heads, dim], dims those of `tsmla_prefill`; strided views are read correctly.
        workspace_buffer, seq_lens, max_q_len, max_kv_len, q_seq_lens_cpu, kv_seq_lens_cpu, skip_all_rows_active_check:
            not read; the kernel finds lengths, and rows without keys, itself.
        bmm1_scale, bmm2_scale: factors of the scores and of the output: numbers, or floating-point tensors of one
            element. A CUDA tensor is waited for, and refused while a CUDA graph is captured.
        o_sf_scale: 1, -1 or None: it scales 4-bit outputs, which are not written here.
        window_left: -1.
        cum_seq_lens_q, cum_seq_lens_kv: [batch_size + 1] int32 on the device.
        enable_pdl: None is False.
        attention_sinks: [heads] float32. With return_lse only under backend "cute-dsl", whose LSE counts them;
            FlashInfer does not say whether trtllm-gen's does.
        lse: [tokens, heads] float32 to write the LSE into, with any strides.
        backend: "trtllm-gen", "cute-dsl" or "auto"; chooses no kernel here.
        skip_softmax_threshold_scale_factor, sage_attn_sfs, num_elts_per_sage_attn_blk, use_fp16_softmax,
        uses_spcompress: refused unless they are what they are by default.

    Returns:
        out [tokens, heads, d_v], query's dtype or bf16 for 8 bits, or (out, lse) with lse [tokens, heads] float32,
        **base 2**. A query row that sees no key gives output 0 and LSE -inf.

    Raises what `tsmla_prefill` raises; the texts have both functions' names of an argument.
    """
    translate.no_skipping(_FACE, skip_softmax_threshold_scale_factor)
    chosen = "it chooses a kernel of FlashInfer's"
    translate.off(_FACE, chosen, use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
    translate.word(_FACE, "backend", backend, ("auto", "trtllm-gen", "cute-dsl"))
    for name, given, neutral in (
        ("sage_attn_sfs", sage_attn_sfs, None),
        ("num_elts_per_sage_attn_blk", num_elts_per_sage_attn_blk, 0),
    ):
        if not isinstance(given, (list, tuple)) or any(x is not neutral for x in given):
            raise UnsupportedError(f"{_FACE}: {name} is given; blocks of keys have no scales of their own here")
    if checks.integer(_FACE, "window_left", window_left, -1, translate.LARGEST_INT) != -1:
        raise UnsupportedError(f"{_FACE}: window_left is {window_left}; prefill has no sliding window, pass -1")
    if o_sf_scale is not None and checks.number(_FACE, "o_sf_scale", o_sf_scale) not in (1.0, -1.0):
        raise UnsupportedError(
            f"{_FACE}: o_sf_scale is {checks.spelled(o_sf_scale)}; it scales 4-bit outputs, which are not written "
            "here; accepted: 1, -1 and None"
        )
    returned = checks.flag(_FACE, "return_lse", return_lse)
    if lse is not None and not returned:
        raise ArgumentError(f"{_FACE}: lse is given and return_lse is False")
    if attention_sinks is not None and returned and backend != "cute-dsl":
        raise UnsupportedError(
            f"{_FACE}: attention_sinks are given with return_lse; whether the LSE of backend {backend} counts them is "
            "not FlashInfer's contract (tsmla_prefill has lse_includes_sink)"
        )
    checks.cuda(_FACE, "query", query)
    if lse is not None:
        sizes = checks.shape(_FACE, "query", query, ("tokens", "heads", "d_qk"))
        translate.check_lse(_FACE, lse, query.device, (sizes["tokens"], sizes["heads"]))
    if cum_seq_lens_q is None:
        raise ArgumentError(f"{_FACE}: cum_seq_lens_q is None; it must be given")
    try:
        return tsmla_prefill(
            query=query,
            key=key,
            value=value,
            seq_lens=None,
            cum_seq_lens=cum_seq_lens_kv,
            max_seq_len=1,
            batch_size=batch_size,
            softmax_scale=translate.number(_FACE, "bmm1_scale", bmm1_scale),
            is_causal=is_causal,
            return_lse=returned,
            cum_seq_lens_q=cum_seq_lens_q,
            enable_pdl=False if enable_pdl is None else enable_pdl,
            out=out,
            v_scale=translate.number(_FACE, "bmm2_scale", bmm2_scale),
            sinks=attention_sinks,
            lse_includes_sink=returned and attention_sinks is not None,
            lse=lse,
            lse_base=2.0,
        )
    except ArgumentError as error:
        raise translate.in_their_words(_FACE, error, _NAMES) from None
