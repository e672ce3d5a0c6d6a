"""Libraries for host tests: real ones of one kernel, and small ones that are wrong in one way each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import launches
import pytest
from example_variants import PACK, PREFILL, SIGNATURE, compile_c, library_manifest
from made_once import made_once
from refusing import Recorder
from tsmla.identity.arch import Arch
from tsmla.loading import jit, loader, resolve, settings, toolchain
from tsmla.operators import checks

from build_aot import link
from build_aot.build import build

_STAND_IN = """
#include <tvm/ffi/c_api.h>
__attribute__((visibility("default")))
int __tvm_ffi_%s(void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  TVMFFIErrorSetRaisedFromCStr("TypeError", "%s");
  return -1;
}
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test starts without settings, with an empty cache directory, and with nothing resolved or opened."""
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
        if setting.alias:
            monkeypatch.delenv(setting.alias, raising=False)
    monkeypatch.setenv(settings.CACHE.name, str(tmp_path / "cache"))
    monkeypatch.setattr(settings, "_logged", set())
    monkeypatch.setattr(loader, "_opened", {})
    resolve.forget()
    yield
    resolve.forget()


@pytest.fixture(scope="package")
def pack_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as the build leaves it, with one library that holds PACK."""

    def make(out: Path) -> Path:
        build([PACK], out, jobs=1, report=lambda line: None)
        return out

    return made_once(tmp_path_factory, "pack", make)


@pytest.fixture
def shipped(pack_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`pack_directory` in the place of the installed libraries."""
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: pack_directory)
    return pack_directory


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No installed libraries, as in a wheel made with TSMLA_AOT=0."""
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: tmp_path / "objs")
    return tmp_path / "objs"


MakeLibrary = Callable[..., Path]


@pytest.fixture
def make_library(tmp_path: Path) -> MakeLibrary:
    """Make `name` with these variants listed in its manifest and with stand-ins for those exported.

    text: the manifest's text, if not the right one. describe: whether the library has a manifest at all.
    """

    def make(name, listed=(PREFILL,), exported=None, *, text=None, describe=True, says=SIGNATURE, **fields) -> Path:
        objects = []
        for variant in listed if exported is None else exported:
            source = tmp_path / f"{variant}.c"
            source.write_text(_STAND_IN % (variant.symbol(), says))
            objects.append(compile_c(source, tmp_path / f"{variant}.o", "-c"))
        text = library_manifest(*listed, **fields).to_json() if text is None else text
        link.link(objects, tmp_path / name, link.host(), text if describe else None)
        return tmp_path / name

    return make


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in compiler in this process; the list says what it compiled."""
    symbols: list[str] = []

    def compile_at_once(variant) -> bytes:
        symbols.append(variant.symbol())
        return variant.symbol().encode()

    monkeypatch.setattr(jit, "_compile", compile_at_once)
    monkeypatch.setattr(jit, "_load_object", lambda code, symbol: code)
    return symbols


@pytest.fixture
def broken(shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed libraries of which one has a changed byte."""
    copy = shutil.copytree(shipped, tmp_path / "objs")
    library = next(copy.glob("*.so"))
    code = bytearray(library.read_bytes())
    code[len(code) // 2] ^= 1
    library.write_bytes(code)
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: copy)
    return copy


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Operators take CPU tensors for those of an sm_90a, and launch nothing."""
    recorder = Recorder()
    monkeypatch.setattr(resolve, "kernel", recorder)
    monkeypatch.setattr(checks, "cuda", checks.stored)
    monkeypatch.setattr(checks, "arch_of", lambda device: Arch.SM90A)
    launches.processors(monkeypatch)
    return recorder
