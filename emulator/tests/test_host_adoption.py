"""Kernels of other packages: adopted from cute.compile, all launches of a call in order."""

from __future__ import annotations

import pytest
import torch
import two_launches
from cutlass.cutlass_dsl import CuTeDSL
from cutlass.utils import HardwareInfo
from tsmla_emulator.run import machine
from tsmla_emulator.run.emulate import emulated
from tsmla_emulator.run.host import call_sites, capture
from tsmla_emulator.run.machine import EmulationError, Options, Report

OPTIONS = "--enable-tvm-ffi --keep-ptx --gpu-arch {} --dump-dir={}"


@pytest.fixture
def seen(monkeypatch):
    launched = []

    def note(module, launches, regions, options):
        launched.append((module, list(launches)))
        return Report()

    monkeypatch.setattr(machine, "run_launches", note)
    return launched


def vectors(length=300):
    source = torch.arange(length, dtype=torch.float32, device="cuda")
    return source, torch.empty_like(source), source.new_empty(length // 2)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_launch_of_a_call_is_recorded(seen, arch, tmp_path):
    compiled = two_launches.compile_it(OPTIONS.format(arch, tmp_path))
    with emulated(arch) as gpu:
        source, doubled, sums = vectors()
        gpu.adopt(compiled)(source, doubled, sums, 0.5)
    ((module, (first, second)),) = seen
    assert "double" in first.entry and "add_neighbours" in second.entry
    assert set(module.entries) == {first.entry, second.entry}
    assert (first.grid, first.block, first.cluster, first.pdl) == ((5, 1, 1), (64, 1, 1), (1, 1, 1), False)
    assert (second.grid, second.block, second.cluster, second.pdl) == ((4, 1, 1), (64, 1, 1), (2, 1, 1), True)
    (call,) = gpu.calls
    assert call.unwritten == {"doubled": 300, "sums": 150}


def test_compiles_inside_are_adopted(seen):
    with emulated("sm_103a", adopt_compiles=True):
        kernel = two_launches.compile_it("--enable-tvm-ffi")
        kernel(*vectors(), 0.5)
    ((module, launches),) = seen
    assert module.target == "sm_103a" and len(launches) == 2


def test_questions_to_the_driver_are_answered():
    with emulated("sm_100a", adopt_compiles=True):
        info = HardwareInfo()
        assert info.get_device_multiprocessor_count() == torch.cuda.get_device_properties(0).multi_processor_count
        assert info.get_max_active_clusters(4) == info.get_device_multiprocessor_count() // 4


def test_kernels_that_ask_are_told_what_is_compiled_for():
    compiler = CuTeDSL._get_dsl()
    before = compiler.get_arch_enum()
    for arch in ("sm_90a", "sm_100a"):
        with emulated(arch, adopt_compiles=True):
            assert compiler.get_arch_enum().name == arch
    assert compiler.get_arch_enum() == before


def test_findings_in_adopted_kernels_name_the_source():
    with emulated("sm_90a", Options(limit=1), adopt_compiles=True) as gpu:
        kernel = two_launches.compile_it("--enable-tvm-ffi")
        with pytest.raises(EmulationError, match="two_launches.py:") as caught:
            kernel(*vectors(), 0.5)
    (finding,) = caught.value.findings
    source = finding.instructions[0].source
    assert not gpu.calls and call_sites.function_at(source.file, source.line) in ("run", "double")


def test_an_address_of_an_allocation_stands_for_all_of_it():
    with emulated("sm_90a"):
        tensor = torch.empty(300, device="cuda")
        whole, *others = capture.extents([tensor.data_ptr(), 7, True, 0], ["x", "y", "z", "w"], lambda name: True)
    assert not others
    assert (whole.start, whole.end - whole.start, whole.name) == (tensor.data_ptr(), 1200, "x")


def test_compiles_without_ptx_are_refused(tmp_path):
    with emulated("sm_90a") as gpu:
        compiled = two_launches.compile_it("--enable-tvm-ffi --gpu-arch sm_90a")
        with pytest.raises(ValueError, match="has no PTX: give cute.compile the options '--enable-tvm-ffi --keep-ptx'"):
            gpu.adopt(compiled)
        compiled = two_launches.compile_it(f"--keep-ptx --gpu-arch sm_90a --dump-dir={tmp_path}")
        with pytest.raises(ValueError, match="is no TVM-FFI function"):
            gpu.adopt(compiled)


def test_a_refused_launch_ends_the_call_and_the_next_one_works(seen, tmp_path):
    with emulated("sm_90a") as gpu:
        kernel = gpu.adopt(two_launches.compile_it(OPTIONS.format("sm_90a", tmp_path)))
        source, doubled, _ = vectors()
        nothing = source.new_empty(0)
        with pytest.raises(EmulationError, match=r"launch of .*add_neighbours.* refused: grid is \(0, 1, 1\)"):
            kernel(source, doubled, nothing, 0.5)
        assert not seen, "a call that fails runs nothing"
        kernel(*vectors(), 0.5)
        assert len(seen) == 1


def test_arguments_by_name(seen, tmp_path):
    with emulated("sm_90a") as gpu:
        kernel = gpu.adopt(two_launches.compile_it(OPTIONS.format("sm_90a", tmp_path)))
        source, doubled, sums = vectors()
        kernel(source, sums=sums, offset=0.5, doubled=doubled)
        with pytest.raises(TypeError, match="takes no speed, or got it twice"):
            kernel(source, doubled, sums, 0.5, speed=3)
        with pytest.raises(TypeError, match="takes no source, or got it twice"):
            kernel(source, doubled, sums, 0.5, source=source)
        with pytest.raises(TypeError, match="Expects 4 parameters"):
            kernel(source, doubled=doubled)
    assert len(seen) == 1
