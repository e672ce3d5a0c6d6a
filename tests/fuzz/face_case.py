"""Calls of faces: an operator's call that a face can express, and how it is made there."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hypothesis import strategies as st
from tsmla.identity.support import prefill_out_dtype
from tsmla.identity.variant import DecodeVariant, Dtype, PrefillVariant
from tsmla.operators.checks import TORCH_DTYPE_OF

from .decode_case import DecodeCase, decode_cases
from .plain import Plain
from .prefill_case import PrefillCase, prefill_cases
from .reference_decode import Sight

DECODES = ("tokenspeed_mla", "trtllm", "wrapper", "flash_mla")
WITH_SCALES = ("tokenspeed_mla", "trtllm")
"""Faces that take a cache whose rows have scales in them."""
PREFILLS = ("tokenspeed_mla", "ragged")
OPERATOR = "the operator"
"""Stands for a face where none takes the call."""


@dataclasses.dataclass(frozen=True, repr=False)
class FaceCase(Plain):
    """A call that `face` makes of an operator. nested: an LSE that is given has as many dimensions as the query, not
    tokens and heads. again: the wrapper had another plan before, of the same shape, made in inference mode, and keeps
    its tables for a graph."""

    call: DecodeCase | PrefillCase
    face: str
    nested: bool = False
    again: bool = False

    def variant(self, arch: str) -> DecodeVariant | PrefillVariant:
        """The kernel that serves the call on this architecture, if there is one."""
        return self.call.variant(arch)


@st.composite
def face_cases(draw: Any, variant: DecodeVariant | PrefillVariant, hostile: bool = True) -> FaceCase:
    """Draw a call that this kernel serves, of any face that can make it."""
    call: DecodeCase | PrefillCase
    if isinstance(variant, PrefillVariant):
        call = draw(prefill_cases(variant, hostile))
        faces = PREFILLS if variant.out_dtype is Dtype.BF16 else PREFILLS[1:]
        faces = (OPERATOR,) if variant.masked else faces
    else:
        call = draw(decode_cases(variant, hostile=False))
        faces = WITH_SCALES if variant.row.scales else DECODES if variant.lse else DECODES[:-1]
        faces = (OPERATOR,) if variant.row.apart else faces
    face = draw(st.sampled_from(faces))
    if face == OPERATOR:
        return FaceCase(call, face)
    return FaceCase(expressible(call, face), face, draw(st.booleans()), draw(st.booleans()))


def expressible(call: Any, face: str) -> DecodeCase | PrefillCase:
    """Change a call into one that a face can make."""
    changes: dict[str, Any] = {"sinks": None, "lse_includes_sink": False}
    if isinstance(call, PrefillCase):
        ragged = face == "ragged"
        changes |= {
            "k_scale": 1.0,
            "merges": False,
            "rope_layouts": (None, None),
            "output_scale": 1.0,
            "lse_base": 2.0 if ragged else math.e,
            "ends_q": call.ends_kv if call.ends_q is None else call.ends_q,
            **({} if ragged else {"v_scale": 1.0, "heads_first": None}),
        }
        usual = TORCH_DTYPE_OF[prefill_out_dtype(Dtype(call.dtype))]
        if ragged and call.out == "new" and call.written != usual:  # it has no argument for the output's dtype
            changes["out"] = "contiguous"
        return dataclasses.replace(call, **changes)
    parallel = face in ("tokenspeed_mla", "trtllm") and call.sight.cp_world > 1 and (call.lse or face != "trtllm")
    window = call.sight.window_left if face == "tokenspeed_mla" and call.sight.causal and call.visible is None else -1
    sight = Sight(causal=call.sight.causal or face == "trtllm", window_left=window)
    if parallel and (face == "trtllm" or call.visible is None):
        interleave = 1 if face == "trtllm" else call.sight.cp_interleave
        sight = dataclasses.replace(
            sight, cp_world=call.sight.cp_world, cp_rank=call.sight.cp_rank, cp_interleave=interleave
        )
    changes |= {
        "sight": sight,
        "causal_seqs": call.causal_seqs if sight.cp_world > 1 else None,
        "visible": None,
        "batch_invariant": False,
        "query": "joined",
    }
    if face == "tokenspeed_mla":
        changes |= {"lse_base": 2.0, "lse_layout": None, "ends_q": None, "tokens": 0}
        if call.visible is not None and call.ends_q is None and sight == Sight(causal=sight.causal):
            changes |= {"visible": call.visible, "sight": Sight(causal=False)}
    elif face == "flash_mla":
        changes |= {"lse_base": math.e, "lse_layout": None, "ends_q": None, "tokens": 0, "out": "new", "cache_dims": 3}
        changes["output_scale"] = 1.0
    elif face == "wrapper":
        changes |= {"cache_dims": 3, "wide_lengths": False, "wide_q": False, "output_scale": 1.0}
        if call.ends_q is not None:
            counts = [max(0, b - a) for a, b in zip(call.ends_q, call.ends_q[1:], strict=False)]
            ends = tuple(sum(counts[:i]) for i in range(len(counts) + 1))
            changes |= {"ends_q": ends, "tokens": ends[-1], "q_len": max([1, *counts])}
    if call.ends_q is not None and changes.get("ends_q", call.ends_q) is None:
        changes["q_len"] = min(call.q_len, 4)
    return dataclasses.replace(call, **changes)
