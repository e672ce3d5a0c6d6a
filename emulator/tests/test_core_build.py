"""The interpreter's library: what its build tells, and what it keeps."""

from __future__ import annotations

import os
import time

from tsmla_emulator.run.core import build


def test_the_build_tells_how_far_it_is_and_keeps_its_objects(monkeypatch, tmp_path):
    made_files: list[str] = []
    told: list[tuple[int, int]] = []

    def stand_in(scratch, *arguments, made):
        made_files.append(made.name.partition("-")[0])
        made.touch()

    monkeypatch.setattr(build, "_zig", stand_in)
    monkeypatch.setenv("TSMLA_EMULATOR_CACHE", str(tmp_path))
    monkeypatch.delenv("TSMLA_EMULATOR_CORE", raising=False)
    first = build.library(lambda *progress: told.append(progress))
    count = len(list(build._HERE.glob("*.cpp")))
    assert told == [(done, count) for done in range(count + 1)] and len(made_files) == count + 3
    assert build.library(lambda *progress: told.append(progress)) == first and len(told) == count + 1
    first.unlink()
    next(tmp_path.glob("replay-*.o")).unlink()
    long_ago = time.time() - (build.UNUSED_DAYS + 1) * 86400
    others = [tmp_path / name for name in (f"core-{'0' * 16}.so", f"replay-{'0' * 16}.o", "callers.o")]
    for path in (*tmp_path.glob("*.o"), *others):
        path.touch()
        os.utime(path, (long_ago, long_ago))
    made_files.clear()
    assert build.library() == first
    assert [name for name in made_files if (build._HERE / f"{name}.cpp").exists()] == ["replay"]
    assert [path.exists() for path in others] == [False, False, True]
    assert len([*tmp_path.glob("*.o")]) == count + 1, "objects of these sources were taken, and stay"
