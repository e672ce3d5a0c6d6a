"""Controls: what is seen against what is stated, findings' names, and the command; without a control's package."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from small_kernels import aligned, run
from tsmla_emulator.prove.controls import __main__ as command
from tsmla_emulator.prove.controls import judging, naming, running
from tsmla_emulator.prove.controls.control import STATED, Control, Explanation, Package, Seen, Stated, Values
from tsmla_emulator.run.machine import EmulationError, Finding
from tsmla_emulator.run.ptx.model import Instruction, Source

RACE, FENCE, PAST = "shared memory: a ld.shared, a st.shared: unordered", "tensor memory: no fence", "memory: past"
CONTROL = Control("decode", Package("other", "1.0"), "sm_100a", lambda: GOOD, Values(1e-2, 1e-4))
GOOD = Values(1e-3, 1e-6)
EXPLANATIONS = {"race": Explanation("defect", "It is one."), "fence": Explanation("kept", "It is kept.")}
AS_STATED = Stated(EXPLANATIONS, {CONTROL.title: {RACE: "race", FENCE: "fence"}})
SEEN = Seen(kernels=1, values=GOOD, lenient={RACE: 2}, strict={RACE: 2, FENCE: 9})


def wrong(stated: Stated = AS_STATED, **changes) -> list[str]:
    return judging.problems(CONTROL, dataclasses.replace(SEEN, **changes), stated)


def test_as_stated():
    assert wrong() == []
    assert wrong(ended={"late": RACE}) == [], "a defect may end a run"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lenient": {RACE: 2, FENCE: 1}}, "lenient: not stated: tensor memory: no fence"),
        ({"lenient": {}}, f"lenient: not reported: {RACE}"),
        ({"strict": {RACE: 2}}, "strict: not reported: tensor memory: no fence"),
        ({"strict": {FENCE: 1}}, f"strict: not reported: {RACE}"),
        ({"strict": {RACE: 2, FENCE: 1, "race: new": 1}}, "strict: not stated: race: new"),
        ({"values": Values(2e-2, 1e-6)}, "out is off by 0.02, more than 0.01"),
        ({"values": Values(1e-3, float("nan"))}, "lse is off by nan, more than 0.0001"),
        ({"values": None}, "no values"),
        ({"unwritten": 3}, "3 elements of results were never written"),
        ({"differ": ["late"]}, "late: other results"),
        ({"ended": {"late": FENCE}}, f"late: ended by what is not stated: {FENCE}"),
        ({"failed": PAST}, f"the call ended with what is not stated: {PAST}"),
        ({"refused": "PtxError: not implemented"}, "PtxError: not implemented"),
    ],
)
def test_what_differs_is_said(changes, said):
    assert wrong(**changes) == [f"other sm_100a decode: {said}"]


def test_an_lse_that_a_package_does_not_return_is_not_compared():
    given = dataclasses.replace(CONTROL, limits=dataclasses.replace(CONTROL.limits, lse=None))
    seen = dataclasses.replace(SEEN, values=dataclasses.replace(GOOD, lse=None))
    assert judging.problems(given, seen, AS_STATED) == []
    assert "| 1.0e-03 | - |" in judging.table([(given, seen)], AS_STATED, "")


def test_a_call_that_ends_as_stated_needs_no_more():
    stated = Stated(EXPLANATIONS, {CONTROL.title: {PAST: "race"}})
    nothing = {"values": None, "lenient": {}, "strict": {}}
    assert wrong(stated, failed=PAST, **nothing) == []
    assert f"other sm_100a decode: not reported: {PAST}" in wrong(stated)


@pytest.mark.parametrize("ends", ["barrier: a mbarrier.init: initialised again", "tmem: a tcgen05.mma: A differs"])
def test_misuse_ends_a_strict_run_before_races_are_found(ends):
    stated = Stated(EXPLANATIONS, {CONTROL.title: {RACE: "race", ends: "fence"}})
    assert wrong(stated, strict={ends: 1}) == []
    assert wrong(stated, strict={ends: 1, FENCE: 1}) == [f"other sm_100a decode: strict: not stated: {FENCE}"]
    assert wrong(stated, strict={}, lenient={RACE: 1}) == [
        f"other sm_100a decode: strict: not reported: {name}" for name in sorted([ends, RACE])
    ]


def test_table():
    page = judging.table([(CONTROL, dataclasses.replace(SEEN, seconds=3.2))], AS_STATED, "With other 1.0.")
    assert "| other sm_100a decode | 1 | 1.0e-03 | 1.0e-06 | race 1 | fence 1, race 1 | 3 |" in page.splitlines()
    assert f"**race** (defect). It is one.\n\n- `{RACE}`\n" in page and "With other 1.0." in page
    page = judging.table([(CONTROL, Seen(values=GOOD, lenient={"new": 1}))], AS_STATED, "")
    assert "| NOT STATED 1 | none |" in page
    page = judging.table([(CONTROL, Seen(refused="PtxError: no"))], AS_STATED, "")
    assert "| - | - | PtxError: no |" in page
    page = judging.table([(CONTROL, SEEN)], AS_STATED, "With " + "another 1.0, " * 20)
    assert max(len(line) for line in page.splitlines()) <= 120


def ran(monkeypatch, capsys, seen: Seen, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(command, "_apart", lambda control, seed, machine_code: seen)
    monkeypatch.setattr(command, "lacking", lambda packages: [])
    monkeypatch.setattr(command.Stated, "read", lambda path: AS_STATED)
    source = type("Source", (), {"controls": staticmethod(lambda: [CONTROL])})
    monkeypatch.setattr(command, "SOURCES", (source,))
    monkeypatch.setattr(command.importlib.metadata, "version", lambda name: "1.0")
    status = command.main([*arguments, "--seed", "7"])
    return status, capsys.readouterr().out


def test_exit_status(monkeypatch, capsys, tmp_path):
    status, said = ran(monkeypatch, capsys, SEEN, "decode")
    assert status == 0 and "[1/1] other sm_100a decode: as stated" in said and "--seed 7" in said
    status, said = ran(monkeypatch, capsys, dataclasses.replace(SEEN, lenient={}), "--table", str(tmp_path / "page"))
    assert status == 1 and f"lenient: not reported: {RACE}" in said
    assert "| other sm_100a decode |" in (tmp_path / "page").read_text()
    with pytest.raises(SystemExit):
        ran(monkeypatch, capsys, SEEN, "encode")


def test_of_machine_code_results_alone_are_judged(monkeypatch, capsys):
    nothing = {"lenient": {}, "strict": {}}
    status, said = ran(monkeypatch, capsys, dataclasses.replace(SEEN, **nothing), "decode", "--machine-code")
    assert status == 0 and "--machine-code" in said
    ended = dataclasses.replace(SEEN, **nothing, values=None, failed=PAST)
    status, said = ran(monkeypatch, capsys, ended, "decode", "--machine-code")
    assert status == 1 and f"the call ended with {PAST}" in said
    off = dataclasses.replace(SEEN, **nothing, values=dataclasses.replace(GOOD, out=1.0))
    assert ran(monkeypatch, capsys, off, "decode", "--machine-code")[0] == 1


def test_packages_that_lack_are_named(monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.metadata, "version", lambda name: "0.1")
    assert command.main(["flash-attn-4"]) == 2
    said = capsys.readouterr().err
    assert "flash-attn-4: 0.1; pip install --no-deps flash-attn-4==4.0.0b36 quack-kernels" in said
    assert "tokenspeed" not in said and "nvidia-cutlass-dsl==4.8.1" in said


def test_what_is_stated_belongs_to_a_control_and_an_explanation():
    stated = Stated.read(STATED)
    titles = [control.title for source in command.SOURCES for control in source.controls()]
    assert len(set(titles)) == len(titles)
    assert set(stated.findings) <= set(titles)
    assert {why for of_one in stated.findings.values() for why in of_one.values()} == set(stated.explanations)
    assert all(explanation.judgement in ("defect", "kept") for explanation in stated.explanations.values())


def test_a_statement_without_an_explanation_is_an_error(tmp_path):
    path = tmp_path / "stated.json"
    path.write_text(json.dumps({"explanations": {}, "findings": {"x": {RACE: "race"}}}))
    with pytest.raises(ValueError, match="no explanation race"):
        Stated.read(path)


def finding(text: str, *opcodes: str, kind: str = "race") -> Finding:
    return Finding(kind, text, tuple(Instruction(opcode, (), 1, "", source=HERE) for opcode in opcodes))


HERE = Source(__file__, finding.__code__.co_firstlineno + 1)
PLACES = "{} lane 0, column 3 of CTA 0: write by CTA 0 warp 8 at @ and read by CTA 1 warp 0 at @ are {}"


def test_names():
    text = PLACES.format("tensor memory", "ordered, but without a tcgen05.fence::after_thread_sync before the latter")
    assert naming.name_of(finding(text, "tcgen05.alloc.cta_group::1", "tcgen05.ld.sync")) == (
        "tensor memory: test_controls.finding tcgen05.alloc, test_controls.finding tcgen05.ld: "
        "no tcgen05.fence::after_thread_sync"
    )
    for how in ("not ordered: the former ends at a tcgen05.wait::ld", "not ordered"):
        loaded = naming.name_of(finding(PLACES.format("tensor memory", how), "tcgen05.ld.sync", "tcgen05.st.sync"))
        assert loaded.endswith(": no tcgen05.wait::ld")
    text = "CTA 0 ends, and nothing says that this is over: its shared memory is touched by write by CTA 0 warp 1 at @"
    name = "exit: test_controls.finding tcgen05.commit: not over when its CTA ends"
    assert naming.name_of(finding(text, "tcgen05.commit.cta_group::1", kind="exit")) == name
    text = "tcgen05.commit of 8 bytes at shared offset 0x458 of CTA 0, which has ended without waiting for it"
    assert naming.name_of(finding(text, "tcgen05.commit.cta_group::2", kind="exit")) == name
    text = "load of 4 bytes at global address 0x10, outside every region; it runs past the end of region 'table'"
    assert naming.name_of(finding(text, "ld.global.b32", kind="memory")) == (
        "memory: test_controls.finding ld.global: past the end of table"
    )
    assert naming.name_of(finding("column 48 of 2", "tcgen05.ld", kind="tmem")) == (
        "tmem: test_controls.finding tcgen05.ld: column # of #"
    )


def test_names_of_what_the_emulator_says():
    body = "setp.ge.u32 %p1, %r1000, 32; @!%p1 st.shared.b32 [smem+64], %r1; @%p1 ld.shared.b32 %r4, [smem+64];"
    with pytest.raises(EmulationError) as caught:
        run(body, aligned(np.zeros(4, np.uint32)), threads=64, shared=128, happens_before=True, lockstep=True)
    assert [naming.name_of(one) for one in caught.value.findings] == ["shared memory: st.shared, ld.shared: unordered"]


def test_what_an_operator_raises_is_kept():
    def fails() -> Values:
        raise RuntimeError("no such GPU")

    seen = running.run(dataclasses.replace(CONTROL, call=fails), 1)
    assert seen.refused == "RuntimeError: no such GPU" and seen.kernels == 0
