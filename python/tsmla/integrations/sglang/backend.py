"""The attention backend of one of SGLang's model runners: it describes batches to kernels, and runs layers on them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask
from sglang.srt.runtime_context import get_parallel, get_spec

from tsmla.integrations.shared.queries import Query, in_requests
from tsmla.operators.decode import SMALL_PAGE_SIZES, tsmla_decode

from . import NAME, PAGE, extend, logger, ready, releases, served
from .metadata import GraphMemory, Layout, Requests, described, starts_of


class Extend:
    """A batch with new tokens. Layers that expand keys need `starts` only, the others the whole of it.

    starts: [requests + 1] int32, where each request's new tokens start.
    """

    def __init__(self, layout: Layout, forward_batch: Any, most_keys: int) -> None:
        self.starts = starts_of(forward_batch.extend_seq_lens)
        self._layout, self._batch, self._most_keys = layout, forward_batch, most_keys
        self._requests: Requests | None = None

    @property
    def requests(self) -> Requests:
        """Describe the batch to decodes, which read new tokens' keys from the cache as well."""
        if self._requests is None:
            batch = self._batch
            longest_q = max(batch.extend_seq_lens_cpu)
            self._requests = described(
                self._layout, batch.req_pool_indices, batch.seq_lens, self._most_keys, longest_q, self.starts
            )
        return self._requests


class TsmlaBackend(AttentionBackend):
    """Decodes, verifies drafts and prefills. LSEs that ranks merge have base 2, as SGLang takes it of names it does not
    know."""

    needs_cpu_seq_lens: bool = False
    """Where SGLang has lengths on the host they bound page tables; nothing waits for them."""
    forward_metadata: Any = None
    """Requests of decodes, an Extend, or None for a batch without requests."""

    def __init__(self, model_runner: Any) -> None:
        config, parallel, spec = model_runner.model_config, get_parallel(), get_spec()
        self.data_type, self.kv_cache_dtype = model_runner.kv_cache_dtype, model_runner.kv_cache_dtype
        self.max_context_len = config.context_len
        self.kv_index_translator = getattr(model_runner, "kv_index_translator", None)
        self.token_to_kv_pool, self.req_to_token_pool = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
        self._model = described_model(model_runner, config, parallel, spec)
        if reason := served.why_not_served(self._model, ready.capability()):
            raise NotImplementedError(reason)
        if self._model.page in SMALL_PAGE_SIZES:
            logger.warning(
                "tsmla reads pages of %d key(s) one by one; --page-size %d is faster", self._model.page, PAGE
            )
        self._drafts = (spec.speculative_num_draft_tokens or 0) if self._model.algorithm else 0
        self._is_draft = model_runner.is_draft_worker
        self._device = torch.device(model_runner.device)
        rank = parallel.dcp_rank if self._model.world > 1 else 0
        self._layout = Layout(self.req_to_token_pool.req_to_token, self._model.page, self._model.world, rank)
        self._graphs: GraphMemory | None = None
        self._verify_mask: VerifyMask | None = None
        self._checked: set[tuple[int, int]] = set()
        self._workspaces: dict[int, torch.Tensor] = {}
        ready.load(self._model)
        self._workspace(config.num_attention_heads // parallel.attn_tp_size * self._model.world)

    def _workspace(self, heads: int) -> torch.Tensor:
        if heads not in self._workspaces:
            self._workspaces[heads] = ready.workspace(heads, self._device)
        return self._workspaces[heads]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe a batch that runs outside of graphs."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
        elif mode.is_decode() or mode.is_target_verify():
            q_len, uncounted = self._query_tokens(mode)
            self.forward_metadata = described(
                self._layout,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens + uncounted,
                self._most_keys(forward_batch) + uncounted,
                q_len,
            )
        elif mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise NotImplementedError(f"tsmla's SGLang plug-in runs no batches of the kind {mode.name}")
        else:
            self.forward_metadata = Extend(self._layout, forward_batch, self._most_keys(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._graphs = GraphMemory(self._layout, max_bs)
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=self._is_draft,
            skip_prefill=False,
            max_bs=max_bs,
            max_context_len=self.max_context_len,
            num_draft_tokens=self._drafts,
            device=self._device,
            is_read=False,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Describe a batch that a graph runs, in the memory that graphs read. Captures and replays do the same."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(
                f"tsmla is not captured in graphs of {mode.name} batches; --cuda-graph-backend-prefill disabled turns "
                "them off"
            )
        assert self._graphs is not None
        count = forward_batch.batch_size
        q_len, uncounted = self._query_tokens(mode)
        columns = self._layout.pages_of(self._most_keys(forward_batch) + uncounted)
        self.forward_metadata = self._graphs.fill(
            forward_batch.req_pool_indices[:count],
            forward_batch.seq_lens[:count] + uncounted,
            columns,
            self.max_context_len + uncounted,
            q_len,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Memory for a mask that SGLang writes and, as drafts are chains, nobody reads."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: no buffer depends on the mask."""

    def _query_tokens(self, mode: Any) -> tuple[int, int]:
        """Return the query tokens of each request of a decode, and how many of their keys SGLang does not count yet."""
        return (self._drafts, self._drafts) if mode.is_target_verify() else (1, 0)

    def _most_keys(self, forward_batch: Any) -> int:
        """Return at least the most keys of a request, without asking the GPU."""
        known = forward_batch.seq_lens_cpu
        return self.max_context_len if known is None or not len(known) else max(int(known.max()), 1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Decode: return the output [tokens, heads * 512] and, under context parallelism, the LSE [tokens, heads].

        q: [tokens, heads, 576], or the part of 512 with `q_rope`, the part of 64. k: the new keys, in as many parts.
        """
        self._check(layer, others)
        self._write(k, v, layer, forward_batch, save_kv_cache, k_rope)
        requests = self.forward_metadata
        if requests.count < forward_batch.batch_size:
            self.init_forward_metadata(forward_batch)  # the batch was padded after it had been described
            requests = self.forward_metadata
        return self._decoded(self._query(q, q_rope, layer), layer, requests)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Prefill where keys are expanded; decode drafts, and new tokens whose layer does not expand keys."""
        if forward_batch.forward_mode.is_target_verify():
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, **others)
        self._check(layer, others)
        if layer.v_head_dim != self._model.latent:
            if not self._model.prefills:
                raise NotImplementedError(f"tsmla was not made for prefills; name --prefill-attention-backend {NAME}")
            return extend.attend(q, k, v, layer, forward_batch, self.forward_metadata.starts)
        if self._layout.world > 1:
            raise NotImplementedError(
                "under context parallelism tsmla prefills with keys of every head; --disable-chunked-prefix-cache and "
                "captured prefills (--cuda-graph-backend-prefill) leave them latent"
            )
        self._write(k, v, layer, forward_batch, save_kv_cache, k_rope)
        return self._decoded(self._query(q, q_rope, layer), layer, self.forward_metadata.requests)

    def _check(self, layer: Any, others: dict[str, Any]) -> None:
        """Refuse a layer that is not served, at its first call."""
        kind = layer.layer_id, layer.v_head_dim
        if kind in self._checked and not others:
            return
        if reason := served.why_no_layer(layer, self._model.cache is served.FP8, others):
            raise NotImplementedError(reason)
        self._checked.add(kind)

    def _write(self, k: torch.Tensor | None, v: Any, layer: Any, forward_batch: Any, wanted: bool, k_rope: Any) -> None:
        """Have SGLang's pool write the new keys."""
        if k is None or not wanted:
            return
        where = releases.write_location(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)

    def _query(self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: Any) -> Query:
        """Return a query in the cache's dtype: [tokens, heads, 576], or its two parts."""
        if q_rope is None or not self._model.dims[1]:
            return self._rounded(q.view(-1, layer.tp_q_head_num, self._model.columns))
        latent = q.view(-1, layer.tp_q_head_num, self._model.latent)
        return self._rounded(latent), self._rounded(q_rope.view(-1, layer.tp_q_head_num, self._model.dims[1]))

    def _rounded(self, part: torch.Tensor) -> torch.Tensor:
        """Return a query's part in the cache's dtype. torch's casts to e4m3 saturate."""
        return part.to(served.FP8) if self._model.cache is served.FP8 else part

    def _decoded(
        self, query: Query, layer: Any, requests: Requests
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        pool, parallel = self.token_to_kv_pool.get_key_buffer(layer.layer_id), self._layout.world > 1
        heads = layer.tp_q_head_num
        result = tsmla_decode(
            query if requests.starts is not None else in_requests(query, requests.q_len),  # type: ignore[arg-type]
            pool.view(-1, self._model.page, self._model.columns),
            self._workspace(heads),
            self._model.latent,
            self._model.dims[1],
            requests.table,
            requests.lengths,
            requests.longest,
            layer.scaling,
            return_lse=parallel,
            causal_seqs=requests.totals,
            cp_world=self._layout.world,
            cp_rank=self._layout.rank,
            cum_seq_lens_q=requests.starts,
            max_q_len=None if requests.starts is None else requests.q_len,
        )
        if not isinstance(result, tuple):
            return result.view(-1, heads * self._model.latent)
        out, lse = result
        return out.view(-1, heads * self._model.latent), lse.view(-1, heads)


def described_model(model_runner: Any, config: Any, parallel: Any, spec: Any) -> served.Model:
    """Return what decides whether a runner's model is served."""
    algorithm = spec.speculative_algorithm
    text = config.hf_text_config
    if not model_runner.use_mla_backend:
        return served.Model(False, 0, (0, 0, 0), model_runner.dtype, model_runner.kv_cache_dtype, 1, False)
    return served.Model(
        mla=True,
        latent=config.kv_lora_rank,
        dims=(config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim),
        dtype=model_runner.dtype,
        cache=model_runner.kv_cache_dtype,
        page=model_runner.page_size,
        prefills=releases.prefill_backend(model_runner) == NAME,
        world=parallel.dcp_size if parallel.dcp_enabled else 1,
        algorithm=algorithm,
        candidates=spec.speculative_eagle_topk or 1,
        odd={
            "keys that layers choose (sparse attention)": getattr(text, "index_topk", None) is not None,
            "queries scaled by their positions (llama_4_scaling)": getattr(text, "llama_4_scaling", None) is not None,
        },
    )
