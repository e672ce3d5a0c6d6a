"""Directories that this user may not enter: whoever looks there for files gets a reason, or what another place has."""

from __future__ import annotations

import builtins
import errno
import importlib.util
import io
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tsmla
from example_variants import PACK, run_python
from tsmla.errors import CacheMiss, CompileError, KernelUnavailable, RuntimeLibraryError
from tsmla.loading import jit, loader, manifest, resolve, settings, toolchain, trust
from tsmla.tools import cli, emulated

CALLS = [(os, name) for name in ("stat", "lstat", "open", "scandir", "listdir", "mkdir", "readlink")]
CALLS += [(io, "open"), (builtins, "open")]
REFUSALS = (errno.EACCES, errno.ESTALE)
Forbid = Callable[[Path, int], None]


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forbid]:
    """Make every call of Python's that looks at a path in a directory fail."""
    with pytest.MonkeyPatch.context() as patch:

        def refuse(directory: Path, code: int) -> None:
            for owner, name in CALLS:
                patch.setattr(owner, name, refusing(getattr(owner, name), directory, code))

        yield refuse


def refusing(call: Callable, directory: Path, code: int) -> Callable:
    def called(*arguments, **named):
        path = arguments[0] if arguments else named.get("path", ".")
        if not isinstance(path, int) and directory in (whole := Path(os.fsdecode(path)), *whole.parents):
            raise OSError(code, os.strerror(code), os.fsdecode(path))
        return call(*arguments, **named)

    return called


PLACES: dict[str, Callable[[], Path]] = {
    "libraries": lambda: Path(tsmla.__file__).parent / "objs",
    "kernel sources": toolchain.kernel_sources,
    "some kernel sources": lambda: toolchain.kernel_sources() / "parts",
    "tsmla's sources": lambda: Path(tsmla.__file__).parent,
    "compiler": lambda: toolchain.dsl_roots()[0],
    "cache": settings.cache_dir,
    "above the cache": lambda: settings.cache_dir().parent,
    "temporary files": lambda: Path(tempfile.gettempdir()),
    "library of the setting": lambda: Path("/forbidden"),
}


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_is_forbidden_is_a_reason(forbid, compiled, monkeypatch, capsys, place: str, code: int) -> None:
    monkeypatch.setattr(emulated, "installed", lambda: False)
    if place == "library of the setting":
        monkeypatch.setenv(settings.BINARY.name, "/forbidden/library.so")
        monkeypatch.setenv("CUTE_DSL_LIBS", f"/forbidden/{loader.RUNTIME_FILE}")
    forbid(PLACES[place](), code)
    report = tsmla.binary_status("sm_90a")
    assert all(family.reason for family in report.families.values() if not family.available)
    tsmla.has_binary_prefill(arch="sm_90a"), tsmla.has_binary_decode("sm_90a"), tsmla.variant_status(PACK)
    try:
        resolve.kernel(PACK)
    except KernelUnavailable as error:
        assert os.strerror(code) in str(error)
    for command in (["probe", "--arch", "sm_90a"], ["list"], ["verify"], ["demo"], ["warmup", "--arch", "sm_90a"]):
        assert cli.main(command) in (0, 1)
    assert cli.main(["show-config"]) == 0
    said = capsys.readouterr().err
    assert "Traceback" not in said and "tsmla: [Errno" not in said


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
def test_libraries_that_cannot_be_looked_at_leave_the_next_step(
    forbid: Forbid, compiled, caplog, monkeypatch, code: int
) -> None:
    objs = PLACES["libraries"]()
    monkeypatch.setattr(toolchain, "shipped_libraries", lambda: objs)  # whatever else an installation has
    forbid(objs, code)
    reason = f"{objs}/manifest.json cannot be read: [Errno {code}] {os.strerror(code)}"
    assert tsmla.binary_status("sm_90a").families["pack"].reason.startswith(reason)
    assert resolve.resolve(PACK).step == "jit"
    assert f"no shipped kernel: {reason}" in caplog.text
    resolve.forget()
    forbid(settings.cache_dir(), code)
    assert resolve.resolve(PACK).step == "jit"
    assert f"{settings.cache_dir()}" in caplog.text and "the result is kept in memory" in caplog.text


def test_finished_libraries_go_before_those_out_of_sight(forbid: Forbid, monkeypatch, tmp_path: Path) -> None:
    forbidden, other = tmp_path / "forbidden", tmp_path / "other"
    monkeypatch.setattr(toolchain, "__file__", str(tmp_path / "built" / "toolchain.py"))
    monkeypatch.setattr(tsmla, "__path__", [str(forbidden), str(other)])
    forbid(forbidden, errno.EACCES)
    assert toolchain.shipped_libraries() == forbidden / "objs"
    (other / "objs").mkdir(parents=True)
    (other / "objs" / manifest.MANIFEST_FILE).touch()
    assert toolchain.shipped_libraries() == other / "objs"


@pytest.mark.parametrize("place", ["kernel sources", "some kernel sources"])
def test_sources_that_cannot_be_read_are_no_other_sources(shipped: Path, forbid: Forbid, place: str) -> None:
    forbid(PLACES[place](), errno.EACCES)
    with pytest.raises(KernelUnavailable) as raised:
        resolve.kernel(PACK)
    assert f"cannot be read: [Errno 13] Permission denied: '{PLACES[place]()}" in str(raised.value)
    assert "was built from other kernel sources" not in str(raised.value)
    assert "jit: cannot compile here: [Errno 13]" in str(raised.value)


def test_a_runtime_library_out_of_sight(shipped: Path, forbid: Forbid, monkeypatch, tmp_path: Path) -> None:
    root, named = PLACES["compiler"](), tmp_path / loader.RUNTIME_FILE
    monkeypatch.setenv("CUTE_DSL_LIBS", f"{named}")
    loader._map_runtime.cache_clear()
    forbid(root, errno.EACCES)
    with pytest.raises(KernelUnavailable) as raised:
        resolve.kernel(PACK)
    looked = f"(looked for {named}, {root}/cu12/lib/{loader.RUNTIME_FILE}: Permission denied)"
    assert f"{looked}; fix: let user {os.geteuid()} read these files" in str(raised.value)
    assert str(raised.value).count(looked) == 3  # shipped, cached, jit
    assert toolchain.installed_compilers() == set() and "cannot be looked for" in toolchain.why_no_cutlass()
    named.touch()
    assert loader.runtime_library() == named


def test_a_path_of_python_that_cannot_be_searched(monkeypatch) -> None:
    """Listing a directory of it may fail in other ways than the import system expects."""

    def fail(name: str) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/gone")

    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", fail)
    with pytest.raises(RuntimeLibraryError, match="nvidia-cutlass-dsl cannot be looked for: .*'/gone'"):
        loader.runtime_library()
    assert toolchain.installed_compilers() == set()
    for step in (jit.load_cached, jit.compile_now):
        with pytest.raises((CacheMiss, CompileError), match="cannot compile here: .*'/gone'"):
            step(PACK)


def test_versions_that_cannot_be_read(monkeypatch) -> None:
    def fail(name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    for version in (fail, lambda name: None):  # None: the metadata's own file cannot be opened
        monkeypatch.setattr(importlib.metadata, "version", version)
        assert toolchain.versions() == {} and toolchain.why_tvm_ffi_not_accepted() is None
        assert cli.main(["show-config"]) == 0


AS_NOBODY = """
import contextlib, io, logging, os, sys
from pathlib import Path
import tsmla
from example_variants import PACK
from tsmla.loading import jit, resolve, toolchain
from tsmla.tools import cli
logging.getLogger("tsmla").setLevel(logging.ERROR)
secret = Path(sys.argv[1])
with contextlib.redirect_stdout(io.StringIO()):  # imports what Python itself imports late: its home may be forbidden
    cli.main(["probe", "--arch", "sm_90a"]), cli.main(["show-config"])
resolve.forget()
os.chdir(secret)
secret.chmod(0)
if os.geteuid() == 0:  # whom no permission stops
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
tsmla.__path__ = [str(secret)]
toolchain.dsl_roots = lambda: [secret]
jit._compile = lambda variant: b""
print(tsmla.binary_status("sm_90a"))
print(tsmla.has_binary_prefill(arch="sm_90a"), tsmla.has_binary_prefill("library.so", "sm_90a"))
print(cli.main(["probe", "--arch", "sm_90a"]), cli.main(["show-config"]))
for known in (False, True):
    if known:
        jit.cache_key = lambda: {}
    try:
        resolve.kernel(PACK)
    except tsmla.KernelUnavailable as error:
        print(error)
"""


@pytest.fixture
def secret() -> Iterator[Path]:
    """A directory, in one that everybody may enter, which the script makes its user's no more."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        (directory := Path(name) / "secret").mkdir()
        yield directory
        directory.chmod(0o700)


def test_as_another_user(secret: Path) -> None:
    runtime = secret / loader.RUNTIME_FILE
    done = run_python(AS_NOBODY, secret, CUTE_DSL_LIBS=str(runtime), TSMLA_CACHE_DIR="cache", TMPDIR="/tmp")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    said = done.stdout
    assert "\nFalse False\n" in said and "\n1 0\n" in said
    unread = f"{secret}/objs/manifest.json cannot be read: [Errno 13] Permission denied"
    assert said.count(f"no precompiled kernels for sm_90a on {platform.machine()}: {unread}") == 2
    assert f"shipped: {secret}/objs/manifest.json cannot be read: [Errno 13]" in said
    assert f"jit: cannot compile here: {loader.RUNTIME_FILE} of NVIDIA's CuTe DSL is missing (looked for " in said
    assert f"{runtime}: Permission denied, {secret}/cu12/lib/{loader.RUNTIME_FILE}: Permission denied)" in said
    assert "cached: cache/" in said and "cannot be read: [Errno 13] Permission denied: 'cache'" in said


def test_a_relative_path_where_the_directory_is_gone(tmp_path: Path, monkeypatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    reason = tsmla.binary_status("sm_90a", "library.so").families["prefill"].reason
    assert reason.startswith("library.so cannot be read: [Errno 2]")


@pytest.mark.parametrize("path", ["nul\0", "~\0/library.so", "~no-such-user/library.so", "\ud800.so"])
def test_names_that_no_file_can_have(path: str) -> None:
    assert tsmla.binary_status("sm_90a", path).families["prefill"].reason
    assert not tsmla.has_binary_prefill(path, "sm_90a")
    assert trust.why_unseen(Path(path))
