"""tsmla_key_mask: the bit mask that `tsmla_prefill(key_mask=)` takes, from lists of chosen keys."""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from ..errors import TsmlaError
from ..identity.call import KEY_MASK
from ..identity.key_mask import words_for
from ..identity.variant import KeyMaskVariant
from ..loading import resolve
from . import checks, examine, traced, written
from .checks import LARGEST_INT
from .written import Served

_OPERATOR = KEY_MASK.name
_kind = examine.kind_of(KEY_MASK)


@written.from_table(KEY_MASK)
def tsmla_key_mask(
    indices: torch.Tensor,
    keys: int,
    *,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool = False,
) -> torch.Tensor:
    """Turn a list of chosen keys for each query token into a bit for each key, as `tsmla_prefill` takes them.

    Bit b of word w of a token is set if key 32 * w + b is in its list. Every word is written, and the result has the
    same bits in every run. Nothing is allocated but the result (and a 32-bit copy of 64-bit lengths), and nothing waits
    for the GPU: calls can be captured in a CUDA graph.

    Args:
        indices: [tokens, top_k] int32, last dimension contiguous: the keys of each token, in any order, as positions in
            its own sequence (not slots of a cache). One that is negative, or not below `keys`, names no key; one that
            stands twice counts once. Causality is not added here: `is_causal` of the prefill goes with the mask.
        keys: of the longest sequence: a token has as many words as these fill, keys / 32 rounded up.
        topk_length: [tokens] int32 or int64: only so many of the first indices of each list count, none where it is
            negative. All when None.
        out: [tokens, words] int32 to write into, last dimension contiguous. It may share no memory with another
            argument; this is not checked.
        enable_pdl: launch with programmatic dependent launch; the kernel waits for its predecessor before it reads.

    Returns:
        out, [tokens, words] int32.

    Raises:
        ArgumentError: an argument is of the wrong device, dtype, shape, stride or value; the text names it.
        UnsupportedError: no kernel exists for this GPU.
        KernelUnavailable: the kernel exists but could neither be loaded nor compiled.
    """
    if is_dynamo_compiling():
        from . import registered

        if out is None:
            out = indices.new_empty(len(indices), words_for(keys))
        return registered.calls["key_mask"](*written.parameters())
    if type(keys) is not int or not 0 <= keys <= LARGEST_INT:
        keys = checks.integer(_OPERATOR, "keys", keys, 0, LARGEST_INT)
    words = words_for(keys)
    tensors, options = written.tensors(), written.options()
    try:
        kind = _kind(tensors, indices.shape, options, out is None or out.shape[1] == words)
        served = resolve.calls.get(kind) or resolve.keep(kind, _examined(tensors, options, words))
        if out is None:
            out = indices.new_empty((len(indices), words))
        if out.numel():
            served.kernel(*written.arguments(served))
        else:  # nothing is launched, so no kernel checks what the kind leaves to it
            _examined(tensors, options, words)
    except TsmlaError:
        raise
    except Exception:
        _examined(tensors, options, words)  # raises if an argument is wrong, and says which
        raise
    return out


def _examined(tensors: tuple, options: tuple, words: int) -> Served:
    """Check everything about a call, and return what serves it."""
    call = written.given(KEY_MASK, tensors, options)
    examination = examine.Examination(KEY_MASK, tensors, sizes={"mask_words": words})
    variant = KeyMaskVariant(examination.arch)
    examination.check(variant)
    return written.served(KEY_MASK, variant, call, {})


traced.offer(KEY_MASK, tsmla_key_mask)
