"""mla_write_cache and mla_read_cache against the same formulas in torch and against a copy of as many bytes.

    python -m benchmarks.bench_cache [--commit HASH] [--seconds S]

GB/s count what the operator must move: rows of 16 bits on one side, rows of the cache on the other, and a slot for each
token. "of ceiling" is against the copy of 1 GiB, "of same copy" against a copy that moves as many bytes as the case.
Where vLLM is installed, its kernels run in turn with the others.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from tsmla import mla_read_cache, mla_write_cache

from . import protocol
from .protocol import Candidate, Monitor

PAGE, REQUEST = 64, 4096
TOKENS = (8192, 1024, 64)
FORMATS = {"bf16": 1152, "e4m3": 576, "fp8_ds_mla": 656, "snapmla": 644}
"""Bytes of a key."""
VLLM = {"bf16": "auto", "e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
HEADER = ("operator", "rows", "tokens", "regime", "tsmla us", "GB/s", "of ceiling", "of same copy", "torch us", "ratio",
          "vLLM us", "MHz", "W")  # fmt: skip


class Case:
    """Tokens in slots at random, as many again in the cache."""

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
        self.others: dict[str, torch.Tensor] = {}
        if format == "snapmla":
            self.others = {"rope_cache": torch.zeros(pages, PAGE, 64, dtype=BF16, device="cuda"),
                           "scale_cache": torch.zeros(pages, PAGE, device="cuda")}  # fmt: skip
        self.scale, self.limit = torch.ones(1, device="cuda"), torch.full((1,), 448.0, device="cuda")
        if verb == "read":
            self.write()

    @property
    def nbytes(self) -> int:
        return self.tokens * (1152 + FORMATS[self.format] + 8)

    def write(self) -> None:
        mla_write_cache(self.kv_c, self.k_pe, self.slots, self.cache, **self.others, format=self.format)

    def read(self) -> None:
        mla_read_cache(self.cache, self.kv_c, self.k_pe, self.slots, **self.others, format=self.format)

    def torch_write(self) -> None:
        """What a PyTorch engine would do: quantise, then scatter."""
        place = self.page, self.place
        if self.format == "bf16":
            self.cache[place] = self.rows
        elif self.format == "e4m3":
            self.cache.view(E4M3)[place] = (self.rows.float() / self.scale).clamp(-448, 448).to(E4M3)
        elif self.format == "fp8_ds_mla":
            blocks = self.kv_c.float().view(-1, 4, 128)
            scales = (blocks.abs().amax(-1, keepdim=True) / self.limit).clamp_min(2.0**-126)
            codes = (blocks / scales).to(E4M3).view(torch.uint8).view(-1, 512)
            parts = (codes, scales.view(-1, 4).view(torch.uint8), self.k_pe.contiguous().view(torch.uint8))
            self.cache[place] = torch.cat(parts, -1)
        else:
            amax = self.kv_c.float().abs().amax(-1, keepdim=True)
            scales = torch.exp2(torch.ceil(torch.log2(amax.clamp_min(1e-26) / self.limit)))
            self.cache.view(E4M3)[place] = (self.kv_c.float() / scales).to(E4M3)
            self.others["rope_cache"][place] = (self.k_pe.float() / scales).to(BF16)
            self.others["scale_cache"][place] = scales.view(-1)

    def torch_read(self) -> None:
        """Gather, then dequantise."""
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
        return [self.rows] if self.verb == "read" else [self.cache, *self.others.values()]

    def check(self) -> None:
        """The same bytes from all."""
        found = []
        for candidate in self.candidates()[:-1]:
            for result in self.results():
                result.zero_()
            if self.verb == "write":
                self.rows.copy_(torch.linspace(-3, 3, self.rows.numel(), device="cuda").view(self.rows.shape))
            candidate.launch()
            found.append([result.clone() for result in self.results()])
        for other in found[1:]:
            pairs = zip(found[0], other, strict=True)
            if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
                raise SystemExit(f"{self.verb} {self.format}: results differ; nothing was measured")

    def candidates(self) -> list[Candidate]:
        ours = getattr(self, self.verb)
        found = [Candidate("tsmla", ours), Candidate("torch", getattr(self, f"torch_{self.verb}"))]
        if self.verb == "write" and self.format in VLLM and (theirs := _vllm()):
            given = self.kv_c, self.k_pe, self.cache, self.slots, VLLM[self.format], self.scale
            found.append(Candidate("vLLM", lambda: theirs(*given)))
        source = torch.zeros(self.nbytes // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        return [*found, Candidate("copy", lambda: target.copy_(source))]


def _vllm() -> Callable[..., None] | None:
    """vLLM's `concat_and_cache_mla`, where it is installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import vllm._C  # noqa: F401

    return torch.ops._C_cache_ops.concat_and_cache_mla


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    protocol.add_arguments(parser)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with Monitor() as monitor:
        ceilings = protocol.ceilings(monitor)
        for verb in ("write", "read"):
            for format in FORMATS:
                for tokens in TOKENS:
                    case = Case(verb, format, tokens)
                    case.check()
                    for graph in (False, True):
                        timings = protocol.measure(case.candidates(), "isolated", monitor, options.seconds, graph)
                        told = {"operator": verb, "format": format, "tokens": tokens, "bytes": case.nbytes}
                        results.append({**told, "timings": timings})
    record = {"certificate": protocol.certificate(options.commit), "ceilings": ceilings, "results": results}
    path = protocol.write_record(options.results, "cache", record)
    print(f"ceilings: {', '.join(f'{name} {value:.0f}' for name, value in ceilings.items())}")
    print(protocol.table(HEADER, (_row(result, ceilings["copy_gb_s"]) for result in results)))
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


if __name__ == "__main__":
    main()
