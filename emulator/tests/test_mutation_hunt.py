"""A hunt on several processes finds what one finds, keeps it, and goes on where there are no compilers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_kernels import text_of
from tsmla_emulator import cli
from tsmla_emulator.prove.mutation import mutate
from tsmla_emulator.prove.mutation.groups import find_covers, settle
from tsmla_emulator.prove.mutation.hunt import Kept, Pace, TimeIsUp, hunt
from tsmla_emulator.run.core import build
from tsmla_emulator.run.record import same

PACK = "tsmla_pack_sm_100a_bf16_to_e4m3_d128x64x128"
EXCHANGE = """
mov.b32 %r1, smem; shl.b32 %r2, %r1000, 2; xor.b32 %r3, %r2, 256; add.s32 %r4, %r1, %r2; add.s32 %r5, %r1, %r3;
st.shared.b32 [%r4], %r1000; bar.sync 0; bar.sync 0; ld.shared.b32 %r6, [%r5];
cvt.u64.u32 %d1, %r2; add.s64 %d2, %d100, %d1; st.global.b32 [%d2], %r6;
"""
"""Four warps exchange words. Of two barriers one would do."""
ADDRESS = 0x100000000000 + 512


@pytest.fixture
def exchange(tmp_path) -> mutate.Subject:
    return subject_of(EXCHANGE, tmp_path)


def subject_of(body: str, tmp_path: Path) -> mutate.Subject:
    memory = {"out": {"address": ADDRESS, "bytes": 512, "writable": True, "fill": "poison"}}
    launch = {"entry": "k", "grid": [1, 1, 1], "block": [128, 1, 1], "cluster": [1, 1, 1], "shared_bytes": 1024}
    launch |= {"pdl": False, "params": ADDRESS.to_bytes(128, "little").hex()}
    (tmp_path / "k.json").write_text(json.dumps({"memory": memory, "launches": [launch]}))
    (tmp_path / "k.ptx").write_text(text_of(body, 1, "sm_90a", 128))
    return mutate.Subject.of_files("exchange", tmp_path / "k.ptx", [tmp_path / "k.json"])


def in_order(subject: mutate.Subject) -> mutate.Findings:
    """One mutant after the other, then survivors together."""
    subject.require_clean()
    results = {site: subject.try_out(site, subject.schedules[:4]) for site in subject.sites}
    results |= {result.site: result for result in settle(subject, [x.site for x in results.values() if x.survived])}
    left = [results[site] for site in subject.sites if results[site].survived]
    results |= {result.site: result for result in find_covers(subject, left)}
    return mutate.Findings([results[site] for site in subject.sites])


def test_several_processes_find_what_one_finds(exchange):
    expected = in_order(exchange)
    survived = {result.site.label: result.cover for result in expected.results if result.survived}
    assert {result.kind for result in expected.results} == {"", "poison"}
    assert survived["bar.sync removed (2 of 2)"] == "bar.sync removed (1 of 2)"
    for processes in (1, 3):
        said = []
        assert hunt(exchange, Pace.of(processes), said.append) == expected
        assert f"{len(exchange.sites)} mutants" in said[0] and len(said) == 1 + len(exchange.sites) + len(survived)


def test_what_is_said_of_survivors_is_not_believed(exchange):
    expected = {x.site: x.survived for x in in_order(exchange).results}
    found = hunt(exchange, Pace.of(2), print, survives=lambda site: True)
    assert {x.site: x.survived for x in found.results} == expected and not all(expected.values())


def test_a_hunt_goes_on_where_it_stopped(exchange, tmp_path, monkeypatch):
    expected, path = in_order(exchange), tmp_path / "kept.jsonl"
    with pytest.raises(TimeIsUp):
        hunt(exchange, Pace.of(2, -1), print, kept=Kept(path, "this"))
    assert hunt(exchange, Pace.of(2), print, kept=Kept(path, "this")) == expected
    lines = path.read_text().splitlines()
    assert len(lines) > len(exchange.schedules) + len(exchange.sites)
    path.write_text("\n".join(lines[:-9]) + "\n" + lines[-9][:10])  # what was found last is lost, and half a line
    assert hunt(exchange, Pace.of(2), print, kept=Kept(path, "this")) == expected
    with monkeypatch.context() as patch:
        patch.delattr(mutate.Subject, "wrong")  # nothing is run again
        assert hunt(exchange, Pace.of(2), print, kept=Kept(path, "this")) == expected
        with pytest.raises(AttributeError):
            hunt(exchange, Pace.of(2), print, kept=Kept(path, "of something else"))


def test_a_failure_of_the_unchanged_kernel_is_told(tmp_path):
    subject = subject_of(EXCHANGE.replace("bar.sync 0; bar.sync 0;", "st.shared.b32 [%r5], %r1000;"), tmp_path)
    with pytest.raises(mutate.NotClean, match="exchange itself fails, schedule late: race: "):
        hunt(subject, Pace.of(2), print)


def test_a_directory_is_all_that_another_machine_needs(tmp_path, capsys):
    """Prepared here; tried by an interpreter that finds neither compiler; and published from what came back."""
    keep, page = tmp_path / "keep", tmp_path / "page.md"
    given = ["mutate", "--keep", str(keep), "--table", str(page)]
    assert cli.main([*given, PACK, "--prepare"]) == 0 and not page.exists()
    assert {path.name for path in keep.iterdir()} == {"hunt.json", "compiled", build.portable_name()}
    blind = "import sys; sys.modules |= dict.fromkeys(('ziglang', 'cutlass', 'tsmla_kernels'))\n"
    blind += "from tsmla_emulator import cli; sys.exit(cli.main(sys.argv[1:]))"

    def elsewhere(*more: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "TSMLA_EMULATOR_CACHE": str(tmp_path / "none")}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        command = [sys.executable, "-c", blind, *given, *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    for seconds, calls in (("0", False), ("0.001", True)):
        short = elsewhere("--seconds", seconds)
        assert short.returncode == 1 and f"not done, to go on with --keep {keep}: {PACK}" in short.stderr
        assert not page.exists() and (keep / "records").exists() == calls
    done = elsewhere()
    assert done.returncode == 0, done.stderr
    assert "1 mutants" in done.stdout and f"| {PACK} | 1 | 0 | 0 | 0 | 1 |" in page.read_text()
    first = page.read_text()
    for path in (*keep.glob("compiled/*.so"), *keep.glob("records/*/*/*"), *keep.glob("found/*.jsonl")):
        path.unlink()
    assert cli.main(given) == 0 and page.read_text() == first
    for path in keep.glob("compiled/*.ptx"):
        path.write_text(path.read_text() + "\n")  # another kernel, of which nothing is known
    failed = elsewhere()  # not in this process: what it starts would be forked from one that has threads
    assert failed.returncode == 1 and f"failed: calls of {PACK}" in failed.stderr
    capsys.readouterr()
    assert cli.main(["mutate", PACK, "--seconds", "1"]) == 2
    assert cli.main([*given, "--only", "pack"]) == 2


def test_a_core_of_other_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("TSMLA_EMULATOR_CORE", str(tmp_path / build.portable_name()))
    assert build.library() == tmp_path / build.portable_name()
    monkeypatch.setenv("TSMLA_EMULATOR_CORE", str(tmp_path / "core-0123456789abcdef.so"))
    with pytest.raises(RuntimeError, match="of these sources is core-"):
        build.library()


@pytest.mark.parametrize(("machine", "flags", "same"), [("x86_64", "fma avx2", True), ("x86_64", "avx", False)])
def test_this_machine_takes_the_core_of_others_where_it_can(monkeypatch, tmp_path, machine, flags, same):
    monkeypatch.delenv("TSMLA_EMULATOR_CORE", raising=False)
    monkeypatch.setattr(build, "_built", lambda directory, target, *_: tmp_path / "".join(target))
    monkeypatch.setattr(build, "_processor", lambda: flags)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert (build.library() == build.portable()) == same


def test_records_are_the_same_but_for_parameters(tmp_path):
    def stored(name: str, byte: str, params: str) -> Path:
        memory = {"x": {"address": ADDRESS, "bytes": 1, "writable": True, "fill": byte}}
        path = tmp_path / name
        path.write_text(json.dumps({"memory": memory, "launches": [{"entry": "k", "params": params}]}))
        return path

    first = stored("a.json", "zeros", "00")
    assert same([first]) == same([stored("b.json", "zeros", "01")]) != same([stored("c.json", "poison", "00")])
