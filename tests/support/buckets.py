"""Buckets on benches: in memory with places to stand between two operations, and stores in any bucket."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import BinaryIO

from layerstore.digest import Digest
from layerstore.errors import ConflictError, NotFoundError
from layerstore.store.bucket import ABSENT, Absent, Bucket, Entry, Guarantees, Piece
from layerstore.store.collector import Patience
from layerstore.store.objectblob import blob_key
from layerstore.store.objects import ObjectStore
from support.stores import SteppedClock

HONOURED = Guarantees(conditional_writes=True, conditional_deletes=True)

Hook = Callable[[str, str], None]
"""Called with an operation and its key."""


class MemoryBucket:
    """The shortest statement of what a bucket does.

    Attributes:
        before, after: called around each operation, by whoever does it; they may do other things, or raise.
        counts: operations so far.
    """

    location = "memory-bucket:"

    def __init__(
        self,
        clock: Callable[[], int] = time.time_ns,
        *,
        guarantees: Guarantees = HONOURED,
        shared: MemoryBucket | None = None,
    ) -> None:
        """``shared`` is another view of the same objects, with hooks of its own."""
        self._clock = clock
        self._guarantees = guarantees
        self._lock = threading.Lock() if shared is None else shared._lock
        self.objects: dict[str, tuple[bytes, int, str]] = {} if shared is None else shared.objects
        self.uploads: dict[str, int] = {}
        self.before: Hook = lambda operation, key: None
        self.after: Hook = lambda operation, key: None
        self.counts: Counter[str] = Counter()

    def guarantees(self) -> Guarantees:
        return self._guarantees

    def close(self) -> None:
        pass

    def now(self) -> int:
        return self._clock()

    def head(self, key: str) -> Entry:
        self._begin("head", key)
        entry = self._entry(key)
        self.after("head", key)
        return entry

    def read(self, key: str, offset: int, length: int) -> Piece:
        self._begin("read", key)
        piece = self._piece(key, offset, length)
        self.after("read", key)
        return piece

    def read_at(self, entry: Entry, offset: int, length: int) -> bytes:
        self._begin("read", entry.key)
        piece = self._piece(entry.key, offset, length)
        if piece.entry.etag != entry.etag:
            raise ConflictError(entry.key)
        return piece.data

    def write(self, key: str, data: bytes, *, expected: str | Absent | None = None) -> str:
        self._begin("write", key)
        etag = self._put(key, data, expected)
        self.after("write", key)
        return etag

    def send(self, key: str, file: BinaryIO, size: int) -> str:
        self._begin("send", key)
        etag = self._put(key, file.read(size), None)
        self.after("send", key)
        return etag

    def entries(self, prefix: str) -> Iterator[Entry]:
        self._begin("list", prefix)
        with self._lock:
            found = [self._listed(key) for key in sorted(self.objects) if key.startswith(prefix)]
        self.after("list", prefix)
        yield from found

    def delete(self, key: str, *, expected: str | None = None) -> bool:
        self._begin("delete", key)
        with self._lock:
            if expected is not None and key in self.objects and self.objects[key][2] != expected:
                raise ConflictError(key)
            self.objects.pop(key, None)
        self.after("delete", key)
        return True

    def copy(self, key: str, target: str) -> None:
        self._begin("copy", key)
        self._put(target, self._piece(key, 0, 1 << 40).data, None)
        self.after("copy", key)

    def abort_uploads(self, *, before: int, keep: Container[str], dry_run: bool) -> int:
        self._begin("abort", "")
        old = [key for key, begun in self.uploads.items() if begun <= before and key not in keep]
        if not dry_run:
            for key in old:
                del self.uploads[key]
        return len(old)

    def _begin(self, operation: str, key: str) -> None:
        self.counts[operation] += 1
        self.before(operation, key)

    def _entry(self, key: str) -> Entry:
        with self._lock:
            if key not in self.objects:
                raise NotFoundError(f"{key} doesn't exist")
            return self._listed(key)

    def _listed(self, key: str) -> Entry:
        data, modified, etag = self.objects[key]
        return Entry(key, len(data), modified, etag)

    def _piece(self, key: str, offset: int, length: int) -> Piece:
        entry = self._entry(key)
        return Piece(self.objects[key][0][offset : offset + length], entry)

    def _put(self, key: str, data: bytes, expected: str | Absent | None) -> str:
        with self._lock:
            found = self.objects[key][2] if key in self.objects else ABSENT
            if expected is not None and found != expected:
                raise ConflictError(f"{key} is not what was expected")
            etag = hashlib.md5(data).hexdigest()  # as S3's: the same bytes have the same
            self.objects[key] = (bytes(data), self._clock(), etag)
            return etag


class Stamped:
    """A bucket some of whose objects are said to be of another time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.stamps: dict[str, int] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._bucket, name)

    def head(self, key: str) -> Entry:
        return self._stamped(self._bucket.head(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        return map(self._stamped, self._bucket.entries(prefix))

    def _stamped(self, entry: Entry) -> Entry:
        return entry._replace(modified=self.stamps.get(entry.key, entry.modified))


class BucketBench:
    """A store in a bucket, on a bench."""

    def __init__(
        self,
        bucket: Bucket,
        lock_seconds: float = 60.0,
        *,
        patience: Patience | None = None,
        spool: str | None = None,
        threads: int = 4,
    ) -> None:
        self.bucket = Stamped(bucket)
        self.clock = SteppedClock(bucket.now)
        self.store = ObjectStore.create(
            self.bucket,  # type: ignore[arg-type]
            clock=self.clock,
            lock_seconds=lock_seconds,
            patience=patience,
            spool=spool,
            threads=threads,
        )

    def damage(self, digest: Digest, data: bytes) -> None:
        self.store.bucket.write(blob_key(digest), data)

    def stamp(self, digest: Digest) -> None:
        self.bucket.stamps[blob_key(digest)] = self.clock()

    def close(self) -> None:
        pass
