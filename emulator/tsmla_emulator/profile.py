"""What a kernel spends per KV tile, by role, and the bound of each resource.

A tile's share is the difference of two runs that differ by a known number of tiles: what a kernel does once drops out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cost, machine, record
from .cost import Bound, Work
from .machine import Count, Module, Options, Report
from .rates import RATES

OPTIONS = Options(count=True)
ROWS = 128
"""Query rows and keys of the tile that tsmla's prefill is profiled for, tokens of a head for the pack kernel."""
_ALIKE = 0.8
_SMALL, _LARGE = 4, 12


class ProfileError(ValueError):
    """Two runs that cannot be told apart into tiles; the text names the kernel and what is wrong."""


@dataclass(frozen=True)
class Role:
    """Warps of a CTA that run the same code per tile. `registers` as setmaxnreg leaves them, 0 without one."""

    entry: str
    warps: tuple[int, ...]
    registers: int
    work: Work

    @property
    def name(self) -> str:
        """Warp ranges, as in "warps 0, 4-11"."""
        runs: list[list[int]] = []
        for warp in self.warps:
            if runs and warp == runs[-1][-1] + 1:
                runs[-1] = [runs[-1][0], warp]
            else:
                runs.append([warp, warp])
        return ("warps " if len(self.warps) > 1 else "warp ") + ", ".join(
            f"{a}-{b}" if b > a else f"{a}" for a, b in runs
        )


@dataclass(frozen=True)
class Profile:
    """A kernel's work per `unit`, all of its roles together in `work`."""

    name: str
    arch: str
    unit: str
    roles: tuple[Role, ...]

    @property
    def work(self) -> Work:
        """The sum over the roles."""
        total = Work()
        for role in self.roles:
            total.add(role.work)
        return total

    @property
    def bounds(self) -> list[Bound]:
        """Clocks of one SM for one unit."""
        return cost.bounds(self.arch, self.work)


def difference(name: str, module: Module, small: Report, large: Report, units: float, unit: str = "unit") -> Profile:
    """The profile of one unit from counts of two runs of a module, the larger one with `units` more of them.

    Raises ProfileError when the second run did no more than the first, and UnknownRate.
    """
    if module.target not in RATES:
        raise ProfileError(f"{name} is for {module.target}; rates are known for {', '.join(RATES)}")
    if units <= 0 or large.warp_instructions <= small.warp_instructions:
        raise ProfileError(
            f"{name}: {large.warp_instructions} warp instructions in the larger run, {small.warp_instructions} in the "
            f"smaller one, said to differ by {units:g} units"
        )
    roles: list[Role] = []
    for entry_name, entry in module.entries.items():
        warps = sorted({warp for kernel, warp, _ in large.counts if kernel == entry_name})
        more = {warp: _more(entry_name, warp, small, large) for warp in warps}
        for alike in _alike(more):
            work = Work()
            for warp in alike:
                work.add(cost.work_of(entry, more[warp]), 1 / units)
            registers = _registers(entry, entry_name, alike[0], large)
            roles.append(Role(entry_name, tuple(alike), registers, work))
    return Profile(name, module.target, unit, tuple(roles))


def _more(entry: str, warp: int, small: Report, large: Report) -> dict[int, Count]:
    """By instruction: what a warp did in the larger run beyond the smaller one."""
    more = {}
    for kernel, number, index in large.counts.keys() | small.counts.keys():
        if (kernel, number) != (entry, warp):
            continue
        a, b = (report.counts.get((kernel, number, index), Count()) for report in (small, large))
        sizes = {key: b.sizes.get(key, 0) - a.sizes.get(key, 0) for key in a.sizes.keys() | b.sizes.keys()}
        count = Count(b.executed - a.executed, b.lanes - a.lanes, b.failed - a.failed, sizes)
        if count.executed or count.lanes:
            more[index] = count
    return more


def _alike(more: dict[int, dict[int, Count]]) -> list[list[int]]:
    """Warps grouped by the instructions that they ran: a role's warps run nearly the same ones as often."""
    groups: list[list[int]] = []
    for warp, counts in more.items():
        for group in groups:
            first = more[group[0]]
            keys = counts.keys() | first.keys()
            pairs = [(counts.get(k, Count()).executed, first.get(k, Count()).executed) for k in keys]
            if not pairs or sum(map(min, pairs)) >= _ALIKE * sum(map(max, pairs)):
                group.append(warp)
                break
        else:
            groups.append([warp])
    return groups


def _registers(entry: Any, name: str, warp: int, report: Report) -> int:
    for index, instruction in enumerate(entry.instructions):
        if instruction.opcode.startswith("setmaxnreg") and (name, warp, index) in report.counts:
            return instruction.operands[0].value
    return 0


def profile_symbol(symbol: str, heads: int | None = None) -> Profile:
    """Profile a tsmla kernel through its operator; a decode, of one token of `heads` heads, by default of as many as
    fill its larger row tile. Raises ValueError when there is no such kernel, EmulationError."""
    from tsmla.plan import DEALS, deal_of, wide_rows
    from tsmla.tools import selftest_cache, selftest_query
    from tsmla.tools.selftest_cases import CacheCase, QueryCase
    from tsmla.tools.selftest_memory import Memory
    from tsmla.variant import DecodeVariant, PackVariant, QuantizeQVariant, ReadCacheVariant, WriteCacheVariant

    from . import check
    from .run import emulated

    variant = check.find(symbol)
    with emulated(variant.arch.value, OPTIONS) as gpu:
        if isinstance(variant, PackVariant):
            across, unit = 4, f"{ROWS} tokens of a head"
            for count in (_SMALL, _LARGE):
                _pack(variant, count * ROWS, across)
        elif isinstance(variant, WriteCacheVariant | ReadCacheVariant):
            across, unit = 1, f"{ROWS} rows"
            for count in (_SMALL, _LARGE):
                selftest_cache.run(variant, CacheCase("", count * ROWS, count * ROWS, 1), Memory())
        elif isinstance(variant, QuantizeQVariant):
            across, unit = 1, f"{ROWS} rows"
            for count in (_SMALL, _LARGE):
                selftest_query.run(variant, QueryCase("", count * ROWS, 1, 1), Memory())
        elif isinstance(variant, DecodeVariant):
            heads = heads or DEALS[variant.arch].row_tile
            tile_kv = deal_of(variant.arch, heads, wide=wide_rows(variant.row)).tile_kv
            # So many that both runs are cut among the CTAs alike, and the combine does the same in both.
            across, unit = 6, f"{heads} query rows x {tile_kv} keys"
            for count in (_SMALL, _LARGE):
                _decode(variant, heads, across * count * tile_kv)
        else:
            across, unit = 2, f"{ROWS} query rows x {ROWS} keys"
            for count in (_SMALL, _LARGE):
                _prefill(variant, across * ROWS, count * ROWS)
    small, large = gpu.calls
    return difference(symbol, small.module, small.report, large.report, (_LARGE - _SMALL) * across, unit)


def _prefill(variant: Any, rows: int, keys: int) -> None:
    import torch
    import tsmla
    from tsmla.checks import TORCH_DTYPE_OF

    dtype = TORCH_DTYPE_OF[variant.dtype]
    q, k, v = (
        torch.randn(tokens, 1, dim, device="cuda").to(dtype)
        for tokens, dim in ((rows, variant.d_qk), (keys, variant.d_qk), (keys, variant.d_v))
    )
    ends_q, ends_kv = (torch.tensor([0, end], dtype=torch.int32, device="cuda") for end in (rows, keys))
    tsmla.tsmla_prefill(
        q, k, v, None, ends_kv, keys, 1, variant.d_qk**-0.5, variant.causal, variant.lse, ends_q, rows
    )


def _decode(variant: Any, heads: int, keys: int) -> None:
    """One request. As `max_seq_len` says nothing of its length, that many keys are dealt to as many CTAs as others."""
    import torch
    import tsmla
    from tsmla.support import LATENT_DIM, ROPE_DIM

    from . import check

    page, shortest, width = 64, 64, LATENT_DIM + ROPE_DIM
    query, cache = (
        given(variant, torch.randn(*outer, width, device="cuda"))
        for given, outer in ((check.given_query, (1, 1, heads)), (check.given_cache, (keys // page, page)))
    )
    pages = torch.arange(keys // page, dtype=torch.int32, device="cuda")[None]
    length = torch.tensor([keys], dtype=torch.int32, device="cuda")
    workspace = torch.empty(tsmla.decode_workspace_size(1, 1, heads, shortest), dtype=torch.int8, device="cuda")
    tsmla.tsmla_decode(
        query, cache, workspace, LATENT_DIM, ROPE_DIM, pages, length, shortest, width**-0.5,
        return_lse=variant.lse,
    )  # fmt: skip


def _pack(variant: Any, tokens: int, heads: int) -> None:
    import torch
    import tsmla
    from tsmla.checks import TORCH_DTYPE_OF

    k_nope, k_pe, v = (
        torch.randn(tokens, count, dim, device="cuda").to(TORCH_DTYPE_OF[variant.dtype])
        for count, dim in ((heads, variant.d_nope), (1, variant.d_rope), (heads, variant.d_v))
    )
    tsmla.mla_kv_pack_quantize_fp8(
        k_nope, k_pe, v, 1.0, 1.0, fp8_dtype=TORCH_DTYPE_OF[variant.out_dtype]
    )


def profile_records(ptx: Path, small: Path, large: Path, units: float) -> Profile:
    """Profile any kernel from its PTX and two launch records, the second with `units` more tiles.

    Raises OSError, RecordError, PtxError, EmulationError and what `difference` does.
    """
    module = machine.parse(ptx.read_text("utf-8"))
    first, second = (record.Record(path).run(module, OPTIONS)[0] for path in (small, large))
    return difference(str(ptx), module, first, second, units, "tile as counted by the caller")
