"""Fetching, whatever happens: everybody is answered once and in time, and nothing wrong gets in."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.faults import fsync_for_free
from support.fetching import (
    Answer,
    FaultyStore,
    another_frame,
    cut_short,
    down,
    ends_early,
    flipped,
    ignores_ranges,
    missing,
    page,
    read_back,
    small_pack,
    until,
    zeros,
)

from layerstore.cache.cache import Cache
from layerstore.cache.format import Origin
from layerstore.errors import CorruptError, ImgtoolError, NotFoundError, PermissionError_, UnavailableError
from layerstore.pack.format import FRAME_SIZE
from prefetch.attempts import ANSWERS, FIRST_PAUSE, LONGEST_PAUSE, Attempts
from prefetch.backlog import ROUNDS, Frame, Read, Want
from prefetch.fetcher import Fetched, Fetcher, Priority
from prefetch.plan import FRAMES_PER_READ, FrameRange, PackFetch
from prefetch.schedule import Schedule

FRAMES = 24
BACKGROUND = 2
COMPRESSED = 100 << 10
TIMEOUT = 10.0
SLACK = 0.001


class Pack:
    """As much of a cached pack as a schedule looks at."""

    def __init__(self, name: str, origins: int) -> None:
        self.digest = self.hex = name
        self.origins: list[Any] = [Origin(f"{name}{number}", number) for number in range(origins)]  # type: ignore[arg-type]
        self.index = SimpleNamespace(
            raw_range=lambda number: (number * FRAME_SIZE, FRAME_SIZE),
            sha256=lambda number: bytes([number]) * 32,
            compressed_size=lambda number: COMPRESSED,
            blob_range=lambda numbers: (numbers.start * COMPRESSED, len(numbers) * COMPRESSED),
        )

    def busy(self) -> Any:
        return nullcontext()


numbers = st.lists(st.integers(0, FRAMES - 1), min_size=1, max_size=FRAMES, unique=True)
kinds = st.sampled_from([CorruptError, NotFoundError, UnavailableError, PermissionError_])


class Scheduling(RuleBasedStateMachine):
    """A schedule, threads that do whatever they like, and time that goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.schedule = Schedule(self.way, background=BACKGROUND)
        self.packs: list[Any] = [Pack("a", 2), Pack("b", 1), Pack("c", 0)]
        self.ready: dict[Any, set[int]] = {pack: set() for pack in self.packs}
        self.wants: list[Want] = []
        self.told: dict[Want, float] = {}
        self.dropped: set[Want] = set()
        self.reads: list[Read] = []
        self.given_up: list[Read] = []
        self.asked: dict[Want, set[int]] = {}

    def way(self, frame: Frame) -> Any:
        origins = frame.pack.origins
        candidates = origins if frame.attempts is None else frame.attempts.open_to(origins)
        return candidates[0] if candidates else None

    def tell(self, finished: Any) -> None:
        for want in finished:
            assert want not in self.told and want not in self.dropped, "told twice"
            self.told[want] = self.now
            if want.error is None:
                assert self.asked[want] <= self.ready[want.pack], "told too early"

    @rule(
        pack=st.integers(0, 2),
        numbers=numbers,
        priority=st.sampled_from(Priority),
        seconds=st.none() | st.floats(0.01, 60),
        first=st.booleans(),
        late=st.none() | st.floats(0.0, 60.0),
        rounds=st.sampled_from([1, ROUNDS]),
    )
    def want(
        self,
        pack: int,
        numbers: list[int],
        priority: Priority,
        seconds: float | None,
        first: bool,
        late: float | None,
        rounds: int,
    ) -> None:
        where = self.packs[pack]
        lacking = [number for number in numbers if number not in self.ready[where]]
        if lacking:
            deadline = None if seconds is None else self.now + seconds
            due = None if late is None else self.now + late
            want = Want(where, lambda error: None, priority, deadline, self.now, due=due, rounds=rounds)
            self.wants.append(want)
            self.asked[want] = set(lacking)
            self.schedule.add(want, lacking, first=first)
            if deadline is not None:
                assert self.schedule.next_event <= deadline

    @rule()
    def start(self) -> None:
        demand = self.schedule.stats(0).queued_demand
        read = self.schedule.start(threading.Thread(), self.now)
        if read is None:
            assert not demand
            return
        assert (read.priority == Priority.DEMAND) == (demand > 0)
        self.reads.append(read)
        assert [frame.number for frame in read.frames] == list(read.numbers)
        assert len(read.frames) <= FRAMES_PER_READ
        assert all(frame.wants for frame in read.frames)

    def some_read(self, data: st.DataObject) -> Read:
        return data.draw(st.sampled_from(self.reads + self.given_up))

    @precondition(lambda self: self.reads or self.given_up)
    @rule(data=st.data())
    def comes(self, data: st.DataObject) -> None:
        """Some frames of a read come, others don't, and it is over."""
        read = self.some_read(data)
        if read.way is not None:
            if not read.arrived:
                self.schedule.arrived(read, 100, self.now)
            wrong = data.draw(st.sets(st.sampled_from(read.frames)))
            for frame in read.frames:
                if frame not in wrong:
                    self.ready[read.pack].add(frame.number)
                    self.tell(self.schedule.there(read, frame.number, 100, 10, self.now)[1])
        else:
            wrong = set(read.frames)
        self.fails(read, sorted(wrong, key=lambda frame: frame.number), data)
        self.over(read)

    def fails(self, read: Read, frames: list[Frame], data: st.DataObject) -> None:
        if read.given_up or not frames:
            return
        error = NotFoundError("none") if read.way is None else data.draw(kinds)("it")
        if data.draw(st.integers(0, 9)) == 0:
            self.tell(self.schedule.lost(read, frames, error, self.now))
        else:
            self.tell(self.schedule.refused(read, frames, error, self.now))

    def over(self, read: Read) -> None:
        self.schedule.finish(read, self.now)
        (self.given_up if read.given_up else self.reads).remove(read)

    @precondition(lambda self: self.reads or self.given_up)
    @rule(data=st.data())
    def is_forgotten(self, data: st.DataObject) -> None:
        """A read ends with nothing said of its frames."""
        self.over(self.some_read(data))

    @rule(seconds=st.floats(0.01, 15))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds
        self.monitor()

    def monitor(self) -> None:
        self.tell(self.schedule.overdue(self.now))
        for read in self.schedule.give_up(self.now - TIMEOUT, self.now):
            self.tell(self.schedule.refused(read, read.frames, UnavailableError("stalled"), self.now))
            read.given_up = True
            self.reads.remove(read)
            self.given_up.append(read)
        self.schedule.wake(self.now)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        want = data.draw(st.sampled_from(self.waiting()))
        self.schedule.drop(want)
        self.dropped.add(want)

    def waiting(self) -> list[Want]:
        return [want for want in self.wants if want not in self.told and want not in self.dropped]

    @invariant()
    def it_agrees_with_itself(self) -> None:
        stats = self.schedule.stats(0)
        assert stats.waiting == len(self.waiting())
        assert stats.in_flight == len(self.reads)
        frames = list(self.schedule._backlog)
        queued = [frame for frame in frames if frame.queue is not None]
        assert stats.queued_demand == sum(frame.queue == Priority.DEMAND for frame in queued)
        assert stats.queued_background == len(queued) - stats.queued_demand
        resting = [frame for frame in frames if frame.queue is None and frame.read is None]
        assert stats.resting == len(resting)
        reading = [frame for frame in frames if frame.read is not None]
        assert all(frame.read in self.reads for frame in reading)
        assert len({(frame.pack, frame.number) for frame in frames}) == len(frames)
        for frame in (*queued, *resting):
            assert frame.wants, "nobody wants it"
            assert frame.priority == min(want.priority for want in frame.wants)
        assert sum(read.priority == Priority.BACKGROUND for read in self.reads) <= BACKGROUND
        unanswered = [read for read in self.reads if not read.arrived]
        assert self.schedule._share.under_way == sum(read.size for read in unanswered)
        assert self.schedule._share.window >= 1.0
        assert self.schedule.stuck == {read.thread for read in self.given_up}

    @invariant()
    def nobody_waits_beyond_the_deadline(self) -> None:
        for want in self.waiting():
            assert want.deadline is None or want.deadline > self.now - SLACK or self.schedule.next_event <= self.now

    def teardown(self) -> None:
        """A store that answers nothing but errors ends it all, soon."""
        for read in list(self.reads):
            self.over(read)
        steps = 0
        while self.waiting():
            self.now += 1.0
            self.monitor()
            while (taken := self.schedule.start(threading.Thread(), self.now)) is not None:
                read = taken
                steps += 1
                assert steps < 3 * FRAMES * (2 * ANSWERS + 100), "it does not end"
                error = random.Random(steps).choice([CorruptError, UnavailableError])("end")
                self.reads.append(read)
                kind = NotFoundError("none") if read.way is None else error
                self.tell(self.schedule.refused(read, read.frames, kind, self.now))
                self.over(read)
        assert all(want in self.told or want in self.dropped for want in self.wants)
        assert not list(self.schedule._backlog)
        assert self.schedule.stats(0).queued_demand == self.schedule.stats(0).resting == 0
        assert self.schedule._share.under_way == 0


Scheduling.TestCase.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduling = Scheduling.TestCase


# -- the whole of it, with threads

SMALL = small_pack(30)
REPACKED = small_pack(30, level=19)

FAULTS = {
    "cut short": cut_short,
    "ends early": ends_early,
    "flipped": flipped,
    "page": page,
    "zeros": zeros,
    "ranges ignored": ignores_ranges(SMALL),
    "another frame": another_frame(SMALL),
    "down": down,
    "missing": missing,
}


class Unreliable(FaultyStore):
    """Answers a share of the reads in some other way than it should, at random."""

    def misbehave(self, seed: int, share: float, faults: list[str]) -> None:
        chance = random.Random(seed)

        def fault(offset: int, length: int, right: bytes) -> bytes:
            if not faults or chance.random() >= share:
                return right
            return FAULTS[chance.choice(faults)](offset, length, right)

        self.fault = fault


wants = st.lists(
    st.tuples(
        st.lists(st.integers(0, 29), min_size=1, max_size=30),
        st.sampled_from(Priority),
        st.sampled_from([0.02, 0.3, 30.0]),
    ),
    max_size=20,
)


@pytest.mark.case("D01")
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    wants,
    st.integers(0, 1 << 30),
    st.floats(0, 1),
    st.lists(st.sampled_from(sorted(FAULTS)), max_size=4),
    st.booleans(),
    st.integers(1, 6),
)
def test_every_answer_is_right_or_an_error(
    wants: list[tuple[list[int], Priority, float]],
    seed: int,
    share: float,
    faults: list[str],
    second: bool,
    threads: int,
) -> None:
    stores: dict[str, Any] = {"one": Unreliable(SMALL, location="one"), "two": Unreliable(REPACKED, location="two")}
    with tempfile.TemporaryDirectory() as root, fsync_for_free():
        cache = Cache(root)
        try:
            pack = cache.pack(SMALL.stored, stores["one"])
            if second:
                cache.pack(REPACKED.stored, stores["two"])
            for number, store in enumerate(stores.values()):
                store.misbehave(seed + number, share, faults)
            answers: list[tuple[list[int], Answer]] = []
            with Fetcher(stores.__getitem__, lambda wanted, hex: 0, threads=threads) as fetcher:
                for frames, priority, seconds in wants:
                    answers.append((frames, Answer()))
                    deadline = time.monotonic() + min(seconds, 1.0)
                    fetcher.want(pack, frames, answers[-1][1], priority=priority, deadline=deadline)
                for frames, answer in answers:
                    error = answer.wait()
                    if error is None:
                        read_back(pack, SMALL, frames)
                    else:
                        assert isinstance(error, CorruptError | UnavailableError | NotFoundError)
                        assert str(error).isprintable()
                        assert type(error) is not NotFoundError or "missing" in faults
                until(lambda: not fetcher.stats().waiting and not fetcher.stats().in_flight)
                read_back(pack, SMALL, set(range(30)) - set(pack.unready(range(30))))
                for store in stores.values():
                    store.fault = None
                total = fetcher.run([PackFetch(pack, (FrameRange(0, 30),))])
                assert total == Fetched() or total.frames > 0
            read_back(pack, SMALL, range(30))
            with open(pack.data_path, "rb") as file:
                assert file.read() == SMALL.raw
            assert pack.complete
        finally:
            cache.close()
        assert all(store.concurrent == 0 for store in stores.values())
        assert os.path.exists(root)


@settings(deadline=None, max_examples=100)
@given(st.lists(kinds, min_size=1, max_size=100), st.integers(1, 3))
def test_attempts_at_a_frame_end(errors: list[type[ImgtoolError]], places: int) -> None:
    """Each place gives but a few answers, whatever they are; one that can't be reached is asked ever more rarely."""
    origins: list[Any] = [Origin(f"{number}", number) for number in range(places)]  # type: ignore[arg-type]
    attempts = Attempts()
    answers = unanswered = 0
    words: dict[Any, type[ImgtoolError]] = {}
    for kind in errors:
        place = attempts.open_to(origins)[0]
        pause = attempts.failed(place, kind("it"), origins, 1.0)
        if kind is not UnavailableError:
            answers += 1
            words[place] = kind
            assert answers <= places * ANSWERS
        if pause is None:
            assert kind is not UnavailableError
            verdict = attempts.verdict("frame 1 of pack p", b"x" * 32)
            assert not isinstance(verdict, UnavailableError)
            assert isinstance(verdict, NotFoundError) == (set(words.values()) == {NotFoundError})
            return
        if pause:
            unanswered += 1
            assert pause == min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (unanswered - 1))
            assert attempts.rounds == unanswered
