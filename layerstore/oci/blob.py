"""Reading blobs that nobody has verified yet: size first, then never more than that, and the digest at the end."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import CorruptError, LimitError
from layerstore.oci.descriptor import Descriptor
from layerstore.oci.files import FileRange, RangeReader

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
    with RangeReader(file, what) as reader:
        while count := reader.readinto(buffer):
            hasher.update(buffer[:count])
    return Digest("sha256", hasher.hexdigest())


class BlobReader(RangeReader):
    """A blob as a stream that raises CorruptError instead of ending, unless its digest is right.

    Bytes are handed out before that is known: nothing may be published from them until :meth:`finish` has returned,
    which reads what a decoder that stops early has left. One thread at a time.

    Attributes:
        verified: whether the end was reached and the digest is right.
    """

    def __init__(self, file: FileRange, descriptor: Descriptor, what: str) -> None:
        check_size(file, descriptor, what)
        super().__init__(file, what)
        self.verified = False
        self._digest = descriptor.digest
        self._hasher = descriptor.digest.hasher()

    def readinto(self, buffer: Buffer, /) -> int:
        count = super().readinto(buffer)
        self._hasher.update(memoryview(buffer).cast("B")[:count])
        if self._position == self.file.size and not self.verified:
            self._digest.check(self._hasher, f"{self._what} has the wrong digest")
            self.verified = True
        return count

    def finish(self) -> None:
        """Read to the end.

        Raises:
            CorruptError: the blob isn't what its descriptor says.
        """
        buffer = bytearray(CHUNK)
        while self.readinto(buffer):
            pass
