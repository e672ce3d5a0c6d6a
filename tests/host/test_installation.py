"""What is said where the packages that tsmla needs are of another version, or lie where Python does not look."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_variants import PACK, python_environment, run_python
from tsmla.errors import CompileError, RuntimeLibraryError
from tsmla.loading import jit, loader, manifest, toolchain
from tsmla.tools import cli

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Python's encoding of paths is ASCII then."""


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Make apache-tvm-ffi of this version what is installed."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "apache-tvm-ffi" else real(name))


def test_accepted_versions_are_those_that_pip_installs() -> None:
    needed = PROJECT.read_text("utf-8").partition("dependencies = [")[2].partition("]")[0]
    assert f'"{toolchain.TVM_FFI}"' in needed and f'"nvidia-cutlass-dsl>={toolchain.MIN_RUNTIME}"' in needed


@pytest.mark.parametrize("version", ["0.1.10", "0.1.2", "0.2", "0.2.0.dev1", "1.0", "0.0.9rc1", "unknown"])
def test_a_tvm_ffi_that_is_not_accepted(monkeypatch, shipped: Path, capsys, version: str) -> None:
    said = f"apache-tvm-ffi {version} is installed, accepted is >=0.1.11,<0.2; fix: pip install '{toolchain.TVM_FFI}'"
    install(monkeypatch, version)
    assert cli.main(["verify"]) == 1
    assert said in capsys.readouterr().out
    assert cli.main(["probe", "--arch", "sm_90a", "--family", "pack"]) == 1
    assert f"pack: no: {next(shipped.glob('*.so'))} cannot be loaded: {said}" in capsys.readouterr().out
    with pytest.raises(RuntimeLibraryError):
        loader.open_library(next(shipped.glob("*.so")))
    for step in (jit.load_cached, jit.compile_now):
        with pytest.raises(CompileError, match=f"cannot compile here: apache-tvm-ffi {version} is installed"):
            step(PACK)


@pytest.mark.parametrize("version", ["0.1.11", "0.1.11+local", "0.1.15.post2", "0.1.99rc1", None])
def test_a_tvm_ffi_that_is_accepted(monkeypatch, version: str | None) -> None:
    install(monkeypatch, version)
    assert toolchain.why_tvm_ffi_not_accepted() is None


WITHOUT_CUTLASS = """
from example_variants import PACK
from tsmla.loading import jit
from tsmla.errors import CompileError
for step in (jit._compile, lambda variant: jit._load_object(b"", variant.symbol())):
    try:
        step(PACK)
    except CompileError as error:
        print(error)
"""


def without_site(script: str, *path: str | Path) -> str:
    """What a script prints where no directory is a site directory: no .pth file is read."""
    environment = python_environment(PYTHONPATH=os.pathsep.join(map(str, path)))
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_compiler_in_no_site_directory() -> None:
    """`pip install --target DIR` leaves it so."""
    (root,) = toolchain.dsl_roots()
    (place,) = (root / name for name in os.listdir(root) if (root / name / "cutlass").is_dir())
    others = [path for path in sys.path if path and Path(path).resolve() != place.resolve()]
    said = without_site(WITHOUT_CUTLASS, *others).splitlines()
    assert len(said) == 2
    for line in said:
        assert "No module named 'cutlass': nvidia-cutlass-dsl lies in " in line
        assert f" lies in {root.parent}, but its package cutlass, in {place}, is not on Python's path" in line
        assert f"Fix: add {place} to PYTHONPATH, or install nvidia-cutlass-dsl without --target" in line
    assert without_site("import cutlass; print(cutlass.__file__)", *others, place).startswith(str(place))


def test_no_compiler_at_all(monkeypatch) -> None:
    monkeypatch.setattr(toolchain, "dsl_roots", lambda: [])
    assert toolchain.why_no_cutlass() == f"nvidia-cutlass-dsl is not installed; fix: {toolchain.INSTALL}"


SERVE = """
import os, sys
from pathlib import Path
import tsmla
from tsmla.loading import resolve, toolchain
from tsmla.tools import cli
for folder in sys.argv[1:]:
    resolve.forget()
    toolchain.shipped_libraries = lambda: Path(folder)
    served = cli.main(["verify"]), cli.main(["probe", "--arch", "sm_90a", "--family", "pack"])
    print(sys.getfilesystemencoding(), *served)
print(tsmla.binary_status("sm_90a", "/b\\xfccher/library.so").families["prefill"].reason)
"""


@pytest.mark.parametrize("locale", [ASCII, {}], ids=["ascii", "as it is"])
def test_libraries_in_folders_with_other_letters_and_with_names_that_are_no_text(
    pack_directory: Path, tmp_path: Path, locale: dict[str, str]
) -> None:
    other = shutil.copytree(pack_directory, tmp_path / "bücher 書")
    no_text = shutil.copytree(pack_directory, os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    done = run_python(SERVE, other, no_text, **locale)
    encoding = "ascii" if locale else sys.getfilesystemencoding()
    served, end, refused = done.stdout.partition(f"{encoding} 0 0\n")
    assert end and "1 libraries, 0 with a problem\n" in served, (done.stdout, done.stderr)
    file = manifest.read_directory(no_text).libraries[0].file
    said = r"\udcff/" + file + "' cannot be loaded: TVM-FFI takes paths in UTF-8, and this is none; rename"
    assert said in refused and f"{encoding} 1 1\n" in refused, (done.stdout, done.stderr)
    if locale:
        assert "this locale's encoding is ascii: set LC_ALL=C.UTF-8 or PYTHONUTF8=1" in refused


def test_a_kernel_is_compiled_and_kept_in_folders_with_other_letters(tmp_path: Path) -> None:
    (tmp_path / "bücher").mkdir()
    script = (
        "from example_variants import PACK\n"
        "from tsmla.loading import jit\n"
        "print(jit.compile_now(PACK)[1]); jit.load_cached(PACK)"
    )
    places = {"TSMLA_CACHE_DIR": str(tmp_path / "bücher" / "cache"), "TMPDIR": str(tmp_path / "bücher")}
    done = run_python(script, **ASCII, **places)
    assert done.stdout == "jit\n", done.stderr


def test_a_processor_is_known_whatever_letters_describe_it(monkeypatch) -> None:
    """In the locale's encoding they may be no text."""
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"model name\t: Some\xae CPU\nflags\t\t: fpu avx2\n")
    assert jit._cpu_features() == hashlib.sha256(b"fpu avx2").hexdigest()[:20]
