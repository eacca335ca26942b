"""Deleting what a sandbox has written: any names, any depth, never through a link, never into a mount.

Programs in a sandbox choose the shape of its upper: a hundred thousand nested directories, immutable files, links to
/etc. Deletion walks by descriptors, holds a bounded number of them, and moves what lies deeper up to the top.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import stat
from itertools import islice

from layerstore.errors import ConflictError, printable

DEPTH = 64
"""Directories held open at once; deeper ones are renamed into the top first."""

FS_IOC_GETFLAGS = 0x80086601
"""<linux/fs.h>, _IOR('f', 1, long) with 8-byte long."""
FS_IOC_SETFLAGS = 0x40086602
FS_IMMUTABLE_FL = 0x10
FS_APPEND_FL = 0x20

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(parent_fd: int, name: bytes) -> None:
    """Remove ``name`` in the directory ``parent_fd`` and all below it; that it is missing is fine.

    One at a time per tree: the caller holds the sandbox's lock.

    Raises:
        ConflictError: something is mounted inside; nothing beyond it has been touched.
        OSError: the filesystem refuses, or somebody still writes into the tree (ENOTEMPTY).
    """
    if _remove_leaf(parent_fd, name, directory=True):
        return
    fd = _open_directory(parent_fd, name)
    if fd is None:
        return
    try:
        while _empty(fd, printable(name)):
            pass
    finally:
        os.close(fd)
    _remove_leaf(parent_fd, name, directory=True, last=True)


def _empty(top: int, shown: str) -> bool:
    """Remove what is in ``top``, which stays open; True when directories were moved up into it: then empty it again."""
    device = os.fstat(top).st_dev
    moved = 0
    fds = [top]
    names: list[bytes] = []
    pending = [_Batch(top)]
    try:
        while pending:
            entry = pending[-1].pop()
            if entry is None:
                pending.pop()
                if names:
                    os.close(fds.pop())
                    _remove_leaf(fds[-1], names.pop(), directory=True, last=True)
                continue
            name, directory = entry
            if _remove_leaf(fds[-1], name, directory=directory):
                continue
            fd = _open_directory(fds[-1], name)
            if fd is None:
                continue
            fds.append(fd)
            if os.fstat(fd).st_dev != device:
                path = printable(b"/".join([*names, name]))
                raise ConflictError(f"something is mounted at {shown}/{path}; unmount it, then remove again")
            if len(fds) > DEPTH:
                os.close(fds.pop())
                _move_up(fds[-1], name, top, b".deeper-%d" % moved)
                moved += 1
                continue
            names.append(name)
            pending.append(_Batch(fd))
    finally:
        for fd in fds[1:]:
            os.close(fd)
    return moved > 0


class _Batch:
    """The entries of a directory, a few thousand at a time, while they are being removed from it."""

    SIZE = 4096

    __slots__ = ("_entries", "_fd", "_more")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._more = True
        self._entries: list[tuple[bytes, bool]] = []

    def pop(self) -> tuple[bytes, bool] | None:
        """(name, whether it is a directory) of an entry that is still there; None at the end."""
        if not self._entries and self._more:
            with os.scandir(self._fd) as entries:
                self._entries = [
                    (os.fsencode(entry.name), entry.is_dir(follow_symlinks=False))
                    for entry in islice(entries, self.SIZE)
                ]
            self._more = len(self._entries) == self.SIZE
        return self._entries.pop() if self._entries else None


def _open_directory(parent_fd: int, name: bytes) -> int | None:
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent_fd)
    except FileNotFoundError:
        return None


def _move_up(parent_fd: int, name: bytes, top: int, new_name: bytes) -> None:
    """Rename into ``top`` under a name that is free there."""
    while True:
        try:
            os.stat(new_name, dir_fd=top, follow_symlinks=False)
        except FileNotFoundError:
            break
        new_name += b"-"
    try:
        os.rename(name, new_name, src_dir_fd=parent_fd, dst_dir_fd=top)
    except PermissionError:
        _clear_flags(parent_fd, name)
        os.rename(name, new_name, src_dir_fd=parent_fd, dst_dir_fd=top)


def _remove_leaf(parent_fd: int, name: bytes, *, directory: bool, last: bool = False) -> bool:
    """Unlink a file or remove an empty directory; False when it is a directory with entries.

    Args:
        parent_fd: where it is.
        name: its name.
        directory: what it is taken for; the other is tried when that is wrong.
        last: a directory that still has entries is an error.
    """
    for attempt in (1, 2):
        try:
            if not directory:
                try:
                    os.unlink(name, dir_fd=parent_fd)
                    return True
                except IsADirectoryError:
                    pass
            try:
                os.rmdir(name, dir_fd=parent_fd)
            except NotADirectoryError:
                os.unlink(name, dir_fd=parent_fd)
            return True
        except FileNotFoundError:
            return True
        except PermissionError:
            if attempt == 2:
                raise
            _clear_flags(parent_fd, name)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or last:
                raise
            return False
    raise AssertionError  # the second attempt has returned or raised


def _clear_flags(parent_fd: int, name: bytes) -> None:
    """Drop "immutable" and "append only" from an entry and from its directory (chattr in the sandbox)."""
    for fd in (parent_fd, _openable(parent_fd, name)):
        if fd is None:
            continue
        try:
            flags = array.array("L", [0])
            fcntl.ioctl(fd, FS_IOC_GETFLAGS, flags, True)
            if flags[0] & (FS_IMMUTABLE_FL | FS_APPEND_FL):
                flags[0] &= ~(FS_IMMUTABLE_FL | FS_APPEND_FL)
                fcntl.ioctl(fd, FS_IOC_SETFLAGS, flags)
        finally:
            if fd != parent_fd:
                os.close(fd)


def _openable(parent_fd: int, name: bytes) -> int | None:
    """A descriptor of a regular file or directory; nothing else carries such flags, and opening it could block."""
    try:
        mode = os.stat(name, dir_fd=parent_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return None
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent_fd)
