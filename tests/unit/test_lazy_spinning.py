"""When the keeper looks for the next event, and when it goes to sleep at once."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from overlay.lazy.spinning import SPIN, SpinningPoll

READY = [(5, 1)]


class Kernel:
    """An epoll set, and the clock. ``after`` is in seconds from one answer to the next event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.after = 0.0
        self.sleeps = 0
        self._next = 0.0

    def answered(self) -> None:
        self._next = self.now + self.after

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        if timeout == 0:
            self.now += SPIN / 10
        else:
            self.sleeps += 1
            self.now = max(self.now, self._next if timeout is None else min(self._next, self.now + timeout))
        return READY if self._next <= self.now else []


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return made


def sleeps(poll: SpinningPoll, kernel: Kernel, after: float, events: int) -> int:
    """How often it slept for so many events, each so long after the answer of the one before."""
    kernel.after = after
    before = kernel.sleeps
    for _ in range(events):
        kernel.answered()
        assert poll(None) == READY
    return kernel.sleeps - before


def spinning(kernel: Kernel) -> SpinningPoll:
    epoll: Any = kernel
    return SpinningPoll(epoll)


def test_it_is_awake_while_events_come_fast(kernel: Kernel) -> None:
    poll = spinning(kernel)
    assert sleeps(poll, kernel, SPIN / 2, 1000) == 1


def test_it_sleeps_between_events_that_come_slowly(kernel: Kernel) -> None:
    poll = spinning(kernel)
    assert sleeps(poll, kernel, SPIN * 2, 100) == 100
    assert kernel.now == pytest.approx(100 * SPIN * 2), "without a look in vain"


def test_it_looks_in_vain_ever_more_seldom(kernel: Kernel) -> None:
    """A reader that needs our processor to go on never comes while we look."""
    poll = spinning(kernel)
    vain = 0
    for _ in range(2000):
        sleeps(poll, kernel, SPIN / 2, 1)
        if poll._credit > 0:
            assert sleeps(poll, kernel, SPIN * 2, 1) == 1
            vain += 1
    assert vain < 12


def test_one_failure_among_many_successes_is_soon_forgotten(kernel: Kernel) -> None:
    poll = spinning(kernel)
    sleeps(poll, kernel, SPIN / 2, 100)
    slept = 0
    for _ in range(20):
        slept += sleeps(poll, kernel, SPIN * 2, 1)
        slept += sleeps(poll, kernel, SPIN / 2, 50)
    assert slept <= 20 * 7


def test_alone_on_its_processor_it_never_looks(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    poll = spinning(kernel)
    assert sleeps(poll, kernel, SPIN / 2, 100) == 100


def test_it_comes_back_with_nothing_at_its_timeout(kernel: Kernel) -> None:
    poll = spinning(kernel)
    sleeps(poll, kernel, SPIN / 2, 10)
    kernel.after = 1000.0
    kernel.answered()
    for _ in range(3):
        before = kernel.now
        assert poll(0.5) == []
        assert before + 0.5 <= kernel.now <= before + 0.5 + 2 * SPIN
