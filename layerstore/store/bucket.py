"""What an object store needs of a service that keeps objects under keys: S3 and its like, or anything fsspec reaches.

A key is a name relative to the bucket's own prefix, such as ``blobs/sha256/…``. Objects are replaced whole, and read
as they were when they were last replaced. The rules:

* After a write or a delete has returned, every read and listing by anybody sees it (S3 since December 2020).
* One that has failed as unavailable may have been done, and may still be done some seconds later. A conditional write
  finds out, as far as that can be found out: its answer may have been lost and not the write.
* Time is the service's.
* Only :class:`~layerstore.errors.NotFoundError` means missing. A service that hides what it may not show (403) has
  said nothing about it.
* A listing is all of it, or an error.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import BinaryIO, NamedTuple, Protocol


class Absent(Enum):
    """As the ``expected`` of a write: nothing may be there."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT

PROBE = "probe-"
"""Begins the keys of objects by which a bucket finds out what its service does. Any that is old can be deleted."""


class Entry(NamedTuple):
    """An object: bytes, nanoseconds since 1970 when it was written, and what changes whenever its bytes do."""

    key: str
    size: int
    modified: int
    etag: str


class Piece(NamedTuple):
    """Bytes of an object, and the object as it was then."""

    data: bytes
    entry: Entry


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a service does, found out by trying.

    Attributes:
        conditional_writes: ``expected`` of a write decides; without, it is looked at a moment before.
        conditional_deletes: ``expected`` of a delete decides; without, it is looked at a moment before.
    """

    conditional_writes: bool
    conditional_deletes: bool


class Bucket(Protocol):
    """Objects below one prefix. Any thread may call.

    Errors of every method, besides those named at it: UnavailableError, PermissionError_, NoSpaceError,
    UnsupportedError.
    """

    @property
    def location(self) -> str:
        """For messages, and to open it again: a URL without credentials."""
        ...

    def guarantees(self) -> Guarantees:
        """Found out once, by whoever needs to know it first: it takes some requests, and leave to write."""
        ...

    def now(self) -> int:
        """Nanoseconds since 1970 by the service's clock, as far as its last answer tells."""
        ...

    def head(self, key: str) -> Entry:
        """Raises NotFoundError."""
        ...

    def read(self, key: str, offset: int, length: int) -> Piece:
        """Bytes from ``offset`` on: as many as there are, at most ``length``. One request, unless there are none.

        Raises:
            NotFoundError: no such object.
            CorruptError: the service gave other bytes than it promised.
        """
        ...

    def read_at(self, entry: Entry, offset: int, length: int) -> bytes:
        """As :meth:`read`, of the object that ``entry`` is of, as far as the service looks at that. One request.

        Raises:
            ConflictError, NotFoundError: it has been replaced or deleted.
            CorruptError: the service gave other bytes than it promised.
        """
        ...

    def write(self, key: str, data: bytes, *, expected: str | Absent | None = None) -> str:
        """Replace a small object; its etag.

        Raises:
            ConflictError: what is there isn't what was ``expected``: an etag, or nothing; nor is it ``data``, which
                this very call may have written.
        """
        ...

    def send(self, key: str, file: BinaryIO, size: int) -> str:
        """Replace an object by the ``size`` bytes of a file that is open and at its start; its etag.

        Parts are sent in parallel; the object is replaced when all have arrived, and looked at then.

        Raises:
            CorruptError: what has arrived is something else; it isn't left under the key.
            LimitError: larger than an object can be.
        """
        ...

    def entries(self, prefix: str) -> Iterator[Entry]:
        """All objects whose keys begin so, by key."""
        ...

    def delete(self, key: str, *, expected: str | None = None) -> bool:
        """Delete an object; one that isn't there is deleted already.

        Returns:
            Whether that is the end of it. False if it took more than one request, and one wasn't answered: it may
            take effect some seconds later.

        Raises:
            ConflictError: it isn't the one with the etag ``expected``.
        """
        ...

    def copy(self, key: str, target: str) -> None:
        """Copy an object within the bucket. Raises NotFoundError."""
        ...

    def close(self) -> None:
        """Close idle connections. It stays usable."""
        ...

    def abort_uploads(self, *, before: int, keep: Container[str], dry_run: bool) -> int:
        """Give up uploads in which nothing has happened since ``before`` (nanoseconds since 1970).

        Those to the keys of ``keep`` stay. Returns the bytes that their parts took.
        """
        ...
