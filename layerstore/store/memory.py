"""A store in memory: for tests, and the shortest statement of what a store does."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from layerstore.digest import Digest
from layerstore.errors import ConflictError, CorruptError, NotFoundError, UnavailableError, UsageError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.clock import NANOSECONDS, Clock
from layerstore.store.counting import CountedUpload
from layerstore.store.locks import LOCK_SECONDS
from layerstore.store.names import check_name
from layerstore.store.protocol import ALGORITHMS, BlobInfo, Lease, Reference

if TYPE_CHECKING:
    from typing_extensions import Buffer


class MemoryStore:
    """A :class:`~layerstore.store.protocol.PruneStore` for the threads of one process.

    Attributes:
        content: the blobs, with the nanosecond when each was committed.
        quarantined: corrupt blobs by where :meth:`quarantine` said that they are.
    """

    def __init__(self, *, clock: Clock = time.time_ns, lock_seconds: float = LOCK_SECONDS) -> None:
        self.content: dict[Digest, tuple[bytes, int]] = {}
        self.quarantined: dict[str, bytes] = {}
        self._references: dict[str, Descriptor] = {}
        self._leases: dict[str, MemoryLease] = {}
        self._clock = clock
        self._mutex = threading.RLock()
        self._lock_seconds = lock_seconds
        self._collector: int | None = None

    @property
    def location(self) -> str:
        return "memory:"

    def stat(self, digest: Digest) -> int:
        return len(self._bytes(digest))

    def open(self, digest: Digest) -> MemoryBlob:
        return MemoryBlob(digest, self._bytes(digest))

    def names(self) -> Iterator[str]:
        yield from sorted(self._references)

    def resolve(self, name: str) -> Descriptor:
        try:
            return self._references[check_name(name)]
        except KeyError as error:
            raise NotFoundError(f"reference {name!r} is not in {self.location}") from error

    def references(self) -> Iterator[Reference]:
        for name, target in sorted(self._references.items()):
            yield Reference(name, target)

    def upload(self, algorithm: str = "sha256") -> MemoryUpload:
        if algorithm not in ALGORITHMS:
            raise UsageError(f"blobs are named by {' or '.join(ALGORITHMS)}, not by {algorithm!r}")
        return MemoryUpload(self, algorithm)

    @contextmanager
    def scratch(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="imgtool-") as path:
            yield path

    def lease(self, *, seconds: int = 86_400) -> MemoryLease:
        if seconds <= 0:
            raise UsageError(f"a lease of {seconds} seconds protects nothing")
        lease = MemoryLease(self, seconds)
        self._leases[lease.identifier] = lease
        return lease

    def set_reference(
        self, name: str, target: Descriptor, *, expected: Descriptor | None, lease: Lease, reaches: Iterable[Digest]
    ) -> None:
        check_name(name)
        if not isinstance(lease, MemoryLease) or lease.store is not self:
            raise UsageError(f"the lease for reference {name!r} is not one of this store")
        needed = {target.digest, *reaches}
        with self.exclusive():
            lease.check()
            gone = sorted(needed - self.content.keys())
            if gone:
                raise ConflictError(f"reference {name!r} is not written: blob {gone[0]} is gone; publish again")
            size = self.stat(target.digest)
            if size != target.size:
                raise CorruptError(f"blob {target.digest}", expected=f"{target.size} bytes", actual=f"{size}")
            self._compare(name, self._references.get(name), expected)
            self._references[name] = target

    def delete_reference(self, name: str, *, expected: Descriptor) -> None:
        with self.exclusive():
            self._compare(name, self.resolve(name), expected)
            del self._references[name]

    def blobs(self) -> Iterator[BlobInfo]:
        now = self._clock()
        for digest, (data, since) in sorted(self.content.items()):
            yield BlobInfo(digest, len(data), max(0, now - since) / NANOSECONDS)

    def pinned(self) -> frozenset[Digest]:
        now = self._clock()
        return frozenset(pin for lease in list(self._leases.values()) if not lease.expired(now) for pin in lease.pins)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        with self.exclusive():
            self._collector = threading.get_ident()
            try:
                yield
            finally:
                self._collector = None

    def delete(self, digest: Digest, *, older_than: float = 0.0) -> bool:
        if self._collector != threading.get_ident():
            raise RuntimeError("blobs are deleted only inside collecting()")
        entry = self.content.get(digest)
        if entry is None or self._clock() - entry[1] < older_than * NANOSECONDS:
            return False
        del self.content[digest]
        return True

    def quarantine(self, digest: Digest) -> str:
        with self.exclusive():
            data = self._bytes(digest)
            hasher = digest.hasher()
            hasher.update(data)
            if hasher.hexdigest() == digest.hex:
                raise ConflictError(f"blob {digest} is intact: verify again")
            place = f"memory:quarantine/{digest.algorithm}-{digest.hex}-{secrets.token_hex(4)}"
            self.quarantined[place] = data
            del self.content[digest]
            return place

    def reclaim(self, *, older_than: float, dry_run: bool = False) -> int:
        with self.exclusive():
            before = self._clock() - int(older_than * NANOSECONDS)
            expired = [identifier for identifier, lease in self._leases.items() if lease.expired(before)]
            if not dry_run:
                for identifier in expired:
                    del self._leases[identifier]
        return 0

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """The store's one lock, for its leases and uploads too."""
        if not self._mutex.acquire(timeout=self._lock_seconds):
            raise UnavailableError(f"the store has been locked for {self._lock_seconds:.0f} s: try again")
        try:
            yield
        finally:
            self._mutex.release()

    def now(self) -> int:
        return self._clock()

    def holds(self, lease: MemoryLease) -> bool:
        return lease.identifier in self._leases

    def drop(self, lease: MemoryLease) -> None:
        self._leases.pop(lease.identifier, None)

    def _bytes(self, digest: Digest) -> bytes:
        try:
            return self.content[digest][0]
        except KeyError as error:
            raise NotFoundError(f"blob {digest} is not in {self.location}") from error

    def _compare(self, name: str, present: Descriptor | None, expected: Descriptor | None) -> None:
        found, wanted = (None if each is None else each.digest for each in (present, expected))
        if found != wanted:
            raise ConflictError(
                f"reference {name!r} stands for {found or 'nothing'} where {wanted or 'nothing'} was expected"
            )


class MemoryBlob:
    """Bytes under the name of a digest, which they may not have."""

    def __init__(self, digest: Digest, data: bytes) -> None:
        self._digest = digest
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read_at(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise CorruptError(f"blob {self._digest} has {self.size} bytes, {length} at {offset} were to be read")
        return self._data[offset : offset + length]

    def close(self) -> None: ...

    def __enter__(self) -> MemoryBlob:
        return self

    def __exit__(self, *exc: object) -> None: ...


class MemoryUpload(CountedUpload):
    """Collects pieces; nothing is seen before :meth:`commit`."""

    def __init__(self, store: MemoryStore, algorithm: str) -> None:
        super().__init__(algorithm)
        self._store = store
        self._pieces: list[bytes] = []

    def write(self, data: Buffer) -> None:
        self._pieces.append(bytes(data))
        self.wrote(self._pieces[-1])

    def commit(self, digest: Digest, size: int) -> None:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self.check(digest, size)
        with self._store.exclusive():
            self._store.content[digest] = (data, self._store.now())

    def __enter__(self) -> MemoryUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pieces.clear()


class MemoryLease:
    """Pins in memory; valid while its store knows it and its time has not come."""

    def __init__(self, store: MemoryStore, seconds: int) -> None:
        self.store = store
        self.pins: frozenset[Digest] = frozenset()
        self._identifier = secrets.token_hex(16)
        self._nanoseconds = seconds * NANOSECONDS
        self._expires = store.now() + self._nanoseconds

    @property
    def identifier(self) -> str:
        return self._identifier

    def pin(self, digests: Iterable[Digest]) -> None:
        wanted = frozenset(digests)
        with self.store.exclusive():
            self.check()
            self.pins |= wanted

    def renew(self) -> None:
        with self.store.exclusive():
            self.check()
            self._expires = self.store.now() + self._nanoseconds

    def expired(self, now: int) -> bool:
        return now >= self._expires

    def check(self) -> None:
        if self.expired(self.store.now()) or not self.store.holds(self):
            raise ConflictError(f"lease {self.identifier} has expired: what it protected may be gone; start again")

    def __enter__(self) -> MemoryLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.store.drop(self)
