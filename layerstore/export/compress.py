"""Compression of what is exported: pieces compressed by a pool, written in order.

The bytes depend on the input, the level, and the release of zlib or zstd, never on the number of threads.

* gzip: one member (RFC 1952), since some readers stop after the first. Each piece of 1 MiB is compressed with the
  32 KiB before it as its dictionary, and ends at a byte boundary (RFC 1951, an empty stored block), as pigz does it.
* zstd: a frame for each 4 MiB, with its size and a checksum; every decoder reads concatenated frames.
"""

from __future__ import annotations

import struct
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer

Write = Callable[[bytes], object]

GZIP_LEVEL = 6
"""The one that others' layers have."""
ZSTD_LEVEL = 3

_GZIP_PIECE = 1 << 20
_ZSTD_PIECE = 4 << 20
_WINDOW = 32 << 10
_GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
"""deflate, no flags, no time, no level, unknown system: nothing that differs between machines."""


class Compression(StrEnum):
    """How an exported layer is compressed."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"

    @property
    def suffix(self) -> str:
        """As media types name it."""
        return "" if self is Compression.NONE else self.value


class Compressor(Protocol):
    """Takes bytes, writes compressed ones. What isn't closed is incomplete; ``abandon`` lets go of it."""

    def write(self, data: Buffer) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...


def compressor(compression: Compression, write: Write, pool: ThreadPoolExecutor, *, jobs: int) -> Compressor:
    """A compressor that gives its output to ``write``, in the thread that uses it."""
    match compression:
        case Compression.NONE:
            return _Plain(write)
        case Compression.GZIP:
            return _Gzip(write, pool, jobs)
        case Compression.ZSTD:
            return _Zstd(write, pool, jobs)


class _Plain:
    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, data: Buffer) -> None:
        self._write(bytes(data))

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _Pieces(ABC):
    """Cuts what is written into pieces of one size, the last one shorter; the pool compresses them."""

    def __init__(self, write: Write, pool: ThreadPoolExecutor, jobs: int, piece: int) -> None:
        self._write = write
        self._pool = pool
        self._most = jobs + 2
        self._piece = piece
        self._buffer = bytearray()
        self._pending: deque[Future[bytes]] = deque()

    def write(self, data: Buffer) -> None:
        self._buffer += memoryview(data)
        at = 0
        while len(self._buffer) - at > self._piece:  # the last piece is told from the others, so one is kept back
            self._submit(bytes(memoryview(self._buffer)[at : at + self._piece]), False)
            at += self._piece
        if at:
            del self._buffer[:at]

    def close(self) -> None:
        self._submit(bytes(self._buffer), True)
        self._buffer.clear()
        self._drain(0)

    def abandon(self) -> None:
        while self._pending:
            self._pending.popleft().cancel()

    def _submit(self, data: bytes, last: bool) -> None:
        self._pending.append(self._start(data, last))
        self._drain(self._most)

    def _drain(self, most: int) -> None:
        while len(self._pending) > most:
            self._write(self._pending.popleft().result())

    @abstractmethod
    def _start(self, data: bytes, last: bool) -> Future[bytes]:
        """Have a piece compressed."""


class _Gzip(_Pieces):
    def __init__(self, write: Write, pool: ThreadPoolExecutor, jobs: int) -> None:
        super().__init__(write, pool, jobs, _GZIP_PIECE)
        self._before = b""
        self._crc = 0
        self._size = 0
        write(_GZIP_HEAD)

    def close(self) -> None:
        super().close()
        self._write(struct.pack("<II", self._crc, self._size & 0xFFFF_FFFF))

    def _start(self, data: bytes, last: bool) -> Future[bytes]:
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        before, self._before = self._before, data[-_WINDOW:]
        return self._pool.submit(_deflate, data, before, last)


def _deflate(data: bytes, before: bytes, last: bool) -> bytes:
    # 8: the memory level that is zlib's default.
    stream = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, 8, zlib.Z_DEFAULT_STRATEGY, before)
    return stream.compress(data) + stream.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


class _Zstd(_Pieces):
    def __init__(self, write: Write, pool: ThreadPoolExecutor, jobs: int) -> None:
        super().__init__(write, pool, jobs, _ZSTD_PIECE)

    def _start(self, data: bytes, last: bool) -> Future[bytes]:
        return self._pool.submit(_frame, data)


def _frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True).compress(data)
