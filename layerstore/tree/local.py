"""A directory of this machine as a tree: the source ``tree:DIR``.

Everything is taken with lstat, whatever order the file system lists names in; mount points are entered, as tar does.
File data is read later, file by file and without keeping descriptors, so each read checks that the file is still the
one that was seen.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from layerstore.errors import (
    ConflictError,
    ImgtoolError,
    MalformedError,
    UsageError,
    from_os_error,
    os_errors,
    printable,
)
from layerstore.tree.attributes import escape
from layerstore.tree.inode import Attrs, Directory, Extent, File, Inode, Special, Symlink, Xattrs

Warn = Callable[[str], None]

_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK = 512
"""Unit of st_blocks (stat(2))."""


class LocalFile:
    """The bytes of one file, as a ByteSource. ``folder`` is shared by the files of a directory."""

    __slots__ = ("_folder", "_name", "_seen")

    def __init__(self, folder: bytes, name: bytes, status: os.stat_result) -> None:
        self._folder = folder
        self._name = name
        self._seen = _signature(status)

    @property
    def path(self) -> bytes:
        return os.path.join(self._folder, self._name)

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes.

        Raises:
            ConflictError: another file has the name now, or this one has been written to or cut.
            PermissionError_: it can't be opened.
        """
        fd = self.open()
        try:
            with os_errors(f"read {printable(self.path)}"):
                pieces: list[bytes] = []
                while length > 0:
                    piece = os.pread(fd, length, offset)
                    if not piece:
                        raise self.changed()
                    pieces.append(piece)
                    offset += len(piece)
                    length -= len(piece)
            self._check(fd)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def open(self) -> int:
        """A descriptor of the file that was scanned; the caller closes it."""
        try:
            fd = os.open(self.path, _OPEN_FLAGS)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise self.changed() from error
            raise from_os_error(error, "read a file of the tree") from error
        try:
            self._check(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def changed(self) -> ConflictError:
        return _changed(self.path)

    def _check(self, fd: int) -> None:
        with os_errors(f"stat {printable(self.path)}"):
            status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or _signature(status) != self._seen:
            raise self.changed()


def scan(path: str, *, warn: Warn) -> Directory:
    """The tree below the directory ``path``, file data left where it is.

    An xattr that is listed but can't be read is left out with a warning: that is how a race and the filters of
    security modules look.

    Raises:
        NotFoundError, UsageError: no such directory.
        PermissionError_: something in it can't be read.
        ConflictError: it changes while it is read.
        MalformedError: a character device 0:0, which would act as an overlay whiteout.
    """
    return _Scan(warn).tree(os.fsencode(path))


class _Scan:
    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._links: dict[tuple[int, int], Inode] = {}

    def tree(self, top: bytes) -> Directory:
        with os_errors("scan a tree"):
            status = os.stat(top)
        if not stat.S_ISDIR(status.st_mode):
            raise UsageError(f"{printable(top)} is not a directory")
        top = os.path.realpath(top)  # it may be given as a symlink, which here is no part of the tree
        root = Directory(self._attrs(top, status))
        stack = [(top, root)]
        while stack:
            folder, directory = stack.pop()
            for name in self._names(folder):
                inode = self._inode(folder, name)
                directory.entries[name] = inode
                if isinstance(inode, Directory):
                    stack.append((os.path.join(folder, name), inode))
        return root

    def _names(self, folder: bytes) -> list[bytes]:
        try:
            fd = os.open(folder, _OPEN_FLAGS | os.O_DIRECTORY)
            try:
                return sorted(map(os.fsencode, os.listdir(fd)))
            finally:
                os.close(fd)
        except OSError as error:
            raise _gone_or(error, folder, "list a directory of the tree") from error

    def _inode(self, folder: bytes, name: bytes) -> Inode:
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
        except OSError as error:
            raise _gone_or(error, path, "stat an entry of the tree") from error
        if stat.S_ISDIR(status.st_mode):
            return Directory(self._attrs(path, status))
        if status.st_nlink == 1:
            return self._leaf(folder, name, status)
        key = status.st_dev, status.st_ino
        inode = self._links.get(key)
        if inode is None:
            inode = self._links[key] = self._leaf(folder, name, status)
        return inode

    def _leaf(self, folder: bytes, name: bytes, status: os.stat_result) -> Inode:
        path = os.path.join(folder, name)
        attrs = self._attrs(path, status)
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFREG:
            return File(attrs, status.st_size, _extents(LocalFile(folder, name, status), status))
        if kind == stat.S_IFLNK:
            try:
                return Symlink(attrs, os.readlink(path))
            except OSError as error:
                raise _gone_or(error, path, "read a symlink of the tree") from error
        if kind in (stat.S_IFCHR, stat.S_IFBLK):
            major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
            if kind == stat.S_IFCHR and major == minor == 0:
                raise MalformedError(
                    f"{printable(path)}: a character device 0:0 would act as an overlay whiteout; remove it"
                )
            return Special(attrs, major, minor)
        return Special(attrs)

    def _attrs(self, path: bytes, status: os.stat_result) -> Attrs:
        seconds, nsec = divmod(status.st_mtime_ns, 1_000_000_000)
        xattrs = self._xattrs(path)
        attrs = Attrs(status.st_mode, status.st_uid, status.st_gid, seconds, nsec, xattrs)
        return escape(attrs, path, self._warn)

    def _xattrs(self, path: bytes) -> Xattrs:
        try:
            names = os.listxattr(path, follow_symlinks=False)
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return ()
            raise _gone_or(error, path, "list xattrs in the tree") from error
        pairs: list[tuple[bytes, bytes]] = []
        for name in names:
            try:
                pairs.append((os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)))
            except OSError as error:
                if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                    raise _gone_or(error, path, f"read xattr {printable(name)} in the tree") from error
                self._warn(f"{printable(path)}: xattr {printable(name)} is listed but can't be read; left out")
        return tuple(sorted(pairs))


def _extents(source: LocalFile, status: os.stat_result) -> tuple[Extent, ...]:
    """Where the file has data. Only one with fewer blocks than its size needs can have holes worth asking for."""
    size = status.st_size
    if size == 0:
        return ()
    if status.st_blocks * _BLOCK >= size:
        return (Extent(0, size, source, 0),)
    fd = source.open()
    try:
        return tuple(Extent(start, end - start, source, start) for start, end in _data_ranges(fd, size, source.path))
    finally:
        os.close(fd)


def _data_ranges(fd: int, size: int, path: bytes) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here on
                break
            if error.errno == errno.EINVAL:  # the file system doesn't tell
                return [(0, size)]
            raise from_os_error(error, f"find the holes of {printable(path)}") from error
        if start >= size:
            break
        ranges.append((start, end))
    return ranges


def _signature(status: os.stat_result) -> int:
    """Identity, size and modification time as one number: a million files have one each."""
    return hash((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


def _gone_or(error: OSError, path: bytes, what: str) -> ImgtoolError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP):
        return _changed(path)
    return from_os_error(error, f"{what}: {printable(path)}")


def _changed(path: bytes) -> ConflictError:
    return ConflictError(f"{printable(path)}: changed while it was read; try again when nothing writes to the tree")
