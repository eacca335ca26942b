"""A store that is asked again when it is unavailable for a moment."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from layerstore.digest import Digest
from layerstore.errors import CorruptError, NotFoundError, UnavailableError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.heldblob import ReplaceableBlob, check_range
from layerstore.store.protocol import Blob, Reference, SizedStore, Store

ATTEMPTS = 6
"""At each question, and at each range of a blob: a long blob gets on over a bad link as long as one of six succeeds."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds. Doubled after each attempt; half of each is left to chance, so that a fleet doesn't ask in step."""

T = TypeVar("T")
Wait = Callable[[float], object]
"""Waits so many seconds; true if there is no use in going on. ``Event.wait`` is one, and so is ``time.sleep``."""


class RetryingStore:
    """A :class:`~layerstore.store.protocol.Store` that asks another one, again where it is unavailable.

    Nothing but :class:`~layerstore.errors.UnavailableError` is tried again, and it is what is raised in the end: what
    is missing, damaged or not permitted is said at once. A blob is read on from where it broke off: its ranges are
    asked for one by one, each again by itself, from the third attempt on of the blob opened anew.
    """

    def __init__(self, store: Store, *, wait: Wait = time.sleep) -> None:
        """Ask ``store``; pauses are made by ``wait``."""
        self._store = store
        self._wait = wait

    @property
    def location(self) -> str:
        return self._store.location

    def stat(self, digest: Digest) -> int:
        return self.patiently(lambda: self._store.stat(digest))

    def open(self, digest: Digest) -> RetryingBlob:
        return RetryingBlob(self, digest, lambda: self._store.open(digest))

    def open_sized(self, digest: Digest, size: int) -> RetryingBlob:
        store = self._store
        if not isinstance(store, SizedStore):
            return self.open(digest)
        return RetryingBlob(self, digest, lambda: store.open_sized(digest, size))

    def names(self) -> Iterator[str]:
        yield from self.patiently(lambda: list(self._store.names()))

    def resolve(self, name: str) -> Descriptor:
        return self.patiently(lambda: self._store.resolve(name))

    def references(self) -> Iterator[Reference]:
        yield from self.patiently(lambda: list(self._store.references()))

    def close(self) -> None:
        close_store(self._store)

    def patiently(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns, at the last attempt what it raises."""
        pause = FIRST_PAUSE
        for _ in range(ATTEMPTS - 1):
            try:
                return ask()
            except UnavailableError:
                if self._wait(pause * (1 + secrets.randbelow(1000) / 1000) / 2):
                    raise
                pause = min(LONGEST_PAUSE, pause * 2)
        return ask()


class RetryingBlob:
    """A blob whose ranges are asked for again."""

    def __init__(self, store: RetryingStore, digest: Digest, opened: Callable[[], Blob]) -> None:
        self._store = store
        self._digest = digest
        self._opened = opened
        blob = store.patiently(opened)
        self._size = blob.size
        self._now = ReplaceableBlob(blob)

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        check_range(self._digest, self._size, offset, length)
        failures: list[Blob] = []

        def ask() -> bytes:
            if len(failures) > 1:
                self._replace(failures[-1])
            with self._now.reading() as blob:
                try:
                    return blob.read_at(offset, length)
                except UnavailableError:
                    failures.append(blob)
                    raise

        return self._store.patiently(ask)

    def _replace(self, blob: Blob) -> None:
        """Open the blob anew, unless it has lost its name: the one that is open may be readable still."""
        try:
            self._now.replace(blob, self._open_again)
        except NotFoundError:
            pass

    def _open_again(self) -> Blob:
        blob = self._opened()
        if blob.size != self._size:
            blob.close()
            raise CorruptError(
                f"blob {self._digest} in {self._store.location} was replaced while it was read",
                expected=f"{self._size} bytes",
                actual=f"{blob.size}",
            )
        return blob

    def close(self) -> None:
        self._now.close()

    def __enter__(self) -> RetryingBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def close_store(store: Store) -> None:
    """Close what a store holds open, if it is one that does."""
    close = getattr(store, "close", None)
    if close is not None:
        close()
