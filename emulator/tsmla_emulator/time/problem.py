"""Problems of tsmla's operators, traced in part and modelled whole.

The model knows which CTAs there are, what each takes, and how they follow each other on a GPU's SMs.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tsmla.identity.arch import Arch
from tsmla.identity.support import LATENT_DIM
from tsmla.identity.variant import DecodeVariant

from ..dealt import deal_out
from ..prove import check
from ..prove.calls.decode import given_cache, given_query
from ..run.emulate import Call, emulated
from ..run.machine import Launch, Options, Trace
from ..run.sass.program import MachineProgram
from .costs import Text
from .executed import Code, costs_on
from .machines import Machine
from .prefill_grid import SINGLE_TILES, ctas_of, keys_of_tile, kv_tiles, query_tiles_of, rows_of_tile
from .replay import Memory, Prepared, Replayed, replay

TILES_TRACED = (8, 40)
"""KV tiles of the two prefill CTAs that are replayed; the clocks of others lie on the line through both. Where a CTA
can take several query tiles, one that takes as many as it can is replayed, too, with the fewer KV tiles for each."""

CHOSEN_OF = 131072
"""Slots that query tokens choose their keys of, at random."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sequences x queries x keys x heads: a prefill's sequences of so many tokens, or a decode's requests."""

    sequences: int
    queries: int
    keys: int
    heads: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read a shape such as "4x4x80Kx16". Raises ValueError."""
        try:
            sizes = [int(part[:-1]) * 1024 if part[-1:] in "kK" else int(part) for part in text.split("x")]
            if len(sizes) != 4 or min(sizes) < 1:
                raise ValueError
        except ValueError:
            raise ValueError(f"shape {text!r}; expected sequences x queries x keys x heads, as in 4x4x80Kx16") from None
        return cls(*sizes)

    def __str__(self) -> str:
        keys = f"{self.keys // 1024}K" if self.keys % 1024 == 0 else str(self.keys)
        return f"{self.sequences}x{self.queries}x{keys}x{self.heads}"


@dataclasses.dataclass
class Modelled:
    """What the model says of one call.

    clocks: of the launches after each other.
    launch: clocks that starting them takes.
    details: clocks by part.
    shown: the cluster whose waits and units are reported.
    per_tile: clocks of a KV tile, 0 where a kernel has none.
    """

    machine: Machine
    clocks: float
    launch: float
    details: dict[str, float]
    shown: Replayed
    prepared: Prepared
    traces: list[Trace]
    per_tile: float = 0.0

    @property
    def microseconds(self) -> float:
        """Time at the machine's clock."""
        return (self.clocks + self.launch) / self.machine.clock.value


class Traced:
    """Kernel runs of a variant at one shape, emulated once and modelled on any machine of the architecture.

    machine_code: whether machine code runs, with its own order, or PTX, with costs by the rules of costs.py. None takes
    machine code where that was compared with a GPU: on Hopper.
    """

    def __init__(
        self, variant: Any, shape: Shape, processors: int, compiled: Any = None, machine_code: bool | None = None
    ):
        self.variant, self.shape, self.processors = variant, shape, processors
        self.arch = variant.arch.value
        self.machine_code = self.arch == "sm_90a" if machine_code is None else machine_code
        self._compiled = compiled
        self._read: dict[int, Text | Code] = {}

    def read(self, call: Call, launch: int) -> Text | Code:
        """Return what ran in one of the call's launches, as the model reads it on any machine."""
        entry = call.module.entries[call.launches[launch].entry]
        if id(entry) not in self._read:
            program = call.module.programs.get(entry.name)
            if isinstance(program, MachineProgram):
                self._read[id(entry)] = Code(program, call.module.text)
            else:
                self._read[id(entry)] = Text(entry, self.arch)
        return self._read[id(entry)]

    def prepared(self, call: Call, launch: int, machine: Machine) -> Prepared:
        """Return the costs of one of the call's launches."""
        return costs_on(machine, self.read(call, launch))

    def run(
        self, operator: Any, clusters: Iterable[int], processors: int | None = None, tests_fail: bool = False
    ) -> Call:
        """Emulate chosen clusters of what `operator()` launches, on a GPU of the problem's SMs or of so many."""
        chosen = tuple(clusters)
        options = Options(trace=chosen, only_traced=True, tests_fail=tests_fail, machine_code=self.machine_code)
        sms = processors or self.processors
        with emulated(self.arch, options, compiled=self._compiled, processors=sms) as gpu:
            operator()
        return gpu.calls[-1]


class PrefillTraced(Traced):
    """A prefill: one CTA at two numbers of KV tiles (when causal, the one that ends at the last key), and one with
    several query tiles where the kernel has such. A key mask has all bits set; its survey is not modelled."""

    def __init__(
        self,
        variant: Any,
        shape: Shape,
        processors: int,
        compiled: Any = None,
        machine_code: bool | None = None,
        tile_kv: int | None = None,
    ):
        super().__init__(variant, shape, processors, compiled, machine_code)
        self.rows = rows_of_tile(variant)
        self.tile_kv = tile_kv or keys_of_tile(variant)
        self.calls = [
            self.run(lambda n=n: _call_prefill(variant, self.rows, n * self.tile_kv), (0,)) for n in TILES_TRACED
        ]
        self.most = query_tiles_of(variant)
        if self.most > 1:  # of one SM and so many heads, the first CTA has as many query tiles as it can
            keys, heads = TILES_TRACED[0] * self.tile_kv, SINGLE_TILES + 2 * self.most
            self.calls.append(self.run(lambda: _call_prefill(variant, self.rows, keys, heads), (0,), processors=1))
        self._ends: dict[tuple[Machine, Memory], list[Replayed]] = {}
        self._ends_cold: dict[tuple[Machine, Memory], int] = {}
        """Clocks of the first, where it is the first of its SM and so finds its code in no cache."""

    def at(self, shape: Shape) -> PrefillTraced:
        """Return this kernel at another shape, without emulating it again."""
        other = copy.copy(self)
        other.shape = shape
        return other

    def model(self, machine: Machine) -> Modelled:
        """Model the whole problem on a machine."""
        memory = self.memory(machine)
        if (machine, memory) not in self._ends:
            self._ends[machine, memory] = [
                replay(self.prepared(call, self.attention, machine), self._traces(call), memory) for call in self.calls
            ]
            prepared, traces = self.prepared(self.calls[0], self.attention, machine), self._traces(self.calls[0])
            self._ends_cold[machine, memory] = replay(prepared, traces, memory, cold=True).clocks
        ends, prepared = self._ends[machine, memory], self.prepared(self.calls[1], self.attention, machine)
        few, many = TILES_TRACED
        per_tile = (ends[1].clocks - ends[0].clocks) / (many - few)
        fixed = ends[0].clocks - few * per_tile
        further = 0.0
        if self.most > 1:
            further = (ends[2].clocks - ends[0].clocks) / (self.most - 1) - few * per_tile
        durations = [fixed + (len(own) - 1) * further + sum(own) * per_tile for own in self.tiles()]
        ctas = ctas_of(self.variant)
        clocks = schedule(durations, machine.processors // ctas, machine.cta_gap.value)
        clocks += self._ends_cold[machine, memory] - ends[0].clocks
        details = {"per KV tile": per_tile, "beside tiles, a CTA": fixed, "CTAs": float(ctas * len(durations))}
        if self.most > 1:
            details["beside tiles, a further query tile"] = further
        return Modelled(
            machine, clocks, machine.launch.value, details, ends[1], prepared, self._traces(self.calls[1]), per_tile
        )

    @property
    def attention(self) -> int:
        """The number of a call's launch that is attention: a survey of its key mask goes before."""
        return int(self.variant.masked)

    def _traces(self, call: Call) -> list[Trace]:
        return [trace for trace in call.report.traces if trace.launch == self.attention]

    def memory(self, machine: Machine) -> Memory:
        """Return what a copy finds on average: the first copy of each byte comes from HBM, all others from L2."""
        v, s = self.variant, self.shape
        keys = (v.d_qk + v.d_v) * v.dtype.bits / 8
        query = s.queries * s.sequences * s.heads * v.d_qk * v.dtype.bits / 8
        once = s.keys * s.sequences * s.heads * keys + query
        new = min(1.0, once / (sum(map(sum, self.tiles())) * self.tile_kv * keys + query))
        share = machine.hbm.value * 1e3 / machine.clock.value / machine.processors
        latency = machine.copy_latency.value + new * (machine.copy_latency_hbm.value - machine.copy_latency.value)
        return Memory(latency, min(machine.l2.value, share / new))

    def tiles(self) -> list[list[int]]:
        """Return the KV tiles of each CTA's query tiles, in the order in which CTAs start."""
        return kv_tiles(self.variant, self.shape, self.processors, self.rows, self.tile_kv)


class DecodeTraced(Traced):
    """A decode: the CTAs that work longest, and one of the combine kernel. Query tokens that choose their keys are
    requests of one token, as the operator takes them."""

    def __init__(
        self, variant: Any, shape: Shape, processors: int, compiled: Any = None, machine_code: bool | None = None
    ):
        super().__init__(variant, shape, processors, compiled, machine_code)
        self.requests, self.q_len = shape.sequences, shape.queries
        if variant.gathers:
            self.requests, self.q_len = shape.sequences * shape.queries, 1
        self.workers = self._workers()
        call = _call_chosen if variant.gathers else _call_decode
        self.call = self.run(lambda: call(variant, shape), (0,))
        # A cluster runs so many workers: of pairs on Hopper each CTA has one, on Blackwell both have one.
        self.in_cluster = max(1, self.call.launches[0].cluster[0] // self.sms)
        busiest = sorted(range(len(self.workers)), key=lambda worker: -self.workers[worker][0])
        kinds: dict[tuple[int, int, int], int] = {}
        for worker in busiest:
            kinds.setdefault(self.workers[worker], worker // self.in_cluster)
        self.chosen = sorted(set([*kinds.values()][:4]) | {0})
        if self.chosen != [0]:
            self.call = self.run(lambda: call(variant, shape), self.chosen)
        self.failing: list[Trace] = []
        if self.read(self.call, 0).tests:
            other = self.run(lambda: call(variant, shape), self.chosen, tests_fail=True)
            self.failing = other.report.traces

    def _workers(self) -> list[tuple[int, int, int]]:
        """Return KV tiles, segments and partial results of each CTA (or pair)."""
        from tsmla.identity.plan import deal_of, plan_decode, row_tiling, wide_rows

        s, arch = self.shape, self.variant.arch
        rows = s.heads * self.q_len
        wide = wide_rows(self.variant.row, self.variant.gathers)
        deal = deal_of(arch, rows, wide=wide)
        plan = plan_decode(arch, self.processors, self.requests, self.q_len, s.heads, s.keys, wide=wide)
        found = []
        self.sms, self.reuse, self.tile_kv = deal.sms, row_tiling(rows, deal.row_tile).group, deal.tile_kv
        self.partials = 0
        lengths = [s.keys] * self.requests
        for own in deal_out(deal, lengths, self.q_len, s.heads, plan.workers, plan.slots).segments:
            split = sum(one.slot >= 0 for one in own)
            self.partials += split * min(rows, deal.row_tile)
            found.append((sum(one.tiles for one in own), len(own), split))
        return found

    def model(self, machine: Machine) -> Modelled:
        """Model the whole problem on a machine."""
        busy = sum(1 for own in self.workers if own[0]) * self.sms
        # Nothing of an isolated call is in L2: neither lengths and page tables nor lists of keys.
        read = dataclasses.replace(machine, load_latency=machine.load_latency_hbm)
        prepared = self.prepared(self.call, 0, read)
        # What an SM gets of memory. What is copied again, as keys and as values or by others of the group, is in L2.
        share = machine.hbm.value * 1e3 / machine.clock.value / busy
        again = max(1.0, self._copied(prepared) * self.reuse / self._keys_bytes()) / self.new(machine)
        memory = Memory(machine.copy_latency_hbm.value, min(share * again, machine.l2.value))
        ends = {}
        for cluster in self.chosen:
            own = [t for t in self.call.report.traces if t.launch == 0 and t.cluster == cluster]
            others = [t for t in self.failing if t.launch == 0 and t.cluster == cluster]
            ends[cluster] = (replay(prepared, own, memory, others, cold=True), own)
        longest = max(ends, key=lambda cluster: ends[cluster][0].clocks)
        attention, traces = ends[longest]
        most = max(own[0] for own in self._of(longest))
        details = {"attention": float(attention.clocks), "KV tiles of the longest CTA": float(most)}
        clocks, launches = float(attention.clocks), self.call.launches[:1]
        if len(self.call.launches) > 1 and self.partials:
            combine = self._combine(machine)
            details["combine"] = combine
            clocks, launches = clocks + combine, self.call.launches[:2]
        details["partial rows"] = float(self.partials)
        return Modelled(
            machine,
            clocks,
            starting_clocks(launches, machine),
            details,
            attention,
            prepared,
            traces,
            attention.clocks / max(most, 1),
        )

    def _of(self, cluster: int) -> list[tuple[int, int, int]]:
        """Return the workers of a cluster."""
        return self.workers[cluster * self.in_cluster : (cluster + 1) * self.in_cluster]

    def new(self, machine: Machine) -> float:
        """Return the share of what requests copy first that L2 does not have of another request: 1 unless keys are
        chosen."""
        if not self.variant.gathers:
            return 1.0
        return new_of(self.requests, self.shape.keys, self.variant.row.bytes, machine)

    def _copied(self, prepared: Prepared) -> float:
        """Return the bytes that all SMs of the first chosen cluster copy."""
        own = [t for t in self.call.report.traces if t.launch == 0 and t.cluster == self.chosen[0]]
        return self.sms * replay(prepared, own, Memory(0, 1e3)).copied

    def _keys_bytes(self) -> float:
        """Return the bytes of the keys that the first chosen cluster attends to, each once."""
        from tsmla.identity.row_format import SCALE_BYTES

        tiles, row = self._of(self.chosen[0])[0][0], self.variant.row
        return max(tiles, 1) * self.tile_kv * (row.bytes + SCALE_BYTES * row.apart)

    def _combine(self, machine: Machine) -> float:
        launch = self.call.launches[1]
        prepared = self.prepared(self.call, 1, machine)
        own = [t for t in self.call.report.traces if t.launch == 1 and t.cluster == 0]
        memory = Memory(machine.copy_latency.value, machine.l2.value)
        one = replay(prepared, own, memory, cold=True).clocks
        row_bytes = partial_row_bytes(self.variant, self.shape.heads * self.q_len)
        return combine_clocks(launch, one, self.partials * row_bytes, machine)


def partial_row_bytes(variant: DecodeVariant, rows: int) -> int:
    """Return the bytes of a row's partial result in a call of `rows` query rows, as the variant's kernels keep it: the
    output, its LSE, and the factor that the output is stored with."""
    from tsmla_kernels.sm90.decode import forms  # with the compiler
    from tsmla_kernels.sm100.decode.geometry import DecodeGeometry

    if variant.arch is Arch.SM90A:
        return int(forms.partial_rows_of(variant, rows).row_bytes(LATENT_DIM))
    return int(DecodeGeometry.few(variant).partial_rows.row_bytes(LATENT_DIM))


def new_of(requests: int, keys: int, row_bytes: float, machine: Machine) -> float:
    """Return the share of `keys` rows that each of so many requests copies, at random of CHOSEN_OF slots, which L2 does
    not have of another request.

    L2 is taken to keep what came last. A row is in it if one of `rate` other requests of a call has asked for it within
    the part of the call, `kept`, that brings as many rows as L2 holds (Che's approximation of such caches). At the
    beginning it is empty.
    """
    rate = (requests - 1) * keys / CHOSEN_OF
    held = machine.l2_bytes.value / (row_bytes * CHOSEN_OF)
    kept = min(1.0, -math.log1p(-held) / rate) if rate and held < 1 else 1.0
    while_empty = kept - (1 - math.exp(-rate * kept)) / rate if rate else 0.0  # of the beginning, all that L2 has
    return 1.0 - while_empty - (1 - kept) * (1 - math.exp(-rate * kept))


def starting_clocks(launches: Sequence[Launch], machine: Machine) -> float:
    """Return what starting kernels of a stream takes, one after the other. The first depends on nothing that is
    modelled."""
    further = (machine.launch_dependent if launch.pdl else machine.launch for launch in launches[1:])
    return machine.launch.value + sum(each.value for each in further)


def combine_clocks(launch: Launch, one: float, partial_bytes: float, machine: Machine) -> float:
    """Return the clocks of a kernel that joins partial results, of which one CTA alone takes `one`."""
    at_once = machine.processors * resident(launch)
    waves = -(-launch.grid[0] * launch.grid[1] * launch.grid[2] // at_once)
    moved = partial_bytes / machine.processors / machine.l2_own.value
    return max(waves * one, moved + one)


def resident(launch: Launch) -> int:
    """Return how many CTAs an SM holds at once, by their threads; registers and shared memory are not looked at."""
    return max(1, min(32, 2048 // (launch.block[0] * launch.block[1] * launch.block[2])))


def schedule(durations: list[float], processors: int, gap: float) -> float:
    """Return the clock at which the last of these CTAs ends. They start in order, each on the SM that is free first."""
    free = [0.0] * processors
    heapq.heapify(free)
    last = 0.0
    for duration in durations:
        end = heapq.heappop(free) + duration
        last = max(last, end)
        heapq.heappush(free, end + gap)
    return last


def arch_of(symbol: str) -> str:
    """Return the architecture of a kernel of tsmla or of a peer. Raises ValueError for a symbol that nobody has."""
    from .peers import peers

    peer = peers().get(symbol)
    return peer.arch if peer else check.find(symbol).arch.value


def traced(symbol: str, shape: Shape, machine: Machine, compiled: Any = None, machine_code: bool | None = None) -> Any:
    """Emulate a variant's kernel, or a peer's, at a shape. Its `model(machine)` gives a `Modelled`.

    compiled: as `emulated` takes it.
    machine_code: see `Traced`; a peer's kernels run as PTX unless it is true.

    Raises ValueError for a symbol that nobody has, and where a peer's package is not there.
    """
    from tsmla.identity.variant import DecodeVariant, PrefillVariant

    from . import peers
    from .streams import StreamTraced

    if symbol in peers.peers():
        return peers.traced(symbol, shape, machine, bool(machine_code))
    variant = check.find(symbol)
    kinds = {PrefillVariant: PrefillTraced, DecodeVariant: DecodeTraced}
    return kinds.get(type(variant), StreamTraced)(variant, shape, machine.processors, compiled, machine_code)


def _call_prefill(variant: Any, rows: int, keys: int, heads: int = 1) -> None:
    import torch
    import tsmla
    from tsmla.operators.checks import TORCH_DTYPE_OF

    torch.manual_seed(0)
    dtype = TORCH_DTYPE_OF[variant.dtype]
    q, k, v = (
        torch.randn(tokens, heads, dim, device="cuda").to(dtype)
        for tokens, dim in ((rows, variant.d_qk), (keys, variant.d_qk), (keys, variant.d_v))
    )
    ends_q, ends_kv = (torch.tensor([0, end], dtype=torch.int32, device="cuda") for end in (rows, keys))
    words = torch.full((rows, -(-keys // 32)), -1, dtype=torch.int32, device="cuda") if variant.masked else None
    tsmla.tsmla_prefill(
        q, k, v, None, ends_kv, keys, 1, variant.d_qk**-0.5, variant.causal, variant.lse, ends_q, rows, key_mask=words
    )


def _call_decode(variant: Any, shape: Shape) -> None:
    """Call the decode. Requests share pages: what keys hold does not matter here."""
    import torch
    import tsmla
    from tsmla.identity.support import LATENT_DIM, ROPE_DIM

    torch.manual_seed(0)
    page, pages, width = 64, 64, LATENT_DIM + ROPE_DIM
    query, cache = (
        given(variant, torch.randn(*outer, width, device="cuda"))
        for given, outer in (
            (given_query, (shape.sequences, shape.queries, shape.heads)),
            (given_cache, (pages, page)),
        )
    )
    table = (torch.arange(-(-shape.keys // page), dtype=torch.int32, device="cuda") % pages).repeat(shape.sequences, 1)
    lengths = torch.full((shape.sequences,), shape.keys, dtype=torch.int32, device="cuda")
    size = tsmla.decode_workspace_size(shape.sequences, shape.queries, shape.heads, shape.keys)
    tsmla.tsmla_decode(
        query,
        cache,
        torch.empty(size, dtype=torch.int8, device="cuda"),
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        table,
        lengths,
        shape.keys,
        width**-0.5,
        return_lse=variant.lse,
    )


def _call_chosen(variant: Any, shape: Shape) -> None:
    """Call the decode with lists of random keys, of fewer pages than CHOSEN_OF says: where keys lie does not matter
    here."""
    import torch
    import tsmla
    from tsmla.identity.support import LATENT_DIM, ROPE_DIM

    torch.manual_seed(0)
    page, pages, width, tokens = 64, 64, LATENT_DIM + ROPE_DIM, shape.sequences * shape.queries
    query = given_query(variant, torch.randn(tokens, shape.heads, width, device="cuda"))
    cache = given_cache(variant, torch.randn(pages, page, width, device="cuda"))
    indices = torch.randint(page * pages, (tokens, shape.keys), dtype=torch.int32).to("cuda")
    size = tsmla.decode_workspace_size(tokens, 1, shape.heads, shape.keys)
    tsmla.tsmla_decode(
        query,
        cache,
        torch.empty(size, dtype=torch.int8, device="cuda"),
        LATENT_DIM,
        variant.row.columns - LATENT_DIM,
        None,
        None,
        None,
        width**-0.5,
        return_lse=True,
        indices=indices,
        topk_length=torch.full((tokens,), shape.keys, dtype=torch.int32, device="cuda"),
    )
