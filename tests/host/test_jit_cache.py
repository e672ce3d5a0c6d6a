"""The on-disk cache of compiled kernels: hits, damage, directories that cannot be written to, processes that race."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from example_variants import PACK, PREFILL, python_environment
from tsmla.errors import CacheMiss, CompileError
from tsmla.loading import jit, loader, settings, toolchain

STAND_IN = """
import os, sys, time
from pathlib import Path
from tsmla.loading import jit
from example_variants import PACK

log, seconds = Path(sys.argv[1]), float(sys.argv[2])

def compile_slowly(variant):
    with open(log, "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    time.sleep(seconds)
    return b"object"

jit._compile = compile_slowly
jit._load_object = lambda code, symbol: code
print("ready", flush=True)
sys.stdin.readline()
function, step = jit.compile_now(PACK)
print(function.decode(), step, flush=True)
"""
"""A process that compiles PACK with a compiler which only takes time and counts how often it ran."""
KERNEL = PACK.symbol().encode()
"""What the stand-in compiler of this process makes of PACK, and what the stand-in loader makes of that."""


def entry() -> Path:
    return next(settings.cache_dir().rglob("*.o"))


def test_a_real_kernel_from_compiler_and_from_cache(shipped: Path, caplog) -> None:
    """The compiler's function, the cached one and the shipped one take the same arguments."""
    compiled, step = jit.compile_now(PACK)
    assert step == "jit"
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == f"compiling {PACK}, about {jit.TYPICAL_SECONDS['pack']} s"
    assert messages[1].startswith(f"compiled {PACK} in ")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    cached = jit.load_cached(PACK)
    ahead = loader.open_library(next(shipped.glob("*.so"))).function(PACK, check_signature=True)
    assert len({loader.signature_of(function) for function in (compiled, cached, ahead)}) == 1
    assert len(caplog.records) == 2


def test_second_use_compiles_nothing(compiled: list[str]) -> None:
    with pytest.raises(CacheMiss, match=f"has no {PACK}.o"):
        jit.load_cached(PACK)
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert jit.load_cached(PACK) == KERNEL
    assert jit.compile_now(PACK) == (KERNEL, "cached")
    assert compiled == [PACK.symbol()]


def test_variants_have_entries_of_their_own(compiled: list[str]) -> None:
    jit.compile_now(PACK)
    with pytest.raises(CacheMiss):
        jit.load_cached(PREFILL)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(toolchain, "source_digest", lambda: "0" * 64),
        lambda patch: patch.setattr(toolchain, "versions", lambda: {"nvidia-cutlass-dsl": "99"}),
        lambda patch: patch.setattr(loader, "runtime_library", lambda: Path("/x/cu99/lib/libcute_dsl_runtime.so")),
        lambda patch: patch.setattr(jit, "_cpu_features", lambda: "another CPU"),
        lambda patch: patch.setattr(jit.platform, "machine", lambda: "riscv64"),
    ],
    ids=["sources", "compiler", "flavour", "cpu", "host"],
)
def test_whatever_decides_the_bytes_is_in_the_key(monkeypatch, compiled: list[str], change) -> None:
    jit.compile_now(PACK)
    change(monkeypatch)
    with pytest.raises(CacheMiss):
        jit.load_cached(PACK)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"X" + file.read_bytes()[1:]),
        lambda file: file.unlink(),
        lambda file: file.with_suffix(".json").write_text(file.with_suffix(".json").read_text()[:20]),
        lambda file: file.with_suffix(".json").write_text("[]"),
        lambda file: file.with_suffix(".json").write_text("{}"),
        lambda file: file.with_suffix(".json").write_bytes(b"\xff\xfe"),
        lambda file: file.with_suffix(".json").write_text("[" * 100_000),
        lambda file: file.with_suffix(".json").write_text(f'{{"sha256": {"9" * 100_000}}}'),
        lambda file: file.with_suffix(".json").write_text(" " * (jit._MOST_RECORD_BYTES + 1)),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: (file.unlink(), file.mkdir()),
        lambda file: file.symlink_to(file.rename(file.with_name("elsewhere"))),
        lambda file: (file.with_suffix(".json").unlink(), os.mkfifo(file.with_suffix(".json"))),
        lambda file: file.chmod(0o620),
        lambda file: file.with_suffix(".json").chmod(0o602),
    ],
    ids=["truncated", "empty", "corrupt", "gone", "record cut", "record of another kind", "record empty", "not text",
         "record nested", "record of digits", "record huge", "fifo", "directory", "link", "record a fifo",
         "group may write", "others may write the record"],
)  # fmt: skip
def test_a_damaged_entry_is_a_miss_with_a_warning_and_is_replaced(compiled: list[str], caplog, damage) -> None:
    jit.compile_now(PACK)
    file = entry()
    damage(file)
    with pytest.raises(CacheMiss, match="is damaged"):
        jit.load_cached(PACK)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(file) in caplog.text
    if file.is_dir():
        file.rmdir()
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert jit.load_cached(PACK) == KERNEL
    assert compiled == [PACK.symbol()] * 2


def test_the_record_says_what_the_entry_was_made_from(compiled: list[str]) -> None:
    jit.compile_now(PACK)
    record = json.loads(entry().with_suffix(".json").read_text())
    assert record["key"] == jit.cache_key()
    assert sorted(path.suffix for path in entry().parent.iterdir()) == [".json", ".lock", ".o"]


def test_a_directory_that_cannot_be_made_costs_a_warning(monkeypatch, tmp_path, compiled, caplog) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TSMLA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert "cannot be used, the result is kept in memory" in caplog.text


def test_a_read_only_directory_still_serves_what_it_holds(monkeypatch, compiled: list[str], caplog) -> None:
    jit.compile_now(PACK)

    def refuse(path, flags, *arguments, **keywords):
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, flags, *arguments, **keywords)

    opened = os.open
    monkeypatch.setattr(jit.os, "open", refuse)
    assert jit.load_cached(PACK) == KERNEL
    assert jit.compile_now(PREFILL) == (PREFILL.symbol().encode(), "jit")
    assert compiled == [PACK.symbol(), PREFILL.symbol()]
    assert "Read-only file system" in caplog.text


def test_a_full_disk_costs_a_warning_and_leaves_no_part_of_an_entry(monkeypatch, compiled: list[str], caplog) -> None:
    def fill(source, target) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jit.os, "replace", fill)
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert "No space left on device" in caplog.text
    assert [path.suffix for path in settings.cache_dir().rglob("*") if path.is_file()] == [".lock"]


def test_processes_that_race_compile_once(tmp_path: Path) -> None:
    racers = [start(tmp_path, 0.5) for _ in range(4)]
    for racer in racers:
        go(racer)
    outputs = [racer.communicate(timeout=60) for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4, outputs
    assert sorted(out.splitlines()[-1] for out, _ in outputs) == ["object cached"] * 3 + ["object jit"]
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert sum("waiting for another process" in err for _, err in outputs) == 3


def test_a_process_killed_while_it_compiles_leaves_no_entry_and_no_lock(tmp_path: Path, compiled: list[str]) -> None:
    victim = start(tmp_path, 60)
    go(victim)
    deadline = time.monotonic() + 30
    while not (tmp_path / "log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    with pytest.raises(CacheMiss, match="has no"):
        jit.load_cached(PACK)
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert compiled == [PACK.symbol()]


def test_a_compiler_that_fails(monkeypatch) -> None:
    import tsmla_kernels.registry

    def fail(variant):
        raise RuntimeError("ptxas said no")

    monkeypatch.setattr(tsmla_kernels.registry, "compile_variant", fail)
    with pytest.raises(CompileError, match=f"compiling {PACK} failed: RuntimeError: ptxas said no"):
        jit.compile_now(PACK)
    with pytest.raises(CacheMiss):
        jit.load_cached(PACK)


def test_a_compiler_that_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    with pytest.raises(CompileError, match="nvidia-cutlass-dsl is not installed"):
        jit.compile_now(PACK)


def test_no_temporary_directory(monkeypatch, tmp_path: Path) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "absent")])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(CompileError, match="needs a temporary directory: .* set TMPDIR"):
        jit.compile_now(PACK)


def start(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", STAND_IN, str(tmp_path / "log"), str(seconds)],
        env=python_environment(TSMLA_CACHE_DIR=os.environ["TSMLA_CACHE_DIR"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
