"""Compression of a layer: told by magic, undone piece by piece.

Formats: gzip RFC 1952, zstd RFC 8878, xz ("The .xz File Format" 1.1), bzip2. All of them may be concatenated, and are
read to the end of the blob. Sizes in headers are never used for allocation, and no piece of output is larger than
OUTPUT, so a bomb costs time until the caller's limit stops it, but no memory.
"""

from __future__ import annotations

import bz2
import enum
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import zstandard
from isal import igzip_lib

from layerstore.errors import LimitError, MalformedError, UnsupportedError

OUTPUT = 1 << 18  # bytes of one decompressed piece at most; pieces that fit a core's cache are cheaper to pass on
SNIFFED = 10  # bytes that sniff() wants to see

Pull = Callable[[], bytes]
"""The next piece of the blob, empty at its end."""

# isal's stubs declare the class as an instance of Exception
_IsalError: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]

_GZIP = b"\x1f\x8b\x08"  # ID1, ID2, CM = deflate
_XZ = b"\xfd7zXZ\0"
_ZSTD = b"\x28\xb5\x2f\xfd"  # le32 0xFD2FB528
_SKIPPABLE = b"\x2a\x4d\x18"  # behind a byte 0x50 to 0x5F
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")  # pi for a block, its square root for the end of an empty stream


class Compression(enum.Enum):
    """How a layer is compressed; the value is the suffix of its media type, where OCI defines one."""

    NONE = ""
    GZIP = "gzip"
    ZSTD = "zstd"
    XZ = "xz"
    BZIP2 = "bzip2"


def sniff(head: bytes) -> Compression:
    """Tell the compression by the first SNIFFED bytes; fewer only if the blob has no more."""
    if head.startswith(_GZIP):
        return Compression.GZIP
    if head.startswith(_ZSTD) or (head[1:4] == _SKIPPABLE and head[0] & 0xF0 == 0x50):
        return Compression.ZSTD
    if head.startswith(_XZ):
        return Compression.XZ
    if head[:3] == b"BZh" and head[3:4] in b"123456789" and head[4:10] in _BZIP2_BLOCKS:
        return Compression.BZIP2
    return Compression.NONE


def decompress(pull: Pull, compression: Compression, *, memory: int) -> Iterator[bytes]:
    """The decompressed bytes in pieces of at most OUTPUT, as far as the input comes in such pieces itself.

    Args:
        pull: the blob.
        compression: what :func:`sniff` said.
        memory: bytes that zstd and xz may use for their windows.

    Raises:
        MalformedError: damaged, cut short, or followed by something else.
        LimitError: needs a larger window than ``memory``.
        UnsupportedError: needs a zstd dictionary.
    """
    match compression:
        case Compression.NONE:
            return iter(pull, b"")
        case Compression.ZSTD:
            return _zstd(pull, memory)
        case Compression.GZIP:
            return _streams(pull, _Codec("gzip", _gzip_stream, padding=1))
        case Compression.XZ:
            return _streams(pull, _Codec("xz", lambda: _xz_stream(memory), padding=4))
        case Compression.BZIP2:
            return _streams(pull, _Codec("bzip2", bz2.BZ2Decompressor, padding=0))


class _Stream(Protocol):
    """A decoder of one gzip member, or one xz or bzip2 stream."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Codec:
    """A format of concatenated streams; ``padding``: zeros between them come in multiples of it (0: none)."""

    name: str
    start: Callable[[], _Stream]
    padding: int


def _gzip_stream() -> _Stream:
    stream: _Stream = igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP)
    return stream


def _xz_stream(memory: int) -> _Stream:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=memory)


def _streams(pull: Pull, codec: _Codec) -> Iterator[bytes]:
    position = 0  # in the output
    data = pull()
    while True:
        stream = codec.start()
        while not stream.eof:
            if stream.needs_input and not data:
                data = pull()
                if not data:
                    raise MalformedError(f"truncated layer: its {codec.name} data ends too early", offset=position)
            try:
                piece = stream.decompress(data, OUTPUT)
            except (_IsalError, lzma.LZMAError, OSError, ValueError, EOFError) as error:
                if "memory usage limit" in str(error).lower():
                    raise LimitError("window too large: the xz layer needs more than decoder_memory") from error
                raise MalformedError(f"layer's {codec.name} data is damaged: {error}", offset=position) from error
            data = b""
            if piece:
                position += len(piece)
                yield piece
        data = _skip_padding(stream.unused_data, pull, codec, position)
        if not data:
            return


def _skip_padding(data: bytes, pull: Pull, codec: _Codec, position: int) -> bytes:
    """What follows the zeros between two streams; empty at the end of the blob."""
    zeros = 0
    data = data or pull()
    while data:
        rest = data.lstrip(b"\0")
        zeros += len(data) - len(rest)
        if rest:
            data = rest
            break
        data = pull()
    if zeros % codec.padding if codec.padding else zeros:
        raise MalformedError(f"layer has {zeros} zero bytes behind its {codec.name} data", offset=position)
    return data


def _zstd(pull: Pull, memory: int) -> Iterator[bytes]:
    frames = _Frames(pull, memory)
    decompressor = zstandard.ZstdDecompressor(max_window_size=min(memory, 1 << 31))
    position = 0
    with decompressor.stream_reader(frames, read_across_frames=True) as reader:  # type: ignore[arg-type]
        while True:
            try:
                piece = reader.read(OUTPUT)
            except zstandard.ZstdError as error:
                raise MalformedError(f"layer's zstd data is damaged: {error}", offset=position) from error
            if not piece:
                return
            position += len(piece)
            yield piece


_BLOCK_MAX = 1 << 17  # Block_Maximum_Size
_RAW, _RLE, _COMPRESSED, _RESERVED = range(4)  # Block_Type


class _Frames:
    """Follows the frames and blocks of a zstd stream on its way to the decoder.

    libzstd's streaming reader can't tell a blob that ends inside a frame from a complete one, and speaks of a window
    that is too large in words of its own. Only the headers are looked at, one per 128 KiB of output.
    """

    def __init__(self, pull: Pull, memory: int) -> None:
        self._pull = pull
        self._memory = memory
        self._skip = 0  # bytes of bodies still to come
        self._head = bytearray()  # the header that is being collected
        self._wanted = 4
        self._parse = self._magic
        self._checksum = 0  # bytes behind the last block

    def read(self, size: int = -1) -> bytes:
        """The next piece, whatever its size: what the decoder calls."""
        data = self._pull()
        if data:
            self._follow(data)
        elif self._skip or self._head or self._parse != self._magic:
            raise MalformedError("truncated layer: its zstd data ends inside a frame")
        return data

    def _follow(self, data: bytes) -> None:
        at, end = 0, len(data)
        while at < end:
            if self._skip:
                step = min(self._skip, end - at)
                self._skip -= step
                at += step
                continue
            step = min(self._wanted - len(self._head), end - at)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == self._wanted:
                self._parse()

    def _expect(self, wanted: int, parse: Callable[[], None]) -> None:
        self._head.clear()
        self._wanted = wanted
        self._parse = parse

    def _magic(self) -> None:
        if self._head == _ZSTD:
            self._expect(1, self._descriptor)
        elif self._head[1:] == _SKIPPABLE and self._head[0] & 0xF0 == 0x50:
            self._expect(4, self._skippable)
        else:
            raise MalformedError("layer has something else behind its zstd frames")

    def _skippable(self) -> None:
        self._skip = int.from_bytes(self._head, "little")
        self._expect(4, self._magic)

    def _descriptor(self) -> None:
        """Frame_Header_Descriptor: tells how long the frame header is."""
        flags = self._head[0]
        single_segment = flags >> 5 & 1
        content_size = (single_segment, 2, 4, 8)[flags >> 6]
        dictionary = (0, 1, 2, 4)[flags & 3]
        self._checksum = 4 * (flags >> 2 & 1)
        self._wanted = 1 + (1 - single_segment) + dictionary + content_size
        self._parse = self._frame_header

    def _frame_header(self) -> None:
        flags = self._head[0]
        single_segment = flags >> 5 & 1
        at = 1
        window = 0
        if not single_segment:
            exponent, mantissa = self._head[1] >> 3, self._head[1] & 7
            window = (1 << 10 + exponent) * (8 + mantissa) // 8
            at = 2
        dictionary = (0, 1, 2, 4)[flags & 3]
        if any(self._head[at : at + dictionary]):
            raise UnsupportedError("zstd layer needs a dictionary")
        if single_segment:  # the window is the whole content
            window = int.from_bytes(self._head[at + dictionary :], "little")
            if flags >> 6 == 1:
                window += 256
        if window > self._memory:
            raise LimitError(f"window too large: the zstd layer needs {window} bytes; decoder_memory is {self._memory}")
        self._expect(3, self._block)

    def _block(self) -> None:
        header = int.from_bytes(self._head, "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == _RESERVED or (size > _BLOCK_MAX and kind != _RLE):
            raise MalformedError("layer's zstd data is damaged: block header")
        self._skip = 1 if kind == _RLE else size
        if last:
            self._skip += self._checksum
            self._expect(4, self._magic)
        else:
            self._expect(3, self._block)
