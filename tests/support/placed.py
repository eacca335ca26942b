"""Trees whose files have addresses, without a conversion, and the places of stacks of them.

::

    places(tree({"usr/bin/sh": 10_000, "sh": "usr/bin/sh", "etc/motd": Inline(20), "var": None}))

A number is a file of so many bytes, which gets the next free blocks of device 1; a text is the target of a link, None a
directory, ``At`` a file at given addresses, and ``Inode``s stand for themselves (hard links, whiteouts).
"""

from __future__ import annotations

import stat
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from layerstore.digest import Digest
from layerstore.erofs.layout import Chunked, address
from layerstore.tree.inode import Attrs, Directory, File, Inode, Symlink, Whiteout
from prefetch.trace.format import TracedLayer
from prefetch.trace.places import ImagePlaces

BLOCK = 4096
DEVICES = 3
"""Packs of each layer."""


@dataclass(frozen=True)
class Inline:
    """A file in the metadata image."""

    size: int


@dataclass(frozen=True)
class At:
    """A file in chunks of ``4096 << bits`` bytes at these addresses (see ``at``)."""

    size: int
    addresses: tuple[int, ...]
    bits: int = 0


Entry = int | str | None | Inline | At | Inode
at = address
"""Block of a device."""
FILE = Attrs(stat.S_IFREG | 0o644, 0, 0, 0, 0)
DIRECTORY = Attrs(stat.S_IFDIR | 0o755, 0, 0, 0, 0)
LINK = Attrs(stat.S_IFLNK | 0o777, 0, 0, 0, 0)
WHITEOUT = Whiteout(Attrs(stat.S_IFCHR, 0, 0, 0, 0))


def placed_file(size: int, addresses: tuple[int, ...], bits: int = 0) -> File:
    file = File(FILE, size, ())
    file.chunks = Chunked(bits, array("Q", addresses))
    return file


def tree(entries: Mapping[str | bytes, Entry]) -> Directory:
    root = Directory(DIRECTORY)
    free = 0
    for name, entry in entries.items():
        *above, last = (name.encode() if isinstance(name, str) else name).split(b"/")
        here = root
        for part in above:
            below = here.entries.setdefault(part, Directory(DIRECTORY))
            assert isinstance(below, Directory)
            here = below
        inode: Inode
        if isinstance(entry, int):
            blocks = -(-entry // BLOCK)
            inode = placed_file(entry, tuple(at(1, free + block) for block in range(blocks)))
            free += blocks
        elif isinstance(entry, str):
            inode = Symlink(LINK, entry.encode())
        elif isinstance(entry, Inline):
            inode = File(FILE, entry.size, ())
        elif isinstance(entry, At):
            inode = placed_file(entry.size, entry.addresses, entry.bits)
        else:
            inode = Directory(DIRECTORY) if entry is None else entry
        here.entries[last] = inode
    return root


def layer_of(number: int) -> TracedLayer:
    return TracedLayer(
        Digest.of(b"layer %d" % number), tuple(Digest.of(b"pack %d %d" % (number, n)) for n in range(DEVICES))
    )


def places(*trees: Directory) -> ImagePlaces:
    """Of a stack, bottom first."""
    return ImagePlaces([layer_of(number) for number in range(len(trees))], trees)
