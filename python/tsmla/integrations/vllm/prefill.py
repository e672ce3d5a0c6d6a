"""The prefill backend: attention over the keys of new tokens, and over one chunk of the context in front of them.

It works under any decode backend of vLLM's. Under tsmla's own, `mha` calls `attend`, which copies less.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from tsmla.identity.support import NOPE_DIMS, PREFILL_DIMS, ROPE_DIM, prefill_out_dtype
from tsmla.identity.variant import Dtype
from tsmla.integrations.shared.gpus import arch_of, why_no_gpu
from tsmla.integrations.shared.heads import why_not_prefilled
from tsmla.integrations.shared.ready import prefill_kernels
from tsmla.operators.checks import TORCH_DTYPE_OF, TORCH_DTYPES
from tsmla.operators.pack import mla_kv_pack_quantize_fp8
from tsmla.operators.prefill import tsmla_prefill

from . import context, name_in, options, ready
from .builder import verifies_adaptively

Keys = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Keys [tokens, heads, nope + rope], or their parts: [tokens, heads, nope], and [tokens, 1, rope] shared by all
heads."""


class TsmlaPrefill(MLAPrefillBackend):
    supported_mla_dimensions: ClassVar[list[MLADimensions]] = [
        MLADimensions(qk_nope_head_dim=d_qk - ROPE_DIM, qk_rope_head_dim=ROPE_DIM, v_head_dim=d_v)
        for d_qk, d_v in PREFILL_DIMS
    ]
    _leaves_out: bool = False
    """Whether there may be tokens of no request, such as drafts that the GPU leaves out."""

    @staticmethod
    def get_name() -> str:
        return name_in(MLAPrefillBackendEnum)

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return arch_of(device_capability) is not None

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        """Return vLLM's reasons against a configuration, and tsmla's: each says what is served."""
        reasons = super().validate_configuration(device_capability, selector_config)
        return [*reasons, reason] if (reason := why_no_gpu(device_capability)) else reasons

    def __init__(
        self,
        num_heads: int,
        scale: float,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        vllm_config: Any,
    ) -> None:
        super().__init__(
            num_heads=num_heads,
            scale=scale,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            vllm_config=vllm_config,
        )
        self.fp8 = options.fp8_prefill(vllm_config)
        self._leaves_out = verifies_adaptively(vllm_config)
        self._one: torch.Tensor | None = None
        dims = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        dtype = torch.get_default_dtype() if vllm_config.model_config is None else vllm_config.model_config.dtype
        arch = ready.arch()
        if reason := why_not_prefilled(arch, dtype, self.fp8, dims):
            raise NotImplementedError(reason)
        model = TORCH_DTYPES[dtype]
        read, written, packed = (Dtype.E4M3, Dtype.BF16, model) if self.fp8 else (model, model, None)
        if arch is not None:
            prefill_kernels(arch, read, written, dims, packed)

    def supports_out(self) -> bool:
        return True

    @property
    def takes_keys_in_parts(self) -> bool:
        """Whether `attend` takes keys in two parts: prefill reads heads of 128 + 64 and 192 + 64 in two, and the pack
        kernel joins them as it rounds them."""
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        return self.fp8 or (rope == ROPE_DIM and NOPE_DIMS.get(nope + rope) == nope)

    def prepared(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries [tokens, heads, nope + rope] as `attend` takes them."""
        if not self.fp8:
            return q
        if self._one is None:
            self._one = torch.ones(1, dtype=torch.float32, device=q.device)
        rounded, _ = ops.scaled_fp8_quant(q.reshape(q.shape[0], -1), self._one)
        return rounded.view(q.shape)

    def attend(
        self,
        queries: torch.Tensor,
        keys: Keys,
        values: torch.Tensor,
        starts_q: torch.Tensor,
        starts_kv: torch.Tensor,
        causal: bool,
        lse: bool,
        out: torch.Tensor | None = None,
        earlier: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output [tokens, heads, value] and, if asked for, the natural LSE [heads, tokens].

        Tokens of no request give 0 and -inf, as those that see no key.

        starts_q, starts_kv: [requests + 1] int32, where each request's rows start in `queries` and in `keys`.
        earlier: output and LSE over other keys, as this function gives them; the new ones are merged into them, in
            place.
        mask: which keys each query sees, as `tsmla_prefill` takes it; all of its request when None. With `causal`,
            none behind its own.
        """
        if self.fp8:
            keys, values = mla_kv_pack_quantize_fp8(*self._parts(keys), values)
        elif isinstance(keys, tuple):
            keys = keys[0], keys[1].squeeze(1)
        rest: dict[str, Any]
        found: torch.Tensor | None = None
        if earlier is not None:
            out, found = earlier
            rest = {"merge_into": (out, found.t())}
        else:
            rest = {"out": self._without_keys(queries, out) if self._leaves_out else out}
            if lse:
                found = torch.empty(queries.shape[1], queries.shape[0], dtype=torch.float32, device=queries.device)
                rest["lse"] = (found.fill_(-math.inf) if self._leaves_out else found).t()
        result = tsmla_prefill(
            queries,
            keys,
            values,
            None,
            starts_kv,
            0,
            starts_q.numel() - 1,
            self.scale,
            causal,
            cum_seq_lens_q=starts_q,
            key_mask=mask,
            **rest,
        )
        assert isinstance(result, torch.Tensor)
        return result, found

    def _without_keys(self, queries: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Make the output of tokens that see no key, in `out` if given. The launch that follows overwrites the rows of
        requests."""
        if out is not None:
            return out.zero_()
        dtype = TORCH_DTYPE_OF[prefill_out_dtype(TORCH_DTYPES[queries.dtype])]
        return queries.new_zeros(*queries.shape[:2], self.v_head_dim, dtype=dtype)

    def _parts(self, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(keys, tuple):
            return keys
        nope = self.qk_nope_head_dim
        return keys[..., :nope], keys[:, :1, nope:]

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if output_scale is not None:
            raise NotImplementedError("tsmla writes no quantised outputs (supports_quant_output)")
        starts = self._prefill_metadata.query_start_loc
        result, lse = self.attend(self.prepared(q), k, v, starts, starts, True, return_softmax_lse, out)
        return result if lse is None else (result, lse)

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        out: torch.Tensor | None = None,
        *,
        chunk_idx: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the LSE over one chunk of context.

        chunk: an object, in newer vLLMs. chunk_idx: a number in the older ones' lists.
        """
        part = context.chunk_of(self._prefill_metadata, chunk if chunk_idx is None else chunk_idx)
        result, lse = self.attend(self.prepared(q), k, v, part.starts_q, part.starts_kv, False, True, out)
        assert lse is not None
        return result, lse
