"""Whose turn the processors are: readers first.

Background has more threads than the machine has processors, since most of the time they wait for stores. When all have
their answers at once, a reader's frame would have to share the processors with them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefetch.statistics import Priority

LONGEST_WAIT = 0.1
"""Seconds that background gives way for one frame: it goes on, slowly, however many readers there are."""


class Turns:
    """Held around what a frame costs: decompressing and hashing it."""

    def __init__(self, processors: int | None = None) -> None:
        self._processors = processors or len(os.sched_getaffinity(0))
        self._changed = threading.Condition(threading.Lock())
        self._demand = self._background = self._waiting = 0

    @contextmanager
    def take(self, priority: Priority) -> Iterator[None]:
        """Demand never waits. Background waits for demand, and for others if they occupy all processors."""
        demand = priority == Priority.DEMAND
        with self._changed:
            if demand:
                self._demand += 1
            else:
                self._waiting += 1
                self._changed.wait_for(self._is_free, LONGEST_WAIT)
                self._waiting -= 1
                self._background += 1
        try:
            yield
        finally:
            with self._changed:
                if demand:
                    self._demand -= 1
                else:
                    self._background -= 1
                if self._waiting and self._is_free():
                    self._changed.notify(self._processors - self._background)

    def _is_free(self) -> bool:
        return not self._demand and self._background < self._processors
