"""Reads EROFS images: ours, and uncompressed ones of mkfs.erofs. No byte of an image is trusted.

A feature that isn't understood is refused by its name, never skipped. What is read is only as sound as what was looked
at; :mod:`~layerstore.erofs.checker` looks at all of it.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Iterator
from struct import iter_unpack
from typing import Protocol

from layerstore.erofs.directory import Entry, decode_block, search_block
from layerstore.erofs.format import (
    BLOCK_BITS,
    BLOCK_MAP_ENTRY_SIZE,
    CHUNK_INDEX_SIZE,
    COMPACT_INODE_SIZE,
    EROFS_CHUNK_FORMAT_48BIT,
    EROFS_CHUNK_FORMAT_BLKBITS_MASK,
    EROFS_CHUNK_FORMAT_INDEXES,
    EROFS_I_ALL,
    EROFS_I_DATALAYOUT_BIT,
    EROFS_I_DATALAYOUT_MASK,
    EROFS_I_NLINK_1_BIT,
    EROFS_I_VERSION_MASK,
    EROFS_INODE_CHUNK_BASED,
    EROFS_INODE_FLAT_INLINE,
    EROFS_INODE_FLAT_PLAIN,
    EROFS_NULL_ADDR,
    INODE_SIZE,
    LAYOUT_NAMES,
    MAX_FILE_SIZE,
    MAX_XATTR_VALUE,
    SYMLINK_MAX,
    XATTR_ENTRY_SIZE,
    ChunkIndex,
    InodeCompact,
    InodeExtended,
    round_up,
    xattr_ibody_size,
)
from layerstore.erofs.layout import HOLE, Chunked, address
from layerstore.erofs.node import Node, Run
from layerstore.erofs.volume import ImageSource, Volume
from layerstore.erofs.xattrs import decode_entry, decode_xattrs
from layerstore.errors import (
    LimitError,
    MalformedError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    printable,
)
from layerstore.tree.inode import Attrs, Xattrs

_TABLE_PIECE = 1 << 16
"""Bytes of a chunk table that are read at once."""
_MAX_LINKS = 40
"""Symbolic links followed in one lookup, as in Linux."""
_SHARED_KEPT = 256
"""Shared xattrs kept decoded, of at most 64 KiB each."""


class Devices(Protocol):
    """The extra devices of an image."""

    def read_device(self, index: int, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes of device ``index``, counted from 1 as in the device table."""
        ...


class Image(Volume):
    """An EROFS image: its inodes, their data, its directories."""

    def __init__(self, source: ImageSource, *, verify: bool = True) -> None:
        """As :class:`Volume`."""
        super().__init__(source, verify=verify)
        self._shared: dict[int, tuple[bytes, bytes]] = {}

    # ---- inodes

    @property
    def root(self) -> Node:
        root = self.node(self.superblock.rootnid_2b)
        if not root.is_directory:
            raise MalformedError("the root of the image is not a directory")
        return root

    def node(self, nid: int) -> Node:
        """The inode with this number.

        Raises:
            MalformedError: there is none, or it or its xattrs contradict themselves.
            UnsupportedError: it is compressed, or of a format that isn't handled here.
        """
        offset = self.offset_of(nid)
        head = self.bytes_at(offset, COMPACT_INODE_SIZE)
        i_format = int.from_bytes(head[:2], "little")
        extended = bool(i_format & EROFS_I_VERSION_MASK)
        layout = i_format >> EROFS_I_DATALAYOUT_BIT & EROFS_I_DATALAYOUT_MASK
        if i_format & ~EROFS_I_ALL:
            raise UnsupportedError(f"inode {nid} has the unknown format {i_format:#x}")
        if layout not in (EROFS_INODE_FLAT_PLAIN, EROFS_INODE_FLAT_INLINE, EROFS_INODE_CHUNK_BASED):
            name = LAYOUT_NAMES.get(layout, str(layout))
            raise UnsupportedError(f"inode {nid} has the layout {name}, which isn't read here")
        on_disk: InodeCompact | InodeExtended
        if extended:
            on_disk = InodeExtended.unpack(self.bytes_at(offset, INODE_SIZE))
            mtime, nsec, size_of_inode = on_disk.i_mtime, on_disk.i_mtime_nsec, INODE_SIZE
        else:
            on_disk = InodeCompact.unpack(head)
            mtime, nsec = self.superblock.epoch + on_disk.i_mtime, self.superblock.fixed_nsec
            size_of_inode = COMPACT_INODE_SIZE
        nlink = on_disk.i_nlink
        kind = stat.S_IFMT(on_disk.i_mode)
        if i_format >> EROFS_I_NLINK_1_BIT & 1:
            if extended or kind == stat.S_IFDIR:
                raise UnsupportedError(f"inode {nid} has the unknown format {i_format:#x}")
            nlink = 1
        if on_disk.i_size > MAX_FILE_SIZE:
            raise MalformedError(f"inode {nid} has a size of {on_disk.i_size} bytes")
        self._check_kind(nid, kind, layout, on_disk.i_u)
        xattr_size = xattr_ibody_size(on_disk.i_xattr_icount)
        try:
            xattrs, name_filter = decode_xattrs(self.bytes_at(offset + size_of_inode, xattr_size), self._shared_xattr)
        except (MalformedError, UnsupportedError) as error:
            raise type(error)(f"inode {nid}: {error}") from error
        attrs = Attrs(on_disk.i_mode, on_disk.i_uid, on_disk.i_gid, mtime, nsec, xattrs)
        return Node(
            nid=nid,
            attrs=attrs,
            size=on_disk.i_size,
            nlink=nlink,
            layout=layout,
            union=on_disk.i_u,
            body=offset + size_of_inode + xattr_size,
            name_filter=name_filter,
            i_ino=on_disk.i_ino,
            extended=extended,
        )

    def _check_kind(self, nid: int, kind: int, layout: int, union: int) -> None:
        if kind in (stat.S_IFDIR, stat.S_IFLNK):
            if layout == EROFS_INODE_CHUNK_BASED:
                raise UnsupportedError(f"inode {nid} has chunks but isn't a regular file")
        elif kind == stat.S_IFREG:
            known = EROFS_CHUNK_FORMAT_BLKBITS_MASK | EROFS_CHUNK_FORMAT_INDEXES
            if layout == EROFS_INODE_CHUNK_BASED and union & ~known:
                name = "48BIT" if union & EROFS_CHUNK_FORMAT_48BIT else f"{union:#x}"
                raise UnsupportedError(f"inode {nid} has the chunk format {name}, which isn't read here")
        elif kind not in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK):
            raise MalformedError(f"inode {nid} is of no type: S_IFMT is {kind:#o}")

    def _shared_xattr(self, number: int) -> tuple[bytes, bytes]:
        found = self._shared.get(number)
        if found is None:
            offset = (self.superblock.xattr_blkaddr << self.superblock.blkszbits) + 4 * number
            longest = round_up(XATTR_ENTRY_SIZE + 0xFF + MAX_XATTR_VALUE, 4)
            data = self.bytes_at(offset, max(XATTR_ENTRY_SIZE, min(longest, self.size - offset)))
            name, value, _ = decode_entry(data, 0)
            found = name, value
            if len(self._shared) >= _SHARED_KEPT:
                self._shared.clear()
            self._shared[number] = found
        return found

    def xattrs(self, node: Node) -> Xattrs:
        """All xattrs of an inode, sorted by name."""
        return node.attrs.xattrs

    # ---- data

    def runs(self, node: Node) -> Iterator[Run]:
        """Where the data of a file, link or directory lies, in order; what is between the runs are holes.

        Raises:
            MalformedError: an address leads nowhere.
        """
        if node.kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            return
        if node.layout == EROFS_INODE_CHUNK_BASED:
            yield from self._merged(self._chunk_runs(node, 0, node.size))
        else:
            yield from self._flat_runs(node)

    def _flat_runs(self, node: Node) -> Iterator[Run]:
        blocks = -(-node.size // self.block_size)
        full = blocks * self.block_size if node.layout == EROFS_INODE_FLAT_PLAIN else (blocks - 1) * self.block_size
        full = max(0, min(full, node.size))
        if full and not (node.layout == EROFS_INODE_FLAT_PLAIN and node.union == EROFS_NULL_ADDR):
            device, block = self.unified(node.nid, node.union, -(-full // self.block_size))
            yield Run(0, full, device, block * self.block_size)
        tail = node.size - full
        if tail:
            if node.body % self.block_size + tail > self.block_size:
                raise MalformedError(f"inode {node.nid}: its inline tail crosses a block")
            if node.body + tail > self.size:
                raise MalformedError(f"inode {node.nid}: its inline tail is outside of the image")
            yield Run(full, tail, 0, node.body)

    def chunk_bits(self, node: Node) -> int:
        """log2 of the size of its chunks in bytes."""
        return self.superblock.blkszbits + (node.union & EROFS_CHUNK_FORMAT_BLKBITS_MASK)

    def chunk_table(self, node: Node) -> tuple[int, int, int]:
        """Of a chunk-based file: offset of its table in the image, bytes of an entry, number of entries."""
        entry = CHUNK_INDEX_SIZE if node.union & EROFS_CHUNK_FORMAT_INDEXES else BLOCK_MAP_ENTRY_SIZE
        return round_up(node.body, entry), entry, -(-node.size >> self.chunk_bits(node))

    def addresses(self, node: Node, first: int, end: int) -> Iterator[int]:
        """Chunks ``first`` to ``end`` of a file as device << 32 | block, or HOLE. Device 0 is the unified space."""
        start, entry, _ = self.chunk_table(node)
        step = _TABLE_PIECE // entry
        for group in range(first, end, step):
            table = self.bytes_at(start + group * entry, min(step, end - group) * entry)
            if entry == BLOCK_MAP_ENTRY_SIZE:
                for (block,) in iter_unpack("<I", table):
                    yield HOLE if block == EROFS_NULL_ADDR else block
            else:
                for _, device, block in ChunkIndex.STRUCT.iter_unpack(table):
                    yield HOLE if block == EROFS_NULL_ADDR else address(device & self.device_mask, block)

    def _chunk_runs(self, node: Node, start: int, end: int) -> Iterator[Run]:
        """The runs of whole chunks that hold bytes ``start`` to ``end``."""
        bits = self.chunk_bits(node)
        first = start >> bits
        for number, where in enumerate(self.addresses(node, first, -(-end >> bits)), first):
            if where == HOLE:
                continue
            offset = number << bits
            length = min(1 << bits, node.size - offset)
            device, block = self.locate(node, number, where)
            yield Run(offset, length, device, block * self.block_size)

    def locate(self, node: Node, number: int, where: int) -> tuple[int, int]:
        """Device and block of a chunk that isn't a hole; device 0 is then the image itself.

        Raises:
            MalformedError: there is no such device, or no such place in the flat form.
        """
        device, block = where >> 32, where & 0xFFFF_FFFF
        if device == 0:
            bits = self.chunk_bits(node)
            length = min(1 << bits, node.size - (number << bits))
            return self.unified(node.nid, block, -(-length // self.block_size))
        if device > len(self.slots):
            raise MalformedError(f"inode {node.nid}: chunk {number} is on device {device}, which isn't there")
        return device, block

    @staticmethod
    def _merged(runs: Iterator[Run]) -> Iterator[Run]:
        whole: Run | None = None
        for run in runs:
            if (
                whole is not None
                and whole.device == run.device
                and whole.at + whole.length == run.at
                and whole.offset + whole.length == run.offset
            ):
                whole = whole._replace(length=whole.length + run.length)
            else:
                if whole is not None:
                    yield whole
                whole = run
        if whole is not None:
            yield whole

    def chunks(self, node: Node) -> Chunked:
        """Where the chunks of a file lie, as it was written.

        Raises:
            UsageError: the file has none.
            UnsupportedError: the image's blocks are not 4 KiB.
        """
        if node.kind != stat.S_IFREG or node.layout != EROFS_INODE_CHUNK_BASED:
            raise UsageError(f"inode {node.nid} has no chunks")
        if self.superblock.blkszbits != BLOCK_BITS:
            raise UnsupportedError(f"chunks of an image with blocks of {self.block_size} bytes")
        self.check_chunk_table(node)
        _, _, count = self.chunk_table(node)
        found = array("Q")
        for number, where in enumerate(self.addresses(node, 0, count)):
            found.append(HOLE if where == HOLE else address(*self.locate(node, number, where)))
        return Chunked(node.union & EROFS_CHUNK_FORMAT_BLKBITS_MASK, found)

    def check_chunk_table(self, node: Node) -> None:
        """Raise MalformedError unless a file's chunk table is in the image; nothing is read or allocated."""
        start, entry, count = self.chunk_table(node)
        if start + count * entry > self.size:
            raise MalformedError(f"inode {node.nid}: its {count} chunk addresses are outside of the image")

    def read(self, node: Node, offset: int, length: int, devices: Devices | None = None) -> bytes:
        """Bytes of a regular file, as many as there are from ``offset`` on, at most ``length``.

        Args:
            node: a regular file.
            offset: into the file.
            length: at most.
            devices: where packs are read. Without, the image is taken for the flat form, which holds them itself.
        """
        if node.kind != stat.S_IFREG:
            raise UsageError(f"inode {node.nid} is not a regular file")
        end = min(offset + length, node.size)
        if end <= offset:
            return b""
        chunked = node.layout == EROFS_INODE_CHUNK_BASED
        parts = []
        position = offset
        for run in self._chunk_runs(node, offset, end) if chunked else self._flat_runs(node):
            start = max(run.offset, offset)
            stop = min(run.offset + run.length, end)
            if start >= stop:
                continue
            parts.append(bytes(start - position))
            parts.append(self.read_run(run.device, run.at + start - run.offset, stop - start, devices))
            position = stop
        parts.append(bytes(end - position))
        return b"".join(parts)

    def read_run(self, device: int, at: int, length: int, devices: Devices | None) -> bytes:
        """Bytes of a device; of the image itself, or of its flat form without ``devices``."""
        if device == 0:
            return self.bytes_at(at, length)
        if devices is not None:
            return devices.read_device(device, at, length)
        slot = self.slots[device - 1]
        if not slot.uniaddr:
            raise UsageError(f"device {device} of the image is needed, but none was given")
        return self.bytes_at(slot.uniaddr * self.block_size + at, length)

    def _read_flat(self, node: Node) -> bytes:
        return b"".join(self.read_run(run.device, run.at, run.length, None) for run in self._flat_runs(node))

    def readlink(self, node: Node) -> bytes:
        """The target of a symbolic link.

        Raises:
            UsageError: it is none.
            MalformedError: empty, longer than 4,095 bytes, or with a NUL in it.
        """
        if node.kind != stat.S_IFLNK:
            raise UsageError(f"inode {node.nid} is not a symbolic link")
        if not 0 < node.size <= SYMLINK_MAX:
            raise MalformedError(f"inode {node.nid}: a symbolic link of {node.size} bytes")
        target = self._read_flat(node)
        if len(target) != node.size or b"\0" in target:
            raise MalformedError(f"inode {node.nid}: a symbolic link with a NUL or a hole in its target")
        return target

    # ---- directories

    def blocks_of(self, node: Node) -> Iterator[list[Entry]]:
        """All entries of a directory, dots included, block by block as they stand."""
        for number in range(self._count_blocks(node)):
            try:
                yield decode_block(self._directory_block(node, number))
            except MalformedError as error:
                raise MalformedError(f"directory {node.nid}, block {number}: {error}") from error

    def _count_blocks(self, node: Node) -> int:
        if not node.is_directory:
            raise UsageError(f"inode {node.nid} is not a directory")
        runs = list(self._flat_runs(node))
        if sum(run.length for run in runs) != node.size or any(run.device for run in runs):
            raise MalformedError(f"inode {node.nid}: a directory with holes, or on another device")
        return -(-node.size // self.block_size)

    def _directory_block(self, node: Node, number: int) -> bytes:
        start = number * self.block_size
        for run in self._flat_runs(node):
            if run.offset <= start < run.offset + run.length:
                length = min(self.block_size, run.offset + run.length - start)
                return self.bytes_at(run.at + start - run.offset, length)
        raise MalformedError(f"directory {node.nid} has no block {number}")

    def entries(self, node: Node) -> Iterator[Entry]:
        """The entries of a directory but for the dots, in order.

        Raises:
            UsageError: it is none.
            MalformedError: an entry isn't what it should be.
        """
        for block in self.blocks_of(node):
            yield from (entry for entry in block if entry.name not in (b".", b".."))

    def lookup(self, node: Node, name: bytes) -> Node:
        """The inode of an entry, found by bisection as the kernel does it.

        Raises:
            NotFoundError: no such entry.
        """
        low, high = 0, self._count_blocks(node)
        while low < high:
            middle = (low + high) // 2
            found = search_block(self._directory_block(node, middle), name)
            if isinstance(found, Entry):
                return self.node(found.nid)
            if found == 0:
                break
            if found < 0:
                high = middle
            else:
                low = middle + 1
        raise NotFoundError(f"no such entry in the image: {printable(name)}")

    def resolve(self, path: bytes, follow: bool = True) -> Node:
        """The inode at a path, which begins at the image's root with or without a slash.

        Links are followed within the image: absolute ones from its root, and ``..`` never leads above it.

        Args:
            path: names and slashes.
            follow: whether a link at the end is followed too.

        Raises:
            NotFoundError: no such path.
            LimitError: more than 40 links on the way.
        """
        todo = path.split(b"/")[::-1]
        way = [self.root]
        links = 0
        while todo:
            name = todo.pop()
            if not way[-1].is_directory:
                raise NotFoundError(f"not a directory on the way to {printable(path)}")
            if name in (b"", b"."):
                continue
            if name == b"..":
                if len(way) > 1:
                    way.pop()
                continue
            try:
                node = self.lookup(way[-1], name)
            except NotFoundError as error:
                raise NotFoundError(f"no such path in the image: {printable(path)}") from error
            if node.kind == stat.S_IFLNK and (follow or todo):
                links += 1
                if links > _MAX_LINKS:
                    raise LimitError(f"more than {_MAX_LINKS} symbolic links on the way to {printable(path)}")
                target = self.readlink(node)
                if target.startswith(b"/"):
                    del way[1:]
                todo.extend(target.split(b"/")[::-1])
            else:
                way.append(node)
        return way[-1]
