"""Values that reading an image gives: an inode, and where a run of a file's bytes lies."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import NamedTuple

from layerstore.erofs.format import rdev_decode
from layerstore.tree.inode import Attrs


@dataclass(frozen=True, slots=True)
class Node:
    """An inode as it is on disk.

    Attributes:
        nid: its number.
        attrs: what stat and listxattr tell, the xattr that marks a directory opaque among them.
        size: in bytes, as stat has it.
        nlink: as it is stored.
        layout: EROFS_INODE_*, how its data is found.
        union: ``i_u``: start block, device number or chunk format.
        body: byte offset in the image behind the inode and its xattrs.
        name_filter: ``h_name_filter``.
        i_ino: the number for 32-bit stat.
        extended: whether it is an ``erofs_inode_extended``.
    """

    nid: int
    attrs: Attrs
    size: int
    nlink: int
    layout: int
    union: int
    body: int
    name_filter: int
    i_ino: int
    extended: bool

    @property
    def kind(self) -> int:
        """The S_IFMT part of the mode."""
        return stat.S_IFMT(self.attrs.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.attrs.mode)

    @property
    def rdev(self) -> tuple[int, int]:
        """(major, minor) of a device."""
        return rdev_decode(self.union) if self.kind in (stat.S_IFCHR, stat.S_IFBLK) else (0, 0)

    @property
    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.attrs.mode) and self.union == 0


class Run(NamedTuple):
    """``length`` bytes at ``offset`` of a file are at byte ``at`` of ``device``; device 0 is the image itself."""

    offset: int
    length: int
    device: int
    at: int
