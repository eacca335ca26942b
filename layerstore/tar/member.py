"""One entry of a layer archive, as the archive tells it."""

from __future__ import annotations

from typing import NamedTuple

from layerstore.tree.inode import Attrs


class Run(NamedTuple):
    """``length`` bytes at ``offset`` of a file lie at ``at`` of the decompressed layer."""

    offset: int
    length: int
    at: int


class Member(NamedTuple):
    """An entry that takes part in the merge.

    Attributes:
        path: its name, bytes as they are: slashes, dots and all; only GNU and PAX long names are resolved.
        kind: S_IFREG, S_IFDIR, S_IFLNK, S_IFCHR, S_IFBLK or S_IFIFO. S_IFREG for a hard link, whose kind is its
            target's.
        attrs: ``mode`` includes the kind.
        size: logical size in bytes, holes included; 0 for all but regular files.
        hardlink: the name this is another name of, or None.
        target: of a symbolic link, 1 to 4,095 bytes without NUL; else empty.
        major: of a device, else 0.
        minor: of a device, else 0.
        data: sorted, disjoint, not empty; what they leave out is a hole.
        offset: of the header in the decompressed layer.
    """

    path: bytes
    kind: int
    attrs: Attrs
    size: int
    hardlink: bytes | None
    target: bytes
    major: int
    minor: int
    data: tuple[Run, ...]
    offset: int
