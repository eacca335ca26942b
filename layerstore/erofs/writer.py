"""Writes a metadata image: a deterministic function of the tree and the devices, streamed in two areas.

The inode area and the data area (directory blocks, long links) are written side by side, each in ascending order but
for the gaps that :mod:`~layerstore.erofs.placement` fills within a window. The superblock comes last: its uuid is
taken from the sha256 of all the rest.
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import BinaryIO
from uuid import UUID

from layerstore.digest import Digest
from layerstore.erofs.crc32c import superblock_checksum
from layerstore.erofs.directory import FILE_TYPES, Entry, encode_blocks
from layerstore.erofs.format import (
    BLOCK_BITS,
    BLOCK_SIZE,
    CHUNK_INDEX_SIZE,
    DEVICE_SLOT_SIZE,
    EROFS_CHUNK_FORMAT_INDEXES,
    EROFS_FEATURE_COMPAT_MTIME,
    EROFS_FEATURE_COMPAT_SB_CHKSUM,
    EROFS_FEATURE_COMPAT_XATTR_FILTER,
    EROFS_FEATURE_INCOMPAT_CHUNKED_FILE,
    EROFS_FEATURE_INCOMPAT_DEVICE_TABLE,
    EROFS_FT_CHRDEV,
    EROFS_FT_DIR,
    EROFS_I_DATALAYOUT_BIT,
    EROFS_I_VERSION_MASK,
    EROFS_INODE_FLAT_INLINE,
    EROFS_INODE_FLAT_PLAIN,
    EROFS_ISLOTBITS,
    EROFS_NULL_ADDR,
    EROFS_SUPER_MAGIC_V1,
    EROFS_SUPER_OFFSET,
    INODE_SIZE,
    MAX_INLINE,
    SUPER_SIZE,
    ChunkIndex,
    DeviceSlot,
    InodeExtended,
    SuperBlock,
    rdev_encode,
    round_up,
)
from layerstore.erofs.layout import HOLE, Chunked, Device
from layerstore.erofs.placement import WINDOW, Placement, Visit, XattrBodies, place, shape_of, visit
from layerstore.erofs.trail import Trail, show
from layerstore.erofs.xattrs import icount
from layerstore.errors import MalformedError, os_errors
from layerstore.tree.inode import Attrs, Directory, File, Inode, Special, Symlink, Whiteout

_PIECE = 1 << 20
_HOLE_INDEX = ChunkIndex(0xFFFF, 0, EROFS_NULL_ADDR).pack()
"""All bits of a 48-bit address set: a hole for readers that look at 32 bits and for those that look at 48."""


@dataclass(frozen=True, slots=True)
class ImageSummary:
    """What was written.

    Attributes:
        bytes: length of the metadata image, a multiple of 4096.
        inodes: hard links counted once.
        blocks: ``bytes`` in units of 4096.
        uuid: of the file system.
        digest: of the metadata image.
    """

    bytes: int
    inodes: int
    blocks: int
    uuid: UUID
    digest: Digest


def write_image(root: Directory, devices: Sequence[Device], out: BinaryIO, *, appended: int = 0) -> ImageSummary:
    """Write the metadata image of a tree.

    Every regular file has either ``chunks`` (all addresses on ``devices``), or at most
    :data:`~layerstore.erofs.format.MAX_INLINE` bytes, which are read through its extents.

    Args:
        root: the tree; it is left as it is.
        devices: the packs, in the order of the device table.
        out: an empty file, seekable, open for reading and writing. After an error it holds no valid image.
        appended: blocks of file data that the caller puts behind the image, in the same file. An address on device 0
            counts from their start.

    Raises:
        LimitError: EROFS can't hold it; before anything is written.
        MalformedError: the tree contradicts itself, or a file's data doesn't fit its size.
        UnsupportedError: an xattr that EROFS has no place for.
    """
    plan = place(root, devices, appended)
    with os_errors("write the metadata image"):
        return _Writer(plan, devices, out, appended).write(root)


class _Area:
    """A part of the file that is written from its start on, but for pieces up to WINDOW bytes back."""

    def __init__(self, out: BinaryIO, start: int) -> None:
        self._out = out
        self._start = start
        self._buffer = bytearray()
        self.hasher = hashlib.sha256()

    @property
    def end(self) -> int:
        return self._start + len(self._buffer)

    def put(self, offset: int, data: bytes) -> None:
        at = offset - self._start
        assert at >= 0
        gap = at - len(self._buffer)
        if gap > 0:
            self._buffer += bytes(gap)
        self._buffer[at : at + len(data)] = data
        if len(self._buffer) >= WINDOW + _PIECE:
            self._write(len(self._buffer) - WINDOW)

    def append(self, data: bytes) -> None:
        self.put(self.end, data)

    def close(self, end: int) -> None:
        """Fill up with zeros to ``end``, and write what is left."""
        self._buffer += bytes(end - self.end)
        self._write(len(self._buffer))

    def _write(self, length: int) -> None:
        piece = bytes(memoryview(self._buffer)[:length])
        self.hasher.update(piece)
        self._out.seek(self._start)
        self._out.write(piece)
        del self._buffer[:length]
        self._start += length


class _Writer:
    def __init__(self, plan: Placement, devices: Sequence[Device], out: BinaryIO, appended: int) -> None:
        self._plan = plan
        self._appended = appended
        self._devices = devices
        self._out = out
        self._data_block = round_up(plan.end, BLOCK_SIZE) // BLOCK_SIZE
        self._blocks = self._data_block + plan.blocks
        self._inodes = _Area(out, 0)
        self._data = _Area(out, self._data_block * BLOCK_SIZE)
        self._bodies = XattrBodies()

    def write(self, root: Directory) -> ImageSummary:
        self._write_slots_or_root(root)
        self._inodes.close(self._data_block * BLOCK_SIZE)
        self._data.close(self._blocks * BLOCK_SIZE)
        content = hashlib.sha256(self._inodes.hasher.digest() + self._data.hasher.digest()).digest()
        uuid = _uuid(content)
        self._write_superblock(root, uuid)
        return ImageSummary(
            bytes=self._blocks * BLOCK_SIZE,
            inodes=len(self._plan.nids),
            blocks=self._blocks,
            uuid=uuid,
            digest=self._digest(),
        )

    def _write_slots_or_root(self, root: Directory) -> None:
        """Everything but the superblock; the device table before or behind the root, where the plan has it."""
        plan = self._plan
        nids = iter(plan.nids)
        numbers = iter(range(1, len(plan.nids) + 1))
        table_first = plan.table < plan.nids[0] << EROFS_ISLOTBITS
        if table_first:
            self._write_device_table()
        for here in visit(root, plan.links):
            places = [next(nids) for _ in range(1 + len(here.fresh))]
            self._write_directory(here, places, next(numbers))
            if not table_first and here.directory is root:
                self._write_device_table()
            for (name, inode), nid in zip(here.fresh, places[1:], strict=True):
                self._write_inode(inode, nid, next(numbers), Trail(here.trail, name))

    def _write_device_table(self) -> None:
        starts = accumulate((device.blocks for device in self._devices), initial=self._blocks + self._appended)
        self._inodes.put(
            self._plan.table,
            b"".join(
                DeviceSlot(device.digest.hex.encode(), device.blocks, start, 0, 0).pack()
                for device, start in zip(self._devices, starts, strict=False)
            ),
        )

    def _write_directory(self, here: Visit, places: list[int], number: int) -> None:
        """Write the inode and the blocks of a directory."""
        plan = self._plan
        own = {id(inode): nid for (_, inode), nid in zip(here.fresh, places[1:], strict=True)}
        subdirectories = 0
        entries = []
        for name in here.names:
            if name == b".":
                entries.append(Entry(name, places[0], EROFS_FT_DIR))
            elif name == b"..":
                entries.append(Entry(name, plan.directories[id(here.parent)], EROFS_FT_DIR))
            else:
                inode = here.directory.entries[name]
                if isinstance(inode, Directory):
                    subdirectories += 1
                    entries.append(Entry(name, plan.directories[id(inode)], EROFS_FT_DIR))
                else:
                    nid = own.get(id(inode)) or plan.linked[id(inode)]
                    entries.append(Entry(name, nid, _file_type(inode)))

        blocks = list(encode_blocks(entries))
        tail = blocks[-1]
        size = (len(blocks) - 1) * BLOCK_SIZE + len(tail)
        layout = EROFS_INODE_FLAT_PLAIN
        if len(tail) <= MAX_INLINE:
            layout = EROFS_INODE_FLAT_INLINE
            blocks.pop()
        else:
            tail = b""
        start = self._append_blocks(blocks)
        attrs = here.directory.attrs
        body = self._bodies.of(attrs.xattrs, here.directory.opaque, here.trail)
        head = _head(attrs, layout, body, size, start, number, 2 + subdirectories)
        self._inodes.put(places[0] << EROFS_ISLOTBITS, head + body + tail)

    def _write_inode(self, inode: Inode, nid: int, number: int, trail: Trail) -> None:
        """Write a non-directory."""
        shape = shape_of(inode, trail)
        attrs = inode.attrs
        if isinstance(inode, Whiteout):
            attrs = attrs._replace(mode=stat.S_IFCHR | stat.S_IMODE(attrs.mode))
        body = self._bodies.of(attrs.xattrs, False, trail)
        union = 0
        data = b""
        if isinstance(inode, File):
            if shape.tail:
                union = EROFS_NULL_ADDR
                data = _content(inode, trail)
            elif shape.indexes:
                assert isinstance(inode.chunks, Chunked)
                union = EROFS_CHUNK_FORMAT_INDEXES | inode.chunks.bits
                data = bytes(-(INODE_SIZE + len(body)) % CHUNK_INDEX_SIZE) + _indexes(
                    inode.chunks.addresses, self._blocks
                )
        elif isinstance(inode, Symlink):
            if shape.tail:
                union = EROFS_NULL_ADDR
                data = inode.target
            else:
                union = self._append_blocks([inode.target])
        elif isinstance(inode, Special):
            union = rdev_encode(inode.major, inode.minor)
        links = self._plan.links.get(id(inode), 1)
        head = _head(attrs, shape.layout, body, shape.size, union, number, links)
        self._inodes.put(nid << EROFS_ISLOTBITS, head + body + data)

    def _append_blocks(self, blocks: Sequence[bytes]) -> int:
        """Add blocks, filled up with zeros, to the data area; returns the number of the first."""
        if not blocks:
            return EROFS_NULL_ADDR
        start = self._data.end // BLOCK_SIZE
        for block in blocks:
            self._data.append(block.ljust(BLOCK_SIZE, b"\0"))
        return start

    def _write_superblock(self, root: Directory, uuid: UUID) -> None:
        compat = EROFS_FEATURE_COMPAT_SB_CHKSUM | EROFS_FEATURE_COMPAT_MTIME
        if self._plan.filtered:
            compat |= EROFS_FEATURE_COMPAT_XATTR_FILTER
        incompat = EROFS_FEATURE_INCOMPAT_CHUNKED_FILE
        if self._devices:
            incompat |= EROFS_FEATURE_INCOMPAT_DEVICE_TABLE
        superblock = SuperBlock(
            magic=EROFS_SUPER_MAGIC_V1,
            checksum=0,
            feature_compat=compat,
            blkszbits=BLOCK_BITS,
            sb_extslots=0,
            rootnid_2b=self._plan.directories[id(root)],
            inos=len(self._plan.nids),
            epoch=0,
            fixed_nsec=0,
            blocks=self._blocks + self._appended,
            meta_blkaddr=0,
            xattr_blkaddr=0,
            uuid=uuid.bytes,
            volume_name=bytes(16),
            feature_incompat=incompat,
            available_compr_algs=0,
            extra_devices=len(self._devices),
            devt_slotoff=self._plan.table // DEVICE_SLOT_SIZE if self._devices else 0,
            dirblkbits=0,
            xattr_prefix_count=0,
            xattr_prefix_start=0,
            packed_nid=0,
            xattr_filter_reserved=0,
            ishare_xattr_prefix_id=0,
            build_time=0,
            rootnid_8b=0,
        )
        self._out.seek(0)
        block = bytearray(self._out.read(BLOCK_SIZE))
        assert len(block) == BLOCK_SIZE
        fields = slice(EROFS_SUPER_OFFSET, EROFS_SUPER_OFFSET + SUPER_SIZE)
        block[fields] = superblock.pack()
        block[fields] = replace(superblock, checksum=superblock_checksum(bytes(block))).pack()
        self._out.seek(0)
        self._out.write(block)

    def _digest(self) -> Digest:
        hasher = hashlib.sha256()
        self._out.seek(0)
        for piece in _pieces(self._out):
            hasher.update(piece)
        self._out.seek(0, os.SEEK_END)
        return Digest("sha256", hasher.hexdigest())


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    while piece := source.read(_PIECE):
        yield piece


def _head(attrs: Attrs, layout: int, body: bytes, size: int, union: int, number: int, links: int) -> bytes:
    return InodeExtended(
        i_format=EROFS_I_VERSION_MASK | layout << EROFS_I_DATALAYOUT_BIT,
        i_xattr_icount=icount(body),
        i_mode=attrs.mode,
        i_nb=0,
        i_size=size,
        i_u=union,
        i_ino=number & 0xFFFF_FFFF,
        i_uid=attrs.uid,
        i_gid=attrs.gid,
        i_mtime=attrs.mtime,
        i_mtime_nsec=attrs.nsec,
        i_nlink=links,
    ).pack()


def _file_type(inode: Inode) -> int:
    return EROFS_FT_CHRDEV if isinstance(inode, Whiteout) else FILE_TYPES[inode.kind]


def _uuid(content: bytes) -> UUID:
    """16 of its bytes as a UUID of version 8 (RFC 9562: made by a rule of one's own)."""
    raw = bytearray(content[:16])
    raw[6] = raw[6] & 0x0F | 0x80
    raw[8] = raw[8] & 0x3F | 0x80
    return UUID(bytes=bytes(raw))


def _indexes(addresses: array[int], appended_at: int) -> bytes:
    """Indexes of a file; what is on device 0 is behind the image, which ends at block ``appended_at``."""
    pack = ChunkIndex.STRUCT.pack
    return b"".join(
        _HOLE_INDEX
        if where == HOLE
        else pack(0, where >> 32, (where & 0xFFFF_FFFF) + (0 if where >> 32 else appended_at))
        for where in addresses
    )


def _content(file: File, trail: Trail) -> bytes:
    data = bytearray(file.size)
    for extent in file.extents:
        data[extent.offset : extent.offset + extent.length] = extent.source.read_at(extent.at, extent.length)
    if len(data) != file.size:
        raise MalformedError(f"{show(trail)}: its data doesn't fit its {file.size} bytes")
    return bytes(data)
