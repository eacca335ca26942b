"""Looking for the next event for a moment before going to sleep, where that pays.

To be woken, and to have the reader's processor leave idleness when it is answered, costs about 30 µs each on a virtual
machine, more than all the work on an event. A reader that misses the page cache again and again comes back within
microseconds: then whoever is awake answers in a quarter of the time. On a busy machine the same look would keep the
reader from running. So it is tried while it succeeds, and after each failure it is tried later again.
"""

from __future__ import annotations

import os
import select
import time

SPIN = 100e-6
"""Seconds to look for the next event. One that comes this soon, with or without a look, is worth looking for."""
_MOST_CREDIT = 8
_LEAST_PENALTY, _MOST_PENALTY = 4, 512
"""Events that come soon by themselves until it is tried again, after a first failure and after many."""
_RELIABLE = 16
"""Successes in a row that make earlier failures forgotten."""


class SpinningPoll:
    """``poll`` of an epoll set, for one thread."""

    def __init__(self, epoll: select.epoll) -> None:
        self._poll = epoll.poll
        self._alone = len(os.sched_getaffinity(0)) == 1  # nobody can come while we look
        self._credit = 0
        self._penalty = _LEAST_PENALTY
        self._successes = 0

    def __call__(self, timeout: float | None) -> list[tuple[int, int]]:
        """What is ready as soon as something is; nothing, after at least ``timeout`` seconds. None waits for ever."""
        clock = time.monotonic
        soon = clock() + SPIN
        if self._credit > 0 and not self._alone:
            while clock() < soon:
                if ready := self._poll(0):
                    self._succeed()
                    return ready
            self._fail()
            return self._poll(timeout)
        ready = self._poll(timeout)
        if clock() < soon:
            self._credit += 1
        return ready

    def _succeed(self) -> None:
        self._credit = min(self._credit + 1, _MOST_CREDIT)
        self._successes += 1
        if self._successes >= _RELIABLE:
            self._penalty = _LEAST_PENALTY

    def _fail(self) -> None:
        self._successes = 0
        self._credit = -self._penalty
        self._penalty = min(self._penalty * 2, _MOST_PENALTY)
