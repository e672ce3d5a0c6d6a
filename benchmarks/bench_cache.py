"""mla_write_cache, mla_read_cache and mla_quantize_q against the same formulas in torch, and against a copy of as many
bytes.

    python -m benchmarks cache [--commit HASH] [--seconds S]

GB/s count what the operator must move: rows of 16 bits on one side, rows of the cache on the other, and a slot for each
token; a rotation also moves positions and the rows of its table. "of ceiling" is against the copy of 1 GiB, "of same
copy" against a copy that moves as many bytes as the case. Where vLLM is installed, its kernels run in turn with the
others.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from tsmla import mla_quantize_q, mla_read_cache, mla_write_cache

from . import protocol, runner
from .peers import vllm_wheel
from .protocol import Candidate, Monitor

PAGE, POSITIONS = 64, 4096
TOKENS = (8192, 1024, 64)
FORMATS = {"bf16": 1152, "e4m3": 576, "fp8_ds_mla": 656, "snapmla": 644}
"""Cache format -> bytes of a key."""
VERBS = {"write": tuple(FORMATS), "rotate": tuple(FORMATS), "read": tuple(FORMATS), "quantise": ("snapmla",)}
"""What is measured -> formats. `rotate`: a write that rotates the rope part. `quantise`: a query, with a row for each
token and head."""
VLLM = {"bf16": "auto", "e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HEADER = ("operator", "rows", "tokens", "regime", "tsmla us", "GB/s", "of ceiling", "of same copy", "torch us", "ratio",
          "vLLM us", "MHz", "W")  # fmt: skip


class Case:
    """Tokens of one call, in random slots of a cache that has twice as many."""

    def __init__(self, verb: str, format: str, tokens: int) -> None:
        self.verb, self.format, self.tokens = verb, format, tokens
        pages = 2 * tokens // PAGE + 1
        self.rows = torch.randn(tokens, 576, device="cuda").to(BF16)
        self.kv_c, self.k_pe = self.rows[:, :512], self.rows[:, 512:]
        self.slots = torch.randperm(pages * PAGE, device="cuda")[:tokens]
        self.page, self.place = self.slots // PAGE, self.slots % PAGE
        width = {"bf16": 576, "e4m3": 576, "fp8_ds_mla": 656, "snapmla": 512}[format]
        dtype = BF16 if format == "bf16" else torch.uint8
        self.cache = torch.zeros(pages, PAGE, width, dtype=dtype, device="cuda")
        self.others: dict[str, Any] = {}
        if format == "snapmla":
            self.others = {
                "rope_cache": torch.zeros(pages, PAGE, 64, dtype=BF16, device="cuda"),
                "scale_cache": torch.zeros(pages, PAGE, device="cuda"),
            }
        self.scale, self.limit = torch.ones(1, device="cuda"), torch.full((1,), 448.0, device="cuda")
        self.positions = torch.randint(0, POSITIONS, (tokens,), device="cuda")
        self.table = torch.randn(POSITIONS, 64, device="cuda")
        self.tables = torch.randperm(pages - 1, device="cuda", dtype=torch.int32)[None, : tokens // PAGE]
        self.ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
        self.request = torch.zeros(tokens, device="cuda", dtype=torch.int32)
        if verb == "read":
            self.slots = (self.tables[0, :, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
            self.page, self.place = self.slots // PAGE, self.slots % PAGE
            self.write()

    @property
    def nbytes(self) -> int:
        """Bytes that the operator must move. A read finds its slots in the block table: a word for each page."""
        beside = {"write": 8, "rotate": 16 + 256, "read": 4 / PAGE, "quantise": 0}[self.verb]
        return int(self.tokens * (1152 + FORMATS[self.format] + beside))

    def write(self) -> None:
        mla_write_cache(self.kv_c, self.k_pe, self.slots, self.cache, **self.others, format=self.format)

    def rotate(self) -> None:
        mla_write_cache(
            self.kv_c,
            self.k_pe,
            self.slots,
            self.cache,
            **self.others,
            format=self.format,
            positions=self.positions,
            cos_sin_cache=self.table,
            rope_interleaved=False,
        )

    def read(self) -> None:
        mla_read_cache(
            self.cache,
            self.kv_c,
            self.k_pe,
            **self.others,
            format=self.format,
            block_tables=self.tables,
            cum_seq_lens=self.ends,
        )

    def quantise(self) -> None:
        self.query = mla_quantize_q(self.rows[:, None])

    def torch_write(self) -> None:
        self.torch_store(self.rows)

    def torch_rotate(self) -> None:
        cos, sin = self.table[self.positions].chunk(2, -1)
        x, y = self.k_pe.float().chunk(2, -1)
        k_pe = torch.cat([x * cos - y * sin, y * cos + x * sin], -1).to(BF16)
        self.torch_store(torch.cat([self.kv_c, k_pe], -1))

    def torch_quantise(self) -> None:
        c, r = self.kv_c.float(), self.k_pe.float()
        scales = torch.exp2(torch.ceil(torch.log2(c.abs().amax(-1, keepdim=True).clamp_min(1e-26) / self.limit)))
        self.query = (c / scales).to(E4M3)[:, None], (r / scales).to(BF16)[:, None], scales

    def torch_store(self, rows: torch.Tensor) -> None:
        """Quantise rows, then scatter them, as a PyTorch engine would."""
        kv_c, k_pe, place = rows[:, :512], rows[:, 512:], (self.page, self.place)
        if self.format == "bf16":
            self.cache[place] = rows
        elif self.format == "e4m3":
            self.cache.view(E4M3)[place] = (rows.float() / self.scale).clamp(-448, 448).to(E4M3)
        elif self.format == "fp8_ds_mla":
            blocks = kv_c.float().view(-1, 4, 128)
            scales = (blocks.abs().amax(-1, keepdim=True) / self.limit).clamp_min(2.0**-126)
            codes = (blocks / scales).to(E4M3).view(torch.uint8).view(-1, 512)
            parts = (codes, scales.view(-1, 4).view(torch.uint8), k_pe.contiguous().view(torch.uint8))
            self.cache[place] = torch.cat(parts, -1)
        else:
            amax = kv_c.float().abs().amax(-1, keepdim=True)
            scales = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(1e-26) / self.limit)))
            self.cache.view(E4M3)[place] = (kv_c.float() / scales).to(E4M3)
            self.others["rope_cache"][place] = (k_pe.float() / scales).to(BF16)
            self.others["scale_cache"][place] = scales.view(-1)

    def torch_read(self) -> None:
        """Gather rows, then dequantise them."""
        rows = self.cache[self.page, self.place]
        if self.format == "bf16":
            self.rows.copy_(rows)
        elif self.format == "e4m3":
            self.rows.copy_(rows.view(E4M3).float() * self.scale)
        elif self.format == "fp8_ds_mla":
            scales = rows[:, 512:528].contiguous().view(torch.float32)
            self.kv_c.copy_((rows[:, :512].view(E4M3).float().view(-1, 4, 128) * scales[..., None]).view(-1, 512))
            self.k_pe.copy_(rows[:, 528:].contiguous().view(BF16))
        else:
            scales = self.others["scale_cache"][self.page, self.place][:, None]
            self.kv_c.copy_(rows.view(E4M3).float() * scales)
            self.k_pe.copy_(self.others["rope_cache"][self.page, self.place].float() * scales)

    def results(self) -> list[torch.Tensor]:
        if self.verb == "quantise":
            return list(self.query)
        return [self.rows] if self.verb == "read" else [self.cache, *self.others.values()]

    def check(self) -> None:
        """Check that all candidates give the same bytes."""
        found = []
        for candidate in self.candidates()[:-1]:
            if self.verb != "quantise":
                for result in self.results():
                    result.zero_()
            if self.verb != "read":
                self.rows.copy_(torch.linspace(-3, 3, self.rows.numel(), device="cuda").view(self.rows.shape))
            candidate.launch()
            found.append([result.clone() for result in self.results()])
        for other in found[1:]:
            pairs = zip(found[0], other, strict=True)
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                raise SystemExit(f"{self.verb} {self.format}: results differ; nothing was measured")

    def candidates(self) -> list[Candidate]:
        ours, theirs = getattr(self, self.verb), self.of_vllm()
        found = [Candidate("tsmla", ours), Candidate("torch", getattr(self, f"torch_{self.verb}"))]
        if theirs:
            found.append(Candidate("vLLM", theirs))
        source = torch.zeros(self.nbytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return [*found, Candidate("copy", lambda: target.copy_(source))]

    def of_vllm(self) -> Callable[[], None] | None:
        """Return vLLM's kernel for the case, where it is installed and has one."""
        if self.format not in VLLM or self.verb not in ("write", "read") or not vllm_wheel.installed():
            return None
        operators = vllm_wheel.cache_operators()
        if self.verb == "write":
            given = self.kv_c, self.k_pe, self.cache, self.slots, VLLM[self.format], self.scale
            return lambda: operators.concat_and_cache_mla(*given)
        paged = self.cache, self.rows, self.tables, self.ends
        if self.format == "fp8_ds_mla":
            starts = torch.zeros(1, device="cuda", dtype=torch.int32)
            return lambda: operators.cp_gather_and_upconvert_fp8_kv_cache(*paged, 1, starts)
        rest = self.request, self.tokens, VLLM[self.format], self.scale, None
        return lambda: operators.gather_and_maybe_dequant_cache(*paged, *rest)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_arguments(parser)


def run(options: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        ceilings = protocol.ceilings(monitor)
        for verb, formats in VERBS.items():
            for format in formats:
                for tokens in TOKENS:
                    case = Case(verb, format, tokens)
                    case.check()
                    for graph in (False, True):
                        timings = protocol.measure(case.candidates(), "isolated", monitor, options.seconds, graph)
                        told = {"operator": verb, "format": format, "tokens": tokens, "bytes": case.nbytes}
                        results.append({**told, "timings": timings})
    record = {"certificate": runner.certificate(options.commit), "ceilings": ceilings, "results": results}
    path = runner.write_record(options.results, "cache", record)
    print(f"ceilings: {', '.join(f'{name} {value:.0f}' for name, value in ceilings.items())}")
    print(runner.table(HEADER, (_row(result, ceilings["copy_gb_s"]) for result in results)))
    print(path)


def _row(result: dict[str, Any], copy_gb_s: float) -> tuple[object, ...]:
    ours, theirs, copy = (result["timings"][name] for name in ("tsmla", "torch", "copy"))
    vllm = result["timings"].get("vLLM")
    rate = result["bytes"] / ours.median_us / 1e3
    return (
        result["operator"], result["format"], result["tokens"], ours.regime + (" graph" if ours.graph else ""),
        ours.median_us, rate, f"{rate / copy_gb_s:.0%}", f"{copy.median_us / ours.median_us:.0%}", theirs.median_us,
        f"{theirs.median_us / ours.median_us:.2f}x", vllm.median_us if vllm else "", ours.sm_clock_mhz, ours.power_w,
    )  # fmt: skip
