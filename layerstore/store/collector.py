"""Who collects in a bucket: one object, ``collector``, that collectors write and publishers look at.

There are no locks in a bucket. What a directory store does under its lock is done here by writing first and looking
afterwards:

* A **collector** writes the mark before it reads leases and references, and takes it back when it has deleted.
* A **publisher** pins, and looks at the mark then. Nobody collects: a collection that begins later will see the pin.
  Somebody does, and may have read the leases before: the publisher waits until that one is done, and only then looks
  at what is there.

Either the collector's writing comes before the publisher's look, and is seen, or the publisher's writing before the
collector's reading, and is marked. That needs reads that see every finished write, as :mod:`layerstore.store.bucket`
asks.

A collector may die, or be stopped for minutes and go on as if nothing had been. So its mark says what it is about to
delete (``dooms``) before it deletes any of it, and every change of the mark is a conditional write:

* It is **void** when nothing has been written for :data:`VOID_SECONDS`. Whoever meets a void mark replaces it by one
  that says that nobody collects. Its owner, should it still live, can then announce nothing more.
* What a void mark had announced is in **doubt** for :data:`DOUBT_SECONDS`: a request to delete it may be on its way,
  or in the hands of a process that sleeps. A publisher doesn't rely on such a blob. It fails, and says until when.
* Its owner deletes nothing later than :data:`TRUST_SECONDS` after it has announced it, by a clock that goes on while
  the machine sleeps.

So no clock decides whether a blob may be deleted, but for the end of doubts: that a request takes effect within a
quarter of an hour is the one thing that is taken on trust.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from layerstore.digest import Digest
from layerstore.errors import (
    ConflictError,
    CorruptError,
    ImgtoolError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from layerstore.store.bucket import ABSENT, Bucket
from layerstore.store.clock import NANOSECONDS, elapsed
from layerstore.store.format import MARK_BYTES, CollectorDocument

KEY = "collector"

VOID_SECONDS = 120.0
TRUST_SECONDS = 60.0
DOUBT_SECONDS = 900.0

_LOOK_SECONDS = 0.25
"""Between looks whether a collector is done; those of others that wait are spread by chance."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. See the module; tests have less of it."""

    void: float = VOID_SECONDS
    trust: float = TRUST_SECONDS
    doubt: float = DOUBT_SECONDS
    look: float = _LOOK_SECONDS


class CollectorMark:
    """The mark of one bucket; any thread may call."""

    def __init__(self, bucket: Bucket, clock: Callable[[], int], *, wait: float, patience: Patience) -> None:
        """``wait``: seconds that a collector is waited for."""
        self._bucket = bucket
        self._clock = clock
        self._wait = wait
        self._patience = patience

    def pass_by(self, wanted: Collection[Digest] = ()) -> None:
        """Wait until nobody collects. What a publisher wrote before this is seen by all that collect afterwards.

        Raises:
            UnavailableError: somebody does for too long; or one of ``wanted`` is in doubt.
        """
        found = self._free()
        if found is None:
            return
        mark, _ = found
        doubtful = sorted(mark.doubts.intersection(wanted))
        left = mark.doubted_until - self._clock() / NANOSECONDS
        if doubtful and left > 0:
            raise UnavailableError(
                f"a collection in {self._bucket.location} was broken off and may still delete blob {doubtful[0]}: "
                f"publish again in {left:.0f} s"
            )

    def take(self) -> Turn:
        """Begin to collect, when nobody else does any more.

        Raises:
            UnavailableError: somebody does for too long.
        """
        while True:
            found = self._free()
            mark = CollectorDocument(_identifier(), True)
            if found is not None:
                mark = replace(mark, doubts=found[0].doubts, doubted_until=found[0].doubted_until)
            try:
                etag = self._bucket.write(KEY, mark.to_bytes(), expected=ABSENT if found is None else found[1])
            except ConflictError:
                continue  # another collector was faster
            return Turn(self._bucket, self._clock, self._patience, mark, etag)

    def _free(self) -> tuple[CollectorDocument, str] | None:
        """The mark and its etag when nobody collects; None where nobody ever has."""
        end = time.monotonic() + self._wait
        while (found := self._read()) is not None:
            mark, etag, written = found
            now = self._clock()
            if not mark.collecting:
                return mark, etag
            if now >= written + self._patience.void * NANOSECONDS:
                free = replace(
                    mark,
                    identifier=_identifier(),
                    collecting=False,
                    dooms=frozenset(),
                    doubts=mark.dooms | (mark.doubts if mark.doubted_until * NANOSECONDS > now else frozenset()),
                    doubted_until=_seconds(now, self._patience.doubt),
                )
                try:
                    return free, self._bucket.write(KEY, free.to_bytes(), expected=etag)
                except ConflictError:
                    pass  # its owner lives, or somebody else has met it
            if time.monotonic() >= end:
                raise UnavailableError(
                    f"{self._bucket.location} has been locked by a collector for {self._wait:.0f} s: try again"
                )
            time.sleep(self._patience.look * (0.5 + secrets.randbelow(1000) / 1000))
        return None

    def _read(self) -> tuple[CollectorDocument, str, int] | None:
        what = f"mark {self._bucket.location}/{KEY}"
        try:
            piece = self._bucket.read(KEY, 0, MARK_BYTES + 1)
        except NotFoundError:
            return None
        try:
            return CollectorDocument.parse(piece.data, what), piece.entry.etag, piece.entry.modified
        except UnsupportedError:
            raise
        except ImgtoolError as error:
            raise CorruptError(f"{error}; delete the object if nobody collects") from error


class Turn:
    """A collector's hold of the mark. Deletes are announced, done, and settled; then it ends."""

    def __init__(
        self, bucket: Bucket, clock: Callable[[], int], patience: Patience, mark: CollectorDocument, etag: str
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        self._patience = patience
        self._mark = mark
        self._etag = etag
        self._unsettled: frozenset[Digest] = frozenset()
        self._trusted = 0.0

    def announce(self, digests: Collection[Digest]) -> None:
        """Say that these are about to be deleted. Until then, none of them may be.

        Raises:
            UnavailableError: publishers have stopped waiting: what has been marked doesn't hold any more.
        """
        begun = elapsed()  # before the mark can have been written: it is void no earlier than it is thought to be
        unsettled = self._unsettled | frozenset(digests)
        mark = replace(self._mark, identifier=_identifier(), dooms=unsettled)
        try:
            self._etag = self._bucket.write(KEY, mark.to_bytes(), expected=self._etag)
        except ConflictError as error:
            raise self._late() from error
        self._mark = mark
        self._unsettled = unsettled
        self._trusted = begun + self._patience.trust

    def check(self) -> None:
        """Just before each delete.

        Raises:
            UnavailableError: it is too long since they were announced.
        """
        if elapsed() >= self._trusted:
            raise self._late()

    def settle(self, digests: Collection[Digest]) -> None:
        """No request to delete these is under way any more."""
        self._unsettled -= frozenset(digests)

    def end(self) -> None:
        """Say that nobody collects any more. Where that can't be said, the mark becomes void by itself."""
        now = self._clock()
        doubts = self._mark.doubts if self._mark.doubted_until * NANOSECONDS > now else frozenset()
        until = self._mark.doubted_until if doubts else 0
        if self._unsettled:
            doubts, until = doubts | self._unsettled, _seconds(now, self._patience.doubt)
        mark = CollectorDocument(_identifier(), False, doubts=doubts, doubted_until=until)
        try:
            self._bucket.write(KEY, mark.to_bytes(), expected=self._etag)
        except ImgtoolError:
            pass

    def _late(self) -> UnavailableError:
        return UnavailableError(
            f"collecting in {self._bucket.location} takes too long at a time: publishers may go on; repeat"
        )


def _identifier() -> str:
    return secrets.token_hex(8)


def _seconds(now: int, more: float) -> int:
    """Whole seconds since 1970, rounded up."""
    return -(-(now + int(more * NANOSECONDS)) // NANOSECONDS)
