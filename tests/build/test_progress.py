"""What a build says while it goes: how much there is to do, for how long, and the same in a file."""

from __future__ import annotations

import pytest
from tsmla.identity.arch import Arch

from build_aot import matrix, progress
from build_aot.build import STORE


def test_a_build_begins_with_what_it_will_compile_and_for_how_long():
    shipped = matrix.shipped()
    said = progress.Estimate(shipped, jobs=2).announcement
    assert said.startswith(f"compiling {len(shipped)} kernels for sm_100a, sm_103a, sm_90a in 2 processes: about ")
    minutes = int(said.split()[-2])
    assert said.endswith(" minutes") and 4 <= minutes <= 20
    hopper = matrix.shipped([Arch.SM90A])
    alone = progress.Estimate(hopper, jobs=len(hopper) + 1).announcement
    assert f" for sm_90a in {len(hopper)} processes: about " in alone and alone.endswith(" seconds")


def test_the_time_that_is_left_follows_what_was_seen(monkeypatch):
    clock = iter([100.0, 160.0, 160.0 + 60])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    variants = [variant for variant in matrix.shipped([Arch.SM90A], ["decode"])[:4]]
    estimate = progress.Estimate(variants, jobs=1)
    assert estimate.left_after(variants[0]) == "about 3 minutes left"
    assert estimate.left_after(variants[1]) == "about 2 minutes left"


def test_what_is_printed_is_in_a_file_too(small_build, small_variants):
    out, ran = small_build
    lines = (out / STORE / progress.FILE).read_text().splitlines()
    assert set(lines) <= set(ran.output.splitlines())
    assert lines[0].startswith(f"compiling {len(small_variants)} kernels for ") and ": about " in lines[0]
    assert lines[len(small_variants)].endswith(" s, about 0 seconds left")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 seconds"), (44, "44 seconds"), (45, "1 minute"), (100, "2 minutes")]
)
def test_minutes(seconds, words):
    assert progress._minutes(seconds) == words
