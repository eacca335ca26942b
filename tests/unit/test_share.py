"""How much the background may have under way, and whose turn the processors are."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fetching import PATIENCE, until

from prefetch.share import ALONE_SECONDS, BESIDE_SECONDS, FIRST_WINDOW, LARGEST_WINDOW, Share
from prefetch.statistics import Priority
from prefetch.turns import LONGEST_WAIT, Turns, Urgency

FRAME = 96 << 10


class Link:
    """A link of a rate and a latency, with one reader of it that keeps the window full."""

    def __init__(self, rate: float, latency: float) -> None:
        self.rate = rate
        self.latency = latency
        self.share = Share()
        self.now = 0.0
        self._free = 0.0
        self._answers: list[tuple[float, float]] = []

    def fill(self) -> None:
        while self.share.has_room or not self._answers:
            self.share.started(FRAME)
            self._free = max(self._free, self.now + self.latency) + FRAME / self.rate
            self._answers.append((self._free, self.now))

    def answer(self, *, beside: bool = False) -> None:
        self.now, started = self._answers.pop(0)
        self.share.arrived(FRAME, self.now - started, beside=beside)

    def run(self, answers: int, *, beside: bool = False) -> None:
        for _ in range(answers):
            self.fill()
            self.answer(beside=beside)

    @property
    def queue(self) -> float:
        """Seconds that a demand would wait for what is under way."""
        self.fill()
        return self._free - self.now - self.latency


@pytest.mark.parametrize("latency", [0.001, 0.005, 0.05])
@pytest.mark.parametrize("rate", [25e6 / 8, 200e6 / 8, 1e9 / 8])
def test_the_queue_stays_short_on_links_of_all_kinds(rate: float, latency: float) -> None:
    link = Link(rate, latency)
    assert link.queue <= (FIRST_WINDOW + FRAME) / rate, "before anything is known"
    link.run(1000)
    frame = FRAME / rate
    assert ALONE_SECONDS / 3 <= link.queue <= 1.5 * ALONE_SECONDS + 2 * frame, "the link is busy, and no more"
    link.run(1000, beside=True)
    assert link.queue <= 1.5 * BESIDE_SECONDS + 2 * frame
    assert link.share.under_way >= FRAME


def test_a_link_that_only_takes_its_time_is_filled_within_a_few_turns() -> None:
    link = Link(1e12, 0.02)
    link.run(100)
    assert link.now <= 6 * 0.02
    assert link.share.window >= 8 * FIRST_WINDOW
    link.run(10_000)
    assert link.share.window == LARGEST_WINDOW


def test_a_link_that_becomes_slow_has_less_under_way_soon() -> None:
    link = Link(125e6, 0.005)
    link.run(2000)
    link.rate /= 40
    link.run(400)
    assert link.queue <= 2 * ALONE_SECONDS


def test_a_window_that_nobody_fills_does_not_grow() -> None:
    share = Share()
    for _ in range(1000):
        share.started(FRAME)
        share.arrived(FRAME, 0.02, beside=False)
    assert share.window <= 2 * FIRST_WINDOW
    assert share.under_way == 0


def test_what_is_lost_halves_the_window_and_never_closes_it() -> None:
    share = Share()
    for _ in range(100):
        share.started(FRAME)
        share.lost(FRAME)
    assert share.window == 1.0
    assert share.under_way == 0


# -- turns -----------------------------------------------------------------------------------------------------------


class Work:
    """Takes turns in a thread of its own, and goes on when it is told to."""

    def __init__(self, pool: ThreadPoolExecutor, turns: Turns, name: str, due: float, order: list[str]) -> None:
        self.urgency: Urgency = (Priority.BACKGROUND, due)
        self._turns = turns
        self._name = name
        self._order = order
        self._steps = threading.Semaphore(0)
        self.job = pool.submit(self._run)

    def _run(self) -> None:
        with self._turns.take(lambda: self.urgency) as turn:
            self._order.append(self._name)
            self._wait()
            turn.give_way()
            self._order.append(self._name)
            self._wait()

    def _wait(self) -> None:
        assert self._steps.acquire(timeout=PATIENCE)

    def go_on(self, steps: int = 1) -> None:
        self._steps.release(steps)


def test_turns_go_by_urgency_and_readers_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetch.turns.LONGEST_WAIT", PATIENCE)
    turns = Turns(1)
    order: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        first = Work(pool, turns, "first", 5.0, order)
        until(lambda: order == ["first"])
        late, soon = Work(pool, turns, "late", 9.0, order), Work(pool, turns, "soon", 2.0, order)
        until(lambda: len(turns._waiting) == 2)
        first.go_on()
        until(lambda: order == ["first", "soon"])  # it gave way to what is due before it
        late.urgency = Priority.DEMAND, 9.0  # somebody waits for it now
        soon.go_on()
        until(lambda: order[2:] == ["late"])
        with turns.take(lambda: (Priority.DEMAND, 0.0)):
            assert turns._taken[Priority.DEMAND] == 2
            late.go_on()
            until(lambda: order[2:] == ["late", "late"])
        late.go_on()
        until(lambda: order[4:] == ["soon"])
        soon.go_on()
        until(lambda: order[5:] == ["first"])
        first.go_on()
        for work in (first, late, soon):
            work.job.result(PATIENCE)
    assert turns._taken == [0, 0]
    assert not turns._waiting


def test_the_background_goes_on_slowly_however_many_readers_there_are() -> None:
    turns = Turns(1)
    order: list[str] = []
    with ThreadPoolExecutor(1) as pool, turns.take(lambda: (Priority.DEMAND, 0.0)):
        work = Work(pool, turns, "one", 1.0, order)
        work.go_on(2)
        work.job.result(PATIENCE + 2 * LONGEST_WAIT)
        assert order == ["one", "one"]
        assert turns._taken == [1, 0]
