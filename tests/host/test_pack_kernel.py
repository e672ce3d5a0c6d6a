"""The machine-independent code of the pack kernel: what makes it fast and what makes dependent launch safe."""

from __future__ import annotations

import re

import pytest
from tsmla.identity.arch import SHIPPED_ARCHS, Arch
from tsmla.identity.variant import Dtype, PackVariant
from tsmla_kernels import registry
from tsmla_kernels.pack.kernel import ROWS_PER_THREAD, THREADS, VECTOR, PackKernel


def ptx_of(variant: PackVariant, directory) -> str:
    from cutlass import cute

    made = registry.recipe(variant)
    options = f"--enable-tvm-ffi --opt-level {registry.OPT_LEVEL} --gpu-arch {variant.arch}"
    cute.compile(made.entry, *made.arguments, options=f"{options} --keep-ptx --dump-dir {directory}")
    (path,) = directory.glob("*.ptx")
    return path.read_text()


@pytest.mark.parametrize("arch", SHIPPED_ARCHS, ids=str)
@pytest.mark.parametrize(("dtype", "out"), [(Dtype.BF16, Dtype.E4M3), (Dtype.FP16, Dtype.E5M2)])
def test_memory_is_touched_16_bytes_at_a_time_and_pairs_are_converted(arch, dtype, out, tmp_path):
    ptx = ptx_of(PackVariant(arch, dtype, out, 128, 64, 128), tmp_path)
    loads = VECTOR * dtype.bits // 128
    assert len(re.findall(r"\bld\.global\.v4\.b32\b", ptx)) == loads * ROWS_PER_THREAD
    assert len(re.findall(r"\bst\.global\.v4\.b32\b", ptx)) == ROWS_PER_THREAD
    assert len(re.findall(r"\b(ld|st)\.global", ptx)) == (loads + 1) * ROWS_PER_THREAD
    assert len(re.findall(rf"\bcvt\.rn\.satfinite\.{out}x2\.f32\b", ptx)) == VECTOR // 2 * ROWS_PER_THREAD
    assert ".local" not in ptx
    assert ".ftz" not in ptx, "flushing subnormals would change bytes for scales far from 1"


def test_dependent_launch_waits_before_it_reads(tmp_path):
    ptx = ptx_of(PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, 128, 64, 128), tmp_path)
    wait, release = ptx.find("griddepcontrol.wait"), ptx.find("griddepcontrol.launch_dependents")
    assert 0 < wait < release, "successors may start only once every predecessor's writes are visible"
    assert wait < ptx.index("ld.global")
    assert "ld.global.nc" not in ptx, "memory that a predecessor may still write is not read-only"


@pytest.mark.parametrize("dims", [(16, 16, 16), (128, 64, 128), (112, 48, 80), (1024, 1024, 1024)])
def test_every_column_has_a_thread(dims):
    kernel = PackKernel(PackVariant(Arch.SM90A, Dtype.BF16, Dtype.E4M3, *dims))
    assert kernel.columns * VECTOR == sum(dims)
    assert kernel.threads == kernel.columns * kernel.rows_per_pass <= THREADS
    assert kernel.rows_per_cta == kernel.rows_per_pass * ROWS_PER_THREAD
