"""The on-disk cache of compiled kernels on a machine with other users: whose files are run, and what is left alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from example_variants import PACK, PREFILL
from tsmla.errors import CacheMiss
from tsmla.loading import jit, settings, trust

KERNEL = PACK.symbol().encode()
"""What the stand-in compiler (`compiled`) makes of PACK."""


def entry() -> Path:
    return next(settings.cache_dir().rglob("*.o"))


def test_what_it_makes_is_the_users_alone(compiled: list[str]) -> None:
    before = os.umask(0)
    try:
        jit.compile_now(PACK)
    finally:
        os.umask(before)
    made = [settings.cache_dir(), *settings.cache_dir().rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_file()} == {0o600}


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `path` belong to another user: root can arrange that, anybody else becomes that other user."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1, follow_symlinks=False)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(trust.os, "geteuid", lambda: other)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda top, key, patch: top.chmod(0o777), "can be written to by others"),
        (lambda top, key, patch: top.chmod(0o770), "can be written to by others"),
        (lambda top, key, patch: key.chmod(0o702), "can be written to by others"),
        (lambda top, key, patch: give_away(top, patch), "belongs to user"),
        (lambda top, key, patch: give_away(key, patch), "belongs to user"),
        (lambda top, key, patch: key.symlink_to(key.rename(top / "elsewhere")), "is a symbolic link"),
    ],
    ids=["anybody writes", "a group writes", "anybody writes below", "another user's", "another user's below", "link"],
)
def test_what_another_user_could_have_planted_is_neither_run_nor_changed(
    monkeypatch, compiled: list[str], caplog, change, reason: str
) -> None:
    """The entry is sound: whoever can write one can write its hash as well."""
    jit.compile_now(PACK)
    (top, key), files = (settings.cache_dir(), entry().parent), sorted(entry().parent.iterdir())
    change(top, key, monkeypatch)
    contents = [file.read_bytes() for file in files]
    with pytest.raises(CacheMiss, match=f"{reason}.* Set TSMLA_CACHE_DIR to a directory"):
        jit.load_cached(PACK)
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert jit.compile_now(PREFILL) == (PREFILL.symbol().encode(), "jit")
    assert compiled == [PACK.symbol(), PACK.symbol(), PREFILL.symbol()]
    assert caplog.text.count("cannot be used, the result is kept in memory") == 2 and "TSMLA_CACHE_DIR" in caplog.text
    assert sorted(key.iterdir()) == files and [file.read_bytes() for file in files] == contents


def test_an_entry_of_another_user_is_replaced(monkeypatch, compiled: list[str]) -> None:
    jit.compile_now(PACK)
    code, look = entry(), trust.why_untrusted
    planted = code.stat().st_ino

    def as_planted(path: Path, found: os.stat_result) -> str | None:
        return "it belongs to user 4711" if (path, found.st_ino) == (code, planted) else look(path, found)

    monkeypatch.setattr(trust, "why_untrusted", as_planted)
    with pytest.raises(CacheMiss, match="belongs to user 4711"):
        jit.load_cached(PACK)
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert jit.load_cached(PACK) == KERNEL and code.stat().st_ino != planted


def test_a_directory_of_roots_serves_every_user(monkeypatch, compiled: list[str]) -> None:
    jit.compile_now(PACK)
    monkeypatch.setattr(trust.os, "geteuid", lambda: 4711)
    owners = {"lstat": os.lstat, "fstat": os.fstat}
    for name, look in owners.items():

        def as_roots(file, look=look):
            found = list(look(file))
            found[stat.ST_UID] = 0
            return os.stat_result(found)

        monkeypatch.setattr(trust.os, name, as_roots)
    assert jit.load_cached(PACK) == KERNEL


def test_a_lock_is_neither_emptied_nor_followed(compiled: list[str], tmp_path: Path, caplog) -> None:
    jit.compile_now(PACK)
    lock = entry().with_suffix(".lock")
    lock.write_text("not ours")
    jit.compile_now(PACK)
    assert lock.read_text() == "not ours"
    (tmp_path / "precious").write_text("precious")
    lock.unlink()
    lock.symlink_to(tmp_path / "precious")
    assert jit.compile_now(PACK) == (KERNEL, "jit")
    assert (tmp_path / "precious").read_text() == "precious"
    assert "cannot be used" in caplog.text


def test_the_code_that_is_loaded_is_the_code_that_was_hashed(monkeypatch, compiled: list[str]) -> None:
    jit.compile_now(PACK)
    check = jit._read_entry

    def exchange(path: Path) -> bytes:
        code = check(path)
        path.write_bytes(b"another program")
        return code

    monkeypatch.setattr(jit, "_read_entry", exchange)
    assert jit.load_cached(PACK) == KERNEL
