"""Leases of an object store: one object each, replaced by conditional writes whenever it changes.

Whether a lease is valid is decided by its object: one that is gone, or that somebody else has written, has expired,
whatever its holder believes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from layerstore.digest import Digest
from layerstore.errors import ConflictError, ImgtoolError, NotFoundError
from layerstore.store.bucket import ABSENT, Bucket
from layerstore.store.clock import NANOSECONDS, elapsed
from layerstore.store.collector import CollectorMark
from layerstore.store.format import LeaseDocument

DIRECTORY = "leases/"


class ObjectLease:
    """A lease held by this process; from several threads, if need be."""

    def __init__(self, bucket: Bucket, clock: Callable[[], int], mark: CollectorMark, seconds: int) -> None:
        self._bucket = bucket
        self._clock = clock
        self._mark = mark
        self._seconds = seconds
        self._mutex = threading.Lock()
        self._since: dict[Digest, float] = {}
        self._kept = False
        self._document = LeaseDocument(secrets.token_hex(16), self._expiry())
        self._etag = bucket.write(self._key, self._document.to_bytes(), expected=ABSENT)

    @property
    def identifier(self) -> str:
        return self._document.identifier

    def pin(self, digests: Iterable[Digest]) -> None:
        wanted = frozenset(digests)
        with self._mutex:
            new = wanted - self._since.keys()
            pins = self._document.pins | new
            if pins != self._document.pins:
                self._write(replace(self._document, pins=pins))
            else:
                self.check()
            if new:
                self._mark.pass_by(new)
                self._since.update(dict.fromkeys(new, elapsed()))

    def pinned_since(self, digest: Digest) -> float:
        """When (by :func:`~layerstore.store.clock.elapsed`) it was safe from collectors; infinity if it isn't."""
        return self._since.get(digest, float("inf"))

    def renew(self) -> None:
        with self._mutex:
            self._write(replace(self._document, expires=self._expiry()))
            self._mark.pass_by()

    def keep(self) -> None:
        """Go on protecting until the lease expires: something that needs it may still come to pass."""
        self._kept = True

    def release(self) -> None:
        """Stop protecting. One that can't be removed now expires by itself."""
        if self._kept:
            return
        try:
            self._bucket.delete(self._key)
        except ImgtoolError:
            pass

    def check(self) -> None:
        """Raises ConflictError if the lease has expired, or its object is another or gone."""
        try:
            whole = self._bucket.head(self._key).etag == self._etag
        except NotFoundError:
            whole = False
        if not whole or self.left() <= 0:
            raise self._expired()

    def left(self) -> float:
        """Seconds for which it is valid yet, by the service's clock."""
        return self._document.expires - self._clock() / NANOSECONDS

    def belongs_to(self, bucket: Bucket) -> bool:
        return self._bucket is bucket

    @property
    def _key(self) -> str:
        return DIRECTORY + self._document.identifier

    def _expiry(self) -> int:
        """Rounded up: a lease lasts at least as long as was asked for."""
        return -(-self._clock() // NANOSECONDS) + self._seconds

    def _write(self, document: LeaseDocument) -> None:
        if self.left() <= 0:
            raise self._expired()
        try:
            self._etag = self._bucket.write(self._key, document.to_bytes(), expected=self._etag)
        except ConflictError as error:
            raise self._expired() from error
        self._document = document

    def _expired(self) -> ConflictError:
        return ConflictError(
            f"lease {self.identifier} on {self._bucket.location} has expired: what it pinned may be gone, start again"
        )

    def __enter__(self) -> ObjectLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
