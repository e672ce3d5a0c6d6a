"""`tsmla selftest`: whatever a child process does is a report, and what the report and the record say."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tsmla
from example_variants import DECODE, KEY_MASK, PACK, PREFILL, QUANTIZE_Q, READ_CACHE, WRITE_CACHE, library_manifest
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.variant import FAMILIES
from tsmla.loading import gpu, manifest, records, toolchain
from tsmla.problems.cases import KINDS, cases_of, kind_of
from tsmla.tools import cli, emulated
from tsmla.tools.selftest import family as selftest_family
from tsmla.tools.selftest.family import Limits, run_all, run_family, shares
from tsmla.tools.selftest.protocol import Job

from build_aot.matrix import shipped as matrix

STAND_IN = """
import json, os, signal, sys, time
from tsmla.identity.variant import variant_from_dict
acts, job = json.loads(sys.argv[1]), json.loads(sys.stdin.readline())
assert os.environ["TSMLA_BACKEND"] == "binary"
say = lambda **event: print(json.dumps(event), flush=True)
if acts.get("start") == "ends":
    print("no such GPU", file=sys.stderr)
    sys.exit(3)
if acts.get("start") == "hangs":
    time.sleep(60)
say(gpu="NVIDIA H200", torch="2.11.0")
for plain in job["kernels"]:
    symbol = variant_from_dict(plain).symbol()
    act = acts.get(symbol, "good")
    say(started=symbol)
    say(case="a tile")
    if act == "hangs":
        time.sleep(60)
    if "/" in act:  # names of directories: one to make, and one that another makes
        made, other = act.split()
        os.mkdir(made)
        while not os.path.exists(other):
            time.sleep(0.01)
    if act == "dies":
        print("illegal memory access", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "ends":
        sys.exit(0)
    if act == "garbage":
        print("no JSON {", "[1]", '{"finished": {"symbol": "' + symbol + '"}}', '{"finished": {"nonsense": 1}}',
              '{"finished": {"symbol": "another", "ok": true}}', "null", '{"what": 1}', sep="\\n", flush=True)
    problem = "a tile: output is off" if act in ("wrong", "poisoned") else ""
    say(finished=dict(symbol=symbol, ok=not problem, cases=1, repeats=job["repeats"], worst_error=0.5,
                      served="shipped", problem=problem))
    if act == "poisoned":
        os._exit(1)
"""
"""A child that acts as it is told for each kernel, instead of running it."""
LIMITS = Limits(start=30, case=1)
NO_INPUTS = {"out_dtype", "causal", "lse"}
VARIANTS = matrix(["sm_90a"], ["decode"])
SYMBOLS = [variant.symbol() for variant in VARIANTS]
SAID = {
    "good": "",
    "garbage": "",
    "wrong": "a tile: output is off",
    "poisoned": "a tile: output is off",
    "dies": "a tile: its process was ended by signal 11 (Segmentation fault) (it printed: illegal memory access)",
    "ends": "a tile: its process ended with status 0",
}
"""What a child does with a kernel, and the problem that is reported of it."""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """Children act as told from here on."""

    def act(**acts: str) -> None:
        command = [sys.executable, "-c", STAND_IN, json.dumps(acts)]
        monkeypatch.setattr(selftest_family, "child_command", lambda family: command)

    return act


def run(limits: Limits = LIMITS):
    told = []
    outcomes, machine = run_family("decode", VARIANTS, Job([], True, 100, ("shipped",)), limits, told.append)
    assert told == outcomes and [outcome.symbol for outcome in outcomes] == SYMBOLS
    return outcomes, machine


@pytest.mark.parametrize("seed", range(3))
def test_every_kernel_has_the_outcome_of_what_its_child_did(stand_in, seed: int) -> None:
    draw = random.Random(seed)
    acts = {symbol: draw.choice([*SAID, "good", "good"]) for symbol in SYMBOLS}
    stand_in(**acts)
    outcomes, machine = run()
    assert [outcome.problem for outcome in outcomes] == [SAID[acts[symbol]] for symbol in SYMBOLS]
    assert [outcome.ok for outcome in outcomes] == [not outcome.problem for outcome in outcomes]
    assert machine is not None and machine.gpu == "NVIDIA H200"


def test_a_hang_is_a_report_and_the_others_run(stand_in) -> None:
    stand_in(**{SYMBOLS[2]: "hangs"})
    outcomes, _ = run()
    assert outcomes[2].problem == "a tile: hung: nothing happened for 1 s"
    assert [outcome.ok for outcome in outcomes] == [symbol != SYMBOLS[2] for symbol in SYMBOLS]


def test_after_three_hangs_the_others_are_not_run(stand_in) -> None:
    stand_in(**dict.fromkeys(SYMBOLS[1:], "hangs"))
    outcomes, _ = run(Limits(start=30, case=0.3))
    assert outcomes[0].ok
    assert all(outcome.problem.startswith("a tile: hung: ") for outcome in outcomes[1:4])
    assert {outcome.problem for outcome in outcomes[4:]} == {"not run: 3 kernels before it hung"}


def test_a_child_that_does_not_start_is_tried_once(stand_in) -> None:
    stand_in(start="ends")
    outcomes, machine = run()
    problem = "not run: its process ended with status 3 (it printed: no such GPU)"
    assert {outcome.problem for outcome in outcomes} == {problem} and machine is None
    stand_in(start="hangs")
    assert {outcome.problem for outcome in run(Limits(0.5, 1))[0]} == {"not run: hung: nothing happened for 0.5 s"}


def test_a_child_is_a_module_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its job, finds that there is no GPU, and ends."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    outcomes, machine = run(Limits(120, 120))
    assert machine is None and not any(outcome.ok for outcome in outcomes)
    assert "not run: its process ended with status 1" in outcomes[0].problem


def test_children_run_side_by_side(stand_in, tmp_path: Path) -> None:
    """Two that wait for each other come to an end; outcomes are told as they come, and returned in order."""
    a, b = tmp_path / "a", tmp_path / "b"
    stand_in(**{DECODE.symbol(): f"{a} {b}", PACK.symbol(): f"{b} {a}"})
    told: list = []
    variants = [PREFILL, DECODE, PACK]
    outcomes, machine = run_all(variants, Job([], False, 2, ("shipped",)), LIMITS._replace(case=20), told.append, 2)
    assert [(each.symbol, each.problem) for each in outcomes] == [(variant.symbol(), "") for variant in variants]
    assert sorted(told, key=str) == sorted(outcomes, key=str) and machine is not None and machine.gpu == "NVIDIA H200"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_no_child_outlives_the_command(stand_in, monkeypatch: pytest.MonkeyPatch, error) -> None:
    stand_in(**{DECODE.symbol(): "hangs"})
    processes, popen = [], subprocess.Popen

    def start(*args, **named):
        processes.append(popen(*args, **named))
        return processes[-1]

    def tell(outcome) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(error):
        run_all([PREFILL, DECODE], Job([], False, 2, ("shipped",)), LIMITS._replace(case=50), tell, 2)
    assert len(processes) == 2 and all(process.wait(10) in (0, -signal.SIGKILL) for process in processes)


def test_what_a_thread_cannot_do_is_an_error(stand_in, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest_family, "child_command", lambda family: ["/nothing/here"])
    with pytest.raises(FileNotFoundError):
        run_all([PREFILL, DECODE], Job([], False, 2, ("shipped",)), LIMITS, lambda outcome: None, 2)


@pytest.mark.parametrize("processes", [1, 2, 10, 64])
@pytest.mark.parametrize("full", [False, True])
def test_shares_are_all_kernels_with_their_inputs_made_once(processes: int, full: bool) -> None:
    variants = matrix(["sm_90a"])
    found = shares(variants, processes, full)
    assert sorted(each.symbol() for share in found for each in share) == [each.symbol() for each in variants]
    assert all(len({each.family for each in share}) == 1 for share in found)
    inputs = [
        {
            dataclasses.replace(each, **{name: vars(variants[0]).get(name) for name in NO_INPUTS & vars(each).keys()})
            for each in share
        }
        for share in found
    ]
    assert sum(map(len, inputs)) == len(set().union(*inputs))
    work = [sum(len(cases_of(kind_of(each), full=full)) for each in share) for share in found]
    assert work == sorted(work, reverse=True)
    assert len(found) == len(FAMILIES) if processes == 1 else len(found) >= min(processes, 10)
    if processes == 10:
        assert work[0] <= 0.16 * sum(work), "a tenth, and what cannot be divided"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Libraries of one kernel each, of which only the manifests are real, on a machine with an H200."""
    directory = tmp_path / "objs"
    directory.mkdir()
    libraries = []
    for variant in (PREFILL, DECODE, PACK, WRITE_CACHE, READ_CACHE, QUANTIZE_Q, KEY_MASK):
        file = directory / manifest.library_file(variant.family, variant.arch, "x86_64")
        file.write_bytes(variant.symbol().encode())
        libraries.append(manifest.LibraryRecord.of_file(file, library_manifest(variant)))
    manifest.write_directory(directory, manifest.DirectoryManifest(manifest.SCHEMA, tuple(libraries)))
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: directory)
    monkeypatch.setattr(gpu, "current_arch", lambda: (Arch.SM90A, "GPU 0 runs sm_90a"))
    return directory


@pytest.fixture
def own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No record of any architecture, and a place for one."""
    monkeypatch.setattr(records, "DIRECTORY", tmp_path)
    return tmp_path


def test_all_good(installed: Path, own_records: Path, stand_in, capsys) -> None:
    stand_in()
    assert cli.main(["selftest"]) == 0
    printed = capsys.readouterr().out
    assert all(f"{v}: ok, 1 cases, error at most 0.50" in printed for v in (PREFILL, DECODE, PACK))
    assert "NVIDIA H200: 7 kernels, 0 wrong" in printed
    assert f"on record for sm_90a: {records.UNVERIFIED}" in printed


def test_something_wrong_is_an_exit_status(installed: Path, stand_in, capsys) -> None:
    stand_in(**{DECODE.symbol(): "wrong"})
    assert cli.main(["selftest"]) == 1
    printed = capsys.readouterr().out
    assert f"{DECODE}: WRONG: a tile: output is off" in printed and "7 kernels, 1 wrong" in printed
    assert cli.main(["selftest", "--family", "prefill", "pack"]) == 0
    assert "2 kernels, 0 wrong" in capsys.readouterr().out
    assert cli.main(["selftest", "--kernel", DECODE.symbol()]) == 1
    assert "1 kernels, 1 wrong" in capsys.readouterr().out


def test_full_json_is_the_record(installed: Path, own_records: Path, stand_in, capsys) -> None:
    stand_in()
    assert cli.main(["selftest", "--full", "--json"]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed)
    assert record["gpu"] == "NVIDIA H200" and record["torch"] == "2.11.0" and record["arch"] == "sm_90a"
    assert record["source_digest"] == toolchain.source_digest()
    assert record["libraries"] == {file.name: manifest.file_sha256(file) for file in installed.glob("*.so")}
    assert [kernel["repeats"] for kernel in record["kernels"]] == [100] * 7
    assert records.passed(record, Arch.SM90A) and not records.passed(record, Arch.SM100A)
    (own_records / "selftest_sm_90a.json").write_text(printed)
    passed = f"selftest passed on NVIDIA H200, {record['date']}"
    assert records.verified(Arch.SM90A, toolchain.source_digest()) == passed
    assert records.verified(Arch.SM90A, "of others") == f"{passed}, of other kernel sources"
    assert records.verified(Arch.SM100A, toolchain.source_digest()) == records.UNVERIFIED


def test_full_in_the_emulator_is_no_record_of_hardware(installed: Path, stand_in, monkeypatch, capsys) -> None:
    monkeypatch.setattr(emulated, "installed", lambda: True)
    stand_in()
    assert cli.main(["selftest", "--emulated", "sm_90a", "--full", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["full"] and record["emulated"] and not records.passed(record, Arch.SM90A)
    symbols = [kernel["symbol"] for kernel in record["kernels"]]
    assert symbols == sorted(symbols) and len(symbols) == 7


@pytest.mark.parametrize(
    ("arguments", "acts"),
    [
        (["--full"], {PACK.symbol(): "wrong"}),
        (["--full"], {PACK.symbol(): "dies"}),
        ([], {}),
        (["--full", "--family", "prefill", "decode"], {}),
        (["--full", "--kernel", PACK.symbol()], {}),
    ],
    ids=["wrong", "dies", "short", "families", "kernel"],
)
def test_a_part_or_a_failure_verifies_nothing(installed, own_records, stand_in, capsys, arguments, acts) -> None:
    stand_in(**acts)
    cli.main(["selftest", "--json", *arguments])
    (own_records / "selftest_sm_90a.json").write_text(capsys.readouterr().out)
    text = records.verified(Arch.SM90A, toolchain.source_digest())
    assert text.startswith(records.UNVERIFIED) and "records no complete run that passed" in text


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1'])
def test_a_record_that_cannot_be_read_verifies_nothing(own_records: Path, text: str) -> None:
    (own_records / "selftest_sm_90a.json").write_text(text)
    assert "selftest_sm_90a.json here cannot be read: " in records.verified(Arch.SM90A, "")


def test_status_and_probe_say_what_ran_on_hardware(shipped: Path, own_records: Path, capsys) -> None:
    assert f"  pack: {records.UNVERIFIED}" in str(tsmla.binary_status("sm_90a")).splitlines()
    record = {"schema": 1, "arch": "sm_90a", "full": True, "complete": True, "emulated": False, "ok": True}
    record |= {"gpu": "NVIDIA H200", "date": "2026-11-22", "source_digest": toolchain.source_digest()}
    (own_records / "selftest_sm_90a.json").write_text(json.dumps(record))
    assert cli.main(["probe", "--arch", "sm_90a", "--family", "pack"]) == 0
    assert "  pack: selftest passed on NVIDIA H200, 2026-11-22\n" in capsys.readouterr().out
    assert cli.main(["probe", "--arch", "sm_90a", "--family", "pack", "--json"]) == 0
    families = json.loads(capsys.readouterr().out)["families"]
    assert families["pack"]["verified"] == "selftest passed on NVIDIA H200, 2026-11-22"
    assert families["decode"]["verified"] == ""


def test_records_that_ship_are_of_complete_runs_that_passed() -> None:
    files = {file.name: json.loads(file.read_text()) for file in records.DIRECTORY.glob("*.json")}
    expected = {records.record_file(arch).name: arch for arch in SHIPPED_ARCHS}
    assert all(records.passed(record, expected[name]) for name, record in files.items())


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(gpu, "_driver", lambda: None)
    assert cli.main(["selftest"]) == 1
    assert "nothing to run on: no CUDA device: libcuda.so.1 is not installed" in capsys.readouterr().err


def test_libraries_that_are_not_what_was_built(installed: Path, stand_in, capsys) -> None:
    next(installed.glob("*.so")).write_bytes(b"another")
    assert cli.main(["selftest"]) == 1
    assert "rebuild or reinstall it" in capsys.readouterr().err


def test_no_library_for_the_gpu(installed: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu, "current_arch", lambda: (Arch.SM103A, "GPU 0"))
    assert cli.main(["selftest"]) == 1
    assert "has no library for sm_103a; it holds: tsmla_" in capsys.readouterr().err


def test_no_library_for_the_operator(shipped: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu, "current_arch", lambda: (Arch.SM90A, "GPU 0"))
    assert cli.main(["selftest", "--family", "decode"]) == 1
    assert "has no such kernels for sm_90a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--kernel", "nothing"], "the libraries have no nothing"),
        (["--family", "pack", "--kernel", DECODE.symbol()], "the libraries have no tsmla_decode"),
    ],
)
def test_wrong_use(installed: Path, monkeypatch, capsys, arguments: list[str], text: str) -> None:
    monkeypatch.setattr(emulated, "installed", lambda: True)
    assert cli.main(["selftest", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_emulation_says_how_to_install_it(installed: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(emulated, "installed", lambda: False)
    assert cli.main(["selftest", "--emulated", "sm_100a"]) == 2
    assert emulated.INSTALL in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_cases_are_some_of_all(kind: str) -> None:
    short, full = cases_of(kind, full=False), cases_of(kind, full=True)
    assert 0 < len(short) < len(full) and set(short) < set(full)
    assert len({case.name for case in full}) == len(full), "a report names cases"
