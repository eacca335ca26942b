"""Reading blobs that nobody has verified yet: size first, then never more than that, and the digest at the end."""

from __future__ import annotations

import hashlib
import io
import os
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError, os_errors
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.files import FileRange

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK = 1 << 20
"""Bytes per read when a blob is read to its end."""


def check_size(file: FileRange, descriptor: Descriptor, what: str) -> None:
    """Raise CorruptError unless the file is as long as the descriptor promises."""
    if file.size != descriptor.size:
        raise CorruptError(f"{what} has the wrong size", expected=f"{descriptor.size} bytes", actual=str(file.size))


def read_blob(file: FileRange, descriptor: Descriptor, what: str, *, limit: int) -> bytes:
    """A whole small blob, verified.

    Raises:
        LimitError: more than ``limit`` bytes are promised.
        CorruptError: another size or digest.
    """
    if descriptor.size > limit:
        raise LimitError(f"{what} has {descriptor.size} bytes, more than the limit of {limit}")
    check_size(file, descriptor, what)
    data = file.read(what, limit)
    verify(data, descriptor, what)
    return data


def verify(data: Buffer, descriptor: Descriptor, what: str) -> None:
    """Raise CorruptError unless ``data`` has the descriptor's digest."""
    hasher = descriptor.digest.hasher()
    hasher.update(data)
    descriptor.digest.check(hasher, f"{what} has the wrong digest")


def digest_of(file: FileRange, what: str) -> Digest:
    """The sha256 digest of what nobody has named yet."""
    hasher = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    descriptor = file.open()
    try:
        done = 0
        while done < file.size:
            with os_errors(f"read {what}"):
                count = os.preadv(descriptor, [buffer[: file.size - done]], file.offset + done)
            if not count:
                raise CorruptError(f"{what} ends early", expected=f"{file.size} bytes", actual=str(done))
            hasher.update(buffer[:count])
            done += count
    finally:
        os.close(descriptor)
    return Digest("sha256", hasher.hexdigest())


class BlobReader(io.RawIOBase):
    """A blob as a stream that raises CorruptError instead of ending, unless its digest is right.

    Bytes are handed out before that is known: nothing may be published from them until :meth:`finish` has returned,
    which reads what a decoder that stops early has left. One thread at a time.

    Attributes:
        file: where the bytes lie, for random access once they are verified.
        verified: whether the end was reached and the digest is right.
    """

    def __init__(self, file: FileRange, descriptor: Descriptor, what: str) -> None:
        super().__init__()
        check_size(file, descriptor, what)
        self.file = file
        self.verified = False
        self._what = what
        self._digest = descriptor.digest
        self._hasher = descriptor.digest.hasher()
        self._position = 0
        self._descriptor = file.open()
        if not file.size:
            self._verify()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")[: self.file.size - self._position]
        if not view:
            return 0
        with os_errors(f"read {self._what}"):
            count = os.preadv(self._descriptor, [view], self.file.offset + self._position)
        if not count:
            raise CorruptError(
                f"{self._what} ends early", expected=f"{self.file.size} bytes", actual=str(self._position)
            )
        self._hasher.update(view[:count])
        self._position += count
        if self._position == self.file.size:
            self._verify()
        return count

    def finish(self) -> None:
        """Read to the end.

        Raises:
            CorruptError: the blob isn't what its descriptor says.
        """
        buffer = bytearray(CHUNK)
        while self._position < self.file.size:
            self.readinto(buffer)
        if not self.verified:
            self._verify()

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _verify(self) -> None:
        self._digest.check(self._hasher, f"{self._what} has the wrong digest")
        self.verified = True
