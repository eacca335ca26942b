"""An image as a tree in memory, as it was before it was written: whiteouts, opaque marks and hard links included.

No file data is read; extents read it when they are asked. Where the image is from outside,
:func:`~layerstore.erofs.checker.require_sound` comes first: here a contradiction is an error only where it is met.
"""

from __future__ import annotations

import stat

from layerstore.erofs.format import BLOCK_BITS, EROFS_INODE_CHUNK_BASED
from layerstore.erofs.node import Node
from layerstore.erofs.reader import Devices, Image
from layerstore.erofs.trail import Trail, show
from layerstore.erofs.xattrs import OPAQUE
from layerstore.errors import MalformedError
from layerstore.tree.inode import Attrs, ByteSource, Directory, Extent, File, Inode, Special, Symlink, Whiteout


class DeviceSource:
    """One device of an image as a source of bytes: a pack, or the image itself as device 0."""

    __slots__ = ("_device", "_devices", "_image")

    def __init__(self, image: Image, device: int, devices: Devices | None) -> None:
        self._image = image
        self._device = device
        self._devices = devices

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; raises as the devices do."""
        return self._image.read_run(self._device, offset, length, self._devices)


def load_tree(image: Image, devices: Devices | None = None) -> Directory:
    """The whole tree of an image.

    Chunk-based files get ``chunks`` (where blocks are 4 KiB) and extents; other files have their data in the image.

    Args:
        image: stays open as long as extents are read.
        devices: where extents on packs are read. Without, the image is taken for the flat form.

    Raises:
        MalformedError: something in it can't be, such as a directory with two names.
        UnsupportedError: an inode of a kind that isn't read here.
    """
    return _Loader(image, devices).load()


class _Loader:
    def __init__(self, image: Image, devices: Devices | None) -> None:
        self._image = image
        self._sources: list[ByteSource] = [
            DeviceSource(image, device, devices) for device in range(len(image.slots) + 1)
        ]
        self._linked: dict[int, Inode] = {}

    def load(self) -> Directory:
        image = self._image
        node = image.root
        root = self._directory(node)
        seen = {node.nid}
        stack: list[tuple[Trail | None, Node, Directory]] = [(None, node, root)]
        while stack:
            trail, node, directory = stack.pop()
            for name, nid, _ in image.entries(node):
                here = Trail(trail, name)
                if name in directory.entries:
                    raise MalformedError(f"{show(here)} is in the image twice")
                inode = self._linked.get(nid)
                if inode is None:
                    child = image.node(nid)
                    if child.is_directory:
                        if nid in seen:
                            raise MalformedError(f"{show(here)} is a directory with two names")
                        seen.add(nid)
                        below = self._directory(child)
                        stack.append((here, child, below))
                        inode = below
                    else:
                        inode = self._inode(child)
                        if child.nlink > 1:
                            self._linked[nid] = inode
                directory.entries[name] = inode
        return root

    def _directory(self, node: Node) -> Directory:
        attrs = node.attrs
        marks = dict(attrs.xattrs)
        opaque = marks.get(OPAQUE) == b"y"
        if opaque:
            del marks[OPAQUE]
            attrs = attrs._replace(xattrs=tuple(marks.items()))
        directory = Directory(attrs)
        directory.opaque = opaque
        return directory

    def _inode(self, node: Node) -> Inode:
        attrs = node.attrs
        if node.kind == stat.S_IFREG:
            return self._file(node, attrs)
        if node.kind == stat.S_IFLNK:
            return Symlink(attrs, self._image.readlink(node))
        if node.is_whiteout:
            return Whiteout(attrs)
        return Special(attrs, *node.rdev)

    def _file(self, node: Node, attrs: Attrs) -> File:
        image = self._image
        if node.layout == EROFS_INODE_CHUNK_BASED:
            image.check_chunk_table(node)
        extents = tuple(Extent(run.offset, run.length, self._sources[run.device], run.at) for run in image.runs(node))
        file = File(attrs, node.size, extents)
        if node.layout == EROFS_INODE_CHUNK_BASED and image.superblock.blkszbits == BLOCK_BITS:
            file.chunks = image.chunks(node)
        return file
