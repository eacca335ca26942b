"""An image as text, for people, golden files and diff: every field that is there, in the order of its paths.

The same image always gives the same text. Numbers are decimal, features and modes as their formats have them, bytes
of names as :func:`~layerstore.errors.printable` shows them, values of xattrs in hex.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from uuid import UUID

from layerstore.erofs.format import (
    EROFS_FT_BLKDEV,
    EROFS_FT_CHRDEV,
    EROFS_FT_DIR,
    EROFS_FT_FIFO,
    EROFS_FT_REG_FILE,
    EROFS_FT_SOCK,
    EROFS_FT_SYMLINK,
    EROFS_INODE_CHUNK_BASED,
    EROFS_INODE_FLAT_INLINE,
    LAYOUT_NAMES,
    incompat_names,
)
from layerstore.erofs.layout import HOLE
from layerstore.erofs.node import Node
from layerstore.erofs.reader import Image
from layerstore.erofs.trail import Trail, show
from layerstore.errors import MalformedError, printable

_TYPES = {
    EROFS_FT_REG_FILE: "file",
    EROFS_FT_DIR: "directory",
    EROFS_FT_CHRDEV: "char",
    EROFS_FT_BLKDEV: "block",
    EROFS_FT_FIFO: "fifo",
    EROFS_FT_SOCK: "socket",
    EROFS_FT_SYMLINK: "symlink",
}
_COMPAT = {1: "SB_CHKSUM", 2: "MTIME", 4: "XATTR_FILTER"}


def dump(image: Image) -> Iterator[str]:
    """The lines of the text, without line ends.

    Raises:
        MalformedError: the image contradicts itself; what was readable before that has been given.
        UnsupportedError: an inode of a kind that isn't read here.
    """
    yield from _superblock(image)
    for number, slot in enumerate(image.slots, 1):
        yield f"device {number}"
        yield f"  tag {printable(slot.tag.rstrip(bytes(1)))}"
        yield f"  blocks {slot.blocks}"
        yield f"  uniaddr {slot.uniaddr}"
    seen: set[int] = set()
    stack: list[tuple[Trail | None, int]] = [(None, image.superblock.rootnid_2b)]
    while stack:
        trail, nid = stack.pop()
        node = image.node(nid)
        if nid in seen:
            if node.is_directory:
                raise MalformedError(f"{show(trail)} is a directory with two names")
            yield f"link {show(trail)}"
            yield f"  nid {nid}"
            continue
        seen.add(nid)
        yield from _inode(image, node, trail)
        if node.is_directory:
            below = []
            for entry in image.entries(node):
                below.append((Trail(trail, entry.name), entry.nid))
            stack.extend(reversed(below))


def _superblock(image: Image) -> Iterator[str]:
    superblock = image.superblock
    compat = [name for bit, name in _COMPAT.items() if superblock.feature_compat & bit]
    yield "superblock"
    yield f"  checksum {superblock.checksum:#010x}"
    yield f"  feature_compat {superblock.feature_compat:#x} {' '.join(compat)}".rstrip()
    incompat = superblock.feature_incompat
    yield f"  feature_incompat {incompat:#x} {incompat_names(incompat).replace(',', '')}".rstrip()
    yield f"  uuid {UUID(bytes=superblock.uuid)}"
    yield f"  block size {image.block_size}"
    yield f"  blocks {superblock.blocks}"
    yield f"  inos {superblock.inos}"
    yield f"  root nid {superblock.rootnid_2b}"
    yield f"  epoch {superblock.epoch} fixed_nsec {superblock.fixed_nsec} build_time {superblock.build_time}"
    yield f"  meta_blkaddr {superblock.meta_blkaddr} xattr_blkaddr {superblock.xattr_blkaddr}"
    yield f"  extra_devices {superblock.extra_devices} devt_slotoff {superblock.devt_slotoff}"


def _inode(image: Image, node: Node, trail: Trail | None) -> Iterator[str]:
    attrs = node.attrs
    yield f"inode {show(trail)}"
    yield f"  nid {node.nid} at {image.offset_of(node.nid)} {'extended' if node.extended else 'compact'}"
    yield f"  mode {attrs.mode:07o} uid {attrs.uid} gid {attrs.gid} nlink {node.nlink} ino {node.i_ino}"
    yield f"  mtime {attrs.mtime} nsec {attrs.nsec}"
    yield f"  size {node.size} layout {LAYOUT_NAMES[node.layout]}"
    if attrs.xattrs:
        yield f"  name filter {node.name_filter:#010x}"
    for name, value in attrs.xattrs:
        yield f"  xattr {printable(name)} = {value.hex() or '(empty)'}"
    if node.is_whiteout:
        yield "  whiteout"
    elif node.kind in (stat.S_IFCHR, stat.S_IFBLK):
        yield "  rdev {}:{}".format(*node.rdev)
    elif node.kind == stat.S_IFLNK:
        yield f"  target {printable(image.readlink(node))}"
    if node.layout == EROFS_INODE_CHUNK_BASED:
        yield from _chunks(image, node)
    else:
        for run in image.runs(node):
            inline = node.layout == EROFS_INODE_FLAT_INLINE and run.at == node.body
            yield f"  data {run.offset}+{run.length} at {run.at}{' inline' if inline else ''}"
    if node.is_directory:
        for number, block in enumerate(image.blocks_of(node)):
            yield f"  block {number}"
            for entry in block:
                kind = _TYPES.get(entry.file_type, str(entry.file_type))
                yield f"    {printable(entry.name)} {kind} {entry.nid}"


def _chunks(image: Image, node: Node) -> Iterator[str]:
    image.check_chunk_table(node)
    start, entry, count = image.chunk_table(node)
    yield f"  chunks of {1 << image.chunk_bits(node)}: {count} entries of {entry} bytes at {start}"
    for number, where in enumerate(image.addresses(node, 0, count)):
        if where == HOLE:
            yield f"    {number} hole"
        else:
            yield f"    {number} device {where >> 32} block {where & 0xFFFF_FFFF}"
