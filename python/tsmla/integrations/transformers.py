"""Hugging Face transformers: attention of models with MLA's expanded heads through `tsmla_prefill`.

    from tsmla.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="tsmla", device_map="cuda")

Models hand over queries, keys and values of every head, [batch, heads, length, dim], when they generate, too. Heads
have the dims (192, 128) or (128, 128), in bf16 also (256, 256); query heads may share key heads. Padding may
lie anywhere; packs without padding are told by `cu_seq_lens_q` and `cu_seq_lens_k`, as for FlashAttention. What cannot
be done is refused by name.

The contract is that of transformers 5: `AttentionInterface`, and `AttentionMaskInterface` with q_length and q_offset.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from ..operators.prefill import tsmla_prefill
from .shared import padding
from .shared.padding import Sequences

NAME = "tsmla"
_NEEDED = ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask")
_REFUSED = ("position_bias", "softcap", "s_aux", "sliding_window", "cache", "head_mask")
"""Options of attention functions that change the result and that no kernel takes: refused unless they are None."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """Stands for an attention mask: the sequences of a batch, or the reason why no kernel can apply the mask.

    transformers hands on a mask that is prepared already as it is. It takes this for one: of four dimensions,
    contiguous.
    """

    sequences: Sequences | None
    reason: str = ""
    ndim = 4

    def contiguous(self) -> Mask:
        return self


def register() -> None:
    """Make attn_implementation="tsmla" known to transformers; calling it again changes nothing.

    Raises ImportError without transformers, and UnsupportedError where its masks have another contract.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__
    from transformers.masking_utils import sdpa_mask

    if missing := set(_NEEDED) - set(inspect.signature(sdpa_mask).parameters):
        raise UnsupportedError(
            f"transformers {__version__}: mask functions do not get {', '.join(sorted(missing))}; tsmla's are written "
            "for transformers 5"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | Mask | None = None,
    device: torch.device | str = "cpu",
    **_ignored: Any,
) -> Mask:
    """Make the mask of a forward pass, as a mask function of transformers.

    q_offset, kv_offset: the positions of the first token and key; static caches give tensors. A 2-D attention_mask is
    looked at on the host, as transformers' own functions do, except while torch traces.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if isinstance(attention_mask, Mask):  # generate() prepared it for a cache of fixed size
        return attention_mask
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        return Mask(
            None,
            "masks other than causal and full ones (sliding windows, chunks, several sequences told by position_ids) "
            "have no kernel here; packs are told by cu_seq_lens_q and cu_seq_lens_k",
        )
    causal = mask_function is causal_mask_function
    end = q_offset + q_length if causal else kv_offset + kv_length
    complete = attention_mask is None or (
        type(end) is int
        and attention_mask.shape[1] >= end
        and not torch.compiler.is_compiling()
        and bool(attention_mask[:, :end].all())
    )
    if complete and type(end) is type(kv_offset) is int and end == kv_offset + kv_length:
        return Mask(padding.whole(batch_size, q_length, kv_length, causal, device))
    places = torch.arange(kv_length, device=device) + kv_offset
    keys = (places < end).expand(batch_size, -1)
    if complete or attention_mask is None:
        return Mask(padding.padded(None, keys, q_length, causal, in_order=True))
    given = attention_mask.to(device=device, dtype=torch.bool)
    tokens = _columns(given, torch.arange(q_length, device=device) + q_offset) if causal else None
    return Mask(padding.padded(tokens, keys & _columns(given, places), q_length, causal))


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as a function of transformers does, and return ([batch, length_q, heads, d_v], None).

    query, key, value: [batch, heads, length, dim], bf16 or fp16 on a CUDA device.
    attention_mask: what `mask` returned. None: all keys are seen, or causal if is_causal or the module says so.
    cu_seq_lens_q, cu_seq_lens_k (options): a pack of batch size 1, instead of a mask.
    scaling: d_qk ** -0.5 if None.
    """
    _refuse(query, key, value, dropout, options)
    batch, _, length_q, d_qk = query.shape
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if options.get("cu_seq_lens_q") is not None:
        sequences = _told(options, attention_mask, batch, causal)
    elif attention_mask is None:
        sequences = padding.whole(batch, length_q, key.shape[2], causal, query.device)
    elif not isinstance(attention_mask, Mask):
        raise ArgumentError(
            f"tsmla: attention_mask has shape {list(attention_mask.shape)}; masks are given to models with two "
            "dimensions, [batch, tokens], 0 for padding"
        )
    elif attention_mask.sequences is None:
        raise UnsupportedError(f"tsmla: {attention_mask.reason}")
    else:
        sequences = attention_mask.sequences
    if sequences.ends_q.device != query.device:
        sequences = sequences.to(query.device)
    out = tsmla_prefill(
        query=padding.packed(query, sequences.order_q),
        key=padding.packed(key, sequences.order_kv),
        value=padding.packed(value, sequences.order_kv),
        seq_lens=None,
        cum_seq_lens=sequences.ends_kv,
        max_seq_len=key.shape[2],
        batch_size=sequences.count,
        softmax_scale=d_qk**-0.5 if scaling is None else scaling,
        is_causal=sequences.causal,
        cum_seq_lens_q=sequences.ends_q,
    )
    assert isinstance(out, torch.Tensor)
    return padding.unpacked(out, batch, sequences.order_q), None


def _columns(given: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the columns of a padding mask at `places`; where it has no such column, padding."""
    inside = places < given.shape[1]
    return given[:, places.clamp(max=given.shape[1] - 1)] & inside


def _told(options: dict[str, Any], attention_mask: Any, batch: int, causal: bool) -> Sequences:
    """Make the sequences of a pack from FlashAttention's arguments."""
    ends_q, ends_kv = options["cu_seq_lens_q"], options.get("cu_seq_lens_k")
    if batch != 1:
        raise ArgumentError(f"tsmla: cu_seq_lens_q is given and the batch size is {batch}; a pack has batch size 1")
    if ends_kv is None:
        raise ArgumentError("tsmla: cu_seq_lens_q is given but cu_seq_lens_k is not; give both")
    if isinstance(attention_mask, torch.Tensor) or (
        isinstance(attention_mask, Mask) and attention_mask.sequences and attention_mask.sequences.order_kv is not None
    ):
        raise ArgumentError("tsmla: cu_seq_lens_q is given and attention_mask as well; a pack has no padding")
    return Sequences(ends_q.to(torch.int32), ends_kv.to(torch.int32), causal)


def _refuse(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, options: dict[str, Any]
) -> None:
    """Refuse what attention functions may be asked for and kernels do not compute."""
    if dropout:
        raise ArgumentError(f"tsmla: dropout is {dropout}; there is none here (model.eval(), or attention_dropout=0)")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ArgumentError(
            "tsmla: query, key or value requires a gradient, and none is computed here; call the model under "
            "torch.no_grad() or torch.inference_mode(), as generate() does"
        )
    if options.get("output_attentions"):
        raise ArgumentError("tsmla: output_attentions is True; weights are not kept (attn_implementation='eager' does)")
    for name in _REFUSED:
        if options.get(name) is not None:
            raise ArgumentError(f"tsmla: {name} is given; no kernel takes it")
