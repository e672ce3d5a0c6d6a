"""Definitions of tsmla's operators for flashinfer-bench: references, workloads, and tsmla's own solutions.

    python -m benchmarks definitions --out DIR
    flashinfer-bench run --local DIR

DIR becomes a data set as flashinfer-bench 0.1.2 reads it: definitions (axes, inputs, outputs, a reference in PyTorch),
workloads (sizes, with page tables and lists in blob/), and solutions, to which anyone's can be added. It needs no GPU
to write. Numbers are random; page tables, lengths and lists are drawn by a seed, so that all solutions see the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tsmla.problems.pages import page_tables

HEADS = (16, 128)
PAGE, LATENT, ROW, TOP_K = 64, 512, 576, 2048
SCALE = 192**-0.5
_BF16, _E4M3, _F32, _I32, _I8 = "bfloat16", "float8_e4m3fn", "float32", "int32", "int8"
Drawn = tuple[dict[str, int], dict[str, torch.Tensor]]
"""Sizes of a workload's variable axes, and its tensors whose numbers are not random."""


@dataclasses.dataclass(frozen=True)
class Definition:
    """One operator as it is defined: which module computes it, and its tensors by name, (axes, dtype). A tensor without
    axes is a number. workloads: each draws one."""

    name: str
    kind: str
    module: str
    constants: dict[str, int]
    inputs: dict[str, tuple[tuple[str, ...] | None, str]]
    outputs: dict[str, tuple[tuple[str, ...] | None, str]]
    workloads: tuple[Callable[[], Drawn], ...]

    def text(self, folder: str) -> str:
        """Return the source of its module of `folder`: reference or solution."""
        return inspect.getsource(importlib.import_module(f".{folder}.{self.module}", __package__))

    @property
    def description(self) -> str:
        return self.text("reference").partition('"""')[2].partition('"""')[0]

    def plain(self) -> dict[str, Any]:
        """Return it as flashinfer-bench's JSON has it."""
        tensors = {**self.inputs, **self.outputs}
        used = dict.fromkeys(axis for axes, _ in tensors.values() for axis in axes or ())
        axes = {
            a: {"type": "const", "value": self.constants[a]} if a in self.constants else {"type": "var"} for a in used
        }
        inputs, outputs = (
            {
                name: {"shape": None if axes is None else list(axes), "dtype": dtype}
                for name, (axes, dtype) in of.items()
            }
            for of in (self.inputs, self.outputs)
        )
        return {
            "name": self.name, "op_type": self.kind, "description": self.description, "axes": axes, "inputs": inputs,
            "outputs": outputs, "reference": self.text("reference"),
        }  # fmt: skip

    def solution(self) -> dict[str, Any]:
        spec = {
            "language": "python", "target_hardware": ["H100", "H200"], "entry_point": "main.py::run",
            "dependencies": ["tsmla"], "destination_passing_style": False,
        }  # fmt: skip
        sources = [{"path": "main.py", "content": self.text("solution")}]
        return {
            "name": f"tsmla_{self.name}",
            "definition": self.name,
            "author": "tsmla",
            "spec": spec,
            "sources": sources,
        }


def definitions() -> Iterator[Definition]:
    """Yield all of them."""
    for heads in HEADS:
        for name, dtype in (("bf16", _BF16), ("e4m3", _E4M3)):
            yield _decode(heads, name, dtype)
        yield _chosen(heads)
        yield _prefill(heads)
        yield _pack(heads)


def _decode(heads: int, name: str, dtype: str) -> Definition:
    def drawn(batch: int, q_len: int, keys: int) -> Drawn:
        torch.manual_seed(0)
        lengths = (torch.rand(batch) * keys + keys / 2).int().clamp_min(q_len)
        table, pages = page_tables(lengths.tolist(), PAGE, unused=0)
        sizes = {"batch": batch, "q_len": q_len, "pages": pages, "width": table.shape[1]}
        return sizes, {"block_tables": table, "seq_lens": lengths}

    return Definition(
        f"mla_paged_decode_h{heads}_d{ROW}_ps{PAGE}_{name}",
        "mla_paged",
        "decode",
        {"heads": heads, "row": ROW, "latent": LATENT, "page_size": PAGE},
        {
            "query": (("batch", "q_len", "heads", "row"), dtype),
            "kv_cache": (("pages", "page_size", "row"), dtype),
            "block_tables": (("batch", "width"), _I32),
            "seq_lens": (("batch",), _I32),
            "softmax_scale": (None, _F32),
        },
        {"out": (("batch", "q_len", "heads", "latent"), _BF16), "lse": (("batch", "q_len", "heads"), _F32)},
        tuple(
            functools.partial(drawn, *case) for case in ((128, 1, 4096), (128, 2, 4096), (4, 4, 81920), (1, 1, 8192))
        ),
    )


def _chosen(heads: int) -> Definition:
    def drawn(tokens: int, keys: int) -> Drawn:
        generator = torch.Generator().manual_seed(0)
        lists = [torch.randperm(keys, generator=generator)[:TOP_K] for _ in range(tokens)]
        return {"tokens": tokens, "pages": keys // PAGE}, {"indices": torch.stack(lists).int()}

    return Definition(
        f"mla_chosen_decode_h{heads}_d{ROW}_ps{PAGE}_top{TOP_K}_bf16",
        "mla_sparse",
        "chosen",
        {"heads": heads, "row": ROW, "latent": LATENT, "page_size": PAGE, "top_k": TOP_K},
        {
            "query": (("tokens", "heads", "row"), _BF16),
            "kv_cache": (("pages", "page_size", "row"), _BF16),
            "indices": (("tokens", "top_k"), _I32),
            "softmax_scale": (None, _F32),
        },
        {"out": (("tokens", "heads", "latent"), _BF16), "lse": (("tokens", "heads"), _F32)},
        tuple(functools.partial(drawn, tokens, 131072) for tokens in (1, 32, 128)),
    )


def _prefill(heads: int) -> Definition:
    def drawn(batch: int, queries: int, keys: int) -> Drawn:
        ends_q, ends = (torch.arange(batch + 1, dtype=torch.int32) * each for each in (queries, keys))
        sizes = {"tokens_q": batch * queries, "tokens_kv": batch * keys, "ends": batch + 1}
        return sizes, {"cum_seq_lens_q": ends_q, "cum_seq_lens": ends}

    return Definition(
        f"mla_ragged_prefill_causal_h{heads}_qk192_v128_bf16",
        "mla_ragged",
        "prefill",
        {"heads": heads, "d_qk": 192, "d_v": 128},
        {
            "query": (("tokens_q", "heads", "d_qk"), _BF16),
            "key": (("tokens_kv", "heads", "d_qk"), _BF16),
            "value": (("tokens_kv", "heads", "d_v"), _BF16),
            "cum_seq_lens_q": (("ends",), _I32),
            "cum_seq_lens": (("ends",), _I32),
            "softmax_scale": (None, _F32),
        },
        {"out": (("tokens_q", "heads", "d_v"), _BF16), "lse": (("tokens_q", "heads"), _F32)},
        tuple(functools.partial(drawn, *case) for case in ((1, 8192, 8192), (1, 8192, 32768), (16, 512, 512))),
    )


def _pack(heads: int) -> Definition:
    return Definition(
        f"mla_kv_pack_h{heads}_nope128_rope64_v128_e4m3",
        "mla_pack",
        "pack",
        {"heads": heads, "d_nope": 128, "d_rope": 64, "d_v": 128, "d_qk": 192, "one": 1},
        {
            "k_nope": (("tokens", "heads", "d_nope"), _BF16),
            "k_pe": (("tokens", "one", "d_rope"), _BF16),
            "v": (("tokens", "heads", "d_v"), _BF16),
        },
        {"k_out": (("tokens", "heads", "d_qk"), _I8), "v_out": (("tokens", "heads", "d_v"), _I8)},
        tuple(functools.partial(_of_tokens, tokens) for tokens in (8192, 32768)),
    )


def _of_tokens(tokens: int) -> Drawn:
    return {"tokens": tokens}, {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder of the data set")


def run(options: argparse.Namespace) -> None:
    for definition in definitions():
        own = Path(definition.kind, definition.name)
        _write_json(options.out / "definitions" / own.with_suffix(".json"), definition.plain())
        _write_json(options.out / "solutions" / own.with_suffix(".json"), definition.solution())
        lines = [json.dumps(_workload(options.out, definition, i)) for i in range(len(definition.workloads))]
        path = options.out / "workloads" / own.with_suffix(".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        print(f"{definition.name}: {len(lines)} workloads")


def _workload(out: Path, definition: Definition, index: int) -> dict[str, Any]:
    """Return one workload, whose tensors are written below blob/."""
    sizes, tensors = definition.workloads[index]()
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"tsmla/{definition.name}/{sorted(sizes.items())}")
    path = Path("blob", "workloads", definition.kind, definition.name, f"{name}.safetensors")
    inputs: dict[str, dict[str, Any]] = {}
    for tensor, (axes, _) in definition.inputs.items():
        if axes is None:
            inputs[tensor] = {"type": "scalar", "value": SCALE}
        elif tensor in tensors:
            inputs[tensor] = {"type": "safetensors", "path": str(path), "tensor_key": tensor}
        else:
            inputs[tensor] = {"type": "random"}
    if tensors:
        _write_tensors(out / path, tensors)
    given = {"axes": sizes, "inputs": inputs, "uuid": str(name)}
    return {"definition": definition.name, "workload": given, "solution": None, "evaluation": None}


def _write_json(path: Path, plain: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain, indent=2) + "\n")


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write int32 tensors in the safetensors format: the length of a header, the header, and all bytes."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        own = tensor.to(torch.int32).contiguous().numpy().tobytes()
        header[name] = {"dtype": "I32", "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(own)]}
        body += own
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
