"""Decoders: every stream and frame, bounded output, and nothing taken on trust."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from collections.abc import Callable, Iterable

import pytest
import zstandard

from layerstore.errors import LimitError, MalformedError, UnsupportedError
from layerstore.tar.compression import OUTPUT, SNIFFED, Compression, decompress, sniff

MEMORY = 1 << 30
TEXT = b"".join(b"line %d of some text\n" % i for i in range(20_000))


def zstd(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)  # type: ignore[arg-type]


def zstd_stream(data: bytes) -> bytes:
    """A frame whose header has no content size."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


def skippable(body: bytes, kind: int = 0) -> bytes:
    return bytes([0x50 + kind]) + b"\x2a\x4d\x18" + len(body).to_bytes(4, "little") + body


COMPRESSORS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.NONE: bytes,
    Compression.GZIP: gzip.compress,
    Compression.ZSTD: zstd,
    Compression.XZ: lzma.compress,
    Compression.BZIP2: bz2.compress,
}
COMPRESSED = [kind for kind in Compression if kind is not Compression.NONE]


def pieces(data: bytes, size: int) -> Callable[[], bytes]:
    stream = io.BytesIO(data)
    return lambda: stream.read(size)


def decoded(data: bytes, compression: Compression | None = None, *, size: int = 65_536, memory: int = MEMORY) -> bytes:
    kind = sniff(data[:SNIFFED]) if compression is None else compression
    found = list(decompress(pieces(data, size), kind, memory=memory))
    assert all(0 < len(piece) <= OUTPUT for piece in found)
    return b"".join(found)


@pytest.mark.case("Z07")
@pytest.mark.parametrize("compression", list(Compression))
def test_compression_is_told_by_magic(compression: Compression) -> None:
    data = COMPRESSORS[compression](TEXT)
    assert sniff(data[:SNIFFED]) is compression
    assert decoded(data) == TEXT


@pytest.mark.case("Z07")
def test_magic_numbers() -> None:
    assert sniff(skippable(b"")) is Compression.ZSTD
    assert sniff(skippable(b"", 15)[:SNIFFED]) is Compression.ZSTD
    assert sniff(bz2.compress(b"")) is Compression.BZIP2
    for other in (b"", b"\x1f", b"\x1f\x8b", b"\x1f\x8b\x00", b"BZh9.txt\0\0", b"BZh0", b"\x60\x2a\x4d\x18", b"ustar"):
        assert sniff(other) is Compression.NONE


@pytest.mark.case("Z01")
@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("size", [1, 7, 65_536])
def test_every_stream_of_a_blob_is_read(compression: Compression, size: int) -> None:
    parts = [TEXT[:512], b"", TEXT[512:3000], b"x"]
    data = b"".join(COMPRESSORS[compression](part) for part in parts)
    assert decoded(data, size=size) == b"".join(parts)


@pytest.mark.case("Z03")
def test_zstd_frames_of_every_form() -> None:
    frames = (
        skippable(b"table of contents"),
        zstd_stream(TEXT),
        skippable(b""),
        zstd(TEXT, write_checksum=True, write_content_size=False),
        zstd(b"", write_checksum=True),
        zstd(b"z" * 300),
        skippable(b"x" * 100_000, 14),
    )
    for size in (1, 3, 65_536, 1 << 20):
        assert decoded(b"".join(frames), size=size) == TEXT + TEXT + b"z" * 300
    assert decoded(skippable(b"nothing else")) == b""


@pytest.mark.case("Z03")
def test_a_zstd_content_size_is_not_trusted() -> None:
    frame = bytearray(zstd(TEXT))
    flags = frame[4]
    assert flags >> 6 == 2, "four bytes of content size"
    at = 5 + (0 if flags >> 5 & 1 else 1)
    for wrong in (0, 1, len(TEXT) - 1, len(TEXT) + 1):
        frame[at : at + 4] = wrong.to_bytes(4, "little")
        with pytest.raises(MalformedError, match="zstd data is damaged"):
            decoded(bytes(frame))


@pytest.mark.case("Z03")
def test_a_window_above_the_limit_is_refused_before_it_is_allocated() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(TEXT) + compressor.flush()
    assert decoded(data) == TEXT
    with pytest.raises(LimitError, match="window too large: the zstd layer needs 134217728 bytes"):
        decoded(data, memory=(1 << 27) - 1)
    # magic, a frame with a window of 2 GiB (--long=31), then anything
    with pytest.raises(LimitError, match="window too large"):
        decoded(b"\x28\xb5\x2f\xfd\x00\xa8" + bytes(100))
    single_segment = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")
    with pytest.raises(LimitError, match="window too large: the zstd layer needs 1099511627776 bytes"):
        decoded(single_segment + bytes(100))
    with pytest.raises(LimitError, match="window too large: the xz layer"):
        decoded(lzma.compress(TEXT, preset=6), memory=1 << 20)


def test_a_zstd_dictionary_is_not_supported() -> None:
    dictionary = zstandard.train_dictionary(1024, [b"line %d of a sample text" % i for i in range(2000)])
    with pytest.raises(UnsupportedError, match="dictionary"):
        decoded(zstandard.ZstdCompressor(dict_data=dictionary).compress(TEXT))


@pytest.mark.case("T41")
@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_blob_cut_anywhere_is_truncated(compression: Compression) -> None:
    data = COMPRESSORS[compression](TEXT[:3000])
    for cut in range(SNIFFED, len(data)):
        with pytest.raises(MalformedError, match="truncated layer"):
            decoded(data[:cut], compression)
    with pytest.raises(MalformedError, match="truncated layer"):
        decoded(data + data[: len(data) // 2], compression)


@pytest.mark.parametrize("compression", COMPRESSED)
@pytest.mark.parametrize("rest", [b"garbage, longer than any header", b"\0\0garbage of more bytes"])
def test_garbage_behind_the_data_is_refused(compression: Compression, rest: bytes) -> None:
    for size in (5, 65_536):
        with pytest.raises(MalformedError):
            decoded(COMPRESSORS[compression](TEXT[:9000]) + rest, size=size)


def test_zeros_behind_the_data_are_padding_where_the_format_has_it() -> None:
    for size in (1, 65_536):
        assert (
            decoded(gzip.compress(TEXT[:900]) + bytes(1000) + gzip.compress(b"more") + b"\0", size=size)
            == TEXT[:900] + b"more"
        )
        assert decoded(lzma.compress(TEXT[:900]) + bytes(8) + lzma.compress(b"more"), size=size) == TEXT[:900] + b"more"
        for data in (lzma.compress(b"x") + bytes(6), bz2.compress(b"x") + bytes(4), zstd(b"x") + bytes(4)):
            with pytest.raises(MalformedError):
                decoded(data, size=size)


@pytest.mark.parametrize("compression", COMPRESSED)
def test_flipped_bits_are_found_by_the_formats_own_checks(compression: Compression) -> None:
    kinds: dict[Compression, Callable[[bytes], bytes]] = {
        **COMPRESSORS,
        Compression.ZSTD: lambda data: zstd(data, write_checksum=True),
    }
    whole = kinds[compression](random.Random(1).randbytes(2000))
    for at in range(40, len(whole) - 40, 97):
        data = bytearray(whole)
        data[at] ^= 4
        with pytest.raises((MalformedError, LimitError)):
            decoded(bytes(data), compression)


@pytest.mark.case("Z10")
@pytest.mark.parametrize("compression", COMPRESSED)
def test_output_of_a_bomb_comes_in_bounded_pieces(compression: Compression) -> None:
    size = 16 << 20
    bomb = COMPRESSORS[compression](bytes(size))
    assert len(bomb) < size // 900
    lengths: Iterable[int] = map(len, decompress(pieces(bomb, 1 << 18), compression, memory=MEMORY))
    longest = total = 0
    for length in lengths:
        longest, total = max(longest, length), total + length
    assert longest <= OUTPUT
    assert total == size


@pytest.mark.case("Z10")
def test_a_zstd_bomb_of_run_length_blocks_is_bounded() -> None:
    block = ((1 << 17) << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    bomb = b"\x28\xb5\x2f\xfd\x00\x38" + block * 4096  # 512 MiB from 16 KiB, and no last block
    produced = decompress(pieces(bomb, 1 << 18), Compression.ZSTD, memory=MEMORY)
    assert {len(next(produced)) for _ in range(100)} == {OUTPUT}
