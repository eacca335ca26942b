"""Layers built member by member, and trees written out as plain values that can be compared."""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import NamedTuple, Self

from layerstore.limits import DEFAULT_LIMITS, Limits
from layerstore.tar.member import Member, Run
from layerstore.tree.inode import (
    Attrs,
    Directory,
    Extent,
    File,
    Inode,
    Special,
    Symlink,
    Whiteout,
    Xattrs,
    walk,
)
from layerstore.tree.links import link_sets
from layerstore.tree.merge import Merge


class Bytes:
    """A ByteSource in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read_at(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(self.data)
        return self.data[offset : offset + length]


class Layer:
    """The members of one layer, in order; a ByteSource for its data as well."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._stream = bytearray()

    def read_at(self, offset: int, length: int) -> bytes:
        assert 0 <= offset <= offset + length <= len(self._stream)
        return bytes(self._stream[offset : offset + length])

    def add(
        self,
        path: bytes,
        kind: int,
        mode: int = 0o644,
        *,
        uid: int = 0,
        gid: int = 0,
        mtime: int = 1000,
        nsec: int = 0,
        xattrs: Xattrs = (),
        size: int = 0,
        hardlink: bytes | None = None,
        target: bytes = b"",
        major: int = 0,
        minor: int = 0,
        data: tuple[Run, ...] = (),
    ) -> Self:
        attrs = Attrs(kind | mode, uid, gid, mtime, nsec, xattrs)
        offset = 512 * len(self.members)
        self.members.append(Member(path, kind, attrs, size, hardlink, target, major, minor, data, offset))
        return self

    def dir(self, path: bytes, mode: int = 0o755, *, uid: int = 0, mtime: int = 1000, xattrs: Xattrs = ()) -> Self:
        return self.add(path, stat.S_IFDIR, mode, uid=uid, mtime=mtime, xattrs=xattrs)

    def file(self, path: bytes, data: bytes = b"", mode: int = 0o644, *, uid: int = 0, xattrs: Xattrs = ()) -> Self:
        runs = (Run(0, len(data), len(self._stream)),) if data else ()
        self._stream += data
        return self.add(path, stat.S_IFREG, mode, uid=uid, xattrs=xattrs, size=len(data), data=runs)

    def symlink(self, path: bytes, target: bytes) -> Self:
        return self.add(path, stat.S_IFLNK, 0o777, target=target)

    def hardlink(self, path: bytes, target: bytes, mode: int = 0o644) -> Self:
        return self.add(path, stat.S_IFREG, mode, hardlink=target)

    def device(self, path: bytes, kind: int, major: int, minor: int) -> Self:
        return self.add(path, kind, major=major, minor=minor)


def merged(
    *layers: Layer,
    lower: Directory | None = None,
    warnings: list[str] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Directory:
    """What Merge makes of the layers, bottom first."""
    warn = ([] if warnings is None else warnings).append
    merge = Merge(lower=lower, warn=warn, limits=limits)
    for layer in layers:
        merge.apply(layer.members, layer)
    return merge.tree()


def at(tree: Directory, path: bytes) -> Inode:
    """The inode at a literal path."""
    inode: Inode = tree
    for part in filter(None, path.split(b"/")):
        assert isinstance(inode, Directory), path
        inode = inode.entries[part]
    return inode


def directory_at(tree: Directory, path: bytes) -> Directory:
    inode = at(tree, path)
    assert isinstance(inode, Directory)
    return inode


def names(tree: Directory) -> list[bytes]:
    """All paths but the root's, in walk order."""
    return [path for path, _ in walk(tree)][1:]


def content(file: Inode) -> bytes:
    """A file's bytes, holes as zeros."""
    assert isinstance(file, File)
    data = bytearray(file.size)
    for extent in file.extents:
        data[extent.offset : extent.offset + extent.length] = extent.source.read_at(extent.at, extent.length)
    assert len(data) == file.size
    return bytes(data)


def same_content(old: File, new: File) -> bool:
    assert old.size == new.size
    return content(old) == content(new)


class Row(NamedTuple):
    """All that is visible of one inode; ``links`` are the names it is known by, where there are several."""

    type: str
    attrs: Attrs
    value: object
    opaque: bool
    links: frozenset[bytes] | None


def manifest(tree: Directory) -> dict[bytes, Row]:
    """Every path with all that is to be compared."""
    links = link_sets(tree)
    return {path: _row(inode, links.get(path)) for path, inode in walk(tree)}


def _row(inode: Inode, links: frozenset[bytes] | None) -> Row:
    value: object = None
    opaque = False
    match inode:
        case Directory():
            opaque = inode.opaque
        case File():
            value = content(inode)
        case Symlink():
            value = inode.target
        case Special():
            value = (inode.major, inode.minor)
        case Whiteout():
            links = None
        case _:
            raise AssertionError(f"{inode!r} in a tree")
    kind = next(c.__name__ for c in (Directory, File, Symlink, Special, Whiteout) if isinstance(inode, c))
    return Row(kind, inode.attrs, value, opaque, links)


def clone(tree: Directory) -> Directory:
    """A copy that shares no inode with the original, as if it had been written to an image and read back."""
    copies: dict[int, Inode] = {}
    root = Directory(tree.attrs)
    root.opaque = tree.opaque
    stack = [(tree, root)]
    while stack:
        source, copy = stack.pop()
        for name, inode in source.entries.items():
            if isinstance(inode, Directory):
                child = Directory(inode.attrs)
                child.opaque = inode.opaque
                stack.append((inode, child))
                copy.entries[name] = child
            else:
                if id(inode) not in copies:
                    copies[id(inode)] = _copied(inode)
                copy.entries[name] = copies[id(inode)]
    return root


def _copied(inode: Inode) -> Inode:
    match inode:
        case File():
            data = content(inode)
            return File(inode.attrs, len(data), (Extent(0, len(data), Bytes(data), 0),) if data else ())
        case Symlink():
            return Symlink(inode.attrs, inode.target)
        case Special():
            return Special(inode.attrs, inode.major, inode.minor)
        case Whiteout():
            return Whiteout(inode.attrs)
    raise AssertionError(f"{inode!r} in a tree")


def tree_of(layer: Layer, *, opaque: Sequence[bytes] = (), whiteouts: Sequence[bytes] = ()) -> Directory:
    """An overlay layer as it stands in an image: a tree, with marks put into it."""
    tree = merged(layer)
    for path in opaque:
        directory_at(tree, path).opaque = True
    for path in whiteouts:
        head, _, name = path.rpartition(b"/")
        directory_at(tree, head).entries[name] = Whiteout(Attrs(stat.S_IFCHR, 0, 0, 0, 0))
    return tree
