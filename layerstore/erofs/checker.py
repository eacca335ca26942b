"""Checks an image before a kernel or anybody else trusts it.

The whole image is walked once. What an image may cost is bounded by its size: its inodes and directories can't take
more bytes than it has, so one whose parts lie over each other is found out before its walk gets long.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from itertools import pairwise

from layerstore.erofs.directory import FILE_TYPES, Entry
from layerstore.erofs.format import (
    EROFS_FEATURE_COMPAT_XATTR_FILTER,
    EROFS_FEATURE_INCOMPAT_CHUNKED_FILE,
    EROFS_INODE_CHUNK_BASED,
    EROFS_INODE_FLAT_INLINE,
    EROFS_ISLOTBITS,
    EROFS_NULL_ADDR,
    NSEC_PER_SEC,
)
from layerstore.erofs.layout import HOLE
from layerstore.erofs.node import Node
from layerstore.erofs.reader import Image
from layerstore.erofs.trail import Trail, show
from layerstore.erofs.xattrs import name_filter
from layerstore.errors import CorruptError, MalformedError, UnsupportedError, printable

_ENOUGH = 100
"""Problems after which the rest isn't looked at."""
_SHARED_FACTOR = 64
"""Bytes of xattrs that are read for a byte of the image: shared ones are read again for each inode that has them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and with which part: a path, or the name of a structure."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def check(image: Image) -> list[Problem]:
    """What is wrong with an image, up to a hundred problems; an empty list for a sound one.

    Extra devices are taken to be as long as the device table says; their bytes are not looked at.
    """
    checker = _Checker(image)
    try:
        checker.run()
    except _Stop:
        pass
    return checker.problems


def require_sound(image: Image) -> list[list[tuple[int, int]]]:
    """Check an image; the parts of each extra device that its files refer to: (first block, blocks), in no order.

    They come with the walk that the check makes: another one would double what a cold start has to wait for.

    Raises:
        MalformedError: with its first problem.
    """
    checker = _Checker(image)
    try:
        checker.run()
    except _Stop:
        pass
    if checker.problems:
        raise MalformedError(f"the image can't be trusted: {checker.problems[0]}")
    return checker.used


class _Stop(Exception):
    """Ends the walk; it is no error."""


class _Checker:
    def __init__(self, image: Image) -> None:
        self.image = image
        self.problems: list[Problem] = []
        self.used: list[list[tuple[int, int]]] = [[] for _ in image.slots]
        self._capacity = [slot.blocks for slot in image.slots]
        self._bytes_left = image.size
        self._xattr_bytes_left = image.size * _SHARED_FACTOR
        self._seen = bytearray((image.size >> EROFS_ISLOTBITS) // 8 + 1)  # a bit for each slot
        self._links: dict[int, tuple[int, Trail]] = {}  # links of an inode that are still to be met

    def run(self) -> None:
        image = self.image
        try:
            image.verify_checksum()
        except (CorruptError, MalformedError) as error:
            self._report("superblock", str(error))
        if image.superblock.blocks * image.block_size > image.size:
            self._report("superblock", f"{image.superblock.blocks} blocks, but the image has {image.size} bytes")
        self._check_devices()
        self._walk()
        for missing, trail in self._links.values():
            if missing:
                self._report(show(trail), f"its link count is {missing} higher than the names it has")

    def _report(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))
        if len(self.problems) >= _ENOUGH:
            raise _Stop

    def _spend(self, count: int, where: Trail | None) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            self._report(show(where), "inodes and directories lie over each other: they have more bytes than the image")
            raise _Stop

    # ---- devices

    def _check_devices(self) -> None:
        image = self.image
        if any(slot.tag.strip(b"\0") for slot in image.slots):  # mkfs.erofs leaves all of them empty
            try:
                _ = image.devices
            except MalformedError as error:
                self._report("device table", f"a tag is no sha256: {error}")
        ranges = [(0, image.superblock.blocks, 0)]
        for number, slot in enumerate(image.slots, 1):
            if slot.blocks_hi or slot.uniaddr_hi:
                self._report(f"device {number}", "its addresses have 48 bits, but the image hasn't")
            if slot.uniaddr:
                ranges.append((slot.uniaddr, slot.uniaddr + slot.blocks, number))
        ranges.sort()
        for (_, end, _), (start, last, number) in pairwise(ranges):
            if start < end:
                self._report(f"device {number}", "it lies over another device in the flat form")
            if last > EROFS_NULL_ADDR:
                self._report(f"device {number}", "it is beyond the 32-bit addresses of the flat form")

    # ---- inodes

    def _walk(self) -> None:
        image = self.image
        try:
            root = image.root
        except (MalformedError, UnsupportedError) as error:
            self._report("/", str(error))
            return
        self._mark(root.nid)
        self._check_node(root, None)
        stack: list[tuple[Trail | None, Node, int]] = [(None, root, root.nid)]
        while stack:
            trail, node, parent = stack.pop()
            for below, child in self._check_directory(node, parent, trail):
                stack.append((below, child, node.nid))

    def _mark(self, nid: int) -> bool:
        """Note that an inode was met; whether it was before."""
        at = self.image.offset_of(nid) >> EROFS_ISLOTBITS
        byte, bit = at >> 3, 1 << (at & 7)
        met = bool(self._seen[byte] & bit)
        self._seen[byte] |= bit
        return met

    def _check_directory(self, node: Node, parent: int, trail: Trail | None) -> list[tuple[Trail, Node]]:
        """Check a directory's entries and the inodes they lead to; returns its directories that are to be walked."""
        below: list[tuple[Trail, Node]] = []
        dots: dict[bytes, int] = {}
        subdirectories = 0
        previous = b""
        try:
            for block in self.image.blocks_of(node):
                for entry in block:
                    if entry.name <= previous:
                        self._report(show(trail), f"the entry {printable(entry.name)} is out of order, or there twice")
                    previous = entry.name
                    if entry.name in (b".", b".."):
                        dots[entry.name] = entry.nid
                        if entry.file_type != FILE_TYPES[stat.S_IFDIR]:
                            self._report(show(trail), f"the entry {printable(entry.name)} isn't marked a directory")
                        continue
                    child = self._check_entry(entry, Trail(trail, entry.name))
                    if child is not None and child.is_directory:
                        subdirectories += 1
                        below.append((Trail(trail, entry.name), child))
        except (MalformedError, UnsupportedError) as error:
            self._report(show(trail), str(error))
            return below
        if dots != {b".": node.nid, b"..": parent}:
            self._report(show(trail), 'its entries "." and ".." are missing, or don\'t lead to itself and its parent')
        if node.nlink != 2 + subdirectories:
            self._report(show(trail), f"its link count is {node.nlink}, but it has {subdirectories} directories")
        return below

    def _check_entry(self, entry: Entry, trail: Trail) -> Node | None:
        """The inode of an entry if it is met for the first time and can be read."""
        if self.image.offset_of(entry.nid) >= self.image.size:
            self._report(show(trail), f"its inode {entry.nid} is outside of the image")
            return None
        if self._mark(entry.nid):
            self._check_link(entry.nid, trail)
            return None
        try:
            node = self.image.node(entry.nid)
        except (MalformedError, UnsupportedError) as error:
            self._report(show(trail), str(error))
            return None
        if FILE_TYPES.get(node.kind) != entry.file_type:
            self._report(show(trail), f"its entry has the type {entry.file_type}, its inode is another")
        if not node.is_directory:
            if node.nlink < 1:
                self._report(show(trail), "its link count is 0")
            elif node.nlink > 1:
                self._links[entry.nid] = (node.nlink - 1, trail)
        self._check_node(node, trail)
        return node

    def _check_link(self, nid: int, trail: Trail) -> None:
        missing, first = self._links.get(nid, (0, trail))
        if missing:
            self._links[nid] = (missing - 1, first)
        else:
            self._report(show(trail), f"its inode {nid} is a directory's, or has more names than its link count")

    def _check_node(self, node: Node, trail: Trail | None) -> None:
        image = self.image
        self._spend(node.body - image.offset_of(node.nid), trail)
        self._xattr_bytes_left -= sum(len(name) + len(value) for name, value in node.attrs.xattrs)
        if self._xattr_bytes_left < 0:
            self._report(show(trail), "shared xattrs are used more often than any image needs")
            raise _Stop
        if node.attrs.nsec >= NSEC_PER_SEC:
            self._report(show(trail), f"its time has {node.attrs.nsec} ns")
        if image.superblock.feature_compat & EROFS_FEATURE_COMPAT_XATTR_FILTER and node.attrs.xattrs:
            hidden = node.name_filter & ~name_filter(name for name, _ in node.attrs.xattrs)
            if hidden:
                self._report(show(trail), "its name filter hides an xattr")
        try:
            self._check_data(node, trail)
        except (MalformedError, UnsupportedError) as error:
            self._report(show(trail), str(error))

    def _check_data(self, node: Node, trail: Trail | None) -> None:
        image = self.image
        if node.kind == stat.S_IFLNK:
            image.readlink(node)
            self._spend(node.size, trail)
        elif node.is_directory:
            for run in image.runs(node):
                self._spend(run.length, trail)
        elif node.kind == stat.S_IFREG:
            if node.layout == EROFS_INODE_CHUNK_BASED:
                self._check_chunks(node, trail)
                return
            runs = list(image.runs(node))
            if node.layout == EROFS_INODE_FLAT_INLINE and runs:
                self._spend(runs[-1].length, trail)
        elif node.size:
            self._report(show(trail), f"a special file of {node.size} bytes")

    def _check_chunks(self, node: Node, trail: Trail | None) -> None:
        image = self.image
        if not image.superblock.feature_incompat & EROFS_FEATURE_INCOMPAT_CHUNKED_FILE:
            self._report(show(trail), "it has chunks, but the image says that no file has")
        image.check_chunk_table(node)
        start, entry, count = image.chunk_table(node)
        self._spend(start + count * entry - node.body, trail)
        used, capacity = self.used, self._capacity
        whole = 1 << (image.chunk_bits(node) - image.superblock.blkszbits)
        left = -(-node.size // image.block_size)
        for number, where in enumerate(image.addresses(node, 0, count)):
            if where != HOLE:
                device, block = where >> 32, where & 0xFFFF_FFFF
                length = min(whole, left)
                if device == 0:
                    device, block = image.locate(node, number, where)
                elif device > len(capacity) or block + length > capacity[device - 1]:
                    raise MalformedError(f"chunk {number} is at block {block} of device {device}, beyond its end")
                if device:
                    used[device - 1].append((block, length))
            left -= whole
