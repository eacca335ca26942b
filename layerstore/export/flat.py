"""The flat form: one layer as one file that anything mounts.

::

    block 0 …   metadata image, as the layer's but for the addresses: all on device 0, which is this very file
    then        the data of chunk after chunk in the order of the tree, each once, in whole blocks

Chunk-based files, uncompressed, 4 KiB blocks, no device table: Linux 5.16 reads it, from a file or a block device, and
so do tools that know nothing of extra devices.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO

from layerstore.erofs.layout import HOLE, Chunked
from layerstore.erofs.writer import write_image
from layerstore.errors import MalformedError, os_errors
from layerstore.export.gather import Data, Piece
from layerstore.material import survey
from layerstore.opened import OpenLayer
from layerstore.pack.format import BLOCK_SIZE
from layerstore.progress import Progress
from layerstore.tree.inode import File

_STEP = 1 << 20
_PAGE_BITS = 6
"""New addresses are kept in pages of 64 blocks, so memory goes by the data that is used and not by that of packs."""
_PAGE = 1 << _PAGE_BITS


@dataclass(frozen=True, slots=True)
class FlatLayer:
    """What was written: bytes of the metadata image, and of the data behind it."""

    metadata_size: int
    data_size: int

    @property
    def size(self) -> int:
        return self.metadata_size + self.data_size


def write_flat(
    opened: OpenLayer, data: Data, write: Callable[[memoryview], object], *, scratch: str, progress: Progress
) -> FlatLayer:
    """Give the flat form of a layer to ``write``, from its first byte to its last.

    Args:
        opened: the layer.
        data: over the layer's packs.
        write: is given memory that must not be kept.
        scratch: directory for the metadata image, which is written before anything else.
        progress: advances by the bytes that are written.

    Raises:
        MalformedError: chunks lie over each other.
        LimitError: more than EROFS can address.
        CorruptError, NotFoundError: as :meth:`Data.read`.
    """
    tree = opened.tree()
    # What is on the disk of a layer bounds what can be made of it: overlapping chunks would multiply it.
    capacity = sum(pack.blocks for pack in opened.layer.packs)
    moved = _Moved(capacity)
    for file in survey(tree)[1]:
        if isinstance(file.chunks, Chunked):
            file.chunks = Chunked(file.chunks.bits, moved.addresses(file, file.chunks))
    with os_errors("write the metadata image"), tempfile.TemporaryFile(dir=scratch) as file_out:
        summary = write_image(tree, (), file_out, appended=moved.blocks)
        progress.start("flatten", summary.bytes + moved.blocks * BLOCK_SIZE)
        del tree
        for piece in _stream(file_out):
            write(piece)
            progress.advance(len(piece))
    with closing(data.read(moved.pieces())) as pieces:  # where writing fails, nothing is read on
        for piece in pieces:
            write(piece)
            progress.advance(len(piece))
    return FlatLayer(summary.bytes, moved.blocks * BLOCK_SIZE)


class _Moved:
    """Where each chunk goes: to the end of what has gone before, the first time it is met."""

    def __init__(self, capacity: int) -> None:
        self.blocks = 0
        self._capacity = capacity
        self._pages: dict[int, array[int]] = {}  # by address >> _PAGE_BITS: new block + 1, 0 for none
        self._copies: list[tuple[int, int]] = []  # address and blocks of what is copied, neighbours as one

    def addresses(self, file: File, chunked: Chunked) -> array[int]:
        whole = 1 << chunked.bits
        left = -(-file.size // BLOCK_SIZE)
        new = array("Q")
        for where in chunked.addresses:
            new.append(HOLE if where == HOLE else self._place(where, min(whole, left)))
            left -= whole
        return new

    def pieces(self) -> Iterator[Piece]:
        for where, blocks in self._copies:
            yield Piece(where >> 32, (where & 0xFFFF_FFFF) * BLOCK_SIZE, blocks * BLOCK_SIZE)

    def _place(self, where: int, blocks: int) -> int:
        page = self._pages.get(where >> _PAGE_BITS)
        if page is None:
            page = self._pages[where >> _PAGE_BITS] = array("Q", bytes(8 * _PAGE))
        entry = page[where & (_PAGE - 1)]
        if entry and entry & 0xFFFF_FFFF == blocks:
            return entry >> 32
        new = self.blocks
        self.blocks += blocks
        if self.blocks > self._capacity:
            raise MalformedError("chunks of the layer lie over each other: its files refer to more than its packs have")
        if self._copies and sum(self._copies[-1]) == where:
            start, count = self._copies[-1]
            self._copies[-1] = (start, count + blocks)
        else:
            self._copies.append((where, blocks))
        page[where & (_PAGE - 1)] = new << 32 | blocks
        return new


def _stream(file: BinaryIO) -> Iterator[memoryview]:
    file.seek(0)
    while piece := file.read(_STEP):
        yield memoryview(piece)
