"""Connections whose answers end: at a deadline, and after so many bytes, whatever the server does.

A timeout of a socket counts from byte to byte, so a server that drips one byte at a time keeps a reader as long as it
likes; and http.client believes a chunk size of -1, which is everything until the connection closes. So the bounds are
kept where bytes come in, below both libraries. All that is used of them here is their public interface.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

if TYPE_CHECKING:
    from typing_extensions import Buffer


class TooLongError(OSError):
    """More bytes came than what was asked for can have."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What one answer may take: until when, by ``time.monotonic()``, and how many bytes, its headers included.

    ``idle`` are seconds without a byte: what is very long may take hours, but not stand still.
    """

    until: float
    bytes: int
    idle: float = float("inf")


_TERMS: ContextVar[Terms] = ContextVar("terms")


@contextmanager
def terms(agreed: Terms) -> Iterator[None]:
    """Answers to what this thread asks for in the block have these bounds, also while they are read after it."""
    token = _TERMS.set(agreed)
    try:
        yield
    finally:
        _TERMS.reset(token)


class _Reader(io.RawIOBase):
    """The incoming bytes of one answer."""

    def __init__(self, sock: socket.socket, agreed: Terms) -> None:
        self._socket = sock
        self._file = sock.makefile("rb", buffering=0)
        self._until = agreed.until
        self._idle = agreed.idle
        self._left = agreed.bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        if self._left <= 0:
            raise TooLongError("longer than what was asked for")
        self._socket.settimeout(min(seconds, self._idle))
        count = self._file.readinto(buffer)
        self._left -= count or 0
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Socket:
    """A connected socket whose files are such readers."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_Reader(self._socket, _TERMS.get()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class _Connection(HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock = _Socket(self.sock)


class _SecureConnection(HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock = _Socket(self.sock)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


POOLS = {"http": _Pool, "https": _SecurePool}
"""For ``PoolManager.pool_classes_by_scheme``."""
