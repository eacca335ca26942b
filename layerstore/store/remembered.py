"""What has been read of objects, for as long as listings say that they are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from layerstore.errors import NotFoundError
from layerstore.store.bucket import Entry
from layerstore.store.clock import NANOSECONDS

REMEMBERED = 20_000
"""Objects of one kind."""
SETTLED_SECONDS = 5.0
"""Age of an object from which on its etag tells whether it has changed, be it made of a time and a size alone."""

T = TypeVar("T")


class Remembered(Generic[T]):
    """By key; any thread may call."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[tuple[str, int], T]] = {}

    def get(self, entry: Entry, read: Callable[[], tuple[T, Entry]]) -> T | None:
        """What is known of a listed object, or is read of it now; None if it isn't there any more."""
        known = self._known.get(entry.key)
        if known is not None and known[0] == (entry.etag, entry.size):
            return known[1]
        try:
            value, found = read()
        except NotFoundError:
            self._known.pop(entry.key, None)
            return None
        if self._clock() - found.modified > SETTLED_SECONDS * NANOSECONDS:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[entry.key] = (found.etag, found.size), value
        return value
