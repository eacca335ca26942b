"""Whose turn the processors are: readers first, then the background by when it is due.

The background has more threads than the machine has processors, since most of the time they wait for stores. When all
have their answers at once, a reader's frame would have to share the processors with them, and they would hinder each
other: Python runs one thread at a time, and changing threads costs more than a frame's bookkeeping.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefetch.statistics import Priority

LONGEST_WAIT = 0.1
"""Seconds that background gives way at a time: it goes on, slowly, however many readers there are."""

Urgency = tuple[Priority, float]
"""Of a read, at the moment: the lesser comes first."""


class Turns:
    """Held around what the frames of a read cost: decompressing, hashing and writing them. For any thread."""

    def __init__(self, processors: int | None = None) -> None:
        self._processors = processors or len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._taken = [0, 0]
        """Turns that are taken, by priority."""
        self._waiting: dict[Turn, threading.Lock] = {}
        """In the order in which they came, and what they wait for."""

    @contextmanager
    def take(self, urgency: Callable[[], Urgency]) -> Iterator[Turn]:
        """Demand never waits. Background waits for demand, and for others if they occupy all processors.

        ``urgency`` is asked whenever it matters, by any thread; it may change from background to demand meanwhile.
        """
        turn = Turn(self, urgency)
        self._begin(turn)
        try:
            yield turn
        finally:
            with self._lock:
                self._leave(turn)

    def _begin(self, turn: Turn) -> None:
        with self._lock:
            if self._may_enter(turn):
                self._enter(turn)
                return
            granted = self._waiting[turn] = threading.Lock()
            granted.acquire()
        if not granted.acquire(timeout=LONGEST_WAIT):
            with self._lock:
                if turn in self._waiting:
                    self._enter(turn)

    def _may_enter(self, turn: Turn) -> bool:
        demand, background = self._taken
        return turn.urgency()[0] == Priority.DEMAND or (not demand and background < self._processors)

    def _enter(self, turn: Turn) -> None:
        self._waiting.pop(turn, None)
        turn.priority = turn.urgency()[0]
        self._taken[turn.priority] += 1

    def _leave(self, turn: Turn) -> None:
        self._taken[turn.priority] -= 1
        while self._waiting:
            first = min(self._waiting, key=lambda each: each.urgency())
            if not self._may_enter(first):
                return
            granted = self._waiting[first]
            self._enter(first)
            granted.release()

    def _give_way(self, turn: Turn) -> None:
        with self._lock:
            mine = turn.urgency()
            if turn.priority == Priority.DEMAND == mine[0]:
                return
            unrivalled = not self._taken[Priority.DEMAND] and all(mine <= each.urgency() for each in self._waiting)
            if turn.priority == mine[0] and unrivalled:
                return
            self._leave(turn)
        self._begin(turn)


class Turn:
    """One thread's; ``priority`` is what it counts as."""

    def __init__(self, turns: Turns, urgency: Callable[[], Urgency]) -> None:
        self._turns = turns
        self.urgency = urgency
        self.priority = Priority.BACKGROUND

    def give_way(self) -> None:
        """To be called between frames: those who are more urgent come first."""
        self._turns._give_way(self)
