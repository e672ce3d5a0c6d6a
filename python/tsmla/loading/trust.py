"""Rules for files before they are read, and for directories before code in them is run. Standard library only.

Only regular files of a bounded size are read: opening a FIFO would hang, and reading a device might never end. The
compile cache holds code that will run, so nothing in it counts that another user could have put or changed there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else, and for a name that no file can have."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except ValueError as error:  # a NUL, or what the file system's encoding cannot spell
        raise _impossible(path, error) from None
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, not a regular file", str(path)) from None
        raise
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def why_unseen(path: Path) -> OSError | None:
    """Return the error of looking at a path, links followed; None when something is there.

    It is not raised: where files are looked for, a directory that this user may not enter is a reason to look
    elsewhere.
    """
    try:
        os.stat(path)
    except ValueError as error:
        return _impossible(path, error)
    except OSError as error:
        return error
    return None


def missing(path: Path) -> bool:
    """Whether nothing is at a path. False where that cannot be seen."""
    return isinstance(why_unseen(path), FileNotFoundError | NotADirectoryError)


def _impossible(path: Path, error: ValueError) -> OSError:
    """Return the error for a name that has a NUL, or that the file system's encoding cannot spell."""
    advice = ""
    if isinstance(error, UnicodeEncodeError):
        advice = f"; this locale's encoding is {error.encoding}: set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
    return OSError(errno.EINVAL, f"no file can have this name ({error}{advice})", str(path))


def read_bounded(stream: BinaryIO, most: int) -> bytes:
    """Everything in an opened file. Raises OSError when that is more than `most` bytes."""
    size = os.fstat(stream.fileno()).st_size
    if size <= most:
        content = stream.read(most + 1)  # the file may have grown
        size = len(content)
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes; at most {most} are read", str(stream.name))
    return content


def why_untrusted(path: Path, found: os.stat_result) -> str | None:
    """Return how another user could have chosen what lies at `path`, as a sentence; None if none but root could.

    Root is trusted by everyone; root itself trusts nobody else, not even the owner of a directory mounted into a
    container. A group that may write counts as other users: who is in it, or will be, cannot be told from here.

    found: what os.lstat says about the path, or os.fstat about the file once opened.
    """
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        return f"{path} belongs to user {found.st_uid}, neither to user {user}, who runs this process, nor to root"
    if stat.S_ISLNK(found.st_mode):
        return f"{path} is a symbolic link"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        return f"{path} can be written to by others than its owner (mode {mode:04o}; `chmod go-w` it, once it is clean)"
    return None


def why_directory_untrusted(top: Path, directory: Path) -> str | None:
    """Return the first sentence of `why_untrusted` for a directory from `top` down to `directory`; None where there is
    none.

    `top` is where the user said, so it may be a link of the user's to a trusted directory, and what lies above it is
    the user's choice. Once a directory is trusted nobody else can exchange what it holds, so looking from the top down
    leaves no gap. Raises OSError when one is missing.
    """
    parts = directory.relative_to(top).parts
    for path in (top.joinpath(*parts[:count]) for count in range(len(parts) + 1)):
        found = os.lstat(path)
        if path == top and stat.S_ISLNK(found.st_mode):
            if found.st_uid not in (os.geteuid(), 0):
                return why_untrusted(path, found)
            found = os.stat(path)
        if reason := why_untrusted(path, found):
            return reason
        if not stat.S_ISDIR(found.st_mode):
            return f"{path} is not a directory"
    return None


def make_directory(directory: Path) -> None:
    """Make a directory, and what is missing above it, for this user only; one that is there stays as it is. The mode is
    0700, less what the umask takes away."""
    absent = []
    while not os.path.lexists(directory) and directory != directory.parent:  # the last one may be out of sight, too
        absent.append(directory)
        directory = directory.parent
    for path in reversed(absent):
        path.mkdir(0o700, exist_ok=True)
