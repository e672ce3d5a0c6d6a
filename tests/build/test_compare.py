"""Two builds are compared by what their kernels do, not by what they are called."""

from __future__ import annotations

import pytest
from tsmla.loading.elf import Elf

from build_aot import compare, cubin
from build_aot.build import STORE
from build_aot.errors import BuildError


def _change(path, find):
    """Flip a bit of the first byte that `find` locates in a file."""
    data = bytearray(path.read_bytes())
    data[find(data)] ^= 1
    path.write_bytes(data)


def _in_machine_code(data):
    """Where an object has the first instruction of its GPU code."""
    image = next(at for at in range(1, len(data)) if data[at : at + 4] == b"\x7fELF" and data[at + 18] == 190)
    (text, *_) = (each for each in Elf(bytes(data[image:])).sections if each.name.startswith(".text."))
    return image + text.offset


def test_equal_builds_are_equal(small_build, own_build, small_variants):
    found = compare.compared(small_build[0], own_build)
    assert found == {variant.symbol(): compare.SAME for variant in small_variants}


def test_an_instruction_that_changed_is_found(small_build, own_build, small_variants, monkeypatch, capsys):
    changed, same_ptx, *_ = (variant.symbol() for variant in small_variants)
    for symbol in (changed, same_ptx):
        _change(own_build / STORE / f"{symbol}.o", _in_machine_code)
    ptx = own_build / STORE / f"{changed}.ptx"
    ptx.write_text(ptx.read_text().replace("griddepcontrol.wait", "griddepcontrol.launch_dependents"))
    found = compare.compared(small_build[0], own_build)
    assert found.pop(changed) == compare.CHANGED and found.pop(same_ptx) == compare.SAME_PTX
    assert set(found.values()) == {compare.SAME}
    monkeypatch.setattr("sys.argv", ["compare", str(small_build[0]), str(own_build)])
    assert compare.main() == 1
    assert f"{changed}: changed\n" in capsys.readouterr().out


def test_names_and_comments_of_ptx_are_no_difference(small_build, own_build, small_variants):
    symbol = small_variants[0].symbol()
    _change(own_build / STORE / f"{symbol}.o", _in_machine_code)
    ptx = own_build / STORE / f"{symbol}.ptx"
    text = ptx.read_text().replace(";", ";  // other words", 1)
    ptx.write_text(text.replace("kernel_cutlass", "kernel_cutlass_renamed"))
    assert compare.compared(small_build[0], own_build)[symbol] == compare.SAME_PTX


def test_a_directory_without_libraries_is_refused(small_build, tmp_path):
    with pytest.raises(BuildError, match="holds no libraries"):
        compare.compared(tmp_path, small_build[0])


def test_an_object_without_gpu_code_is_refused(tmp_path):
    (tmp_path / "a.o").write_bytes(b"no code")
    assert cubin.images(tmp_path / "a.o") == []
    with pytest.raises(BuildError, match="holds no GPU code"):
        compare.machine_code(tmp_path / "a.o")
