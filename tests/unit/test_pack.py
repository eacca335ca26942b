"""Packs: what is written is what is read, and nothing else is."""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from support.tools import need_tool

from layerstore.digest import Digest
from layerstore.errors import CorruptError, MalformedError, UnsupportedError
from layerstore.pack import format as pack_format
from layerstore.pack.chunks import chunk_key
from layerstore.pack.format import BLOCK_SIZE, FRAME_SIZE, ChunkListHeader, ChunkRecord, FrameIndexHeader, FrameRecord
from layerstore.pack.reader import FrameIndex, PackReader, read_span
from layerstore.pack.stored import StoredPack
from layerstore.pack.writer import PackWriter
from layerstore.store.memory import MemoryStore


def noise(count: int, seed: int) -> bytes:
    """Half compressible bytes: ``count`` of them."""
    unit = hashlib.sha256(str(seed).encode()).digest() + bytes(32)
    return (unit * (count // len(unit) + 1))[:count]


def write_pack(store: MemoryStore, chunks: list[bytes], *, level: int = 3, jobs: int = 2) -> StoredPack:
    with ThreadPoolExecutor(jobs) as pool, store.upload() as upload:
        writer = PackWriter(upload, pool, jobs=jobs, level=level)
        for chunk in chunks:
            writer.add([(chunk_key(chunk), len(chunk) // BLOCK_SIZE)], chunk)
        pack = writer.finish()
        upload.commit(pack.blob, pack.blob_size)
    return pack


CHUNKS = [noise(BLOCK_SIZE * n, n) for n in (1, 16, 3, 64, 200, 7)]


def test_a_pack_reads_back_and_is_named_by_its_raw_bytes() -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    raw = b"".join(CHUNKS)
    assert pack.digest == Digest.of(raw)
    assert pack.raw_size == len(raw)
    with store.open(pack.blob) as blob:
        reader = PackReader(pack, blob)
        assert reader.read_at(0, len(raw)) == raw
        for offset, length in ((0, 1), (FRAME_SIZE - 1, 2), (len(raw) - 5, 5), (12345, FRAME_SIZE * 2), (len(raw), 0)):
            assert reader.read_at(offset, length) == raw[offset : offset + length]
        with pytest.raises(CorruptError):
            reader.read_at(len(raw) - 1, 2)


def test_levels_and_jobs_never_change_the_pack() -> None:
    store = MemoryStore()
    packs = [write_pack(store, CHUNKS, level=level, jobs=jobs) for level, jobs in ((1, 1), (3, 1), (3, 4), (12, 2))]
    assert len({pack.digest for pack in packs}) == 1
    assert packs[1] == packs[2]


def test_plain_zstd_restores_the_raw_pack() -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    with store.open(pack.blob) as blob:
        data = blob.read_at(0, blob.size)
    result = subprocess.run([need_tool("zstd"), "-d", "-c"], input=data, capture_output=True, check=True)
    assert result.stdout == b"".join(CHUNKS)


def test_the_seek_table_is_the_seekable_formats() -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    with store.open(pack.blob) as blob:
        data = blob.read_at(0, blob.size)
    frames, descriptor, magic = pack_format.SeekFooter.STRUCT.unpack(data[-9:])
    assert (descriptor, magic) == (0, 0x8F92EAB1)
    table = data[-9 - frames * 8 : -9]
    head = data[-9 - frames * 8 - 8 : -9 - frames * 8]
    assert pack_format.SkippableHeader(*pack_format.SkippableHeader.STRUCT.unpack(head)) == (
        pack_format.SkippableHeader(0x184D2A5E, frames * 8 + 9)
    )
    position, raw = 0, b""
    for compressed, size in pack_format.SeekEntry.STRUCT.iter_unpack(table):
        piece = zstandard.ZstdDecompressor().decompress(data[position : position + compressed])
        assert len(piece) == size
        raw += piece
        position += compressed
    assert raw == b"".join(CHUNKS)


def test_record_sizes() -> None:
    # erofs-image-spec (draft) and zstd's seekable format give these; ours are documented in docs/formats.md.
    assert FrameIndexHeader.STRUCT.size == 32
    assert FrameRecord.STRUCT.size == 48
    assert ChunkRecord.STRUCT.size == 36
    assert ChunkListHeader.STRUCT.size == 24
    assert FrameIndexHeader(8192, 1).pack()[:4] == bytes.fromhex("cde4ec67")


@pytest.mark.case("C10")
@pytest.mark.parametrize("where", [0, 5, 100, -1])
def test_a_damaged_frame_is_named_and_never_returned(where: int) -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    with store.open(pack.blob) as blob:
        data = bytearray(blob.read_at(0, blob.size))
    offset = where if where >= 0 else pack.data_end - 1
    data[offset] ^= 0x40
    store.content[pack.blob] = (bytes(data), 0)
    with store.open(pack.blob) as blob, pytest.raises(CorruptError, match=r"frame \d+ of pack sha256:"):
        PackReader(pack, blob).read_at(0, pack.raw_size)


def test_a_frame_that_claims_a_huge_size_is_refused_before_it_inflates() -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    with store.open(pack.blob) as blob:
        index = FrameIndex.read(pack, blob)
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(CorruptError, match="wrong length"):
        index.decode(0, bomb)


@pytest.mark.case("C08")
def test_other_versions_and_unknown_features_are_refused() -> None:
    header = bytearray(ChunkListHeader(0).pack())
    header[8] = 2
    with pytest.raises(UnsupportedError, match="version 2"):
        pack_format.unpack_chunk_list(bytes(header))
    with pytest.raises(UnsupportedError, match="0x4"):
        pack_format.unpack_chunk_list(ChunkListHeader(0, incompatible=4).pack())
    index = bytearray(FrameIndexHeader(0, 0).pack())
    index[4] = 9
    with pytest.raises(UnsupportedError, match="version 9"):
        pack_format.unpack_frame_index(bytes(index), 0)


def test_an_index_with_a_wrong_digest_is_corrupt() -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    with store.open(pack.blob) as blob:
        data = bytearray(blob.read_at(0, blob.size))
    data[pack.frame_index.offset + 40] ^= 1
    store.content[pack.blob] = (bytes(data), 0)
    with store.open(pack.blob) as blob, pytest.raises(CorruptError, match="frame index"):
        read_span(blob, pack.frame_index, "frame index")


def test_descriptors_carry_everything() -> None:
    store = MemoryStore()
    pack = write_pack(store, CHUNKS)
    descriptor = pack.descriptor()
    assert StoredPack.from_descriptor(descriptor) == pack
    for missing in descriptor.annotations:
        if missing in ("org.erofs.role", "org.erofs.chunk-index.mediaType"):
            continue
        notes = {key: value for key, value in descriptor.annotations.items() if key != missing}
        broken = type(descriptor)(descriptor.media_type, descriptor.digest, descriptor.size, notes)
        with pytest.raises(MalformedError, match="annotation"):
            StoredPack.from_descriptor(broken)
