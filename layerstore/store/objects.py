"""A store of objects in a bucket, laid out as a directory store is: ``store.json``, ``blobs/``, ``refs/``, ``leases/``.

There are no locks. What keeps collectors and publishers apart is the mark ``collector`` (``collector.py``): publishers
look at it after they have pinned, and pinning is what protects. The rest follows from the order of things:

* ``set_reference`` pins what isn't pinned, looks whether all of it is there, and then writes the reference while the
  lease is valid and stays so for minutes. So a collector sees the lease or the reference.
* References are replaced by conditional writes. Where a service doesn't do them, the last of two writers who publish
  the same name at the same moment wins, and :attr:`ObjectStore.exclusive` is False; nor is the mark then more than a
  look and a write: collect when nobody publishes.
* A reference whose writing has failed may be written yet. Its lease then stays until it expires.

A listing tells which references and leases have changed since they were last read: only these are read again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import BinaryIO

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
    UsageError,
    printable,
)
from layerstore.oci.descriptor import Descriptor
from layerstore.store.ahead import THREADS, ahead
from layerstore.store.bucket import ABSENT, PROBE, Bucket, Entry
from layerstore.store.clock import NANOSECONDS, elapsed
from layerstore.store.collector import CollectorMark, Patience, Turn
from layerstore.store.format import (
    LEASE_BYTES,
    MARKER_BYTES,
    REFERENCE_BYTES,
    LeaseDocument,
    ReferenceDocument,
    StoreMarker,
)
from layerstore.store.locks import LOCK_SECONDS
from layerstore.store.names import check_name, decode_name, encode_name
from layerstore.store.objectblob import ObjectBlob, ObjectUpload, blob_key, spooling
from layerstore.store.objectlease import DIRECTORY as LEASES
from layerstore.store.objectlease import ObjectLease
from layerstore.store.protocol import ALGORITHMS, BlobInfo, Lease, Reference
from layerstore.store.reading import is_intact
from layerstore.store.remembered import REMEMBERED, SETTLED_SECONDS, Remembered

MARKER = "store.json"
START_BYTES = 16 << 10
"""Bytes of a blob that come when it is opened: most manifests and configs, and no second request for them."""
DELETED_AT_ONCE = 1000
"""Blobs that a collector announces, and then deletes."""
MARGIN_SECONDS = 300.0
"""For which a lease has to be valid yet when a reference is written: longer than any attempt to write it takes."""
TRUSTED_SECONDS = 60.0
"""For which a pinned blob that was there isn't looked for again."""

_REFERENCES = "refs/"


class ObjectStore:
    """A ``PruneStore``, ``BulkPruneStore`` and ``SizedStore`` in a bucket.

    Attributes:
        location: for messages, and to open it again.
        spool: directory for blobs on their way in, and scratch; None is the system's.
    """

    def __init__(
        self,
        bucket: Bucket,
        *,
        clock: Callable[[], int] | None = None,
        lock_seconds: float = LOCK_SECONDS,
        patience: Patience | None = None,
        spool: str | None = None,
        threads: int = THREADS,
    ) -> None:
        """Open the store in ``bucket``: one request.

        Args:
            bucket: closed by :meth:`close`.
            clock: instead of the service's, for tests.
            lock_seconds: how long to wait for a collector.
            patience: with collectors that don't end, for tests.
            spool: see there.
            threads: requests at a time, where there are many to be made.

        Raises:
            NotFoundError: there is none.
            CorruptError, UnsupportedError: its marker can't be parsed, or is of another version.
        """
        self.location = bucket.location
        self.bucket = bucket
        self.spool = spool
        self._clock = clock or bucket.now
        self._ahead = partial(ahead, threads=threads)
        self._mark = CollectorMark(bucket, self._clock, wait=lock_seconds, patience=patience or Patience())
        self._collecting: tuple[int, Turn] | None = None
        self._present: dict[Digest, tuple[int, float]] = {}
        self._references: Remembered[Descriptor] = Remembered(self._clock)
        self._leases: Remembered[LeaseDocument] = Remembered(self._clock)
        self._confirmed = 0.0
        try:
            data = bucket.read(MARKER, 0, MARKER_BYTES + 1).data
        except NotFoundError as error:
            raise NotFoundError(
                f"{self.location} is not a store, it has no {MARKER}: check the name, or create a store there"
            ) from error
        _parse_marker(data, f"{self.location}/{MARKER}")

    @classmethod
    def create(
        cls,
        bucket: Bucket,
        *,
        clock: Callable[[], int] | None = None,
        lock_seconds: float = LOCK_SECONDS,
        patience: Patience | None = None,
        spool: str | None = None,
        threads: int = THREADS,
    ) -> ObjectStore:
        """The store in ``bucket``, made if there is none; several may try at once.

        Raises:
            ConflictError: there is something else below the prefix, or a store that has lost its marker.
        """

        def opened() -> ObjectStore:
            return cls(bucket, clock=clock, lock_seconds=lock_seconds, patience=patience, spool=spool, threads=threads)

        try:
            return opened()
        except NotFoundError:
            pass
        found = next((entry for entry in bucket.entries("") if not entry.key.startswith(PROBE)), None)
        if found is not None and found.key != MARKER:
            raise ConflictError(
                f"{bucket.location} has objects, such as {printable(found.key)!r}, but no {MARKER}: choose an empty "
                "prefix, or restore that object"
            )
        try:
            bucket.write(MARKER, StoreMarker().to_bytes(), expected=ABSENT)
        except ConflictError:
            pass  # somebody was faster
        return opened()

    def close(self) -> None:
        """Close idle connections. It stays usable."""
        self.bucket.close()

    @property
    def exclusive(self) -> bool:
        """Whether what a writer of a reference expected decides. It is found out by writing, at the first time."""
        return self.bucket.guarantees().conditional_writes

    # Reading

    def stat(self, digest: Digest) -> int:
        with self._existing(f"blob {digest}"):
            entry = self.bucket.head(blob_key(digest))
        self._saw(digest, entry.size)
        return entry.size

    def open(self, digest: Digest) -> ObjectBlob:
        with self._existing(f"blob {digest}"):
            piece = self.bucket.read(blob_key(digest), 0, START_BYTES)
        return ObjectBlob(self.bucket, digest, piece.entry.size, entry=piece.entry, start=piece.data)

    def open_sized(self, digest: Digest, size: int) -> ObjectBlob:
        return ObjectBlob(self.bucket, digest, size, entry=None)

    def names(self) -> Iterator[str]:
        yield from sorted(self._names())

    def resolve(self, name: str) -> Descriptor:
        return self._resolve(name)[0]

    def references(self) -> Iterator[Reference]:
        names = self._names()
        read = self._ahead(lambda name: self._references.get(names[name], lambda: self._resolve(name)), sorted(names))
        for name, target in read:
            if target is not None:  # else deleted meanwhile
                yield Reference(name, target)

    def _names(self) -> dict[str, Entry]:
        names = {}
        for entry in self.bucket.entries(_REFERENCES):
            file = entry.key.removeprefix(_REFERENCES)
            try:
                names[decode_name(file)] = entry
            except UsageError as error:
                shown = printable(f"{self.location}/{entry.key}")
                raise CorruptError(f"{shown} is not a reference: move the object elsewhere") from error
        return names

    def _resolve(self, name: str) -> tuple[Descriptor, Entry]:
        """The target, and the object that says so."""
        key = _reference_key(name)
        what = f"reference {name!r} in {self.location}"
        with self._existing(f"reference {name!r}"):
            piece = self.bucket.read(key, 0, REFERENCE_BYTES + 1)
        try:
            document = ReferenceDocument.parse(piece.data, what)
        except UnsupportedError:
            raise
        except ImgtoolError as error:
            raise CorruptError(f"{error}: delete it and publish again") from error
        if document.name != name:
            raise CorruptError(f"{what} says that it is {printable(document.name)!r}: delete it and publish again")
        return document.target, piece.entry

    @contextmanager
    def _existing(self, what: str) -> Iterator[None]:
        """Missing, unless it is the whole store that is."""
        try:
            yield
        except NotFoundError as error:
            if elapsed() >= self._confirmed:
                try:
                    self.bucket.head(MARKER)
                except NotFoundError:
                    raise UnavailableError(f"{self.location} is not there any more; {what} wasn't read") from error
                self._confirmed = elapsed() + SETTLED_SECONDS
            raise NotFoundError(f"{what} is not in {self.location}") from error

    # Publishing

    def upload(self, algorithm: str = "sha256") -> ObjectUpload:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"blobs are named by {' or '.join(ALGORITHMS)}, not by {algorithm!r}")
        return ObjectUpload(self, algorithm)

    def arrive(self, digest: Digest, file: BinaryIO, size: int) -> None:
        """The end of an upload, whose bytes have been checked."""
        self._mark.pass_by([digest])
        self.bucket.send(blob_key(digest), file, size)
        self._saw(digest, size)

    def scratch(self) -> AbstractContextManager[str]:
        return spooling(self.spool)

    def lease(self, *, seconds: int = 86_400) -> ObjectLease:
        if seconds <= 0:
            raise UsageError(f"a lease of {seconds} seconds protects nothing")
        return ObjectLease(self.bucket, self._clock, self._mark, seconds)

    def set_reference(
        self, name: str, target: Descriptor, *, expected: Descriptor | None, lease: Lease, reaches: Iterable[Digest]
    ) -> None:
        key = _reference_key(name)
        if not isinstance(lease, ObjectLease) or not lease.belongs_to(self.bucket):
            raise UsageError(f"the lease for reference {name!r} is not one of {self.location}")
        needed = frozenset({target.digest, *reaches})
        lease.pin(needed)
        if lease.left() < MARGIN_SECONDS:
            lease.renew()
        self._mark.pass_by(needed)
        self._check_present(name, target, needed, lease)
        before = self._compare(name, expected)
        try:
            etag = self.bucket.write(key, ReferenceDocument(name, target).to_bytes(), expected=before or ABSENT)
        except ConflictError as error:
            raise self._changed(name) from error
        except BaseException:
            lease.keep()
            raise
        if lease.left() <= 0:
            self._confirm(name, key, etag, target, needed)

    def _confirm(self, name: str, key: str, etag: str, target: Descriptor, needed: frozenset[Digest]) -> None:
        """After a reference was written for longer than its lease lasted: who collects now sees it."""
        try:
            self._mark.pass_by(needed)
            self._check_present(name, target, needed, None)
        except ImgtoolError:
            self.bucket.delete(key, expected=etag)
            raise

    def delete_reference(self, name: str, *, expected: Descriptor) -> None:
        key = _reference_key(name)
        self._mark.pass_by()
        try:
            etag = self._compare(name, expected)
        except ConflictError:
            self.resolve(name)  # or there is none
            raise
        try:
            self.bucket.delete(key, expected=etag)
        except ConflictError as error:
            raise self._changed(name) from error

    def _compare(self, name: str, expected: Descriptor | None) -> str | None:
        """The etag of the reference as it is now, which has to stand for ``expected``."""
        try:
            present, entry = self._resolve(name)
        except NotFoundError:
            if expected is None:
                return None
            found: object = "nothing"
        else:
            if expected is not None and present.digest == expected.digest:
                return entry.etag
            found = present.digest
        wanted = expected.digest if expected is not None else "nothing"
        raise ConflictError(
            f"reference {name!r} in {self.location} stands for {found} where {wanted} was expected: look again"
        )

    def _changed(self, name: str) -> ConflictError:
        return ConflictError(f"reference {name!r} in {self.location} was changed meanwhile: look again")

    def _check_present(
        self, name: str, target: Descriptor, needed: Collection[Digest], lease: ObjectLease | None
    ) -> None:
        """Look for what hasn't been seen since it was pinned; without a lease, for all."""
        now = elapsed()
        sizes: dict[Digest, int] = {}
        if lease is not None:
            for digest in needed:
                size, seen = self._present.get(digest, (0, 0.0))
                if max(lease.pinned_since(digest), now - TRUSTED_SECONDS) <= seen:
                    sizes[digest] = size
        try:
            sizes.update(self._ahead(self.stat, sorted(set(needed) - sizes.keys())))
        except NotFoundError as error:
            raise ConflictError(f"reference {name!r} is not written: {error}; publish again") from error
        if sizes[target.digest] != target.size:
            raise CorruptError(
                f"blob {target.digest}", expected=f"{target.size} bytes", actual=f"{sizes[target.digest]}"
            )

    def _saw(self, digest: Digest, size: int) -> None:
        if len(self._present) >= REMEMBERED:
            self._present.clear()
        self._present[digest] = size, elapsed()

    # Pruning

    def blobs(self) -> Iterator[BlobInfo]:
        entries = list(self.bucket.entries("blobs/"))
        now = self._clock()  # that of an answer, so that even the first of a process is the service's
        found = []
        for entry in entries:
            algorithm, _, name = entry.key.removeprefix("blobs/").partition("/")
            try:
                digest = Digest.parse(f"{algorithm}:{name}")
            except ImgtoolError:
                continue
            found.append(BlobInfo(digest, entry.size, max(0, now - entry.modified) / NANOSECONDS))
        yield from sorted(found, key=lambda blob: blob.digest)

    def pinned(self) -> frozenset[Digest]:
        leases = [lease for _, lease in self._lease_documents()]
        now = self._clock()
        return frozenset(pin for lease in leases if not lease.expired(now) for pin in lease.pins)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        turn = self._mark.take()
        self._collecting = threading.get_ident(), turn
        try:
            yield
        finally:
            self._collecting = None
            turn.end()

    def delete(self, digest: Digest, *, older_than: float = 0.0) -> bool:
        return bool(self.delete_many([digest], older_than=older_than))

    def delete_many(self, digests: Collection[Digest], *, older_than: float = 0.0) -> frozenset[Digest]:
        thread, turn = self._collecting or (None, None)
        if turn is None or thread != threading.get_ident():
            raise RuntimeError("blobs are deleted only inside collecting()")
        ordered = list(dict.fromkeys(digests))
        gone: set[Digest] = set()
        for start in range(0, len(ordered), DELETED_AT_ONCE):
            gone |= self._delete_announced(turn, ordered[start : start + DELETED_AT_ONCE], older_than)
        return frozenset(gone)

    def _delete_announced(self, turn: Turn, digests: list[Digest], older_than: float) -> set[Digest]:
        turn.announce(digests)

        def one(digest: Digest) -> bool:
            key = blob_key(digest)
            removed, done = False, True
            try:
                entry = self.bucket.head(key)
                if max(0, self._clock() - entry.modified) >= older_than * NANOSECONDS:
                    self._present.pop(digest, None)
                    turn.check()
                    done = self.bucket.delete(key, expected=entry.etag)
                    removed = True
            except (NotFoundError, ConflictError):
                pass  # gone, or written again since
            if done:
                settled.append(digest)
            return removed

        settled: list[Digest] = []
        try:
            return {digest for digest, removed in self._ahead(one, digests) if removed}
        finally:
            turn.settle(settled)

    def quarantine(self, digest: Digest) -> str:
        with self.open(digest) as blob:
            if is_intact(blob, digest):
                raise ConflictError(f"blob {digest} is intact: verify again")
            assert blob.entry is not None
            key, target = blob_key(digest), f"quarantine/{digest.algorithm}-{digest.hex}-{secrets.token_hex(4)}"
            try:
                self.bucket.copy(key, target)
                if self.bucket.head(key).etag != blob.entry.etag:
                    raise ConflictError("another object")
                self.bucket.delete(key, expected=blob.entry.etag)
            except (ConflictError, NotFoundError) as error:
                self.bucket.delete(target)
                raise ConflictError(f"blob {digest} has been replaced or deleted meanwhile: verify again") from error
        self._present.pop(digest, None)
        return f"{self.location}/{target}"

    def reclaim(self, *, older_than: float, dry_run: bool = False) -> int:
        leases = list(self._lease_documents())
        probes = list(self.bucket.entries(PROBE))
        now = self._clock()
        before = now - int(older_than * NANOSECONDS)
        old = [entry for entry, lease in leases if lease.expired(before)]
        old += [entry for entry in probes if entry.modified <= before]
        freed = sum(entry.size for entry in old)
        if not dry_run:
            for entry in old:
                try:
                    self.bucket.delete(entry.key, expected=entry.etag)
                except ConflictError:
                    freed -= entry.size
        # What a valid lease pins may be on its way, however slowly.
        kept = {blob_key(pin) for _, lease in leases if not lease.expired(now) for pin in lease.pins}
        return freed + self.bucket.abort_uploads(before=before, keep=kept, dry_run=dry_run)

    def _lease_documents(self) -> Iterator[tuple[Entry, LeaseDocument]]:
        entries = list(self.bucket.entries(LEASES))
        read = self._ahead(lambda entry: self._leases.get(entry, lambda: self._read_lease(entry)), entries)
        for entry, lease in read:
            if lease is not None:  # else released meanwhile
                yield entry, lease

    def _read_lease(self, entry: Entry) -> tuple[LeaseDocument, Entry]:
        what = f"lease {printable(self.location + '/' + entry.key)}"
        piece = self.bucket.read(entry.key, 0, LEASE_BYTES + 1)
        try:
            document = LeaseDocument.parse(piece.data, what)
        except UnsupportedError:
            raise
        except ImgtoolError as error:
            raise CorruptError(f"{error}; delete the object if no publisher uses it") from error
        if document.identifier != entry.key.removeprefix(LEASES):
            raise CorruptError(f"{what} says that it is {printable(document.identifier)!r}; delete the object")
        return document, piece.entry


def _reference_key(name: str) -> str:
    return f"{_REFERENCES}{encode_name(check_name(name))}"


def _parse_marker(data: bytes, what: str) -> None:
    try:
        StoreMarker.parse(data, f"store {what}")
    except UnsupportedError:
        raise
    except ImgtoolError as error:
        raise CorruptError(f"{error}: is this a store?") from error
