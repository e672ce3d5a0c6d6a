"""How every operator is measured, so that two numbers from here can be compared.

A *candidate* is one way to do the work; all candidates of a case run in turn, in an order drawn anew each round, so
that clocks and temperature are shared and nobody always follows the same other one. Each launch is timed by its own
pair of CUDA events, and starts with an L2 that holds none of its data. Events and launch are queued while the GPU is
busy with a spinning kernel and the flush, so that no host time is in the figure. Where the GPU got to a launch before
the host had queued all of it, the sample is dropped and counted, and the GPU spins longer from there on.

Two candidates *tie* unless the 95 % confidence interval of the median, over at least 30 rounds, of the ratio of their
times leaves out 1.

There are two regimes, because one clock does not fit both: *isolated* launches (idle gaps, the GPU at its boost clock)
and *back to back* (no gaps, the GPU at its power limit). SM clock and power are sampled all the while.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .runner import gpu_uuid, require_gpu

REGIMES = ("isolated", "back to back")
LONGEST_GAP_SECONDS, SHORTEST_GAP_SECONDS = 0.06, 0.01
GAP_OF_LAUNCHES = 20
"""Gap between isolated launches, in their own lengths; never outside of SHORTEST_GAP_SECONDS to LONGEST_GAP_SECONDS."""
HIDE_CYCLES = 200_000, 20_000_000
"""SM cycles (0.1 to 10 ms) that the GPU spins first, so that the host has time to queue what is timed: at first, and at
most."""
QUEUE_DEPTH = 64
"""Launches between waits in the back-to-back regime: the GPU never idles, the event list stays short."""
LEAST_ROUNDS, MOST_ROUNDS_IN_VAIN = 30, 600
"""Rounds of which no sample must be dropped; and rounds after which to give up where there are fewer."""
NORMAL_97_5 = 1.96
"""The 97.5 % quantile of the standard normal distribution."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to do a case's work; `launch` queues it on the current stream and allocates nothing it need not."""

    name: str
    launch: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one candidate in one regime, with the median SM clock (MHz) and power (W) of that regime.

    ratio: the confidence interval of the first candidate's time over this one's, round by round.
    dropped: samples for which the GPU was not kept busy; nothing else counts them.
    """

    regime: str
    graph: bool
    launches: int
    median_us: float
    min_us: float
    max_us: float
    sm_clock_mhz: float | None
    power_w: float | None
    dropped: int = 0
    ratio: tuple[float, float] | None = None


class Monitor:
    """Samples SM clock and power every 20 ms from nvidia-smi. Without nvidia-smi there are no samples.

    Entering it ends the process with a sentence where there is no GPU to measure.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Monitor:
        require_gpu()
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", f"--id={gpu_uuid()}", "--query-gpu=clocks.sm,power.draw"]
            self._process = subprocess.Popen(
                [*command, "--format=csv,noheader,nounits", "-lms", "20"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                clock, power = (float(field) for field in line.split(","))
            except ValueError:
                continue  # a field that this GPU does not report
            self.samples.append((time.monotonic(), clock, power))

    def since(self, start: float) -> tuple[float | None, float | None]:
        """Return the median (SM clock in MHz, power in W) of the samples taken after `start` (time.monotonic
        seconds)."""
        chosen = [sample for sample in self.samples if sample[0] >= start]
        if not chosen:
            return None, None
        return statistics.median(s[1] for s in chosen), statistics.median(s[2] for s in chosen)


class Flush:
    """Empties the L2 of what a launch reads or writes.

    It writes twice the L2's size, then reads as much of something else, so that no dirty line is left to be written
    back at the expense of the next launch.
    """

    def __init__(self) -> None:
        size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._written = torch.empty(size // 4, dtype=torch.int32, device="cuda")
        self._read = torch.zeros_like(self._written)
        self._sum = torch.empty((), dtype=torch.int64, device="cuda")

    def __call__(self) -> None:
        self._written.zero_()
        torch.sum(self._read, dim=0, dtype=torch.int64, out=self._sum)


def as_graph(candidate: Candidate) -> Candidate:
    """Return the candidate as a replayed CUDA graph. Its launch must write into tensors that exist before."""
    candidate.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        candidate.launch()
    return Candidate(candidate.name, graph.replay)


def measure(
    candidates: Sequence[Candidate],
    regime: str,
    monitor: Monitor,
    seconds: float = 2.0,
    graph: bool = False,
) -> dict[str, Timing]:
    """Time every candidate for about `seconds` in all, interleaved; the names of the candidates are the keys.

    However short, each takes LEAST_ROUNDS rounds. Medians are printed to stderr as they come, for who waits for the
    record, or whose run is cut. Raises RuntimeError where the host was always too slow to keep the GPU busy.
    """
    if regime not in REGIMES:
        raise ValueError(f"regime is {regime!r}; known: {', '.join(REGIMES)}")
    if graph:
        candidates = [as_graph(candidate) for candidate in candidates]
    started = time.monotonic()
    for candidate in candidates:
        candidate.launch()
    torch.cuda.synchronize()
    start = time.monotonic()
    rounds = _isolated(candidates, seconds) if regime == "isolated" else _back_to_back(candidates, seconds)
    clock, power = monitor.since(start)
    timings = {}
    for name in (candidate.name for candidate in candidates):
        micros = [taken for of_round in rounds if (taken := of_round[name]) is not None]
        if len(micros) < LEAST_ROUNDS:
            raise RuntimeError(f"{name}, {regime}: the GPU waited for the host in most of {len(rounds)} launches")
        pairs = ((of_round[candidates[0].name], of_round[name]) for of_round in rounds)
        ratios = [first / other for first, other in pairs if first and other]
        timings[name] = Timing(
            regime,
            graph,
            len(micros),
            statistics.median(micros),
            min(micros),
            max(micros),
            clock,
            power,
            len(rounds) - len(micros),
            of_median(ratios),
        )
    said = ", ".join(f"{name} {timing.median_us:.1f} us" for name, timing in timings.items())
    print(f"{time.monotonic() - started:.1f} s, {regime}: {said}", file=sys.stderr, flush=True)
    return timings


def of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a 95 % confidence interval of the median of what `values` are drawn from; None for fewer than six.

    Its bounds are two of the values, chosen by the normal approximation of the sign test (Conover, Practical
    Nonparametric Statistics, 3.2).
    """
    if len(values) < 6:
        return None
    ordered, half = sorted(values), NORMAL_97_5 * len(values) ** 0.5 / 2
    middle = len(values) / 2
    return ordered[max(0, int(middle - half))], ordered[min(len(values) - 1, int(middle + half + 0.5))]


class _Spin:
    """A kernel that keeps the GPU busy while the host queues; it spins longer after each launch for which it was too
    short."""

    def __init__(self) -> None:
        self._cycles, self._most = HIDE_CYCLES

    def __call__(self) -> None:
        torch.cuda._sleep(self._cycles)

    def longer(self) -> None:
        self._cycles = min(2 * self._cycles, self._most)


Round = dict[str, float | None]
"""Microseconds of each candidate's launch; None where the sample was dropped."""
Sample = tuple[torch.cuda.Event, torch.cuda.Event, bool]
"""Events around a launch, and whether the GPU was still busy when the second was queued."""


def _isolated(candidates: Sequence[Candidate], seconds: float) -> list[Round]:
    flush, spin, gap = Flush(), _Spin(), LONGEST_GAP_SECONDS
    start, rounds = time.monotonic(), list[Round]()
    while time.monotonic() - start < seconds or _too_few(rounds):
        of_round: Round = {}
        for candidate in random.sample(candidates, len(candidates)):
            time.sleep(gap)
            spin()
            sample = _timed(candidate, flush)
            torch.cuda.synchronize()
            of_round[candidate.name] = taken = _micros(sample)
            if taken is None:
                spin.longer()
            else:
                gap = min(LONGEST_GAP_SECONDS, max(SHORTEST_GAP_SECONDS, GAP_OF_LAUNCHES * taken * 1e-6))
        rounds.append(of_round)
    return rounds


def _back_to_back(candidates: Sequence[Candidate], seconds: float) -> list[Round]:
    flush, spin = Flush(), _Spin()
    start, rounds = time.monotonic(), list[Round]()
    while time.monotonic() - start < seconds or _too_few(rounds):
        spin()
        queued = [
            {candidate.name: _timed(candidate, flush) for candidate in random.sample(candidates, len(candidates))}
            for _ in range(max(1, QUEUE_DEPTH // len(candidates)))
        ]
        torch.cuda.synchronize()
        if not all(busy for of_round in queued for *_, busy in of_round.values()):
            spin.longer()
        rounds += [{name: _micros(sample) for name, sample in of_round.items()} for of_round in queued]
    return rounds


def _too_few(rounds: Sequence[Round]) -> bool:
    whole = sum(None not in of_round.values() for of_round in rounds)
    return whole < LEAST_ROUNDS and len(rounds) < MOST_ROUNDS_IN_VAIN


def _timed(candidate: Candidate, flush: Flush) -> Sample:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush()
    first.record()
    candidate.launch()
    last.record()
    return first, last, not first.query()


def _micros(sample: Sample) -> float | None:
    first, last, busy = sample
    return first.elapsed_time(last) * 1000 if busy else None


def ceilings(monitor: Monitor, seconds: float = 1.0) -> dict[str, float]:
    """Measure what this GPU reaches in this run, isolated: copy and read in GB/s (10^9 bytes; copies count both
    directions), and a bf16 8192^3 matmul in TFLOP/s."""
    source = torch.zeros(2**28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    total = torch.empty((), dtype=torch.float32, device="cuda")
    side = 8192
    a, b = (torch.randn(side, side, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    work = {
        "copy_gb_s": (2 * source.nbytes / 1e9, lambda: target.copy_(source)),
        "read_gb_s": (source.nbytes / 1e9, lambda: torch.sum(source, dim=0, out=total)),
        "matmul_bf16_tflop_s": (2 * side**3 / 1e12, lambda: torch.matmul(a, b, out=product)),
    }
    timings = measure([Candidate(name, launch) for name, (_, launch) in work.items()], REGIMES[0], monitor, seconds)
    return {name: amount / (timings[name].median_us * 1e-6) for name, (amount, _) in work.items()}


def agree(launches: Mapping[str, Callable[[], torch.Tensor]], most: float) -> None:
    """Stop unless every candidate gives what "tsmla" gives, within a relative RMS difference of `most`."""
    ours = launches["tsmla"]().float()
    for name, launch in launches.items():
        difference = float((launch().float().view_as(ours) - ours).norm() / ours.norm())
        if not difference <= most:
            raise SystemExit(f"{name} differs from tsmla by {difference:.2e} (relative RMS); nothing was measured")
