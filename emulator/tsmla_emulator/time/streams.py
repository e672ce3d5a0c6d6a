"""Kernels that move rows once (packs, cache writers and readers, quantisers of queries) in the timing model.

Their CTAs are equal and share nothing: one is traced, as many as an SM holds are replayed beside each other, and sets
of those follow each other while memory gives what it can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tsmla.identity.dtype import bytes_of
from tsmla.identity.row_format import SCALE_BYTES, format_of

from ..run.machine import Launch
from .machines import Machine
from .problem import Modelled, Shape, Traced, resident
from .replay import Memory, replay

ROWS_TRACED = 2048
"""Rows of the call that is emulated; its first CTA runs."""
PAGE = 64
INDEX_BYTES = 8
"""Bytes of a row's slot."""


class StreamTraced(Traced):
    """The first CTA of a kernel that moves rows.

    A shape's keys are what is packed or read, its queries what is written or quantised; heads count where rows have
    them. Raises ValueError where warps wait for others.
    """

    def __init__(
        self, variant: Any, shape: Shape, processors: int, compiled: Any = None, machine_code: bool | None = None
    ):
        super().__init__(variant, shape, processors, compiled, machine_code)
        if variant.family not in KINDS:
            raise ValueError(f"{variant} has no model: its warps wait for each other")
        kind = KINDS[variant.family]
        self.call = self.run(lambda: kind.call(variant), (0,))
        launch = self.call.launches[0]
        self.rows_per_cta = -(-ROWS_TRACED // launch.grid[0])
        tokens = shape.sequences * (shape.keys if kind.of_keys else shape.queries)
        self.rows = tokens * (shape.heads if kind.of_heads else 1)
        self.bytes = kind.bytes(variant, tokens, self.rows)

    def model(self, machine: Machine) -> Modelled:
        """Model the whole problem on a machine. What is loaded comes from HBM, and what is stored goes there."""
        launch, traces = self.call.launches[0], self.call.report.traces
        far = dataclasses.replace(machine, load_latency=machine.load_latency_hbm)
        prepared = self.prepared(self.call, 0, far)
        if any(cost.kind in ("wait", "named_sync", "cluster_wait", "product") for cost in prepared.costs):
            raise ValueError(f"{self.variant}: its warps wait for others, and the model takes them to share nothing")
        ctas = -(-self.rows // self.rows_per_cta)
        at_once = min(resident(launch), -(-ctas // machine.processors))
        together = [
            dataclasses.replace(trace, warp=trace.warp + cta * _warps(launch))
            for cta in range(at_once)
            for trace in traces
        ]
        memory = Memory(machine.copy_latency_hbm.value, machine.l2.value)
        shown = replay(prepared, together, memory)
        first = replay(prepared, together, memory, cold=True).clocks - shown.clocks
        sets = -(-ctas // (machine.processors * at_once))
        gap = machine.cta_gap.value
        issued = first + sets * (shown.clocks + gap) - gap
        moved = self.bytes / (machine.hbm.value * 1e3 / machine.clock.value)
        details = {
            "CTAs": float(ctas),
            "CTAs of an SM at once": float(at_once),
            "a set of them": float(shown.clocks),
            "code, once": float(first),
            "sets": float(sets),
            "bytes": float(self.bytes),
            "moving them": moved,
        }
        clocks = max(issued, moved + first + shown.clocks)
        return Modelled(machine, clocks, machine.launch.value, details, shown, prepared, together)


def _warps(launch: Launch) -> int:
    return -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A family of such kernels.

    call: calls its operator on ROWS_TRACED rows.
    bytes: what it must move, by (variant, tokens, rows).
    of_keys: its tokens are a shape's keys, not its queries.
    of_heads: each token has a row for each head.
    """

    call: Callable[[Any], None]
    bytes: Callable[[Any, int, int], int]
    of_keys: bool
    of_heads: bool


def _random(variant: Any, *shape: int) -> Any:
    import torch
    from tsmla.operators.checks import TORCH_DTYPE_OF

    torch.manual_seed(0)
    return torch.randn(shape, dtype=TORCH_DTYPE_OF[variant.dtype], device="cuda")


def _call_pack(variant: Any) -> None:
    import tsmla
    from tsmla.operators.checks import TORCH_DTYPE_OF

    both = _random(variant, ROWS_TRACED, 1, variant.d_nope + variant.d_v)
    k_nope, v = both.split([variant.d_nope, variant.d_v], -1)
    tsmla.mla_kv_pack_quantize_fp8(
        k_nope, _random(variant, ROWS_TRACED, variant.d_rope), v, fp8_dtype=TORCH_DTYPE_OF[variant.out_dtype]
    )


def _pack_bytes(variant: Any, tokens: int, rows: int) -> int:
    size, out = bytes_of(variant.dtype.bits), bytes_of(variant.out_dtype.bits)
    return rows * (variant.d_nope + variant.d_v) * (size + out) + (tokens * size + rows * out) * variant.d_rope


def _keys(variant: Any) -> Any:
    """Make kv_c and k_pe; the latter is None where rows have no rope piece."""
    pieces = _random(variant, ROWS_TRACED, variant.row.columns).split([p.columns for p in variant.row.pieces], -1)
    return pieces if variant.row.has("rope") else (*pieces, None)


def _cache_of(variant: Any) -> dict[str, Any]:
    """Make empty pages, under the names that the operators have for them."""
    import torch
    from tsmla.operators.checks import TORCH_DTYPE_OF

    row, pages = variant.row, ROWS_TRACED // PAGE
    given = {
        "cache": torch.zeros(pages, PAGE, variant.row_width, dtype=TORCH_DTYPE_OF[variant.cache_dtype], device="cuda")
    }
    if row.apart:
        given["rope_cache"] = torch.zeros(
            pages, PAGE, row.piece("rope").columns, dtype=TORCH_DTYPE_OF[variant.rope_dtype], device="cuda"
        )
        given["scale_cache"] = torch.ones(pages, PAGE, device="cuda")
    return given


def _call_write(variant: Any) -> None:
    import torch
    import tsmla

    kv_c, k_pe = _keys(variant)
    slots = torch.randperm(ROWS_TRACED).to("cuda")
    tsmla.mla_write_cache(kv_c, k_pe, slots, **_cache_of(variant), format=format_of(variant.row))


def _call_read(variant: Any) -> None:
    import torch
    import tsmla

    kv_c, k_pe = _keys(variant)
    slots = torch.randperm(ROWS_TRACED).to("cuda")
    tsmla.mla_read_cache(kv_c=kv_c, k_pe=k_pe, indices=slots, **_cache_of(variant), format=format_of(variant.row))


def _call_quantize(variant: Any) -> None:
    import tsmla

    tsmla.mla_quantize_q(_random(variant, ROWS_TRACED, 1, variant.row.columns))


def _row_bytes(variant: Any) -> int:
    """Return the bytes of a row on one side plus on the other."""
    row = variant.row
    return int(bytes_of(variant.dtype.bits, row.columns) + row.bytes + SCALE_BYTES * row.apart)


KINDS = {
    "pack": Kind(_call_pack, _pack_bytes, of_keys=True, of_heads=True),
    "write_cache": Kind(_call_write, lambda v, tokens, rows: rows * (_row_bytes(v) + INDEX_BYTES), False, False),
    "read_cache": Kind(_call_read, lambda v, tokens, rows: rows * (_row_bytes(v) + INDEX_BYTES), True, False),
    "quantize_q": Kind(_call_quantize, lambda v, tokens, rows: rows * _row_bytes(v), False, True),
}
