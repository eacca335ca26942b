"""Which blocks of which packs hold which pages of a file: by the inodes of metadata images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from layerstore.erofs.format import EROFS_INODE_CHUNK_BASED
from layerstore.erofs.layout import HOLE, Chunked
from layerstore.erofs.reader import Image
from layerstore.errors import os_errors, printable
from layerstore.opened import FileSource
from layerstore.pack.format import BLOCK_SIZE

_MOST = 4096
"""Inodes remembered."""


class PageRanges:
    """Of the layers of a stack. Its metadata images are open until it is closed."""

    def __init__(self, images: Sequence[str]) -> None:
        """Raises ImgtoolError: one can't be opened, or is no image."""
        self._stack = ExitStack()
        self._images: list[Image] = []
        self._inodes: dict[tuple[int, int], tuple[int, Chunked | None]] = {}
        try:
            for path in images:
                what = f"metadata image {printable(path)}"
                with os_errors(f"open {what}"):
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._stack.callback(os.close, file)
                self._images.append(Image(FileSource(file, what)))
        except BaseException:
            self._stack.close()
            raise

    def of(self, layer: int, nid: int, first: int, count: int) -> list[tuple[int, int, int]]:
        """(device, offset, length) of ``count`` pages from ``first``, in their order, joined where they adjoin.

        Nothing for what lies in the metadata image itself, for holes, and behind the end.

        Raises:
            MalformedError: no such inode.
        """
        size, chunks = self._inode(layer, nid)
        if chunks is None:
            return []
        found: list[tuple[int, int, int]] = []
        last = min(first + count, -(-size // BLOCK_SIZE))
        while first < last:
            number = first >> chunks.bits
            within = first - (number << chunks.bits)
            pages = min(last - first, (1 << chunks.bits) - within)
            first += pages
            where = chunks.addresses[number]
            if where == HOLE or not where >> 32:
                continue
            device, offset, length = where >> 32, ((where & 0xFFFF_FFFF) + within) * BLOCK_SIZE, pages * BLOCK_SIZE
            if found and found[-1][0] == device and found[-1][1] + found[-1][2] == offset:
                found[-1] = (device, found[-1][1], found[-1][2] + length)
            else:
                found.append((device, offset, length))
        return found

    def _inode(self, layer: int, nid: int) -> tuple[int, Chunked | None]:
        known = self._inodes.get((layer, nid))
        if known is None:
            image = self._images[layer]
            node = image.node(nid)
            chunks = image.chunks(node) if node.layout == EROFS_INODE_CHUNK_BASED else None
            if len(self._inodes) >= _MOST:
                self._inodes.clear()
            known = self._inodes[layer, nid] = (node.size, chunks)
        return known

    def close(self) -> None:
        self._stack.close()
