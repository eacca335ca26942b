"""Cuts files into chunks and names them: the first of two passes over the data."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from layerstore.pack.format import BLOCK_SIZE
from layerstore.progress import Progress
from layerstore.tree.inode import File

CHUNK_SIZE = 16 * 1024
"""Bytes of a chunk of an ordinary file. Part of the format version; ``docs/measurements.md`` has what others give."""

INLINE_LIMIT = 512
"""Files up to this size live in the metadata image. Part of the format version; measured as above."""

CHUNKS_PER_FILE = 16_384
"""A large dense file gets larger chunks, so that its index stays below 128 KiB."""

MAX_CHUNK_SIZE = 4 * 1024 * 1024
"""Upper bound of the above, so that a chunk fits in memory several times."""

INDEX_ENTRY = 8
"""Bytes that a chunk costs in the metadata image (``struct erofs_inode_chunk_index``)."""

_BATCH = 4 * 1024 * 1024
"""Bytes that one job of the pool hashes: large against the cost of handing it over."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that decide a layout; anything but the default is for measuring them."""

    chunk: int = CHUNK_SIZE
    inline: int = INLINE_LIMIT


DEFAULT_SIZES = Sizes()


def chunk_bits(file: File, sizes: Sizes) -> int:
    """log2 of the file's chunk size in blocks.

    A file without holes gets the ordinary size, or what keeps it to ``CHUNKS_PER_FILE`` chunks. One with holes gets the
    size that makes index and stored data smallest together, so holes survive to the block where that is worth it, and
    300 GiB with one byte in it cost neither 600 MB of index nor a huge chunk of zeros.
    """
    if sum(extent.length for extent in file.extents) == file.size:
        return _bits(min(file.size, MAX_CHUNK_SIZE, max(sizes.chunk, -(-file.size // CHUNKS_PER_FILE))))
    return min(range(_bits(MAX_CHUNK_SIZE) + 1), key=lambda bits: (_cost(file, BLOCK_SIZE << bits), -bits))


def _bits(size: int) -> int:
    return max(0, (max(size, 1) - 1).bit_length() - 12)


def _cost(file: File, chunk: int) -> int:
    used = 0
    after = 0  # first chunk not yet counted
    for extent in file.extents:
        first = max(after, extent.offset // chunk)
        last = (extent.offset + extent.length - 1) // chunk
        used += max(0, last + 1 - first)
        after = max(after, last + 1)
    return -(-file.size // chunk) * INDEX_ENTRY + min(used * chunk, -(-file.size // BLOCK_SIZE) * BLOCK_SIZE)


def pieces(file: File, bits: int) -> Iterator[int]:
    """Numbers of the chunks that hold data, in order."""
    size = BLOCK_SIZE << bits
    after = 0
    for extent in file.extents:
        first = max(after, extent.offset // size)
        after = (extent.offset + extent.length - 1) // size + 1
        yield from range(first, after)


def read_piece(file: File, bits: int, number: int) -> bytes:
    """A chunk's bytes: holes inside it are zeros, and zeros pad it to whole blocks."""
    size = BLOCK_SIZE << bits
    start = number * size
    length = min(size, file.size - start)
    padded = -(-length // BLOCK_SIZE) * BLOCK_SIZE
    if len(file.extents) == 1:
        offset, extent_length, source, at = file.extents[0]
        if offset <= start and start + length <= offset + extent_length:
            data = source.read_at(at + start - offset, length)
            return data if length == padded else data + bytes(padded - length)
    piece = bytearray(padded)
    for offset, extent_length, source, at in file.extents:
        low, high = max(offset, start), min(offset + extent_length, start + length)
        if low < high:
            piece[low - start : high - start] = source.read_at(at + low - offset, high - low)
    return bytes(piece)


@dataclass(slots=True)
class ChunkTable:
    """The distinct chunks of a tree in order of first use, and which of them each file is made of.

    Attributes:
        keys: sha256 of each chunk, to its number.
        blocks: length of each chunk.
        first_file, first_piece: where each chunk can be read.
        files: each chunked file once, in the order of the walk.
    """

    keys: dict[bytes, int] = field(default_factory=dict)
    blocks: array[int] = field(default_factory=lambda: array("I"))
    first_file: list[int] = field(default_factory=list)
    first_piece: array[int] = field(default_factory=lambda: array("I"))
    files: list[ChunkedFile] = field(default_factory=list)

    @property
    def raw_size(self) -> int:
        """Bytes of all distinct chunks, padding included."""
        return sum(self.blocks) * BLOCK_SIZE


@dataclass(slots=True)
class ChunkedFile:
    """A file, its chunk size, and the number of the chunk behind each of its pieces that hold data."""

    file: File
    bits: int
    chunks: array[int]


def is_inline(file: File, sizes: Sizes) -> bool:
    """Whether the metadata image holds the file's data."""
    return file.size <= sizes.inline and (
        file.size == 0 or (len(file.extents) == 1 and file.extents[0].length == file.size)
    )


def chunk_files(
    files: Iterable[File], sizes: Sizes, pool: ThreadPoolExecutor, jobs: int, progress: Progress
) -> ChunkTable:
    """Hash every chunk of the files that are not inline; the result doesn't depend on ``jobs``."""
    table = ChunkTable()
    under_way: list[Future[list[tuple[File, int, list[tuple[int, bytes, int]]]]]] = []

    def take(result: list[tuple[File, int, list[tuple[int, bytes, int]]]]) -> None:
        for file, bits, hashed in result:
            if not table.files or table.files[-1].file is not file:
                table.files.append(ChunkedFile(file, bits, array("I")))
            chunks = table.files[-1].chunks
            for piece, key, blocks in hashed:
                number = table.keys.setdefault(key, len(table.keys))
                if number == len(table.blocks):
                    table.blocks.append(blocks)
                    table.first_file.append(len(table.files) - 1)
                    table.first_piece.append(piece)
                chunks.append(number)

    for batch in _batches((file for file in files if not is_inline(file, sizes)), sizes):
        under_way.append(pool.submit(_hash_batch, batch, progress))
        if len(under_way) > jobs + 1:
            take(under_way.pop(0).result())
    for future in under_way:
        take(future.result())
    return table


def _batches(files: Iterable[File], sizes: Sizes) -> Iterator[list[tuple[File, int, range | list[int]]]]:
    batch: list[tuple[File, int, range | list[int]]] = []
    room = _BATCH
    for file in files:
        bits = chunk_bits(file, sizes)
        per_batch = max(1, _BATCH // (BLOCK_SIZE << bits))
        numbers: list[int] = []
        if not file.extents:
            batch.append((file, bits, numbers))
        for number in pieces(file, bits):
            numbers.append(number)
            if len(numbers) == per_batch:
                yield [*batch, (file, bits, numbers)]
                batch, numbers, room = [], [], _BATCH
        if numbers:
            batch.append((file, bits, numbers))
            room -= len(numbers) * min(BLOCK_SIZE << bits, file.size)
            if room <= 0:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


def _hash_batch(
    batch: list[tuple[File, int, range | list[int]]], progress: Progress
) -> list[tuple[File, int, list[tuple[int, bytes, int]]]]:
    result = []
    for file, bits, numbers in batch:
        hashed = []
        for number in numbers:
            data = read_piece(file, bits, number)
            hashed.append((number, hashlib.sha256(data).digest(), len(data) // BLOCK_SIZE))
            progress.advance(len(data))
        result.append((file, bits, hashed))
    return result
