"""What a store is: three capabilities, each on top of the last. A class that passes ``tests/conformance`` is one.

``Store`` reads, ``WriteStore`` publishes, ``PruneStore`` deletes. The rules:

* A blob is named by the digest of its bytes and never changes. Names are no proof: whoever reads a whole blob checks
  it; ranges are checked by the records above (frames). A blob whose size differs from its descriptor is corrupt.
* Nothing incomplete ever has its final name. ``commit`` returns after the bytes are durable.
* Content first, reference last. A reference is written by compare-and-swap, and only while the lease that protects
  what it reaches is held and every blob it reaches is there.
* Only :class:`~layerstore.errors.NotFoundError` means missing. Every other failure is one, and stops whoever decides
  about deletion.
* Implementations may be used from several threads, and by several processes and hosts at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from layerstore.digest import Digest
from layerstore.oci.descriptor import Descriptor

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Blob(Protocol):
    """An open blob; a context manager."""

    @property
    def size(self) -> int: ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``.

        Raises:
            CorruptError: the blob ends before that.
        """
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Blob: ...
    def __exit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Reference:
    """A name and the manifest it stands for."""

    name: str
    target: Descriptor


class Store(Protocol):
    """Reads blobs and references."""

    @property
    def location(self) -> str:
        """For messages: a path or URL."""
        ...

    def stat(self, digest: Digest) -> int:
        """Size in bytes.

        Raises:
            NotFoundError: no such blob.
        """
        ...

    def open(self, digest: Digest) -> Blob:
        """Open for random reads.

        Raises:
            NotFoundError: no such blob.
        """
        ...

    def resolve(self, name: str) -> Descriptor:
        """The target of a reference.

        Raises:
            NotFoundError: no such reference.
            CorruptError: the reference can't be parsed.
        """
        ...

    def references(self) -> Iterator[Reference]:
        """All of them, by name. Raises rather than skip one that can't be read."""
        ...


class Upload(Protocol):
    """Bytes on their way in. A context manager: what is not committed is gone at its end."""

    @property
    def size(self) -> int:
        """Bytes written so far."""
        ...

    def digest(self) -> Digest:
        """sha256 of the bytes written so far."""
        ...

    def write(self, data: Buffer) -> None: ...

    def commit(self, digest: Digest, size: int) -> None:
        """Make the bytes durable under their name, replacing whatever has that name.

        The upload hashes what is written; committing the same digest twice, or at once from two processes, succeeds.

        Raises:
            CorruptError: the bytes written have another digest or size.
        """
        ...

    def __enter__(self) -> Upload: ...
    def __exit__(self, *exc: object) -> None: ...


class Lease(Protocol):
    """Protects blobs that no reference reaches yet. A context manager that releases at its end."""

    @property
    def identifier(self) -> str: ...

    def pin(self, digests: Iterable[Digest]) -> None:
        """Protect these from collection, whether they exist yet or not; durable on return.

        Check that a blob is there only after pinning it: one that is there then stays.

        Raises:
            ConflictError: the lease has expired.
        """
        ...

    def renew(self) -> None:
        """Start its time to live again.

        Raises:
            ConflictError: it has already expired.
        """
        ...

    def __enter__(self) -> Lease: ...
    def __exit__(self, *exc: object) -> None: ...


class WriteStore(Store, Protocol):
    """Publishes."""

    def upload(self) -> Upload:
        """Start writing a blob, in temporary space of the store's own."""
        ...

    def scratch(self) -> AbstractContextManager[str]:
        """A private temporary directory on the store's own file system (a local one, if it has none)."""
        ...

    def lease(self, *, seconds: int = 86_400) -> Lease: ...

    def set_reference(
        self, name: str, target: Descriptor, *, expected: Descriptor | None, lease: Lease, reaches: Iterable[Digest]
    ) -> None:
        """Point ``name`` at ``target`` if it still stands for ``expected`` (None: does not exist).

        Checks, in one step that excludes collection, that the lease is still valid and every blob of ``reaches`` is
        there; then swaps, durably.

        Raises:
            ConflictError: the reference is not what was expected, the lease has expired, or a blob is gone.
            UsageError: not a valid name.
        """
        ...

    def delete_reference(self, name: str, *, expected: Descriptor) -> None:
        """Remove ``name`` if it still stands for ``expected``.

        Raises:
            NotFoundError: no such reference.
            ConflictError: it stands for something else now.
        """
        ...


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A stored blob; ``age`` is in seconds by the store's own clock, never negative."""

    digest: Digest
    size: int
    age: float


class PruneStore(WriteStore, Protocol):
    """Can be listed and swept."""

    def blobs(self) -> Iterator[BlobInfo]: ...

    def pinned(self) -> frozenset[Digest]:
        """What valid leases protect. Raises if one of them can't be read."""
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """Excludes ``pin``, ``set_reference`` and other collectors, on every host where locks work.

        Raises:
            UnavailableError: somebody holds it for too long.
        """
        ...

    def delete(self, digest: Digest) -> None:
        """Remove a blob; idempotent. Only inside ``collecting``."""
        ...

    def quarantine(self, digest: Digest) -> str:
        """Take a corrupt blob out of its name, keep its bytes; returns where they are."""
        ...

    def reclaim(self, *, older_than: float, dry_run: bool = False) -> int:
        """Delete what dead or expired writers left (temporary files, expired leases); returns the bytes freed."""
        ...
