"""Kernels of other projects in the timing model: traced as their packages launch them, replayed like tsmla's.

A prefill runs one cluster at two numbers of KV tiles, and the replay draws a line through both. One that keeps its SMs
for many row tiles also runs with two of these, and the second shows what a further one takes. A decode runs the first
cluster of the call itself, which stands for every cluster: peers cut keys into equal splits.
"""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import multiprocessing
from collections.abc import Mapping, Sequence

from ..prove.controls import cudnn, flash_attn_4, tokenspeed_mla
from ..prove.controls.control import Peer
from ..run import machine as interpreter
from ..run.emulate import emulated
from ..run.machine import Launch, Options, Trace
from ..run.sass.program import MachineProgram
from .costs import Text
from .executed import Code, costs_on
from .machines import Machine
from .problem import TILES_TRACED, Modelled, Shape, combine_clocks, new_of, schedule, starting_clocks
from .replay import Memory, Prepared, Replayed, replay

TILE_KV = 128
"""Keys of a tile, in every kernel here."""
PARTIAL_ROW_BYTES = 4 * (512 + 1)
"""Bytes that a split of a decode leaves of a row: outputs and LSE, float32."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a call launched, and what the warps of the first cluster of each launch executed.

    programs: the machine code that ran, by entry; none where PTX did.
    """

    ptx: str
    launches: tuple[Launch, ...]
    traces: tuple[Trace, ...]
    programs: Mapping[str, MachineProgram] = dataclasses.field(default_factory=dict)


def peers() -> dict[str, Peer]:
    """Return all kernels that the model knows, by name; their packages need not be installed."""
    return {peer.name: peer for source in (flash_attn_4, tokenspeed_mla, cudnn) for peer in source.peers()}


def seen(peer: Peer, processors: int, shapes: Sequence[Shape], machine_code: bool = False) -> list[Seen]:
    """Emulate the peer's call at each shape on a GPU of so many SMs, in a process of its own.

    Packages and the compiler remember for which GPU they worked. Raises ValueError where a package is missing or of
    another version.
    """
    from ..prove.controls.__main__ import lacking

    if missing := lacking({peer.package}):
        raise ValueError("; ".join(missing))
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(_seen, peer, processors, shapes, machine_code).result()


def _seen(peer: Peer, processors: int, shapes: Sequence[Shape], machine_code: bool) -> list[Seen]:
    options = Options(trace=(0,), only_traced=True, machine_code=machine_code, lenient_tensor=True)
    found = []
    with emulated(peer.arch, options, adopt_compiles=True, processors=processors) as gpu:
        for shape in shapes:
            peer.call(shape.sequences, shape.queries, shape.keys, shape.heads)
            call = gpu.calls[-1]
            programs = {n: one for n, one in call.module.programs.items() if isinstance(one, MachineProgram)}
            found.append(Seen(call.module.text, call.launches, tuple(call.report.traces), programs))
    return found


def traced(name: str, shape: Shape, machine: Machine, machine_code: bool = False) -> PeerPrefill | PeerDecode:
    """Emulate a peer's kernel at a shape. Raises KeyError for a name that nobody has, and what `seen` raises."""
    peer = peers()[name]
    if peer.family == "prefill":
        return PeerPrefill(peer, shape, seen_prefill(peer, machine_code))
    return PeerDecode(peer, shape, *seen(peer, machine.processors, [shape], machine_code))


def seen_prefill(peer: Peer, machine_code: bool = False) -> list[Seen]:
    """Return the calls from which a peer's prefill is modelled at any shape."""
    few, many = TILES_TRACED
    shapes = [Shape(1, peer.rows, few * TILE_KV, 1), Shape(1, peer.rows, many * TILE_KV, 1)]
    if peer.persistent:
        shapes.append(Shape(1, peer.rows, few * TILE_KV, 2))
    return seen(peer, 2, shapes, machine_code)


class _Replays:
    """Traces of a peer's calls, for any machine."""

    def __init__(self, peer: Peer, shape: Shape):
        self.peer, self.shape = peer, shape
        self._read: dict[tuple[str, str], Text | Code] = {}

    def prepared(self, call: Seen, launch: int, machine: Machine) -> Prepared:
        name = call.launches[launch].entry
        if (call.ptx, name) not in self._read:
            program = call.programs.get(name)
            entries = {} if program else interpreter.parse(call.ptx).entries
            self._read[call.ptx, name] = Code(program, call.ptx) if program else Text(entries[name], self.peer.arch)
        return costs_on(machine, self._read[call.ptx, name])

    def replayed(self, call: Seen, launch: int, machine: Machine, memory: Memory) -> Replayed:
        """Replay the first cluster of one of the call's launches."""
        return replay(self.prepared(call, launch, machine), _own(call, launch), memory)


def _own(call: Seen, launch: int) -> list[Trace]:
    return [trace for trace in call.traces if trace.launch == launch]


def _ctas(launch: Launch) -> int:
    return launch.cluster[0] * launch.cluster[1] * launch.cluster[2]


def _clusters(launch: Launch) -> int:
    return launch.grid[0] * launch.grid[1] * launch.grid[2] // _ctas(launch)


class PeerPrefill(_Replays):
    """A peer's prefill of sequences of one length. Raises ValueError where a call had other clusters than assumed."""

    def __init__(self, peer: Peer, shape: Shape, calls: Sequence[Seen]):
        super().__init__(peer, shape)
        self.calls = calls
        for call in calls:
            if (found := _clusters(call.launches[-1])) != 1:
                raise ValueError(f"{peer.name}: {found} clusters for {peer.rows} query rows, not one")
        self.ctas = _ctas(calls[0].launches[-1])
        self._ends: dict[Machine, list[Replayed]] = {}

    def at(self, shape: Shape) -> PeerPrefill:
        """Return this kernel at another shape, without emulating it again."""
        other = copy.copy(self)
        other.shape = shape
        return other

    def model(self, machine: Machine) -> Modelled:
        """Model the whole problem on a machine."""
        if machine not in self._ends:
            memory = Memory(machine.copy_latency.value, machine.l2.value)
            self._ends[machine] = [self.replayed(c, len(c.launches) - 1, machine, memory) for c in self.calls]
        ends = self._ends[machine]
        few, many = TILES_TRACED
        per_tile = (ends[1].clocks - ends[0].clocks) / (many - few)
        first = ends[0].clocks - few * per_tile
        further = ends[2].clocks - ends[0].clocks - few * per_tile if self.peer.persistent else first
        places, tiles = machine.processors // self.ctas, self.tiles()
        durations = [further + n * per_tile for n in tiles]
        if self.peer.persistent:
            clocks = first - further + max(sum(durations[place::places]) for place in range(places))
        else:
            clocks = schedule(durations, places, machine.cta_gap.value)
        details = {"per KV tile": per_tile, "beside tiles, a row tile": further, "row tiles": float(len(tiles))}
        shown = self.calls[1]
        return Modelled(
            machine,
            clocks,
            machine.launch.value,
            details,
            ends[1],
            self.prepared(shown, len(shown.launches) - 1, machine),
            _own(shown, len(shown.launches) - 1),
            per_tile,
        )

    def tiles(self) -> list[int]:
        """Return the KV tiles of each row tile, in the order in which they start."""
        peer, s = self.peer, self.shape
        of_head = []
        for row_tile in range(-(-s.queries // peer.rows)):
            seen_keys = s.keys
            if peer.causal:
                seen_keys = min(s.keys, s.keys - s.queries + min((row_tile + 1) * peer.rows, s.queries))
            of_head.append(-(-max(seen_keys, 0) // TILE_KV))
        heads = s.sequences * s.heads
        if not peer.section:
            return of_head * heads
        head_bytes = s.keys * sum(peer.dims) * (2 if peer.dtype == "bf16" else 1)
        together = 1 << max(peer.section // head_bytes, 1).bit_length() - 1
        found = []
        for start in range(0, heads, together):
            for tiles in reversed(of_head):
                found += [tiles] * min(together, heads - start)
        return found


class PeerDecode(_Replays):
    """A peer's decode of requests of one length: waves of equal clusters, and a kernel that joins splits."""

    def __init__(self, peer: Peer, shape: Shape, call: Seen):
        super().__init__(peer, shape)
        self.call = call

    @property
    def row_bytes(self) -> int:
        return sum(self.peer.dims) * (2 if self.peer.dtype == "bf16" else 1)

    def new(self, machine: Machine) -> float:
        """Return the share of what is copied first that L2 does not have of another token: 1 unless keys are chosen."""
        if not self.peer.gathers:
            return 1.0
        return new_of(self.shape.sequences * self.shape.queries, self.shape.keys, self.row_bytes, machine)

    def model(self, machine: Machine) -> Modelled:
        """Model the whole problem on a machine. HBM is shared by the SMs of a wave."""
        launch, s = self.call.launches[0], self.shape
        ctas, clusters = _ctas(launch), _clusters(launch)
        places = machine.processors // ctas
        copied = self.replayed(self.call, 0, machine, Memory(0, 1e3)).copied * ctas * clusters
        tokens = s.queries if self.peer.gathers else 1
        again = max(1.0, copied / (s.sequences * tokens * s.keys * self.row_bytes)) / self.new(machine)
        waves = [places] * (clusters // places) + [rest for rest in [clusters % places] if rest]
        ends = {}
        for busy in set(waves):
            share = machine.hbm.value * 1e3 / machine.clock.value / (busy * ctas)
            memory = Memory(machine.copy_latency_hbm.value, min(share * again, machine.l2.value))
            ends[busy] = self.replayed(self.call, 0, machine, memory)
        attention = sum(ends[busy].clocks for busy in waves) + (len(waves) - 1) * machine.cta_gap.value
        rows = s.heads if self.peer.gathers else s.queries * s.heads
        splits = max(1, clusters // (s.sequences * tokens * -(-rows // (64 * ctas))))
        details = {
            "attention": float(attention),
            "clusters": float(clusters),
            "splits": float(splits),
            "copied, of the keys' bytes": again,
        }
        clocks = float(attention)
        if len(self.call.launches) > 1:
            near = Memory(machine.copy_latency.value, machine.l2.value)
            one = self.replayed(self.call, 1, machine, near).clocks
            partials = splits * s.sequences * s.queries * s.heads * PARTIAL_ROW_BYTES
            details["combine"] = combine_clocks(self.call.launches[1], one, partials, machine)
            clocks += details["combine"]
        keys = s.keys / splits
        shown = ends[waves[0]]
        return Modelled(
            machine,
            clocks,
            starting_clocks(self.call.launches, machine),
            details,
            shown,
            self.prepared(self.call, 0, machine),
            _own(self.call, 0),
            shown.clocks / max(1.0, keys / TILE_KV),
        )
