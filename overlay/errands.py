"""Work for other threads, in order, with nobody waiting for it: few threads, which come with the first work.

They are daemons: one that hangs, in a store that doesn't answer for instance, holds up what is behind it and no end of
the process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from prefetch.mistakes import report_mistake


class Errands:
    """A queue, and at most ``threads`` threads that work it off. Any thread may call."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._most = threads
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def send(self, errand: Callable[[], None]) -> None:
        """Have it done. What it raises is a mistake, and reported as one. After :meth:`close` nothing is done."""
        with self._changed:
            if self._closed:
                return
            self._queue.append(errand)
            if len(self._queue) <= self._idle:
                self._changed.notify()
                return
            if self._threads == self._most:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:  # the system has no more: others will do it, or it isn't done
            with self._changed:
                self._threads -= 1

    def close(self) -> None:
        """Forget what hasn't begun. What is being done goes on."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    self._threads -= 1
                    return
                errand = self._queue.popleft()
            try:
                errand()
            except Exception:
                report_mistake()
            del errand  # it may hold packs
