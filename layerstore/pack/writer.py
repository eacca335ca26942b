"""Writes a new pack: raw blocks in, a seekable zstd blob out, with compression and hashing on all cores."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import zstandard

from layerstore.digest import Digest
from layerstore.pack.format import (
    BLOCK_SIZE,
    FRAME_SIZE,
    SEEK_TABLE_MAGIC,
    ChunkListHeader,
    ChunkRecord,
    FrameIndexHeader,
    FrameRecord,
    SeekEntry,
    SeekFooter,
    SkippableHeader,
    skippable,
)
from layerstore.pack.stored import Span, StoredPack
from layerstore.store.protocol import Upload

DEFAULT_LEVEL = 1
"""zstd level: 3 makes packs 6 % smaller and conversions a fifth slower; see ``docs/measurements.md``."""


class PackWriter:
    """Cuts what it is given into frames, and writes them in order to ``upload``.

    Up to ``2 * jobs + 2`` frames are under way, so memory is a few MiB whatever the size. The pool's threads do what
    releases the interpreter lock: sha256 and zstd.
    """

    def __init__(self, upload: Upload, pool: ThreadPoolExecutor, *, jobs: int, level: int = DEFAULT_LEVEL) -> None:
        self._upload = upload
        self._pool = pool
        self._level = level
        self._window = 2 * jobs + 2
        self._pieces: list[bytes | memoryview] = []  # of the next frame
        self._pending = 0  # bytes in them
        self._under_way: deque[Future[tuple[bytes, bytes, int]]] = deque()
        self._frames: list[FrameRecord] = []
        self._seek: list[SeekEntry] = []
        self._chunks = bytearray()
        self._raw = hashlib.sha256()
        self._raw_size = 0

    @property
    def blocks(self) -> int:
        """Blocks added so far: the address of the next chunk."""
        return (self._raw_size + self._pending) // BLOCK_SIZE

    def add(self, chunks: Iterable[tuple[bytes, int]], data: bytes | memoryview) -> None:
        """Append neighbouring chunks: the key and the blocks of each, and the bytes of all."""
        for key, blocks in chunks:
            self._chunks += ChunkRecord.STRUCT.pack(key, blocks)
        self._pieces.append(data)
        self._pending += len(data)
        if self._pending < FRAME_SIZE:
            return
        raw = memoryview(b"".join(self._pieces))
        whole = self._pending - self._pending % FRAME_SIZE
        self._pieces = [raw[whole:]]
        self._pending -= whole
        for offset in range(0, whole, FRAME_SIZE):
            self._submit(raw[offset : offset + FRAME_SIZE])

    def finish(self) -> StoredPack:
        """Write what is left and the indexes; the caller commits the upload under the digest that is returned."""
        if self._pending:
            self._submit(b"".join(self._pieces))
            self._pending = 0
        while self._under_way:
            self._write_next()
        chunk_count = len(self._chunks) // ChunkRecord.STRUCT.size
        chunk_list = self._index(ChunkListHeader(chunk_count).pack() + bytes(self._chunks))
        frame_index = self._index(
            FrameIndexHeader(self._raw_size, len(self._frames)).pack() + b"".join(f.pack() for f in self._frames)
        )
        table = b"".join(entry.pack() for entry in self._seek) + SeekFooter(len(self._seek)).pack()
        self._upload.write(skippable(table, SEEK_TABLE_MAGIC))
        blob, blob_size = self._upload.digest(), self._upload.size
        return StoredPack(Digest.from_raw(self._raw.digest()), self._raw_size, blob, blob_size, frame_index, chunk_list)

    def _submit(self, raw: bytes | memoryview) -> None:
        self._raw_size += len(raw)
        self._under_way.append(self._pool.submit(_frame, raw, self._level))
        self._raw.update(raw)  # one chain, so it stays in this thread, while the pool works on the frame
        if len(self._under_way) > self._window:
            self._write_next()

    def _write_next(self) -> None:
        compressed, digest, raw_size = self._under_way.popleft().result()
        raw_offset = self._frames[-1].raw_offset + self._seek[-1].raw if self._frames else 0
        self._frames.append(FrameRecord(self._upload.size, raw_offset, digest))
        self._seek.append(SeekEntry(len(compressed), raw_size))
        self._upload.write(compressed)

    def _index(self, content: bytes) -> Span:
        offset = self._upload.size + SkippableHeader.STRUCT.size
        self._upload.write(skippable(content))
        return Span(offset, len(content), Digest.of(content))


def _frame(raw: bytes | memoryview, level: int) -> tuple[bytes, bytes, int]:
    # A compressor may not be shared between threads; making one costs nothing that can be measured.
    compressed = zstandard.ZstdCompressor(level=level, write_checksum=False).compress(raw)
    return compressed, hashlib.sha256(raw).digest(), len(raw)
