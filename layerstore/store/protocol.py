"""What a store is: three capabilities, each on top of the last. A class that passes the conformance suite is one.

``Store`` reads, ``WriteStore`` publishes, ``PruneStore`` deletes. ``LocalStore`` is a capability beside them: blobs
are files; and so is ``SizedStore``. The rules:

* A blob is named by the digest of its bytes and never changes. Names are no proof: whoever reads a whole blob checks
  it (:mod:`layerstore.store.reading`); ranges are checked by the records above (frames). A blob whose size differs
  from its descriptor is corrupt.
* Nothing incomplete ever has its final name. ``commit`` returns after the bytes are durable.
* Content first, reference last. A reference is written by compare-and-swap, and only while the lease that protects
  what it reaches is held and every blob it reaches is there.
* Only :class:`~layerstore.errors.NotFoundError` means missing. Every other failure is one, and stops whoever decides
  about deletion. A store that has gone away (unmounted, unreachable) is unavailable, never empty.
* Time is the store's own: no host's clock decides about leases and ages.
* Implementations may be used from several threads, and by several processes and hosts at once.

Errors of every method, besides those named at it: ``UnavailableError``, ``PermissionError_``, and where something is
written ``NoSpaceError``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from layerstore.digest import Digest
from layerstore.oci.descriptor import Descriptor

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALGORITHMS = ("sha256", "sha512")
"""What an upload can be named by: all that :class:`~layerstore.digest.Digest` verifies. We publish sha256 alone."""


class Blob(Protocol):
    """An open blob; a context manager. It stays readable when its name is deleted or replaced."""

    @property
    def size(self) -> int: ...

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes from ``offset``; from several threads at once, if need be.

        Raises:
            CorruptError: the blob ends before that. Nothing is allocated for it.
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

    def names(self) -> Iterator[str]:
        """The names of all references, sorted; those of damaged ones too."""
        ...

    def resolve(self, name: str) -> Descriptor:
        """The target of a reference.

        Raises:
            NotFoundError: no such reference.
            CorruptError: the reference can't be parsed.
            UnsupportedError: it is of a later version of its format.
            UsageError: not a valid name.
        """
        ...

    def references(self) -> Iterator[Reference]:
        """All of them, by name. Raises rather than skip one that can't be read."""
        ...


@runtime_checkable
class SizedStore(Protocol):
    """Opens a blob without asking for its size, where a turn to the store and back counts."""

    def open_sized(self, digest: Digest, size: int) -> Blob:
        """As :meth:`Store.open`, of a blob of a known size. Its reads find out if it is missing, or has another one."""
        ...


@runtime_checkable
class LocalStore(Store, Protocol):
    """Its blobs are files of this machine, on whatever file system."""

    def local_path(self, digest: Digest) -> str:
        """Absolute path of the regular file whose content is the blob, or would be: nobody looks."""
        ...


class Upload(Protocol):
    """Bytes on their way in. A context manager: what is not committed is gone at its end."""

    @property
    def size(self) -> int:
        """Bytes written so far."""
        ...

    def digest(self) -> Digest:
        """Of the bytes written so far, for those who learn the name by writing."""
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


@runtime_checkable
class WriteStore(Store, Protocol):
    """Publishes."""

    def upload(self, algorithm: str = "sha256") -> Upload:
        """Start writing a blob, in temporary space of the store's own; ``algorithm`` is that of its digest."""
        ...

    def scratch(self) -> AbstractContextManager[str]:
        """A private temporary directory on the store's own file system (a local one, if it has none)."""
        ...

    def lease(self, *, seconds: int = 86_400) -> Lease:
        """A new lease that pins nothing yet and expires in ``seconds`` unless it is renewed."""
        ...

    def set_reference(
        self, name: str, target: Descriptor, *, expected: Descriptor | None, lease: Lease, reaches: Iterable[Digest]
    ) -> None:
        """Point ``name`` at ``target`` if it still stands for ``expected`` (None: does not exist).

        Checks, in one step that excludes collection, that the lease is still valid and that the target and every blob
        of ``reaches`` are there; then swaps, durably. Descriptors are compared by digest.

        Raises:
            ConflictError: the reference is not what was expected, the lease has expired, or a blob is gone.
            CorruptError: the target's size is not what its descriptor says, or the present reference is damaged.
            UsageError: not a valid name.
        """
        ...

    def delete_reference(self, name: str, *, expected: Descriptor) -> None:
        """Remove ``name`` if it still stands for ``expected``; durable on return.

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


@runtime_checkable
class PruneStore(WriteStore, Protocol):
    """Can be listed and swept."""

    def blobs(self) -> Iterator[BlobInfo]:
        """All blobs, by digest. What isn't named like a blob isn't one: it is neither listed nor ever deleted."""
        ...

    def pinned(self) -> frozenset[Digest]:
        """What valid leases protect. Raises if one of them can't be read."""
        ...

    def collecting(self) -> AbstractContextManager[None]:
        """Excludes ``commit``, ``pin``, changes of references and other collectors, on every host where locks work.

        Hold it for seconds: publishers wait meanwhile, and give up in the end.

        Raises:
            UnavailableError: somebody else holds it for too long.
        """
        ...

    def delete(self, digest: Digest, *, older_than: float = 0.0) -> bool:
        """Remove a blob if its age is at least ``older_than`` seconds. Only inside ``collecting``.

        Returns:
            Whether it was removed; False if it is younger, or wasn't there.
        """
        ...

    def quarantine(self, digest: Digest) -> str:
        """Take a corrupt blob out of its name, keep its bytes; returns where they are.

        Raises:
            NotFoundError: no such blob.
            ConflictError: its bytes are what the name promises, or have been replaced meanwhile.
        """
        ...

    def reclaim(self, *, older_than: float, dry_run: bool = False) -> int:
        """Delete what dead or expired writers left (temporary files, expired leases); returns the bytes freed.

        What a live writer of this host holds stays whatever its age; ``older_than`` seconds are for writers of other
        hosts, and count from its last change, or from the expiry of a lease. Not inside ``collecting``.
        """
        ...


@runtime_checkable
class BulkPruneStore(PruneStore, Protocol):
    """Deletes many blobs in less time than one after the other takes."""

    def delete_many(self, digests: Collection[Digest], *, older_than: float = 0.0) -> frozenset[Digest]:
        """As :meth:`PruneStore.delete`, of each; those that were removed. If it fails, some may have been."""
        ...
