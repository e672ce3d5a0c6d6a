"""Compiled variants and linked libraries are kept by what decides them; the process that compiles."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import time

import pytest
from tsmla.identity.arch import Arch
from tsmla.identity.variant import Dtype, PackVariant
from tsmla_emulator.run.core import build
from tsmla_emulator.run.host import compile as compile_module
from tsmla_emulator.run.host import link as link_module
from tsmla_emulator.run.host.compile import CompileError, compile_for_emulation
from tsmla_emulator.run.host.link import link

PACK = PackVariant(Arch.SM100A, Dtype.BF16, Dtype.E4M3, 128, 64, 128)


@pytest.mark.parametrize(
    "owner, name", [(compile_module.jit, "cache_key"), (compile_module, "_sources")], ids=["contents", "place"]
)
def test_compiled_variants_are_kept_by_what_decides_them(monkeypatch, owner, name):
    first = compile_for_emulation(PACK)
    assert compile_for_emulation(PACK) == first
    compiled = []
    monkeypatch.setattr(
        compile_module.Compiler, "compile", lambda self, variant, obj, ptx: compiled.append((variant, obj.parent))
    )
    monkeypatch.setattr(compile_module, "link", lambda obj: obj)
    assert compile_for_emulation(PACK).ptx == first.ptx and not compiled
    monkeypatch.setattr(owner, name, lambda: "others")
    compile_for_emulation(PACK)
    ((variant, directory),) = compiled
    assert variant == PACK and directory != first.ptx.parent


def test_one_process_compiles_many_variants_and_outlives_one_that_fails(tmp_path):
    """What it makes for a variant does not depend on what came before."""
    alone = compile_for_emulation(PACK).ptx.read_text()
    impossible = dataclasses.replace(PACK, d_nope=7)
    (tmp_path / "made").mkdir()
    files = tmp_path / "made" / "kernel.o", tmp_path / "made" / "kernel.ptx"
    with compile_module.Compiler() as compiler:
        with pytest.raises(CompileError, match=f"compiling {impossible} failed(?s:.*)multiple of 16"):
            compiler.compile(impossible, *files)
        assert not files[1].exists()
        compiler.compile(dataclasses.replace(PACK, out_dtype=Dtype.E5M2), *files)
        assert files[1].read_text() != alone
        compiler.compile(PACK, *files)
    assert files[0].exists() and files[1].read_text() == alone


def test_a_compiler_that_dies(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "false")
    with compile_module.Compiler() as compiler, pytest.raises(CompileError, match="ended with status 1"):
        compiler.compile(PACK, tmp_path / "kernel.o", tmp_path / "kernel.ptx")


def test_linked_libraries_are_kept_by_content(monkeypatch, tmp_path):
    obj = compile_for_emulation(PACK).ptx.with_name("kernel.o")
    first = link(obj)
    assert link(shutil.copy(obj, tmp_path / "other.o")) == first
    changed = tmp_path / "double.c"
    changed.write_text(link_module.DOUBLE.read_text() + "/* changed */")
    monkeypatch.setattr(link_module, "DOUBLE", changed)
    assert link(obj) != first


def test_what_nobody_took_for_weeks_goes(monkeypatch, tmp_path):
    obj = compile_for_emulation(PACK).ptx.with_name("kernel.o")
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path))
    kept, long_ago = link_module.cache_directory(), time.time() - (build.UNUSED_DAYS + 1) * 86400
    first = link(obj)
    old, young = (kept / (digit * 32) / "tsmla_k" / "kernel.o" for digit in "ab")
    old_library = first.with_name(f"{'c' * 32}.so")
    for path in (old, young, old_library):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    shutil.copy(obj, young)
    for path in (old.parents[1], young.parents[1], old_library, first):
        os.utime(path, (long_ago, long_ago))
    assert link(obj) == first and old.exists(), "only what makes something new looks for what is old"
    other = tmp_path / "double.c"
    other.write_text(link_module.DOUBLE.read_text() + "/* changed */")
    monkeypatch.setattr(link_module, "DOUBLE", other)
    assert link(young).exists() and first.exists() and young.exists()
    assert not old.parents[1].exists() and not old_library.exists()
