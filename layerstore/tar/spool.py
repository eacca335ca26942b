"""A growing anonymous file: the decompressed layer, readable at any offset as soon as it is there."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import BinaryIO

from layerstore.errors import CorruptError, MalformedError, UsageError, os_errors

_LEAD = 2 << 20  # bytes a reader lets the writer get ahead, once it has to wait: fewer switches between them
_NOBODY = 1 << 63


class Spool:
    """One writer appends; any number of threads read what lies below the watermark, and wait for what doesn't yet.

    A :class:`~layerstore.tree.inode.ByteSource`. The file has no name, so nothing stays behind.
    """

    def __init__(self, file: BinaryIO, size: int | None) -> None:
        self._file = file
        self._fd = file.fileno()
        self._ready = 0 if size is None else size  # the watermark: below it, bytes never change
        self._ended = size is not None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._wanted = _NOBODY  # the lowest watermark that somebody waits for

    @classmethod
    def create(cls, directory: str) -> Spool:
        """An empty one, in a directory of the file system whose space it may use."""
        with os_errors("create temporary file"):
            return cls(tempfile.TemporaryFile(dir=directory, buffering=0), None)

    @classmethod
    def over(cls, file: BinaryIO, size: int) -> Spool:
        """A plain file that is complete already. Closing the spool closes it."""
        return cls(file, size)

    # the writer's side

    def append(self, data: bytes) -> None:
        view = memoryview(data)
        at = self._ready
        with os_errors("write temporary file"):
            while view:
                written = os.pwrite(self._fd, view, at)
                at += written
                view = view[written:]
        with self._changed:
            self._ready = at
            if at >= self._wanted:
                self._wake()

    def end(self) -> None:
        """No more will come."""
        with self._changed:
            self._ended = True
            self._wake()

    def fail(self, error: BaseException) -> None:
        """No more will come, and this is why. The first reason stands."""
        with self._changed:
            self._error = self._error or error
            self._ended = True
            self._wake()

    def _wake(self) -> None:
        self._wanted = _NOBODY
        self._changed.notify_all()

    # the readers' side

    def read(self, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes, fewer only at the end of the layer.

        Raises:
            ImgtoolError: what the writer failed with, if it got no further than this.
        """
        end = offset + length
        if end > self._ready:
            self._wait(end)
            end = min(end, self._ready)
            if offset >= end:
                return b""
        return self._pread(offset, end - offset)

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes.

        Raises:
            MalformedError: the layer ends before that.
            ImgtoolError: what the writer failed with.
        """
        if offset + length > self._ready:
            self._wait(offset + length)
            if offset + length > self._ready:
                raise MalformedError("truncated layer: ends inside a file", offset=self._ready)
        return self._pread(offset, length)

    def _wait(self, end: int) -> None:
        with self._changed:
            while self._ready < end and not self._ended:
                self._wanted = min(self._wanted, end + _LEAD)
                self._changed.wait()
            if self._ready < end and self._error is not None:
                raise self._error

    def _pread(self, offset: int, length: int) -> bytes:
        with os_errors("read layer"):
            data = os.pread(self._fd, length, offset)
            while len(data) < length:  # 2 GiB at a time, or a file that was cut meanwhile
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise CorruptError("layer has become shorter while it was read")
                data += more
        return data

    def close(self) -> None:
        """Free the space. Readers that still wait are woken with an error."""
        self.fail(UsageError("the layer archive has been closed"))
        self._file.close()
