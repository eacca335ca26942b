"""Several stores that should have the same: mirrors, asked in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from layerstore.digest import Digest
from layerstore.errors import CorruptError, ImgtoolError, NotFoundError, UnavailableError, UsageError
from layerstore.oci.descriptor import Descriptor
from layerstore.store.heldblob import ReplaceableBlob, check_range
from layerstore.store.protocol import Blob, Reference, SizedStore, Store
from layerstore.store.retrying import close_store

AVOID_SECONDS = 5.0
"""So long a mirror that was unavailable is asked after the others: they need not wait for its time-out each time."""
DISTRUSTED = 4096
"""Blobs that are remembered to be wrong at some mirror; the oldest are forgotten."""

T = TypeVar("T")


class FailoverStore:
    """A :class:`~layerstore.store.protocol.Store` that reads from the first of its mirrors that can answer.

    =========================================  =====================================================================
    a mirror says                              then
    =========================================  =====================================================================
    missing                                    the next is asked
    unavailable, damaged, not permitted, …     the next is asked; this one is asked last for a while (unavailable),
                                               or from now on (a blob that is damaged there)
    not a valid name                           it is so everywhere
    =========================================  =====================================================================

    If none has it, it is missing only where **every** mirror said so. One that failed might have it: then the error is
    UnavailableError if any was unavailable, and the first failure otherwise.

    A blob that breaks off is read on from the next mirror that has it. One that turns out to be damaged while it is
    read is an error, since part of it has been given away; who opens it again gets it from another mirror.

    A reference is what the first mirror that has it says, so one that moved may still be the old one where a mirror
    lags behind. The list of names is that of all mirrors, and is had only if each can be listed: a list that lacks
    those of one would say that they don't exist.

    Attributes:
        location: those of the mirrors, with ``|`` between them.
    """

    def __init__(self, mirrors: Sequence[Store], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read from ``mirrors``, the first first; ``clock`` is in seconds.

        Raises:
            UsageError: there is none.
        """
        if not mirrors:
            raise UsageError("no mirror is named")
        self.mirrors = tuple(mirrors)
        self.location = "|".join(mirror.location for mirror in mirrors)
        self._clock = clock
        self._avoided: dict[int, float] = {}
        self._distrusted: dict[tuple[int, Digest], None] = {}

    def stat(self, digest: Digest) -> int:
        return self._first(f"blob {digest}", lambda mirror: mirror.stat(digest), self._order(digest))

    def open(self, digest: Digest) -> FailoverBlob:
        return FailoverBlob(self, digest, lambda mirror: mirror.open(digest))

    def open_sized(self, digest: Digest, size: int) -> FailoverBlob:
        def opened(mirror: Store) -> Blob:
            blob = mirror.open_sized(digest, size) if isinstance(mirror, SizedStore) else mirror.open(digest)
            if blob.size != size:
                blob.close()
                raise CorruptError(
                    f"blob {digest} in {mirror.location}", expected=f"{size} bytes", actual=f"{blob.size}"
                )
            return blob

        return FailoverBlob(self, digest, opened)

    def names(self) -> Iterator[str]:
        """As of every store.

        Raises:
            ImgtoolError: one of the mirrors can't be listed.
        """
        yield from sorted({name for mirror in self.mirrors for name in mirror.names()})

    def resolve(self, name: str) -> Descriptor:
        return self._first(f"reference {name!r}", lambda mirror: mirror.resolve(name), self._order())

    def references(self) -> Iterator[Reference]:
        for name in self.names():
            try:
                target = self.resolve(name)
            except NotFoundError:
                continue  # deleted meanwhile
            yield Reference(name, target)

    def close(self) -> None:
        for mirror in self.mirrors:
            close_store(mirror)

    # --- for FailoverBlob

    def open_one(self, digest: Digest, opened: Callable[[Store], Blob], but: frozenset[int]) -> MirrorBlob:
        """The blob at the first mirror that has it; those in ``but`` are not asked."""
        order = [number for number in self._order(digest) if number not in but]

        def one(number: int) -> MirrorBlob:
            try:
                return MirrorBlob(opened(self.mirrors[number]), number)
            except CorruptError:
                self.distrust(number, digest)
                raise

        return self._first_of(f"blob {digest}", one, order)

    def failed(self, number: int, error: ImgtoolError) -> None:
        """A mirror could not answer just now."""
        if isinstance(error, UnavailableError):
            self._avoided[number] = self._clock() + AVOID_SECONDS

    def distrust(self, number: int, digest: Digest) -> None:
        """The blob that a mirror has is damaged."""
        self._distrusted[number, digest] = None
        while len(self._distrusted) > DISTRUSTED:
            self._distrusted.pop(next(iter(self._distrusted)), None)

    def verdict(self, what: str, errors: Sequence[ImgtoolError]) -> ImgtoolError:
        """The error of what no mirror could give."""
        failures = [error for error in errors if not isinstance(error, NotFoundError)]
        if not failures:
            return NotFoundError(f"{what} is not in {self.location}")
        if len(self.mirrors) == 1:
            return failures[0]
        unavailable = next((error for error in failures if isinstance(error, UnavailableError)), None)
        if unavailable is None:
            return failures[0]
        return UnavailableError(
            f"{what} was had from none of {len(self.mirrors)} mirrors, one of which failed: {unavailable}"
        )

    # --- which mirror

    def _order(self, digest: Digest | None = None) -> list[int]:
        now = self._clock()

        def worth(number: int) -> tuple[bool, bool]:
            return (number, digest) in self._distrusted, self._avoided.get(number, now) > now

        return sorted(range(len(self.mirrors)), key=worth)

    def _first(self, what: str, ask: Callable[[Store], T], order: Sequence[int]) -> T:
        return self._first_of(what, lambda number: ask(self.mirrors[number]), order)

    def _first_of(self, what: str, ask: Callable[[int], T], order: Sequence[int]) -> T:
        errors: list[ImgtoolError] = []
        for number in order:
            try:
                return ask(number)
            except UsageError:
                raise
            except ImgtoolError as error:
                self.failed(number, error)
                errors.append(error)
        verdict = self.verdict(what, errors)
        raise verdict from (errors[-1] if errors and verdict is not errors[-1] else None)


class FailoverBlob:
    """A blob of the mirrors: of one at a time."""

    def __init__(self, store: FailoverStore, digest: Digest, opened: Callable[[Store], Blob]) -> None:
        self._store = store
        self._digest = digest
        self._opened = opened
        blob = store.open_one(digest, opened, frozenset())
        self._size = blob.size
        self._now = ReplaceableBlob(blob)

    @property
    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, length: int) -> bytes:
        check_range(self._digest, self._size, offset, length)
        asked: dict[int, ImgtoolError] = {}
        # Another thread may go back to a mirror that has failed here, so the turns are counted.
        for _ in range(4 * len(self._store.mirrors)):
            with self._now.reading() as blob:
                try:
                    if blob.number not in asked:
                        return blob.read_at(offset, length)
                except CorruptError:
                    self._store.distrust(blob.number, self._digest)
                    raise
                except ImgtoolError as error:
                    self._store.failed(blob.number, error)
                    asked[blob.number] = error
                self._now.replace(blob, lambda: self._next(asked))
        raise self._verdict(asked)

    def _next(self, asked: dict[int, ImgtoolError]) -> MirrorBlob:
        """The blob at a mirror that hasn't been asked for the range."""
        if len(asked) == len(self._store.mirrors):
            raise self._verdict(asked)
        try:
            blob = self._store.open_one(self._digest, self._opened, frozenset(asked))
        except ImgtoolError as error:
            raise self._verdict(asked, error) from error
        if blob.size != self._size:
            blob.close()
            self._store.distrust(blob.number, self._digest)
            where = self._store.mirrors[blob.number].location
            raise CorruptError(
                f"blob {self._digest} in {where} has another size than elsewhere",
                expected=f"{self._size} bytes",
                actual=f"{blob.size}",
            )
        return blob

    def _verdict(self, asked: dict[int, ImgtoolError], *more: ImgtoolError) -> ImgtoolError:
        return self._store.verdict(f"blob {self._digest}", [*asked.values(), *more])

    def close(self) -> None:
        self._now.close()

    def __enter__(self) -> FailoverBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class MirrorBlob:
    """A blob at the mirror of that number."""

    def __init__(self, blob: Blob, number: int) -> None:
        self._blob = blob
        self.number = number
        self.read_at = blob.read_at
        self.close = blob.close

    @property
    def size(self) -> int:
        return self._blob.size

    def __enter__(self) -> MirrorBlob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
