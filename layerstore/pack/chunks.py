"""Cuts files into chunks and names them: the first of two passes over the data."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from layerstore.pack.format import BLOCK_SIZE
from layerstore.progress import Progress
from layerstore.tree.inode import File

if TYPE_CHECKING:
    from typing_extensions import Buffer

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

_RUN = 1024 * 1024
"""Bytes read at once of a file whose chunks are smaller."""


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


def read_pieces(file: File, bits: int, first: int, count: int) -> bytes:
    """Neighbouring chunks' bytes: holes inside them are zeros, and zeros pad the file's last one to whole blocks."""
    size = BLOCK_SIZE << bits
    start = first * size
    length = min(count * size, file.size - start)
    padded = -(-length // BLOCK_SIZE) * BLOCK_SIZE
    extents = file.extents
    if len(extents) == 1:
        offset, extent_length, source, at = extents[0]
        if offset <= start and start + length <= offset + extent_length:
            data = source.read_at(at + start - offset, length)
            return data if length == padded else data + bytes(padded - length)
    run = bytearray(padded)
    for offset, extent_length, source, at in extents:
        low, high = max(offset, start), min(offset + extent_length, start + length)
        if low < high:
            run[low - start : high - start] = source.read_at(at + low - offset, high - low)
    return bytes(run)


def runs(numbers: Iterable[int], most: int) -> Iterator[tuple[int, int]]:
    """Rising numbers as (first, count) of neighbours, at most ``most`` together."""
    first = count = 0
    for number in numbers:
        if count and number == first + count and count < most:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


@dataclass(slots=True)
class ChunkTable:
    """The distinct chunks of a tree in order of first use, and which of them each file is made of.

    Attributes:
        keys: name of each chunk, to its number.
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


class ChunkedFile(NamedTuple):
    """A file, its chunk size, and the number of the chunk behind each of its pieces that hold data."""

    file: File
    bits: int
    chunks: array[int]


def is_inline(file: File, sizes: Sizes) -> bool:
    """Whether the metadata image holds the file's data."""
    return file.size <= sizes.inline and (
        file.size == 0 or (len(file.extents) == 1 and file.extents[0].length == file.size)
    )


def chunk_key(data: Buffer) -> bytes:
    """The name of a chunk: BLAKE3 of its padded bytes, 32 of them."""
    return blake3(data).digest()


Job = tuple[File, int, int, int]
"""File, bits, first piece and number of pieces to hash."""

Hashed = tuple[File, int, int, list[tuple[bytes, int]], memoryview]
"""File, bits, first piece, key and blocks of each, and the bytes of all."""

Taker = Callable[[list[tuple[bytes, int]], memoryview], None]
"""Takes neighbouring chunks: key and blocks of each, and the bytes of all."""


def run_length(bits: int) -> int:
    """How many neighbouring pieces are read at once."""
    return max(1, _RUN // (BLOCK_SIZE << bits))


def chunk_files(
    files: Iterable[File],
    sizes: Sizes,
    pool: ThreadPoolExecutor,
    jobs: int,
    progress: Progress,
    take: Taker = lambda chunks, data: None,
) -> ChunkTable:
    """Hash every chunk of the files that are not inline; the result doesn't depend on ``jobs``.

    ``take`` is given each chunk that has not been seen before, in the order of its number.
    """
    table = ChunkTable()
    under_way: deque[Future[list[Hashed]]] = deque()
    for batch in _batches((file for file in files if not is_inline(file, sizes)), sizes):
        under_way.append(pool.submit(_hash_batch, batch, progress))
        if len(under_way) > jobs + 1:
            _enter(table, under_way.popleft().result(), take)
    while under_way:
        _enter(table, under_way.popleft().result(), take)
    return table


def _enter(table: ChunkTable, hashed: list[Hashed], take: Taker) -> None:
    keys, blocks = table.keys, table.blocks
    for file, bits, first, found, data in hashed:
        if not table.files or table.files[-1].file is not file:
            table.files.append(ChunkedFile(file, bits, array("I")))
        chunks = table.files[-1].chunks
        fresh: list[tuple[bytes, int]] = []  # neighbours that end at byte ``at``
        at = begin = 0
        for piece, (key, length) in enumerate(found, first):
            number = keys.setdefault(key, len(keys))
            if number == len(blocks):
                blocks.append(length)
                table.first_file.append(len(table.files) - 1)
                table.first_piece.append(piece)
                if not fresh:
                    begin = at
                fresh.append((key, length))
            elif fresh:
                take(fresh, data[begin:at])
                fresh = []
            chunks.append(number)
            at += length * BLOCK_SIZE
        if fresh:
            take(fresh, data[begin:at])


def _batches(files: Iterable[File], sizes: Sizes) -> Iterator[list[Job]]:
    batch: list[Job] = []
    room = _BATCH
    for file in files:
        bits = chunk_bits(file, sizes)
        if not file.extents:
            batch.append((file, bits, 0, 0))
        for first, count in runs(pieces(file, bits), run_length(bits)):
            batch.append((file, bits, first, count))
            room -= min(count * (BLOCK_SIZE << bits), file.size)
            if room <= 0:
                yield batch
                batch, room = [], _BATCH
    if batch:
        yield batch


def _hash_batch(batch: list[Job], progress: Progress) -> list[Hashed]:
    result: list[Hashed] = []
    done = 0
    for file, bits, first, count in batch:
        data = memoryview(read_pieces(file, bits, first, count)) if count else memoryview(b"")
        size = BLOCK_SIZE << bits
        found = [_key(data[start : start + size]) for start in range(0, len(data), size)]
        result.append((file, bits, first, found, data))
        done += len(data)
    progress.advance(done)
    return result


def _key(data: memoryview) -> tuple[bytes, int]:
    return chunk_key(data), len(data) // BLOCK_SIZE
