"""Blobs of an object store: open ones, and those on their way in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    NotFoundError,
    PermissionError_,
    UnavailableError,
    UsageError,
    os_errors,
)
from layerstore.store.bucket import Bucket, Entry
from layerstore.store.counting import CountedUpload

if TYPE_CHECKING:
    from typing_extensions import Buffer

SMALL_BYTES = 8 << 20
"""Of an upload that are kept in memory."""


def blob_key(digest: Digest) -> str:
    return f"blobs/{digest.algorithm}/{digest.hex}"


class ObjectBlob:
    """A blob as it was when it was opened, or first read. It holds no connection, so closing it does nothing."""

    def __init__(self, bucket: Bucket, digest: Digest, size: int, *, entry: Entry | None, start: bytes = b"") -> None:
        """``start`` is what has been read of it; without ``entry`` nobody has asked whether it is there at all."""
        self._bucket = bucket
        self._digest = digest
        self._start = start
        self.size = size
        self.entry = entry

    def read_at(self, offset: int, length: int) -> bytes:
        what = f"blob {self._digest} in {self._bucket.location}"
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptError(f"{what} has {self.size} bytes, {length} at {offset} were to be read: publish it again")
        if offset + length <= len(self._start) or not length:
            return self._start[offset : offset + length]
        data = self._first(offset, length) if self.entry is None else self._more(self.entry, offset, length, what)
        if len(data) != length:
            raise CorruptError(f"{what}: {len(data)} bytes came of {length} at {offset}: publish it again")
        return data

    def _first(self, offset: int, length: int) -> bytes:
        try:
            piece = self._bucket.read(blob_key(self._digest), offset, length)
        except NotFoundError as error:
            raise NotFoundError(f"blob {self._digest} is not in {self._bucket.location}") from error
        if piece.entry.size != self.size:
            raise CorruptError(
                f"blob {self._digest} in {self._bucket.location}",
                expected=f"{self.size} bytes",
                actual=f"{piece.entry.size}",
            )
        self.entry = piece.entry
        return piece.data

    def _more(self, entry: Entry, offset: int, length: int, what: str) -> bytes:
        try:
            return self._bucket.read_at(entry, offset, length)
        except (ConflictError, NotFoundError) as error:
            raise UnavailableError(f"{what} was replaced or deleted while it was read: open it again") from error

    def close(self) -> None: ...

    def __enter__(self) -> ObjectBlob:
        return self

    def __exit__(self, *exc: object) -> None: ...


class Landing(Protocol):
    """Where uploads go: a store, as they see it."""

    @property
    def spool(self) -> str | None:
        """Where uploads wait; None is the system's temporary directory."""
        ...

    def arrive(self, digest: Digest, file: BinaryIO, size: int) -> None: ...


class Place(Landing, Protocol):
    """Where blobs are: a store in a bucket."""

    bucket: Bucket


class ObjectUpload(CountedUpload):
    """A blob on its way: hashed and spooled here, since its name is known only when all of it has been written."""

    def __init__(self, place: Landing, algorithm: str) -> None:
        super().__init__(algorithm)
        self._place = place
        spool = tempfile.SpooledTemporaryFile(SMALL_BYTES, prefix="imgtool-", dir=place.spool)  # noqa: SIM115
        self._spool = cast(BinaryIO, spool)  # closed by __exit__

    def write(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        try:
            with spool_errors("spool a blob", self._place.spool):
                self._spool.write(view)
        except BaseException:
            self._spool.close()
            raise
        self.wrote(view)

    def commit(self, digest: Digest, size: int) -> None:
        try:
            self.check(digest, size)
            with spool_errors("read a spooled blob", self._place.spool):
                self._spool.flush()
                self._spool.seek(0)
            self._place.arrive(digest, self._spool, size)
        finally:
            self._spool.close()

    def __enter__(self) -> ObjectUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        self._spool.close()


def spooled(file: BinaryIO, spool: str | None) -> Callable[[int, int], bytes]:
    """Reads what waits in ``file``, by offset and length."""

    def read(offset: int, length: int) -> bytes:
        with spool_errors("read a spooled blob", spool):
            file.seek(offset)
            return file.read(length)

    return read


@contextmanager
def spooling(spool: str | None) -> Iterator[str]:
    """A directory of one's own where blobs wait; gone at the end."""
    with spool_errors("make a scratch directory", spool):
        scratch = tempfile.TemporaryDirectory(prefix="imgtool-", dir=spool)
    with scratch as path:
        yield path


@contextmanager
def spool_errors(what: str, spool: str | None) -> Iterator[None]:
    """Errors of the disk where blobs wait. None of them looks as if something were missing from the store."""
    try:
        where = spool or tempfile.gettempdir()
    except OSError as error:
        raise UsageError(f"{what}: there is no usable temporary directory: set TMPDIR to one with room") from error
    try:
        with os_errors(f"{what} in {where}"):
            yield
    except (NotFoundError, PermissionError_) as error:
        raise UsageError(f"{error}: set TMPDIR to a directory with room") from error
