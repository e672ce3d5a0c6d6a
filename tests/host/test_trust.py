"""What may be opened: regular files of a bounded size; in the compile cache, only what nobody else could put there."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tsmla.loading import trust

USER, OTHER = os.geteuid(), os.geteuid() + 4711


def said(mode: int, owner: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, owner, owner, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (os.mkfifo, "it is a FIFO"),
        (os.mkdir, "it is a directory"),
        (lambda path: os.symlink("/dev/zero", path), "it is a device"),
        (lambda path: os.symlink(path.parent, path), "it is a directory"),
        (lambda path: os.symlink(path, path), "symbolic link"),
        (lambda path: None, "No such file"),
    ],
    ids=["fifo", "directory", "device", "link to a directory", "link to itself", "nothing"],
)
def test_only_regular_files_are_opened(tmp_path: Path, make, text: str) -> None:
    make(tmp_path / "name")
    with pytest.raises(OSError, match=text):
        trust.open_regular(tmp_path / "name")


def test_a_socket_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        with pytest.raises(OSError):
            trust.open_regular(Path("socket"))


def test_links_are_followed_only_when_asked_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    with trust.open_regular(tmp_path / "link") as stream:
        assert stream.read() == b"content"
    with pytest.raises(OSError, match="it is a symbolic link"):
        trust.open_regular(tmp_path / "link", follow_links=False)


def test_refusing_a_file_leaves_none_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(OSError):
            trust.open_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have(name: str) -> None:
    with pytest.raises(OSError, match="no file can have this name"):
        trust.open_regular(Path(name))


@pytest.mark.parametrize("size", [0, 1, 100])
def test_what_is_too_large_is_not_read(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    with trust.open_regular(tmp_path / "file") as stream:
        assert trust.read_bounded(stream, size) == bytes(size)
    with trust.open_regular(tmp_path / "file") as stream, pytest.raises(OSError, match=f"{size} bytes"):
        trust.read_bounded(stream, size - 1)


@pytest.mark.parametrize(
    ("mode", "owner", "reason"),
    [
        (stat.S_IFREG | 0o600, USER, None),
        (stat.S_IFREG | 0o644, USER, None),
        (stat.S_IFDIR | 0o755, 0, None),
        (stat.S_IFREG | 0o600, OTHER, f"belongs to user {OTHER}"),
        (stat.S_IFDIR | 0o700, OTHER, f"belongs to user {OTHER}"),
        (stat.S_IFREG | 0o620, USER, "mode 0620"),
        (stat.S_IFDIR | 0o775, USER, "mode 0775"),
        (stat.S_IFDIR | 0o1777, 0, "mode 1777"),
        (stat.S_IFLNK | 0o777, USER, "is a symbolic link"),
        (stat.S_IFLNK | 0o777, OTHER, f"belongs to user {OTHER}"),
    ],
)
def test_who_could_have_put_it_there(mode: int, owner: int, reason: str | None) -> None:
    answer = trust.why_untrusted(Path("/cache/entry"), said(mode, owner))
    assert answer is None if reason is None else answer and reason in answer and "/cache/entry" in answer


def test_root_trusts_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust.os, "geteuid", lambda: 0)
    assert "belongs to user 1000, neither to user 0" in (trust.why_untrusted(Path("x"), said(0o100600, 1000)) or "")


@given(st.integers(0, 0o7777), st.sampled_from([0, USER, OTHER]), st.sampled_from([stat.S_IFREG, stat.S_IFDIR]))
def test_trusted_means_that_others_cannot_write(mode: int, owner: int, kind: int) -> None:
    others_can = owner not in (0, USER) or bool(mode & 0o020) or bool(mode & 0o002)
    assert (trust.why_untrusted(Path("x"), said(kind | mode, owner)) is not None) == others_can


def test_every_directory_from_the_top_down_counts(tmp_path: Path) -> None:
    top = tmp_path / "top"
    inner = top / "a" / "b"
    trust.make_directory(inner)
    assert trust.why_directory_untrusted(top, inner) is None
    assert trust.why_directory_untrusted(top, top) is None
    for path in (top, top / "a", inner):
        for mode in (0o770, 0o702):
            path.chmod(mode)
            assert str(path) in (trust.why_directory_untrusted(top, inner) or "")
        path.chmod(0o700)
    tmp_path.chmod(0o777)  # what lies above is the user's choice
    assert trust.why_directory_untrusted(top, inner) is None


def test_links_count_inside_and_at_the_top_only_other_users(tmp_path: Path, monkeypatch) -> None:
    trust.make_directory(tmp_path / "real" / "key")
    (tmp_path / "top").symlink_to("real")
    assert trust.why_directory_untrusted(tmp_path / "top", tmp_path / "top" / "key") is None
    (tmp_path / "real" / "linked").symlink_to("key")
    assert "is a symbolic link" in (trust.why_directory_untrusted(tmp_path / "top", tmp_path / "top" / "linked") or "")
    lstat = os.lstat
    monkeypatch.setattr(trust.os, "lstat", lambda p: said(lstat(p).st_mode, OTHER if p.name == "top" else USER))
    assert f"belongs to user {OTHER}" in (trust.why_directory_untrusted(tmp_path / "top", tmp_path / "top") or "")


def test_a_file_in_a_directorys_place(tmp_path: Path) -> None:
    (tmp_path / "top").touch(0o600)
    assert "is not a directory" in (trust.why_directory_untrusted(tmp_path / "top", tmp_path / "top") or "")
    with pytest.raises(FileNotFoundError):
        trust.why_directory_untrusted(tmp_path / "absent", tmp_path / "absent")


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_new_directories_are_the_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "there").mkdir(0o755)
    (tmp_path / "there").chmod(0o755)
    before = os.umask(umask)
    try:
        trust.make_directory(tmp_path / "there" / "a" / "b")
        trust.make_directory(tmp_path / "there" / "a" / "b")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "there", tmp_path / "there" / "a" / "b")]
    assert modes == [0o755, 0o700]
    assert stat.S_IMODE((tmp_path / "there" / "a").stat().st_mode) == 0o700
