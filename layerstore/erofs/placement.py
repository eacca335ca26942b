"""Where each inode goes, decided before a byte is written.

Inodes are visited by directories, depth first in byte order: a directory's own inode, then its entries that are no
directories. A hard link has its place where it is met first. An inode whose tail would cross a block is moved on, and
the room left behind is filled with later ones that fit: with small files inline that saves a sixth of the image.

The plan is compact: one number an inode, in the order of the visit. Whoever visits again with :func:`visit` meets the
same inodes in the same order.
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from layerstore.erofs.directory import is_name, measure
from layerstore.erofs.format import (
    BLOCK_SIZE,
    CHUNK_INDEX_SIZE,
    DEVICE_SLOT_SIZE,
    DEVICE_TABLE_OFFSET,
    EROFS_CHUNK_FORMAT_BLKBITS_MASK,
    EROFS_INODE_CHUNK_BASED,
    EROFS_INODE_FLAT_INLINE,
    EROFS_INODE_FLAT_PLAIN,
    EROFS_ISLOTBITS,
    EROFS_NULL_ADDR,
    INODE_SIZE,
    MAX_DEVICES,
    MAX_FILE_SIZE,
    MAX_ID,
    MAX_INLINE,
    MAX_ROOT_NID,
    SYMLINK_MAX,
    round_up,
)
from layerstore.erofs.layout import HOLE, Chunked, Device
from layerstore.erofs.trail import Trail, show
from layerstore.erofs.xattrs import OPAQUE, encode_xattrs
from layerstore.errors import LimitError, MalformedError, printable
from layerstore.tree.inode import Attrs, Directory, File, Inode, Special, Symlink, Whiteout, Xattrs

WINDOW = 256 << 10
"""How far behind the last inode a gap may be, in bytes: what the writer holds back in memory."""
_GAPS = 16
"""Gaps kept for later inodes. More save little: 64 of them half a percent with all files inline."""
_SLOT = 1 << EROFS_ISLOTBITS
TOO_LARGE = "too large for EROFS 32-bit block addresses"


class Visit(NamedTuple):
    """One directory in the order of places."""

    trail: Trail | None
    directory: Directory
    parent: Directory
    """Of the root, the root itself."""
    names: list[bytes]
    """Its entries and both dots, sorted."""
    fresh: list[tuple[bytes, Inode]]
    """Its entries that are no directories and were not met before."""


class Shape(NamedTuple):
    """What an inode takes on disk besides its 64 bytes and its xattrs."""

    layout: int
    indexes: int
    """Bytes of chunk indexes; they begin at a multiple of 8."""
    tail: int
    """Bytes behind the inode that must not cross a block."""
    blocks: int
    """Blocks in the data area."""
    size: int


@dataclass(slots=True)
class Placement:
    """The plan of an image."""

    links: dict[int, int]
    """By id() of those that have several: how many names an inode has."""
    linked: dict[int, int] = field(default_factory=dict)
    """By id(): nid of an inode with several names."""
    directories: dict[int, int] = field(default_factory=dict)
    """By id(): nid."""
    nids: array[int] = field(default_factory=lambda: array("Q"))
    """Of all inodes in the order of the visit."""
    table: int = DEVICE_TABLE_OFFSET
    """Offset of the device table in bytes."""
    end: int = 0
    """Offset behind the last inode."""
    blocks: int = 0
    """Of the data area, which begins at the first block boundary from ``end``."""
    filtered: bool = False
    """Whether any inode has xattrs, and so a name filter."""


class XattrBodies:
    """Encodes xattrs; most inodes that have some have the same as many others."""

    _KEPT = 1024
    _LARGEST = 4096

    def __init__(self) -> None:
        self._bodies: dict[Xattrs, bytes] = {}

    def of(self, xattrs: Xattrs, opaque: bool, trail: Trail | None) -> bytes:
        """Raises as :func:`~layerstore.erofs.xattrs.encode_xattrs`."""
        if opaque:
            xattrs = tuple(sorted({**dict(xattrs), OPAQUE: b"y"}.items()))
        if not xattrs:
            return b""
        body = self._bodies.get(xattrs)
        if body is None:
            body = encode_xattrs(xattrs, show(trail))
            if len(body) <= self._LARGEST:
                if len(self._bodies) >= self._KEPT:
                    self._bodies.clear()
                self._bodies[xattrs] = body
        return body


def count_links(root: Directory) -> dict[int, int]:
    """By id(), the number of names of each non-directory that has several.

    Raises:
        MalformedError: a directory has two names.
    """
    seen: set[int] = {id(root)}
    stack = [root]
    ids = array("Q")
    while stack:
        for child in stack.pop().entries.values():
            if isinstance(child, Directory):
                if id(child) in seen:
                    raise MalformedError("a directory is in the tree under two names")
                seen.add(id(child))
                stack.append(child)
            else:
                ids.append(id(child))
    links: dict[int, int] = {}
    for one, next_one in pairwise(sorted(ids)):
        if one == next_one:
            links[one] = links.get(one, 1) + 1
    return links


def visit(root: Directory, links: dict[int, int]) -> Iterator[Visit]:
    """All directories in the order of places.

    Args:
        root: of the tree.
        links: what :func:`count_links` found.
    """
    met: set[int] = set()
    stack: list[tuple[Trail | None, Directory, Directory]] = [(None, root, root)]
    while stack:
        trail, directory, parent = stack.pop()
        entries = directory.entries
        names = sorted(entries)
        fresh = []
        below = []
        for name in names:
            child = entries[name]
            if isinstance(child, Directory):
                below.append((Trail(trail, name), child, directory))
            elif id(child) not in links:
                fresh.append((name, child))
            elif id(child) not in met:
                met.add(id(child))
                fresh.append((name, child))
        below.reverse()
        stack.extend(below)
        names += (b".", b"..")
        names.sort()
        yield Visit(trail, directory, parent, names, fresh)


def shape_of(inode: Inode, trail: Trail | None) -> Shape:
    """What a non-directory takes.

    Raises:
        MalformedError: the inode contradicts itself.
        LimitError: EROFS can't hold it, or no address was given to data that is too long to be inline.
    """
    kind = inode.kind
    if isinstance(inode, File):
        if kind != stat.S_IFREG:
            raise MalformedError(f"{show(trail)}: a file with mode {inode.attrs.mode:#o}")
        return _shape_of_file(inode, trail)
    if isinstance(inode, Symlink):
        size = len(inode.target)
        if kind != stat.S_IFLNK or not 0 < size <= SYMLINK_MAX or b"\0" in inode.target:
            raise MalformedError(
                f"{show(trail)}: a symbolic link of {size} bytes with mode {inode.attrs.mode:#o}; "
                f"a target has 1 to {SYMLINK_MAX} bytes and no NUL"
            )
        if size <= MAX_INLINE:
            return Shape(EROFS_INODE_FLAT_INLINE, 0, size, 0, size)
        return Shape(EROFS_INODE_FLAT_PLAIN, 0, 0, 1, size)
    if isinstance(inode, Special):
        if kind not in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK):
            raise MalformedError(f"{show(trail)}: a special file with mode {inode.attrs.mode:#o}")
        if not (0 <= inode.major <= 0xFFF and 0 <= inode.minor <= 0xFFFFF):
            raise LimitError(
                f"{show(trail)}: device {inode.major}:{inode.minor} is beyond 4095:1048575, the largest of Linux"
            )
    elif not isinstance(inode, Whiteout):
        raise MalformedError(f"{show(trail)}: an inode of no known kind")
    return Shape(EROFS_INODE_FLAT_PLAIN, 0, 0, 0, 0)


def _shape_of_file(file: File, trail: Trail | None) -> Shape:
    size = file.size
    if not 0 <= size <= MAX_FILE_SIZE:
        raise LimitError(f"{show(trail)}: a file of {size} bytes; the largest of Linux has {MAX_FILE_SIZE}")
    if size == 0:
        return Shape(EROFS_INODE_FLAT_PLAIN, 0, 0, 0, 0)
    chunks = file.chunks
    if chunks is None:
        if size > MAX_INLINE:
            raise LimitError(
                f"{show(trail)}: {size} bytes without an address in a pack; at most {MAX_INLINE} are inline"
            )
        return Shape(EROFS_INODE_FLAT_INLINE, 0, size, 0, size)
    if not isinstance(chunks, Chunked) or not 0 <= chunks.bits <= EROFS_CHUNK_FORMAT_BLKBITS_MASK:
        raise MalformedError(f"{show(trail)}: chunks of no known kind or size")
    count = -(-size // (BLOCK_SIZE << chunks.bits))
    if len(chunks.addresses) != count:
        raise MalformedError(f"{show(trail)}: {len(chunks.addresses)} chunks, but its size takes {count}")
    return Shape(EROFS_INODE_CHUNK_BASED, CHUNK_INDEX_SIZE * count, 0, 0, size)


class _Slots:
    """Gives places to inodes, in one area of slots from ``cursor`` on."""

    def __init__(self, cursor: int) -> None:
        self.cursor = cursor
        self._gaps: list[tuple[int, int]] = []  # (bytes, offset): the first that is large enough is the best fit

    def place(self, head: int, indexes: int, tail: int) -> int:
        """The offset for an inode with ``head`` bytes of inode and xattrs."""
        if indexes:
            length = round_up(head, CHUNK_INDEX_SIZE) + indexes
        else:
            length = head + tail
        for number, (free, start) in enumerate(self._gaps):
            if free >= length and start >= self.cursor - WINDOW:
                del self._gaps[number]
                self._keep(start + round_up(length, _SLOT), start + free)
                return start
        start = self.cursor
        if tail and (start + head) % BLOCK_SIZE + tail > BLOCK_SIZE:
            boundary = round_up(start + head, BLOCK_SIZE)
            start = round_up(boundary - head, _SLOT)
            self._keep(self.cursor, min(start, round_up(self.cursor + 1, BLOCK_SIZE)))
        self.cursor = round_up(start + length, _SLOT)
        return start

    def _keep(self, start: int, end: int) -> None:
        if end - start < INODE_SIZE:
            return
        self._gaps = [gap for gap in self._gaps if gap[1] >= self.cursor - WINDOW]
        self._gaps.append((end - start, start))
        self._gaps.sort()
        if len(self._gaps) > _GAPS:
            del self._gaps[0]


def place(root: Directory, devices: Sequence[Device], appended: int = 0) -> Placement:
    """Plan an image of ``root`` whose data is on ``devices``, or in ``appended`` blocks behind it (device 0).

    Raises:
        LimitError: EROFS can't hold it; the message names the entry.
        MalformedError: the tree contradicts itself, or has a name that no entry may have.
        UnsupportedError: an xattr that EROFS has no place for.
    """
    if len(devices) > MAX_DEVICES:
        raise LimitError(f"{len(devices)} packs in one image; an EROFS device table holds at most {MAX_DEVICES}")
    capacity = [appended, *(device.blocks for device in devices)]
    if sum(capacity) > EROFS_NULL_ADDR:
        raise LimitError(f"packs of {sum(capacity)} blocks are {TOO_LARGE}; use fewer or smaller packs")
    plan = Placement(count_links(root))
    bodies = XattrBodies()
    after_table = round_up(DEVICE_TABLE_OFFSET + len(devices) * DEVICE_SLOT_SIZE, _SLOT)
    # The root's nid has 16 bits, so behind a table of more than 16,000 devices it would be out of reach.
    root_first = after_table > (MAX_ROOT_NID << EROFS_ISLOTBITS) - BLOCK_SIZE
    slots = _Slots(DEVICE_TABLE_OFFSET if root_first else after_table)

    for trail, directory, _, names, fresh in visit(root, plan.links):
        attrs = directory.attrs
        _check_attrs(attrs, trail)
        _check_directory(directory, trail)
        full, used = measure(names)
        tail = used if used <= MAX_INLINE else 0
        body = len(bodies.of(attrs.xattrs, directory.opaque, trail))
        plan.blocks += full + (tail == 0)
        plan.filtered |= body > 0
        nid = slots.place(INODE_SIZE + body, 0, tail) >> EROFS_ISLOTBITS
        plan.directories[id(directory)] = nid
        plan.nids.append(nid)
        if root_first and directory is root:
            plan.table = round_up(slots.cursor, DEVICE_SLOT_SIZE)
            slots = _Slots(plan.table + len(devices) * DEVICE_SLOT_SIZE)
        for name, inode in fresh:
            here = Trail(trail, name)
            attrs = inode.attrs
            _check_attrs(attrs, here)
            shape = shape_of(inode, here)
            if shape.indexes:
                _check_addresses(inode, capacity, here)
            body = len(bodies.of(attrs.xattrs, False, here))
            plan.blocks += shape.blocks
            plan.filtered |= body > 0
            nid = slots.place(INODE_SIZE + body, shape.indexes, shape.tail) >> EROFS_ISLOTBITS
            plan.nids.append(nid)
            if id(inode) in plan.links:
                plan.linked[id(inode)] = nid
    plan.end = slots.cursor
    blocks = round_up(plan.end, BLOCK_SIZE) // BLOCK_SIZE + plan.blocks
    if blocks + sum(capacity) > EROFS_NULL_ADDR:
        raise LimitError(f"{blocks} blocks of metadata and {sum(capacity)} of packs are {TOO_LARGE}")
    return plan


def _check_directory(directory: Directory, trail: Trail | None) -> None:
    if directory.kind != stat.S_IFDIR:
        raise MalformedError(f"{show(trail)}: a directory with mode {directory.attrs.mode:#o}")
    for name in directory.entries:
        if not is_name(name):
            raise MalformedError(f"{show(trail)}: an entry can't be named {printable(name)!r}")


def _check_attrs(attrs: Attrs, trail: Trail | None) -> None:
    if not (0 <= attrs.uid <= MAX_ID and 0 <= attrs.gid <= MAX_ID):
        raise LimitError(f"{show(trail)}: owner {attrs.uid}:{attrs.gid}; ids of Linux end at {MAX_ID}")
    if not -(1 << 63) <= attrs.mtime < 1 << 63:
        raise LimitError(f"{show(trail)}: its time is {attrs.mtime} seconds; those of EROFS have 64 bits")
    if not 0 <= attrs.mode <= 0xFFFF:
        raise MalformedError(f"{show(trail)}: the mode {attrs.mode:#o} has more than 16 bits")


def _check_addresses(inode: Inode, capacity: list[int], trail: Trail | None) -> None:
    assert isinstance(inode, File) and isinstance(inode.chunks, Chunked)
    whole = 1 << inode.chunks.bits
    left = round_up(inode.size, BLOCK_SIZE) // BLOCK_SIZE
    for where in inode.chunks.addresses:
        if where != HOLE:
            device, block = where >> 32, where & 0xFFFF_FFFF
            if device >= len(capacity) or block + min(whole, left) > capacity[device]:
                raise MalformedError(f"{show(trail)}: block {block} of pack {device} isn't in the image's packs")
        left -= whole
