"""Every byte of a stored pack that is not file data. All integers are little-endian; offsets and sizes are bytes.

::

    zstd frame 0 … zstd frame n-1          each FRAME_SIZE raw bytes, the last one shorter
    skippable frame 0x184D2A50: chunk list        ChunkListHeader, then a ChunkRecord per chunk, in pack order
    skippable frame 0x184D2A50: frame index       FrameIndexHeader, then a FrameRecord per frame
    skippable frame 0x184D2A5E: seek table        zstd's seekable format 0.1.0, without checksums

The frame index is the chunk index of the draft erofs-image-spec (``application/vnd.erofs.chunk-index.v1``), whose
"chunks" are our frames. Its place and digest, and the chunk list's, are annotations of the pack's descriptor, so either
can be read and verified with one range request.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import ClassVar

from layerstore.errors import MalformedError, UnsupportedError

BLOCK_SIZE = 4096
"""EROFS block: the alignment of chunks in a pack, and the padding of its end."""

FRAME_SIZE = 256 * 1024
"""Raw bytes of a frame. What we write; any multiple of the block size is accepted. ``docs/measurements.md`` has why."""

MAX_FRAME_SIZE = 16 * 1024 * 1024
"""The largest raw frame that is accepted: what one read may have to decompress."""

MAX_FRAMES = 1 << 26
"""16 TiB of pack, the reach of a 32-bit block address, in the smallest frames that make sense."""

SKIPPABLE_MAGIC = 0x184D2A50
SEEK_TABLE_MAGIC = 0x184D2A5E
SEEKABLE_FOOTER_MAGIC = 0x8F92EAB1

FRAME_INDEX_MAGIC = b"\xcd\xe4\xec\x67"
FRAME_INDEX_VERSION = 1
COMPRESSION_ZSTD = 1
HASH_SHA256 = 1
"""Of frames; the number is the draft's."""

CHUNK_LIST_MAGIC = b"imgchunk"
CHUNK_LIST_VERSION = 1
CHUNK_HASH_BLAKE3 = 1
"""Of chunks; the number is ours. To change it costs the deduplication against every pack that is stored."""
CHUNK_LIST_INCOMPATIBLE = 0
"""Incompatible features that are understood: none yet."""


@dataclass(frozen=True, slots=True)
class SkippableHeader:
    """Head of a zstd skippable frame (RFC 8878 §3.1.2)."""

    magic: int
    size: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<II")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.magic, self.size)


@dataclass(frozen=True, slots=True)
class FrameIndexHeader:
    """Head of the frame index (erofs-image-spec, draft of 2026)."""

    raw_size: int
    frames: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<4sBBHQIBB10x")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            FRAME_INDEX_MAGIC,
            FRAME_INDEX_VERSION,
            COMPRESSION_ZSTD,
            0,
            self.raw_size,
            self.frames,
            HASH_SHA256,
            32,
        )

    @classmethod
    def unpack(cls, data: bytes) -> FrameIndexHeader:
        if len(data) < cls.STRUCT.size:
            raise MalformedError(f"frame index has {len(data)} bytes, its header alone takes {cls.STRUCT.size}")
        magic, version, compression, flags, raw_size, frames, algorithm, hash_size = cls.STRUCT.unpack_from(data)
        if magic != FRAME_INDEX_MAGIC:
            raise MalformedError(f"not a frame index: magic {magic.hex()}")
        if (version, compression, flags, algorithm, hash_size) != (1, COMPRESSION_ZSTD, 0, HASH_SHA256, 32):
            raise UnsupportedError(
                f"frame index of version {version}, compression {compression}, flags {flags:#x}, "
                f"hash {algorithm} of {hash_size} bytes; this release reads version 1 with zstd and sha256"
            )
        return cls(raw_size, frames)


@dataclass(frozen=True, slots=True)
class FrameRecord:
    """Where a frame begins in the blob and in the raw pack, and the sha256 of its raw bytes."""

    blob_offset: int
    raw_offset: int
    sha256: bytes

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<QQ32s")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.blob_offset, self.raw_offset, self.sha256)


@dataclass(frozen=True, slots=True)
class ChunkListHeader:
    """Head of the chunk list: magic, version, features a reader may ignore, and features it must know."""

    chunks: int
    compatible: int = 0
    incompatible: int = 0

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<8sHBxIII")

    def pack(self) -> bytes:
        return self.STRUCT.pack(
            CHUNK_LIST_MAGIC, CHUNK_LIST_VERSION, CHUNK_HASH_BLAKE3, self.compatible, self.incompatible, self.chunks
        )

    @classmethod
    def unpack(cls, data: bytes) -> ChunkListHeader:
        if len(data) < cls.STRUCT.size:
            raise MalformedError(f"chunk list has {len(data)} bytes, its header alone takes {cls.STRUCT.size}")
        magic, version, algorithm, compatible, incompatible, chunks = cls.STRUCT.unpack_from(data)
        if magic != CHUNK_LIST_MAGIC:
            raise MalformedError(f"not a chunk list: magic {magic!r}")
        if version != CHUNK_LIST_VERSION or algorithm != CHUNK_HASH_BLAKE3:
            raise UnsupportedError(
                f"chunk list of version {version} with hash {algorithm}; this release reads version "
                f"{CHUNK_LIST_VERSION} with hash {CHUNK_HASH_BLAKE3} (BLAKE3)"
            )
        if incompatible & ~CHUNK_LIST_INCOMPATIBLE:
            raise UnsupportedError(f"chunk list needs unknown features {incompatible:#x}")
        return cls(chunks, compatible, incompatible)


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk: BLAKE3 of its padded bytes, and how many blocks it takes. It begins where the one before ends."""

    key: bytes
    blocks: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<32sI")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.key, self.blocks)


@dataclass(frozen=True, slots=True)
class SeekEntry:
    """A frame in the seek table: compressed and raw size."""

    compressed: int
    raw: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<II")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.compressed, self.raw)


@dataclass(frozen=True, slots=True)
class SeekFooter:
    """Last nine bytes of the seek table (zstd, contrib/seekable_format)."""

    frames: int

    STRUCT: ClassVar[struct.Struct] = struct.Struct("<IBI")

    def pack(self) -> bytes:
        return self.STRUCT.pack(self.frames, 0, SEEKABLE_FOOTER_MAGIC)


def skippable(content: bytes, magic: int = SKIPPABLE_MAGIC) -> bytes:
    """``content`` as a zstd skippable frame."""
    return SkippableHeader(magic, len(content)).pack() + content


def unpack_chunk_list(data: bytes) -> tuple[memoryview, int]:
    """Check a chunk list; returns its records as raw bytes, and their number."""
    header = ChunkListHeader.unpack(data)
    body = memoryview(data)[ChunkListHeader.STRUCT.size :]
    if len(body) != header.chunks * ChunkRecord.STRUCT.size:
        raise MalformedError(f"chunk list of {header.chunks} chunks has {len(body)} bytes of records")
    return body, header.chunks


def unpack_frame_index(data: bytes, blob_size: int) -> tuple[int, array[int], array[int]]:
    """Check a frame index wholly; returns the raw size of the pack, and where frames begin in it and in the blob.

    Args:
        data: header and records, without the skippable frame's own head.
        blob_size: of the stored pack, which no frame may leave.
    """
    header = FrameIndexHeader.unpack(data)
    size = FrameRecord.STRUCT.size
    body = memoryview(data)[FrameIndexHeader.STRUCT.size :]
    if header.frames > MAX_FRAMES or len(body) != header.frames * size:
        raise MalformedError(f"frame index of {header.frames} frames has {len(body)} bytes of records")
    if header.raw_size % BLOCK_SIZE:
        raise MalformedError(f"pack of {header.raw_size} bytes is not padded to {BLOCK_SIZE}")
    if (header.raw_size == 0) != (header.frames == 0):
        raise MalformedError(f"pack of {header.raw_size} bytes in {header.frames} frames")
    blob_offsets, raw_offsets = _columns(body)
    if header.frames and (raw_offsets[0] or blob_offsets[0]):
        raise MalformedError("the first frame does not begin at 0")
    for number in range(header.frames):
        last = number + 1 == header.frames
        length = (header.raw_size if last else raw_offsets[number + 1]) - raw_offsets[number]
        blob_end = blob_size if last else blob_offsets[number + 1]
        if not 0 < length <= MAX_FRAME_SIZE or length % BLOCK_SIZE:
            raise MalformedError(f"frame {number} of a pack has {length} raw bytes")
        if not blob_offsets[number] < blob_end <= blob_size:
            raise MalformedError(f"frame {number} of a pack lies outside its blob")
    return header.raw_size, raw_offsets, blob_offsets


def _columns(records: memoryview) -> tuple[array[int], array[int]]:
    """The first two numbers of all FrameRecords: packs have tens of thousands of frames, so they get no objects."""
    words = array("Q")
    words.frombytes(records)
    if sys.byteorder == "big":
        words.byteswap()
    stride = FrameRecord.STRUCT.size // words.itemsize
    return words[0::stride], words[1::stride]
