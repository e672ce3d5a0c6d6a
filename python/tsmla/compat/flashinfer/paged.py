"""FlashInfer's planned decode, `BatchMLAPagedAttentionWrapper`, computed by `tsmla_decode`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...errors import ArgumentError, UnsupportedError
from ...identity.support import LATENT_DIM, ROPE_DIM
from ...operators import checks
from ...operators.decode import PAGE_SIZES, SMALL_PAGE_SIZES, tsmla_decode
from .. import translate
from . import run_inputs
from .page_tables import Pages, csr_pages, dense_pages

_FACE = "BatchMLAPagedAttentionWrapper"
_PLAN, _RUN = f"{_FACE}.plan", f"{_FACE}.run"
_NAMES = {"workspace_buffer": "float_workspace_buffer", "softmax_scale": "sm_scale"}
_BACKENDS = (
    "auto", "fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa", "cute-dsl", "cute-dsl-monolithic",
    "cute-dsl-modular",
)  # fmt: skip
_CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_DENSE = ("cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len")


class _Planned(NamedTuple):
    """What `plan` leaves for `run`."""

    pages: Pages
    num_heads: int
    rope_dim: int
    page_size: int
    causal: bool
    sm_scale: float
    dtype: torch.dtype
    lse_mode: str
    use_sinks: bool
    enable_pdl: bool


class BatchMLAPagedAttentionWrapper:
    """FlashInfer's wrapper of a paged decode: `plan` takes lengths and pages, `run` calls `tsmla_decode`.

    `plan` reads lengths and page indices back from where they are, makes page tables of them and waits for the GPU, as
    FlashInfer's does; `run` launches.

    Args:
        float_workspace_buffer: contiguous, any dtype, on the device; 128 MiB are enough for up to 8 query tokens a
            request.
        use_cuda_graph: page tables and lengths stay at one place, so that `run` can be captured and `plan` be called
            between replays. Every plan then has as many requests and query tokens as the first one. If the first one's
            requests have different numbers of query tokens, later plans may divide them otherwise. A request has room
            for as many pages as the first plan's widest, or `kv_indices` divided by the requests, whichever is more.
        qo_indptr, kv_indptr, kv_len_arr: not used; kv_indices: only its length is.
        backend: any of FlashInfer's names; chooses no kernel here.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        self.device = checks.cuda(_FACE, "float_workspace_buffer", float_workspace_buffer)
        checks.contiguous(_FACE, "float_workspace_buffer", float_workspace_buffer)
        self._workspace = float_workspace_buffer.view(-1).view(torch.uint8)
        self._use_cuda_graph = checks.flag(_FACE, "use_cuda_graph", use_cuda_graph)
        if kv_indices is not None:
            checks.stored(_FACE, "kv_indices", kv_indices)
        self._page_room = kv_indices.numel() if kv_indices is not None and self._use_cuda_graph else 0
        translate.word(_FACE, "backend", backend, _BACKENDS)
        self._planned: _Planned | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: Any = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Say which requests `run` will see, by page lists or page tables.

        Args:
            qo_indptr, kv_indptr: [batch + 1], first query token and first entry of kv_indices of each request.
            kv_indices: pages of all requests. kv_len_arr: [batch], keys of each request.
            cum_seq_lens_q, block_tables, seq_lens: the same, as `tsmla_decode` has them. max_q_len: not used.
            metadata: an object with these as attributes, such as FlashInfer's MLAPlanMetadata; page tables first.
            num_heads: query heads. head_dim_ckv, head_dim_kpe: 512 and 64, or 512 and 0 (bf16, fp16 or e4m3).
            page_size: 1, 2, 4, 8, 16, 32, 64 or 128.
            causal: query token t sees no further than its own position; aligned to the last key.
            sm_scale: factor of the scores.
            q_data_type, kv_data_type: the same, bf16, fp16, e4m3 or e5m2.
            query_layout, kv_cache_layout: None, "packed" or "split"; `run` takes both.
            lse_mode: "none", "base2" or "basee"; what `run` must then ask for. "none" lets it ask for any.
            output_dtype: None or what `tsmla_decode` writes: query's dtype, bf16 for 8 bits.
            scale_mode: "default", "kv-per-tensor" or "bmm-scalar"; `run` takes what is given.
            enable_pdl: None is False. use_sinks: whether `run` will get sinks.
            use_profiler, output_scale, skip_softmax: refused unless they are what they are by default.
        """
        translate.off(_PLAN, "there is no profiler here", use_profiler=use_profiler)
        translate.off(_PLAN, "every key is computed here", skip_softmax=skip_softmax)
        if translate.word(_PLAN, "output_scale", output_scale, ("none", "per-tensor")) != "none":
            raise UnsupportedError(f"{_PLAN}: output_scale is {output_scale}; 8-bit outputs are not written here")
        translate.word(_PLAN, "scale_mode", scale_mode, ("default", "kv-per-tensor", "bmm-scalar"))
        for name, layout in (("query_layout", query_layout), ("kv_cache_layout", kv_cache_layout)):
            if layout is not None:
                translate.word(_PLAN, name, layout, ("packed", "split"))
        flat = dict(
            zip(
                _CSR + _DENSE,
                (qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len),
                strict=True,
            )
        )
        given: dict[str, Any] = {
            "num_heads": num_heads,
            "head_dim_ckv": head_dim_ckv,
            "head_dim_kpe": head_dim_kpe,
            "page_size": page_size,
            "causal": causal,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        for name, value in given.items():
            if value is None:
                raise ArgumentError(f"{_PLAN}: {name} is None; it must be given")
        for name, exist in (("head_dim_ckv", (LATENT_DIM,)), ("head_dim_kpe", (ROPE_DIM, 0))):
            if (size := checks.integer(_PLAN, name, given[name], 0, translate.LARGEST_INT)) not in exist:
                raise UnsupportedError(f"{_PLAN}: {name} is {size}; kernels exist for {checks.listed(exist)}")
        dtype = run_inputs.planned_dtype(_PLAN, given["q_data_type"], given["kv_data_type"], output_dtype)
        heads = checks.integer(_PLAN, "num_heads", given["num_heads"], 0, translate.LARGEST_INT)
        page = checks.integer(_PLAN, "page_size", given["page_size"], 1, translate.LARGEST_INT)
        if page not in (sizes := (*SMALL_PAGE_SIZES, *PAGE_SIZES)):
            raise UnsupportedError(f"{_PLAN}: page_size is {page}; kernels exist for {checks.listed(sizes)}")
        is_causal = checks.flag(_PLAN, "causal", given["causal"])
        planned = _Planned(
            self._pages(metadata, flat, page),
            heads,
            given["head_dim_kpe"],
            page,
            is_causal,
            checks.number(_PLAN, "sm_scale", given["sm_scale"]),
            dtype,
            translate.word(_PLAN, "lse_mode", lse_mode, ("none", "base2", "basee")),
            checks.flag(_PLAN, "use_sinks", use_sinks),
            enable_pdl is not None and checks.flag(_PLAN, "enable_pdl", enable_pdl),
        )
        # Last, since it may overwrite the plan before this one: a plan that is refused changes nothing.
        self._planned = planned._replace(pages=self._kept(planned.pages, page))

    def _pages(self, metadata: Any, flat: dict[str, Any], page_size: int) -> Pages:
        if metadata is not None:
            if any(value is not None for value in flat.values()):
                both = ", ".join(name for name, value in flat.items() if value is not None)
                raise ArgumentError(f"{_PLAN}: metadata is given, and so is {both}")
            flat = {name: getattr(metadata, name, None) for name in flat}
        for names, pages_of in ((_DENSE[:3], dense_pages), (_CSR, csr_pages)):
            if all(flat[name] is not None for name in names):
                return pages_of(_PLAN, self.device, *(flat[name] for name in names), page_size=page_size)
        raise ArgumentError(f"{_PLAN}: needs {', '.join(_CSR)}, or {', '.join(_DENSE[:3])}, or metadata with either")

    def _kept(self, pages: Pages, page_size: int) -> Pages:
        """Return where `run` finds this plan: with CUDA graphs, the first plan's tensors, overwritten; otherwise
        `pages`."""
        if not self._use_cuda_graph:
            return pages
        width = pages.block_tables.shape[1]
        if self._planned is None:
            room = max(width, self._page_room // max(pages.batch, 1))
            return pages.widened(room, page_size)
        kept = self._planned.pages
        if kept.q_ends is not None:
            pages = pages.spelled_out()
        if pages.said() != kept.said() or width > kept.block_tables.shape[1]:
            raise ArgumentError(
                f"{_PLAN}: with use_cuda_graph, every plan has the shape of the first, {kept.said()}, and up to "
                f"{kept.block_tables.shape[1]} pages each; this one has {pages.said()}, and {width} (kv_indices with "
                "more entries makes room for more pages)"
            )
        return kept.overwritten(pages)

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Decode what `plan` said.

        Args:
            query: [tokens, heads, 576], or a pair of its parts, [tokens, heads, 512] and [tokens, heads, 64], copied
                only where strides are no multiples of 16 bytes. q_nope, q_pe: the pair.
            kv_cache: [pages, page_size, 576], or a pair of its parts. ckv_cache, kpe_cache: the pair, [pages,
                page_size, 512] and [pages, page_size, 64]. Parts that do not lie side by side, as cache[..., :512] and
                cache[..., 512:] do, are read row by row. Where plan had a head_dim_kpe of 0, rows and their parts have
                512 and 0 columns.
            out: [tokens, heads, 512] to write into. lse: [tokens, heads] float32 to write the LSE into, any strides,
                whether it is returned or not.
            ckv_scale, kpe_scale: dequantisation factors of the cache's parts, which must be equal.
            bmm1_scale, bmm2_scale: factors of the scores, in place of the plan's sm_scale, and of the output.
            sinks: [heads] float32, scores of one more key without a value, if `plan` said so; not with an LSE.
            profiler_buffer, kv_len, page_table, o_scale, ckv_scale_arr, skip_softmax_threshold_scale_factor: refused if
                given.

        Returns:
            out [tokens, heads, 512], or (out, lse) with lse [tokens, heads] float32, base 2, or e if
            return_lse_base_on_e. A query row that sees no key gives output 0 and LSE -inf.
        """
        planned = self._planned
        if planned is None:
            raise ArgumentError(f"{_RUN}: call plan first; it says which requests there are")
        translate.refused(_RUN, "there is no profiler here", profiler_buffer=profiler_buffer)
        translate.refused(_RUN, "plan says it", kv_len=kv_len, page_table=page_table)
        translate.refused(_RUN, "8-bit outputs are not written here", o_scale=o_scale)
        translate.refused(_RUN, "rows of a cache have no scales of their own here", ckv_scale_arr=ckv_scale_arr)
        translate.no_skipping(_RUN, skip_softmax_threshold_scale_factor)
        computes_lse, returns_lse, base_e = run_inputs.asked_lse(
            _RUN, planned.lse_mode, lse, return_lse, return_lse_base_on_e
        )
        if (sinks is not None) != planned.use_sinks:
            given = "not " if sinks is None else ""
            raise ArgumentError(f"{_RUN}: sinks are {given}given; plan had use_sinks={planned.use_sinks}")
        if sinks is not None and computes_lse:
            raise UnsupportedError(
                f"{_RUN}: sinks are given, and an LSE is asked for; whether it counts them is not FlashInfer's "
                "contract (tsmla_decode has lse_includes_sink)"
            )
        pieces = run_inputs.query_pieces(_RUN, query, q_nope, q_pe, planned.rope_dim)
        cache = run_inputs.cache_of(_RUN, kv_cache, ckv_cache, kpe_cache, planned.page_size, planned.rope_dim)
        first, pages = pieces[0], planned.pages
        checks.dtype_in(_RUN, "query", first, (planned.dtype,))
        flat = pages.tokens, planned.num_heads
        if first.shape[:2] != flat:
            raise ArgumentError(
                f"{_RUN}: query has {first.shape[0]} tokens x {first.shape[1]} heads; plan said {flat[0]} x {flat[1]}"
            )
        if lse is not None:
            translate.check_lse(_RUN, lse, first.device, flat)
        if out is not None:
            checks.stored(_RUN, "out", out)
            checks.contiguous(_RUN, "out", out)
            checks.shape(_RUN, "out", out, (*flat, LATENT_DIM))
        packed = pages.q_ends is not None
        outer = flat if packed else (pages.batch, pages.most, planned.num_heads)
        shaped = tuple(piece.view(*outer, piece.shape[-1]) for piece in pieces)
        scale, output_scale = run_inputs.factors(_RUN, planned.sm_scale, ckv_scale, kpe_scale, bmm1_scale, bmm2_scale)
        result: Any
        try:
            result = tsmla_decode(
                query=shaped if len(shaped) == 2 else shaped[0],
                kv_cache=cache,
                workspace_buffer=self._workspace,
                kv_lora_rank=LATENT_DIM,
                qk_rope_head_dim=planned.rope_dim,
                block_tables=pages.block_tables,
                seq_lens=pages.keys,
                max_seq_len=pages.longest,
                softmax_scale=scale,
                output_scale=output_scale,
                out=None if out is None else out.view(*outer, LATENT_DIM),
                causal_mask=planned.causal,
                enable_pdl=planned.enable_pdl,
                return_lse=computes_lse,
                lse_base=math.e if base_e else 2.0,
                sinks=sinks,
                lse=None if lse is None else lse.view(outer),
                cum_seq_lens_q=pages.q_ends,
                max_q_len=pages.most if packed else None,
            )
        except ArgumentError as error:
            raise translate.in_their_words(_RUN, error, _NAMES) from None
        made = result[0] if computes_lse else result
        made = made.view(*flat, LATENT_DIM) if out is None else out
        if not returns_lse:
            return made
        return made, result[1].view(flat) if lse is None else lse
