"""The checks see every kind of synchronisation that tsmla's kernels use, and a bug that one of them once had."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from small_kernels import text_of
from tsmla_emulator import cli
from tsmla_emulator.prove import check
from tsmla_emulator.prove.calls.decode import DECODE_LENGTHS
from tsmla_emulator.prove.mutation import mutate
from tsmla_emulator.prove.mutation import table as mutation_table
from tsmla_emulator.prove.mutation.actions import (
    B_AWAY,
    B_STRIDE,
    B_SWIZZLE,
    EARLIER,
    FEWER_BYTES,
    FEWER_REGISTERS,
    LATER,
    MORE_BYTES,
    MORE_REGISTERS,
    NEXT_BARRIER,
    NEXT_COLUMN,
    NEXT_MBARRIER,
    NEXT_ROW,
    OF_GLOBAL_MEMORY,
    ONE_LESS,
    ONE_MORE,
    OTHER_BOUND,
    PARITY_0,
    PARITY_1,
    PLACE_FURTHER,
    RELAXED,
    WIDER,
    changed,
)
from tsmla_emulator.prove.mutation.groups import find_covers, settle
from tsmla_emulator.prove.mutation.reasons import Mutants, Reasons
from tsmla_emulator.prove.mutation.sites import MASKS
from tsmla_emulator.run import machine
from tsmla_emulator.run.core.binding import program_of
from tsmla_emulator.run.machine import Options
from tsmla_emulator.run.ptx import calls
from tsmla_emulator.run.ptx.model import Call
from tsmla_emulator.run.record import Record

DOCS = Path(__file__).parents[1] / "docs"
REASONS = Reasons.read(DOCS / "mutation-reasons.json")
PREFILL = "tsmla_prefill_sm_90a_bf16_to_bf16_d192x128_causal_lse"
LONG = f"{PREFILL}, long sequences"
SEVERAL_TILES = "tsmla_prefill_sm_90a_e4m3_to_bf16_d192x128_causal_lse"
BLACKWELL = "tsmla_prefill_sm_100a_e4m3_to_bf16_d192x128_causal_lse"
PACK = "tsmla_pack_sm_100a_bf16_to_e4m3_d128x64x128"
DECODE = "tsmla_decode_sm_100a_e4m3_to_bf16_d512x64_lse"
ONLY_A_FULL_HUNT_CATCHES = {
    "sm100/prefill/softmax._wait_full_of: turns.wait_full: mbarrier.try_wait always true (2 of 3)",
    "sm100/prefill/softmax._wait_full_of: turns.wait_full: mbarrier.try_wait always true (3 of 3)",
    "sm100/decode/mma._values: k.release_after_mmas: tcgen05.commit removed (1 of 2)",
}
"""Not under the schedules that are tried here (emulator/docs/mutation-table.md)."""
LENGTHS_OF_SEVERAL_TILES = ((200, 390, 178), (60, 400, 20))
"""Two CTAs have six query tiles each, far apart, which see none, one, three or five KV tiles. Two CTAs have one, of no
rows."""
RACE = Options(async_mode="late", happens_before=True)
QUICK = [("eager", Options()), ("late", Options(async_mode="late")), ("late", RACE)]
FENCE = "fence.mbarrier_init.release.cluster;"
ONLY_HAPPENS_BEFORE_SEES = {
    "fence.mbarrier_init",
    "fence.proxy.async",
    "wgmma.fence",
    "cp.async.bulk.commit_group",
    "cp.async.bulk.wait_group",
    "griddepcontrol.wait",
    "tcgen05.wait::ld",
    "tcgen05.fence",
}


WRONG = (RELAXED, OF_GLOBAL_MEMORY, ONE_MORE, ONE_LESS, NEXT_BARRIER)
MISPLACED = (
    EARLIER, LATER, MORE_BYTES, FEWER_BYTES, NEXT_MBARRIER, PARITY_0, PARITY_1, NEXT_COLUMN, NEXT_ROW, WIDER,
    OTHER_BOUND, PLACE_FURTHER, B_AWAY, B_STRIDE, B_SWIZZLE,
)  # fmt: skip
REGISTERS = (MORE_REGISTERS, FEWER_REGISTERS)
WHOLE_WARP = "bar.warp.sync"


def taken_away(subject: mutate.Subject) -> list[mutate.Site]:
    """Mutants without an instruction, but for synchronisations of a warp."""
    others = WRONG + MISPLACED + REGISTERS
    return [site for site in subject.sites if site.action not in others and site.family != WHOLE_WARP]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """PTX text and records of a kernel by its name in the table; decodes of fewer requests than there."""
    found = {}
    small = pytest.MonkeyPatch()
    small.setattr(mutation_table, "DECODE_LENGTHS", DECODE_LENGTHS)
    small.setattr(check, "DECODE_HIDING", (70, 0, 170, 330))
    for symbol in (PREFILL, BLACKWELL, PACK, DECODE):
        for name, (ptx, *some) in mutation_table.recorded(symbol, tmp_path_factory.mktemp("records")).items():
            found[name] = ptx.read_text(), *([Record(path) for path in records] for records in some)
    small.undo()
    return found


def subject_of(ptx: str, records: list[Record], of_masks: Sequence[Record] = ()) -> mutate.Subject:
    subject = mutate.Subject("kernel", machine.parse(ptx), records, of_masks)
    subject.schedules = QUICK
    return subject


@pytest.fixture(scope="module")
def subjects(kernels):
    """Gives a kernel by its name in the table as a subject of mutants: made, and found clean, once for all tests."""

    @functools.cache
    def made(name: str) -> mutate.Subject:
        subject = subject_of(*kernels[name])
        subject.require_clean()
        return subject

    return made


@pytest.mark.parametrize("symbol", [PREFILL, LONG, BLACKWELL, PACK])
def test_each_kind_of_synchronisation_is_missed(subjects, symbol):
    subject = subjects(symbol)
    families, unreached = defaultdict(list), []
    for site in taken_away(subject):
        result = subject.try_out(site)
        if result.executed:
            families[site.family].append(result)
        else:
            unreached.append(site.label)
    assert not unreached
    results = sum(families.values(), [])
    left = [x.site for x in results if x.survived and not REASONS.of(symbol, x.site)]
    survivors = [site.label for site in left if site.label not in ONLY_A_FULL_HUNT_CATCHES]
    assert len(survivors) <= 0.05 * len(results), survivors
    assert not [label for label in survivors if label.startswith("tcgen05.")]
    for family, of_family in families.items():
        caught = {result.kind for result in of_family} - {""}
        assert caught, f"no check saw any {family} missing"
        if family in ONLY_HAPPENS_BEFORE_SEES:
            assert caught <= {"race", "exit"}, family
    assert len(families) == {PREFILL: 9, LONG: 9, BLACKWELL: 13, PACK: 1}[symbol]
    if symbol != PACK:
        assert {result.kind for result in families["mbarrier.try_wait"]} >= {"values", "poison", "race"}


def test_each_kind_of_synchronisation_is_missed_in_a_decode(subjects):
    """Some of its waits and fences are redundant, for the reasons in the table; nothing of other kinds is."""
    name = f"{DECODE}, 10 rows"
    subject = subjects(name)
    families, left = defaultdict(list), []
    for result in map(subject.try_out, taken_away(subject)):
        if result.executed:
            families[result.site.family].append(result.survived)
            if result.survived and not REASONS.of(name, result.site):
                left.append(result.site)
    unknown = {site.family for site in left if site.label not in ONLY_A_FULL_HUNT_CATCHES}
    assert unknown <= {"mbarrier.try_wait", "tcgen05.wait::ld", "tcgen05.fence"}
    assert all(2 * sum(survived) <= len(survived) for survived in families.values())
    assert len(families) == 13


@pytest.mark.parametrize("name", [PREFILL, BLACKWELL, f"{DECODE}, 10 rows", f"{DECODE}, 66 rows"])
def test_instructions_that_are_wrong_are_caught(subjects, name):
    """Equivalent, but for those with a reason in the table: another number where one instruction serves all who meet; a
    wait or an arrival that orders nothing which others do not; and a count of a barrier that nobody waits for."""
    subject = subjects(name)
    results = [subject.try_out(site) for site in subject.sites if site.action in WRONG]
    left = [result.site for result in results if result.survived]
    survived = [(site.family, site.action) for site in left if not REASONS.of(name, site)]
    assert {action for _, action in survived} <= {RELAXED, ONE_MORE, ONE_LESS, NEXT_BARRIER}
    assert len(survived) <= 0.15 * len(results), survived
    of_counts = [result for result in results if result.site.family == "mbarrier.init"]
    assert len([result for result in of_counts if result.survived]) <= 0.2 * len(of_counts)


@pytest.mark.parametrize("name", [PREFILL, BLACKWELL, f"{DECODE}, 10 rows"])
def test_instructions_that_are_misplaced_are_caught(subjects, name):
    """A few of each kind. Equivalent: a commit for which nobody waits yet; a wait whose phase is always the same, or
    whose barrier completes with the other one; a bound at which no key of the recorded call lies; columns of products
    that are written again."""
    subject = subjects(name)
    kinds = defaultdict(list)
    for site in subject.sites:
        if site.action in MISPLACED:
            kinds[site.family, site.action].append(site)
    of_hopper = set(MISPLACED) - {NEXT_COLUMN, WIDER}
    possible = {PREFILL: of_hopper, LONG: of_hopper - {PLACE_FURTHER}, BLACKWELL: set(MISPLACED)}
    assert {action for _, action in kinds} == possible.get(name, set(MISPLACED) - {LATER})
    may_survive = {LATER, NEXT_MBARRIER, PARITY_0, PARITY_1, OTHER_BOUND, NEXT_COLUMN, WIDER}
    for (_, action), of_kind in kinds.items():
        results = [subject.try_out(site) for site in Random(4).sample(of_kind, min(4, len(of_kind)))]
        survived = [x.site.label for x in results if x.survived and not REASONS.of(name, x.site)]
        assert not survived or (action in may_survive and (action == LATER or len(survived) < len(results))), survived


BULK = "cp.async.bulk.global.shared::cta.bulk_group [%d100], [%r{0}], 16; "
COMMIT = "cp.async.bulk.commit_group; "


@pytest.mark.parametrize(
    ("body", "action", "expected"),
    [
        (BULK + BULK + COMMIT, EARLIER, [0, 2, 1]),
        (BULK + "mov.u32 %r2, 1; " + COMMIT, EARLIER, [2, 0, 1]),
        (BULK + "L1: " + COMMIT, EARLIER, None),
        ("mov.u32 %r2, 1; " + COMMIT, EARLIER, None),
        (COMMIT + "mov.u32 %r2, 1; " + BULK, LATER, [1, 2, 0]),
        (COMMIT + "bra L1; L1: " + BULK, LATER, None),
    ],
)
def test_commits_move_within_their_basic_block(body, action, expected):
    module = machine.parse(text_of(body.format(1), 1, "sm_90a", 32))
    (entry,) = module.entries.values()
    program = program_of(module, entry)
    position = next(i for i, at in enumerate(entry.instructions) if "commit" in at.opcode)
    moved = changed(program, position, action)
    assert (moved is None) == (expected is None)
    if moved is not None and expected is not None:
        first = position if action == LATER else position - len(expected) + 1
        size = len(program.code) // (len(entry.instructions) + 1)
        pieces = [program.code[size * at : size * (at + 1)] for at in range(len(entry.instructions) + 1)]
        pieces[first : first + len(expected)] = [pieces[first + at] for at in expected]
        assert moved.code == b"".join(pieces)


@pytest.mark.parametrize("name", [PREFILL, BLACKWELL, f"{DECODE}, 10 rows", f"{DECODE}, 66 rows"])
def test_other_bounds_of_masks_are_caught(subjects, name):
    """Some of them. Equivalent: whether a tile is masked at all and a page looked up, where both answers are right at
    the bound; and, of a causal tile before the last, rows that cannot have their last key in its first two columns."""
    subject = subjects(name)
    of_masks = [site for site in subject.sites if site.family == MASKS]
    results = [subject.try_out(site) for site in Random(5).sample(of_masks, 40)]
    survived = Counter(result.site.callee for result in results if result.survived)
    only_of_tiles = {"all.lacks", "look_up", "follow", "surely_seen", "seen_bits"}
    assert set(survived) <= (only_of_tiles if "decode" in name else {"mask_scores", "mask_row"})
    assert survived.total() <= (len(results) / 2 if "decode" in name else 4)


@pytest.mark.parametrize("name", [BLACKWELL, f"{DECODE}, 10 rows", f"{DECODE}, 66 rows"])
def test_synchronisations_of_a_warp_are_missed(subjects, name):
    """But where all that comes before is of the whole warp: tcgen05.ld and st with their waits; or of one lane: values
    from pages of 64 keys; and of turns, which hand nothing over. Of two behind copied rows, one would do."""
    subject = subjects(name)
    results = [subject.try_out(site) for site in subject.sites if site.family == WHOLE_WARP]
    if "decode" in name:
        of_rows = [site for site in subject.sites if site.family == WHOLE_WARP and "_load_query" in site.key][:2]
        assert [site.callee for site in of_rows] == ["copy_rows", "q.hand_over"]
        assert subject.caught(of_rows)[0] == "race"
    assert {result.kind for result in results} >= {"race"}
    survived = {result.site.key.partition(": bar.")[0] for result in results if result.survived}
    assert survived <= {
        "sm100/prefill/softmax._tell: probabilities_early.hand_over",
        "sm100/prefill/softmax._step: scores_read.hand_over",
        "sm100/prefill/softmax._make_all: turns.hand_over",
        "sm100/decode/softmax._tile: s.release",
        "sm100/decode/keys/load._load_query: copy_rows",
        "sm100/decode/keys/load._load_query: q.hand_over",
        "sm100/decode/keys/load._tell_values: arch.sync_warp",
        "sm100/decode/keys/load._tell_values: v.hand_over",
    }


def test_barriers_of_a_decodes_pair_are_missed(subjects):
    subject = subjects(f"{DECODE}, 66 rows")
    results = [subject.try_out(site) for site in subject.sites if site.family == "barrier.cluster"]
    assert len(results) == 4 and all(result.kind for result in results)


def test_an_instruction_that_another_makes_up_for_names_it(kernels):
    """A kernel with its fence behind the barriers' initialisation twice: either is redundant, both are not."""
    ptx, records, _ = kernels[PREFILL]
    subject = subject_of(ptx.replace(FENCE, f"{FENCE}\n\t{FENCE}"), records)
    fences = [site for site in taken_away(subject) if site.family == "fence.mbarrier_init"]
    first, second = map(subject.try_out, fences)
    assert first.survived and second.survived
    first, second = find_covers(subject, [first, second])
    key = "sm90/prefill/kernel.kernel: barriers.init: fence.mbarrier_init removed"
    assert (first.cover, second.cover) == ("", f"{key} (1 of 2)")
    findings = {"twice": mutate.Findings([first, second])}
    page, problems = mutation_table.render(findings, Reasons(), ["mutate"])
    (problem,) = problems
    assert problem.startswith(f"twice: {key} (1 of 2) (sm90/prefill/kernel.py:")
    assert problem.endswith(f"`{FENCE}`): no check catches it, and no reason is given".replace(";", ""))
    assert "| `sm90/prefill/kernel` | 0 | 1 | 1 |" in page and f"| `{key}` | 1 | 1 |" in page
    assert "1 survivors without a reason" in page


def test_mutants_of_one_function_and_their_reasons_only(tmp_path, capsys):
    reasons = tmp_path / "reasons.json"
    reasons.write_text(json.dumps([{"kernels": [PACK], "mutants": ["elsewhere: bar.sync removed"], "reason": "r"}]))
    given = ["mutate", PACK, "--processes", "1", "--reasons", str(reasons)]
    assert cli.main([*given, "--only", "griddepcontrol.wait"]) == 0  # reasons for others are not asked for
    page = capsys.readouterr().out
    assert f"--only 'griddepcontrol.wait' --reasons {reasons}" in page.replace(" \\\n", " ")
    assert "| 1 | 0 | 0 | 0 | 1 | 0 | 0 | 0 | 100.0 % |" in page
    assert cli.main([*given, "--list", "--only", "griddepcontrol.wait"]) == 0
    name, *labels = capsys.readouterr().out.splitlines()
    assert name == PACK and len(labels) == 1 and "griddepcontrol.wait" in labels[0]
    for how in ([], ["--list"]):
        assert cli.main([*given, *how, "--only", "elsewhere"]) == 2
        assert "no mutant has 'elsewhere' in its name" in capsys.readouterr().err
    assert cli.main(given) == 1
    assert "no such mutant" in capsys.readouterr().err


def test_mutants_are_settled_together_as_they_would_be_alone(kernels):
    """Either of two fences may go and one must stay; a wait beside them that none makes up for is caught."""
    ptx, records, _ = kernels[PREFILL]
    subject = subject_of(ptx.replace(FENCE, f"{FENCE}\n\t{FENCE}"), records)
    fences = [site for site in taken_away(subject) if site.family == "fence.mbarrier_init"]
    waits = [site for site in subject.sites if "k.wait_full" in site.key and "wait always true" in site.key]
    assert len(fences) == 2 and waits
    for order in ([*fences, *waits], [*waits, *reversed(fences)]):
        results = list(settle(subject, order))
        assert {result.site: result.survived for result in results} == {
            **dict.fromkeys(fences, True),
            **dict.fromkeys(waits, False),
        }
        assert len(results) == len(order) and all(result.kind for result in results if result.site in waits)


@pytest.mark.parametrize("name", [PREFILL, BLACKWELL])
def test_registers_that_the_launch_did_not_take_are_missed(subjects, name):
    """Fewer are not: what a role's code needs only ptxas knows, whose code the build audits."""
    subject = subjects(name)
    results = [subject.try_out(site) for site in subject.sites if site.family == "setmaxnreg"]
    assert {result.kind for result in results if result.site.action == MORE_REGISTERS} == {"deadlock"}
    assert {result.kind for result in results if result.site.action == FEWER_REGISTERS} <= {"", "budget"}


def test_a_kernel_without_a_tensor_fence_is_judged_leniently_and_says_so(kernels):
    ptx, records, _ = kernels[BLACKWELL]
    fence = "tcgen05.fence::before_thread_sync;"
    assert fence in ptx
    subject = subject_of(ptx.replace(fence, ""), records)
    subject.require_clean()
    assert "but without a tcgen05.fence::before_thread_sync after the former" in subject.lenient
    after = next(site for site in subject.sites if site.family == "tcgen05.fence")
    findings = mutate.Findings([subject.try_out(after)], subject.lenient)
    assert findings.results[0].survived
    page, _ = mutation_table.render({"unfenced": findings}, Reasons(), ["mutate"])
    assert f"| unfenced | {subject.lenient} |" in page


def test_a_mutant_is_known_by_function_edge_and_operation(subjects):
    """Functions are the kernel's own, also where parts lie between; `wgmma.fence`, to which the compiler gives no
    place, by the product that it is for."""
    keys = {site.key for site in subjects(PREFILL).sites}
    assert all(key.startswith("sm90/prefill/") for key in keys)
    assert {key for key in keys if key.count(": ") != 2} == {
        "sm90/prefill/tasks.write: ld, st of shared memory 16 bytes further"
    }
    assert {
        "sm90/prefill/steps.start_scores: k.wait_full: mbarrier.try_wait always true",
        "sm90/prefill/steps.start_scores: mma.issue: wgmma.fence removed",
        "sm90/prefill/attend._visit: q.release: mbarrier.arrive removed",
    } <= keys
    label = "sm100/decode/mma._scores: s.wait_empty: mbarrier.try_wait always true"
    assert label in {site.label for site in subjects(f"{DECODE}, 10 rows").sites}


def test_unrelated_instructions_do_not_move_a_mutants_name(kernels):
    """With two more waits at its beginning and lines that lie elsewhere, names of today stand for what they did."""
    ptx, records, _ = kernels[PREFILL]
    before = {site.label: site.text for site in subject_of(ptx, records).sites}
    wait = next(line for line in ptx.splitlines() if "wgmma.wait_group" in line)
    begin = ptx.index("\tmov.u32 ", ptx.index(f".entry {records[0].launches[0].entry}"))
    moved = subject_of(f"{ptx[:begin]}\t{wait}\n\t{wait}\n{ptx[begin:]}".replace(".py:", ".py:1"), records)
    after = {site.label: site.text for site in moved.sites}
    assert len(after) == len(before) + 2 and before.items() <= after.items()


def test_reasons_that_fit_no_survivor_are_listed(kernels, subjects, tmp_path):
    subject = subjects(f"{DECODE}, 10 rows")
    waits = [site for site in taken_away(subject) if site.callee == "s.wait_empty"]
    loads = [site for site in subject.sites if site.callee == "tmem.wait_loads" and site.copies > 3]
    loads = [site for site in loads if site.key == loads[0].key]
    results = [mutate.Result(site, True) for site in (*waits, *loads)]
    results[-1] = dataclasses.replace(results[-1], kind="race", schedule="late", message="caught")
    (wait,), many = waits, loads[0]

    def of(*names):
        path = tmp_path / "reasons.json"
        path.write_text(json.dumps([{"kernels": ["k"], "mutants": names, "reason": "Because."}]))
        return mutation_table.render({"k": mutate.Findings(results)}, Reasons.read(path), ["mutate"])

    copies = f"1-{many.copies - 1} of {many.copies}"
    page, problems = of(wait.label, f"{many.key} ({copies})")
    assert not problems and f"| k | {len(results)} | 0 | 0 | 0 | 1 | 0 | {len(results) - 1} | 0 | 100.0 % |" in page
    assert of(wait.label, many.key)[1] == [f"k: a reason is given for {loads[-1].label}: a check catches it"]
    page, problems = of(wait.label.replace("s.wait", "t.wait"), f"{many.key} (1-3 of {many.copies + 1})")
    assert len(problems) == 2 + len(results) - 1
    assert f"t.wait_empty: mbarrier.try_wait always true: no such mutant; close to it: {wait.key}" in problems[-2]
    assert problems[-1].endswith(f"no such mutant; there are {many.copies} of that key")


def test_copies_of_a_mutant_by_name():
    assert Mutants.of_name("a: b: c removed").copies == frozenset()
    some = Mutants.of_name("a: b: c removed (2-4, 6 of 8)")
    assert (some.key, some.copies, some.total) == ("a: b: c removed", {2, 3, 4, 6}, 8)
    for wrong in ("a (0 of 3)", "a (2-4 of 3)", "a (3-2 of 3)"):
        with pytest.raises(ValueError, match="names copies that are not among 1 to 3"):
            Mutants.of_name(wrong)


def test_calls_are_read_as_written():
    random = Random()
    words = ["load", "k_edge.wait_full", "edges[i + 1].acquire", "Struct().x", "a.b"]
    stacks = {
        number: tuple(
            Call(f"sm90/{random.choice('abc')}.f", random.randrange(1, 999), random.choice([*words, ""]))
            for _ in range(random.randrange(1, 6))
        )
        for number in random.sample(range(1, 1 << 16), 50)
    }
    assert calls.read("\tret;\n" + calls.written(stacks)) == stacks


def test_shipped_reasons_are_for_kernels_of_the_table_and_for_mutants_that_exist(kernels):
    """All names of kernels that are compiled here fit; the whole table is rendered by hand."""
    table = (DOCS / "mutation-table.md").read_text()
    for name in REASONS.of_kernels:
        assert f"| {name} |" in table
    for name, (ptx, records, _) in kernels.items():
        assert not [*REASONS.wrong(name, subject_of(ptx, records).sites)]
    assert REASONS.of_kernels.keys() & kernels.keys()


def test_what_is_never_executed_does_not_count(kernels):
    ptx, records, _ = kernels[PACK]
    before, after = ptx.rsplit("\tret;", 1)
    subject = subject_of(f"{before}\tret;\n\tgriddepcontrol.wait;{after}", records)
    reached, unreachable = map(subject.try_out, subject.sites)
    assert reached.kind == "race" and not unreachable.executed and not unreachable.survived


def test_a_starved_warp_is_interrupted_behind_every_instruction(subjects):
    """The first warpgroup, with a single KV tile, lets go the second one's query: the loading warp then waits in vain,
    if it comes so late that it has not begun to load that query."""
    subject = subjects(LONG)
    (site,) = [site for site in subject.sites if "q.release: mbarrier.arrive at the next mbarrier" in site.label]
    (schedule,) = [each for each in mutate.schedules(12) if each[0] == "eager, warp 0 starved and interrupted"]
    assert subject.try_out(site, [schedule]).kind == "deadlock"


def test_earlier_results_that_another_lane_stores_over_are_a_race(subjects):
    """Lanes of a quad exchange what they store, so that one once overwrote what another had yet to add."""
    subject = subjects(PREFILL)
    (site,) = [site for site in subject.sites if site.family == WHOLE_WARP]
    assert site.key == "sm90/prefill/attend.end_task: arch.sync_warp: bar.warp.sync removed"
    assert subject.try_out(site).kind == "race"


def test_the_turn_to_a_ctas_next_query_tile_is_missed(tmp_path):
    """The query's places, which are filled again, and the words that tell roles their tiles: in one small call."""
    verdict = check.check(check.find(SEVERAL_TILES), lengths=LENGTHS_OF_SEVERAL_TILES, record_to=tmp_path)
    assert verdict.error is None and verdict.calls[0].launches[0].grid == (4, 1, 1)
    (path,) = tmp_path.glob("*.npz")
    subject = subject_of(path.with_suffix(".ptx").read_text(), [Record(path)])
    subject.require_clean()
    turn = [site for site in subject.sites if site.callee.startswith("q.") or "sm90/prefill/tasks." in site.key]
    results = [subject.try_out(site) for site in turn]
    assert len(results) > 30 and all(result.executed for result in results)
    assert not [result.site.label for result in results if not result.kind]
