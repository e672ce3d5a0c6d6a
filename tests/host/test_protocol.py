"""The measuring protocol on a GPU that is made up: a clock that the host moves, and a queue of launches."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import protocol, published

HOST_US = 30.0
"""What queueing anything costs this host."""


class Gpu:
    """Works off what is queued; `busy_until` and the host's `now` are in microseconds."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0.0
        self.order: list[str] = []

    def queue(self, micros: float) -> None:
        self.now += HOST_US
        self.busy_until = max(self.busy_until, self.now) + micros

    def synchronize(self) -> None:
        self.now = max(self.now, self.busy_until)

    def candidate(self, name: str, micros: float, spread: float = 0.0) -> protocol.Candidate:
        def launch() -> None:
            self.order.append(name)
            self.queue(micros * (1 + spread * random.uniform(-1, 1)))

        return protocol.Candidate(name, launch)


class Event:
    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.gpu.queue(0)
        self.at = self.gpu.busy_until

    def query(self) -> bool:
        return self.gpu.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) / 1000


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(Event, "gpu", made, raising=False)
    monkeypatch.setattr(protocol.torch.cuda, "Event", Event)
    monkeypatch.setattr(protocol.torch.cuda, "synchronize", made.synchronize)
    monkeypatch.setattr(protocol.torch.cuda, "_sleep", lambda cycles: made.queue(cycles / 2000))
    monkeypatch.setattr(protocol, "Flush", lambda: lambda: made.queue(20))
    monkeypatch.setattr(protocol.time, "sleep", lambda seconds: setattr(made, "now", made.now + seconds * 1e6))
    return made


@pytest.mark.parametrize("regime", protocol.REGIMES)
def test_no_time_of_the_host_is_measured(
    gpu: Gpu, regime: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spin too short for this host is found out: its samples are dropped, not averaged. Medians are told at once."""
    monkeypatch.setattr(protocol, "HIDE_CYCLES", (2_000, protocol.HIDE_CYCLES[1]))
    candidates = [gpu.candidate("tsmla", 17), gpu.candidate("other", 19)]
    timings = protocol.measure(candidates, regime, protocol.Monitor(), seconds=0.0)
    for name, micros in (("tsmla", 17), ("other", 19)):
        assert timings[name].max_us == pytest.approx(micros) == pytest.approx(timings[name].min_us)
        assert timings[name].dropped > 0 and timings[name].launches >= protocol.LEAST_ROUNDS
    assert timings["other"].ratio == pytest.approx((17 / 19, 17 / 19))
    assert capsys.readouterr().err.endswith(f"{regime}: tsmla 17.0 us, other 19.0 us\n")


def test_a_host_that_is_always_late_is_refused(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HIDE_CYCLES", (2_000, 2_000))
    with pytest.raises(RuntimeError, match="tsmla, isolated: the GPU waited for the host in most of 600 launches"):
        protocol.measure([gpu.candidate("tsmla", 17)], "isolated", protocol.Monitor(), seconds=0.0)


@pytest.mark.parametrize("regime", protocol.REGIMES)
def test_nobody_always_follows_the_same_other_one(gpu: Gpu, regime: str) -> None:
    names = ("tsmla", "a", "b")
    protocol.measure([gpu.candidate(name, 10) for name in names], regime, protocol.Monitor(), seconds=0.0)
    followed = set(zip(gpu.order[3:], gpu.order[4:], strict=False))
    assert len(followed) >= 6


@given(st.lists(st.floats(0.5, 2), min_size=30, max_size=200, unique=True))
def test_the_interval_is_around_the_median(values: list[float]) -> None:
    interval = protocol.of_median(values)
    assert interval is not None
    below, above = (sum(value < interval[0] for value in values), sum(value > interval[1] for value in values))
    expected = len(values) / 2 - 0.98 * len(values) ** 0.5
    assert below == pytest.approx(expected, abs=1.5) and above == pytest.approx(expected, abs=1.5)


def test_intervals_are_wrong_as_seldom_as_they_say() -> None:
    source = random.Random(1)
    runs = [protocol.of_median([source.gauss(1, 0.1) for _ in range(40)]) for _ in range(2000)]
    missed = sum(not run[0] <= 1 <= run[1] for run in runs if run) / len(runs)
    assert 0.02 < missed < 0.07


@pytest.mark.parametrize(
    ("ours", "interval", "tie"),
    [(100.5, (0.99, 1.01), True), (100.5, (1.003, 1.007), False), (95.0, None, False), (99.5, None, True)],
)
def test_a_tie_is_what_the_interval_says(ours: float, interval: tuple[float, float] | None, tie: bool) -> None:
    best = {"median_us": 100.0} | ({"ratio": interval} if interval else {})
    slower = {"median_us": 110.0, "ratio": (0.9, 0.91)}
    timings = {"tsmla": {"median_us": ours}, "slower": slower, "best": best}
    assert published.best_peer(timings) is best
    assert published.is_tie(timings) is tie


def test_without_a_gpu_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="benchmarks measure on a CUDA GPU; torch sees none"), protocol.Monitor():
        pass


def test_what_is_written_is_read():
    """Lists within entries, dataclasses, and fractions, of which six digits are kept."""
    timing = protocol.Timing("isolated", True, 30, 12.799999676644802, 12.6, 13.3, None, 132.49, ratio=(0.98, 1.0))
    record = {"certificate": {"device": "a GPU"}, "results": [{"shape": [1, "fixed"], "timings": {"tsmla": timing}}]}
    text = published.text_of({**record, "runs": {"one": [0.5], "none": []}, "of": []})
    read = json.loads(text)
    assert text.count("\n") == 9
    kept = dataclasses.asdict(timing) | {"median_us": 12.8, "ratio": [0.98, 1.0]}
    assert read["results"][0]["timings"]["tsmla"] == kept
    assert (read["certificate"], read["runs"], read["of"]) == (record["certificate"], {"one": [0.5], "none": []}, [])
