"""Kernels run behind their host code: results land in the caller's tensors, and what is wrong is said."""

from __future__ import annotations

import copy
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
import tsmla
import two_launches
from shipped_kernels import BUILT
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.plan import deal_of, plan_decode
from tsmla.identity.row_format import ROWS
from tsmla.identity.variant import DecodeVariant, Dtype, PackVariant, PrefillVariant
from tsmla_emulator import cli
from tsmla_emulator.dealt import deal_out
from tsmla_emulator.prove import check
from tsmla_emulator.prove.calls.decode import DECODE_LENGTHS, DECODE_SMS, HOPPER_FEW_ROWS, decode_rows, turns_values
from tsmla_emulator.prove.mutation import table as mutation_table
from tsmla_emulator.run import machine, record
from tsmla_emulator.run.core.binding import core
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.host.compile import CompileError
from tsmla_emulator.run.host.link import LinkError
from tsmla_emulator.run.host.memory import GuardError
from tsmla_emulator.run.machine import EmulationError, Options
from tsmla_kernels.sm90.decode.row16.geometry import FEW_ROWS
from tsmla_kernels.sm90.decode.row64.geometry import DecodeGeometry
from tsmla_kernels.sm90.decode.work.ring import TASK_RING

SYMBOL = PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128).symbol()


def test_two_launches_in_order(gpu, tmp_path):
    options = f"--enable-tvm-ffi --keep-ptx --gpu-arch {gpu.arch} --dump-dir={tmp_path}"
    kernel = gpu.emulation.adopt(two_launches.compile_it(options))
    source = torch.arange(300, dtype=torch.float32, device="cuda")
    doubled, sums = torch.empty_like(source), source.new_empty(150)
    kernel(source, doubled, sums, 0.5)
    assert torch.equal(doubled, 2 * source)
    assert torch.equal(sums, doubled[::2] + doubled[1::2] + 0.5)
    (call,) = gpu.emulation.calls
    assert call.unwritten == {} and call.report.warp_instructions > 0


def test_a_write_to_an_input_is_an_error(tmp_path):
    options = f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_100a --dump-dir={tmp_path}"
    with emulated("sm_100a") as gpu:
        kernel = gpu.adopt(two_launches.compile_it(options), writes=lambda name: name != "doubled")
        source = torch.ones(64, device="cuda")
        with pytest.raises(EmulationError, match="doubled"):
            kernel(source, torch.empty_like(source), source.new_empty(32), 0.0)
        assert not gpu.calls


@pytest.fixture
def double(tmp_path):
    """The first kernel without its host code: call it with source, doubled and the length to claim for both."""
    compiled = two_launches.compile_it(f"--enable-tvm-ffi --keep-ptx --gpu-arch sm_90a --dump-dir={tmp_path}")
    ptx = compiled.__ptx__.rstrip("\0")
    with emulated("sm_90a") as gpu:
        entry = next(name for name in machine.parse(ptx).entries if "double" in name)

        def call(source, doubled, length):
            params = [struct.pack("<Qi4x", x.data_ptr(), length) for x in (source, doubled)]
            return gpu.launch(ptx, entry, [1], [two_launches.THREADS], params, touches=[source, doubled])

        yield call


def test_outputs_that_nobody_wrote_are_counted(double):
    source, doubled = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    assert double(source, doubled, 5).unwritten == {"argument 3": 3}
    assert doubled[:5].tolist() == [2] * 5 and doubled[5:].isnan().all()
    assert double(source, doubled, 8).unwritten == {}


def test_access_beyond_a_tensor_is_an_error(double):
    source, doubled = torch.ones(8, device="cuda"), torch.empty(8, device="cuda")
    with pytest.raises(EmulationError, match=f"{source.data_ptr() + 32:#x}"):
        double(source, doubled, 9)


def test_a_rewritten_module_is_what_runs():
    def add(module: machine.Module) -> machine.Module:
        changed = copy.deepcopy(module)
        for entry in changed.entries.values():
            for instruction in entry.instructions:
                instruction.opcode = instruction.opcode.replace("mul.f32", "add.f32")
        return changed

    for rewrite, expected in ((None, 4.0 * 3.0), (add, 4.0 + 3.0)):  # the kernel as it is has run, and is kept, before
        with emulated("sm_90a", rewrite=rewrite):
            x = torch.full((3, 2, 128), 4.0, dtype=torch.bfloat16, device="cuda")
            k, _ = tsmla.mla_kv_pack_quantize_fp8(x, x[:, :1, :64], x, 3.0)
        assert (k.float() == expected).all()


@pytest.mark.parametrize(
    "variant",
    [
        PackVariant(Arch.SM103A, Dtype.FP16, Dtype.E5M2, 128, 64, 128),
        PrefillVariant(Arch.SM90A, Dtype.FP16, Dtype.FP16, 128, 128, True, True),
    ],
    ids=str,
)
def test_check_of_a_variant(variant):
    verdict = check.check(variant, Options(async_mode="late", seed=5), compiled=BUILT)
    assert verdict.error is None and verdict.measured


def test_few_rows_of_a_check_are_those_of_hoppers_kernel():
    assert HOPPER_FEW_ROWS == FEW_ROWS


def test_decodes_that_turn_value_products_are_those_that_kernels_say():
    decodes = [variant for variant in check.variants([Arch.SM90A]) if isinstance(variant, DecodeVariant)]
    turned = [variant for variant in decodes if turns_values(variant)]
    assert turned == [variant for variant in decodes if DecodeGeometry.of(variant).turns] != []


def test_check_of_a_blackwell_decode_reaches_both_kernels():
    variant = DecodeVariant(Arch.SM100A, Dtype.E4M3, Dtype.BF16, True)
    verdict = check.check(variant, Options(async_mode="late"), compiled=BUILT)
    assert verdict.error is None
    assert [[launch.cluster[0] for launch in call.launches] for call in verdict.calls] == [[1, 1], [2, 1]]


def test_check_of_hoppers_656_byte_rows_reaches_all_forms():
    """Few rows, pairs of CTAs, and single ones."""
    variant = DecodeVariant(Arch.SM90A, Dtype.BF16, Dtype.BF16, True, ROWS["fp8_ds_mla"])
    verdict = check.check(variant, Options(async_mode="late"), compiled=BUILT)
    attention = [call.launches[0] for call in verdict.calls]
    assert verdict.error is None
    assert [(launch.cluster[0], launch.block[0]) for launch in attention] == [(1, 384), (2, 512), (1, 640)]


@pytest.mark.parametrize("requests", [DECODE_LENGTHS, mutation_table.DECODE_LENGTHS], ids=["check", "mutate"])
@pytest.mark.parametrize(
    ("arch", "rows", "wide"),
    [
        (arch, rows, wide)
        for arch in SHIPPED_ARCHS
        for rows in decode_rows(arch)
        for wide in sorted({False, deal_of(arch, rows, wide=True) != deal_of(arch, rows)})
    ],
)
def test_small_decodes_have_all_kinds_of_work(arch, rows, wide, requests):
    """Some CTA has them: several segments with keys, more tiles than a ring has places; a worker, a whole and an empty
    unit; even and odd numbers of tiles, which warpgroups of Hopper share. To try mutants, segments and an end for every
    place of its ring of tasks three times, and an end in the last of them."""
    deal, heads = deal_of(arch, rows, wide=wide), rows // 2
    plan = plan_decode(arch, DECODE_SMS, len(requests), 2, heads, max(requests), wide=wide)
    workers = deal_out(deal, requests, 2, heads, plan.workers, plan.slots).segments
    assert max(sum(segment.tiles > 0 for segment in worker) for worker in workers) >= 2
    if arch is Arch.SM90A and requests == mutation_table.DECODE_LENGTHS:
        assert max(map(len, workers)) + 1 >= 3 * TASK_RING
        assert any(len(worker) > TASK_RING and (len(worker) + 1) % TASK_RING == 0 for worker in workers)
    tiles = [segment.tiles for worker in workers for segment in worker if segment.tiles > 0]
    assert max(tiles) >= 10
    assert {number % 2 for number in tiles} == {0, 1}
    kinds = {(segment.slot >= 0, segment.tiles > 0) for worker in workers for segment in worker}
    assert kinds == {(True, True), (False, True), (False, False)}


def test_records_give_the_same_results_elsewhere(tmp_path):
    with emulated("sm_90a", record_to=tmp_path):
        k_nope, v = (torch.randn(7, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k_pe = torch.randn(7, 1, 64, device="cuda", dtype=torch.bfloat16)
        k, _ = tsmla.mla_kv_pack_quantize_fp8(k_nope, k_pe, v)
    (record,) = tmp_path.glob("*.npz")
    saved = tmp_path / "saved.npz"
    arguments = ["run", "--ptx", str(record.with_suffix(".ptx")), "--record", str(record), "--save", str(saved)]
    command = [sys.executable, "-m", "tsmla_emulator.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "warp instructions" in done.stdout
    with np.load(saved) as results:
        assert results["k_out"].tobytes() == k.cpu().view(torch.uint8).numpy().tobytes()


def test_one_launch_of_a_record_is_judged_alone(tmp_path):
    """The first launch has what the second's results depend on; what it does is not judged."""

    def call():
        source = torch.arange(300, dtype=torch.float32, device="cuda")
        two_launches.compile_it("--enable-tvm-ffi")(source, torch.empty_like(source), source.new_empty(150), 0.5)

    with emulated("sm_90a", record_to=tmp_path, adopt_compiles=True):
        call()
    (path,) = tmp_path.glob("*.npz")
    recorded, module = record.Record(path), machine.parse(path.with_suffix(".ptx").read_text())
    whole, expected = recorded.run(module, machine.Options())
    first, _ = recorded.run(module, machine.Options(), only=0)
    second, results = recorded.run(module, machine.Options(), only=1)
    assert first.warp_instructions + second.warp_instructions == whole.warp_instructions
    assert all((results[name] == expected[name]).all() for name in expected)
    limit = machine.Options(limit=first.warp_instructions // 20)
    with pytest.raises(machine.EmulationError, match="without an end") as caught:
        recorded.run(module, limit, only=1)
    assert "add_neighbours" in str(caught.value)


def test_command_line_of_a_symbol(capsys):
    assert cli.main(["run", SYMBOL, "--async-mode", "random", "--seed", "9"]) == 0
    assert "[1/1] " + SYMBOL in (text := capsys.readouterr().out) and "0 bytes differ" in text


def test_command_line_errors(capsys):
    assert cli.main(["run", "tsmla_pack_sm_90a"]) == 2
    assert "close to it" in capsys.readouterr().err
    assert cli.main(["run", "--ptx", "k.ptx"]) == 2
    assert "--ptx together with --record" in capsys.readouterr().err
    assert cli.main(["run", "--ptx", "/nowhere.ptx", "--record", "/nowhere.npz"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_command_line_refuses_what_it_would_ignore(capsys):
    assert cli.main(["run", "--ptx", "k.ptx", "--record", "k.npz", "--machine-code"]) == 2
    assert "a record has PTX alone" in capsys.readouterr().err
    assert cli.main(["run", SYMBOL, "--save", "saved.npz"]) == 2
    assert "--save goes with --record" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"no archive"])
def test_what_is_no_record_is_named_in_one_line(content, tmp_path, capsys):
    ptx, path = tmp_path / "k.ptx", tmp_path / "k.npz"
    ptx.write_text(".version 8.6\n.target sm_90a\n.address_size 64\n")
    path.write_bytes(content)
    with pytest.raises(record.RecordError, match="k.npz is not a launch record"):
        record.Record(path)
    assert cli.main(["run", "--ptx", str(ptx), "--record", str(path)]) == 2
    assert (said := capsys.readouterr().err).startswith("tsmla-emulator: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "error, status", [(CompileError("no compiler"), 2), (LinkError("no linker"), 2), (GuardError("outside"), 1)]
)
def test_errors_that_users_meet_are_one_line(error, status, monkeypatch, capsys):
    def fails(*_):
        raise error

    monkeypatch.setattr(check, "check", fails)
    assert cli.main(["run", SYMBOL]) == status
    assert capsys.readouterr().err == f"tsmla-emulator: {error}\n"


def test_core_of_other_sources_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("TSMLA_EMULATOR_CORE", "/elsewhere/core-0.so")
    core.cache_clear()
    try:
        assert cli.main(["run", SYMBOL]) == 2
    finally:
        core.cache_clear()
    assert "of these sources is core-" in (said := capsys.readouterr().err) and said.count("\n") == 1


@pytest.mark.parametrize("name", ["Stream", "ExternalStream", "Event", "CUDAGraph"])
def test_what_is_not_emulated_says_so(name):
    torchs = getattr(torch.cuda, name)
    with emulated("sm_90a"):
        with pytest.raises(EmulationError, match=f"not emulated: torch.cuda.{name}"):
            getattr(torch.cuda, name)(1)
        assert not isinstance(torch.cuda.current_stream(), torch.cuda.Stream), "asking does not end in an error"
    assert getattr(torch.cuda, name) is torchs
