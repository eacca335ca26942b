"""Inodes of a tree in memory: what a layer holds, before it is an EROFS image and after it has been read from one.

A million entries have to fit into 300 MiB, hence slots, names as plain bytes, and attributes taken apart: times, which
often differ from file to file, are one int each, and all the rest is shared between inodes. Hard links are one object
under several names; ``nlink`` is counted when it is needed, never stored.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import NamedTuple, Protocol

Xattrs = tuple[tuple[bytes, bytes], ...]
"""(full name, value) pairs, sorted by name."""


class Attrs(NamedTuple):
    """What stat and listxattr tell of an inode.

    ``mode`` is a whole st_mode, type included; ``mtime`` is seconds (may be negative), ``nsec`` 0 to 999,999,999.
    """

    mode: int
    uid: int
    gid: int
    mtime: int
    nsec: int
    xattrs: Xattrs = ()


class ByteSource(Protocol):
    """Random access to bytes that stay as they are: a spooled layer, a local file, a pack."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes; raises rather than return fewer."""
        ...


class Extent(NamedTuple):
    """``length`` bytes at ``offset`` of a file are those at ``at`` of ``source``."""

    offset: int
    length: int
    source: ByteSource
    at: int


_NANO = 1_000_000_000
_BOUND = 1 << 16  # equal values come close together; tables without a bound would weigh more than they save
_shared: dict[Attrs, Attrs] = {}
_times: dict[int, int] = {}


class Inode:
    """A non-directory. Its kind is ``attrs.mode``'s; the other slot that matters depends on it."""

    __slots__ = ("_common", "_time")

    def __init__(self, attrs: Attrs) -> None:
        self.attrs = attrs

    @property
    def attrs(self) -> Attrs:
        """A new object each time, but its xattrs are one object for all inodes that have equal ones."""
        mode, uid, gid, _, _, xattrs = self._common
        return Attrs(mode, uid, gid, *divmod(self._time, _NANO), xattrs)

    @attrs.setter
    def attrs(self, attrs: Attrs) -> None:
        mode, uid, gid, mtime, nsec, xattrs = attrs
        if len(_shared) >= _BOUND:
            _shared.clear()
        if len(_times) >= _BOUND:
            _times.clear()
        common = Attrs(mode, uid, gid, 0, 0, xattrs)
        time = mtime * _NANO + nsec
        self._common: Attrs = _shared.setdefault(common, common)
        self._time: int = _times.setdefault(time, time)

    @property
    def kind(self) -> int:
        """The S_IFMT part of the mode."""
        return stat.S_IFMT(self._common.mode)


class File(Inode):
    """A regular file: ``size`` bytes, of which the extents (sorted, disjoint, not empty) are data and the rest holes.

    ``chunks`` is set once the data has an address: see :mod:`layerstore.erofs.layout`.
    """

    # Most files are one extent without holes; then only its source and position are kept (a third of the memory).
    __slots__ = ("_at", "_source", "chunks", "size")

    def __init__(self, attrs: Attrs, size: int, extents: tuple[Extent, ...]) -> None:
        super().__init__(attrs)
        self.size = size
        self.chunks: object = None
        self.extents = extents

    @property
    def extents(self) -> tuple[Extent, ...]:
        if self._source is not None:
            assert isinstance(self._at, int)
            return (Extent(0, self.size, self._source, self._at),)
        assert isinstance(self._at, tuple)
        return self._at

    @extents.setter
    def extents(self, extents: tuple[Extent, ...]) -> None:
        self._source: ByteSource | None = None
        self._at: int | tuple[Extent, ...] = extents
        if len(extents) == 1 and extents[0].offset == 0 and extents[0].length == self.size:
            self._source = extents[0].source
            self._at = extents[0].at


class Symlink(Inode):
    """``target`` is 1 to 4,095 bytes without NUL."""

    __slots__ = ("target",)

    def __init__(self, attrs: Attrs, target: bytes) -> None:
        super().__init__(attrs)
        self.target = target


class Special(Inode):
    """A device, FIFO or socket; major and minor are 0 but for devices."""

    __slots__ = ("major", "minor")

    def __init__(self, attrs: Attrs, major: int = 0, minor: int = 0) -> None:
        super().__init__(attrs)
        self.major = major
        self.minor = minor


class Whiteout(Inode):
    """Hides the name in the layers below; a character device 0:0 in the EROFS image."""

    __slots__ = ()


class Directory(Inode):
    """Entries by name. ``opaque`` hides what layers below have in it."""

    __slots__ = ("entries", "opaque")

    def __init__(self, attrs: Attrs) -> None:
        super().__init__(attrs)
        self.entries: dict[bytes, Inode] = {}
        self.opaque = False


def walk(root: Directory) -> Iterator[tuple[bytes, Inode]]:
    """Every entry with its path (``b""`` for the root, no leading slash), directories first, names in byte order."""
    stack: list[tuple[bytes, Inode]] = [(b"", root)]
    while stack:
        path, inode = stack.pop()
        yield path, inode
        if isinstance(inode, Directory):
            prefix = path + b"/" if path else b""
            stack.extend((prefix + name, inode.entries[name]) for name in sorted(inode.entries, reverse=True))
