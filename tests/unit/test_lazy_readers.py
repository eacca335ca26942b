"""Who waits for what, with a pipe in place of the kernel: its answers are read from the other end."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from typing import Any

import pytest

from layerstore.cache.framemap import MISSING, READY, UNVERIFIED, FrameMap
from overlay.lazy.fanotify import FAN_ALLOW, FAN_DENY, Event, fanotify_response
from overlay.lazy.journal import Journal, Record
from overlay.lazy.link import Link, Message
from overlay.lazy.outlet import MOST_UNSENT, Outlet
from overlay.lazy.quietlog import QuietLog
from overlay.lazy.readers import GuardedPack, Readers, runs

FRAME = 100
FRAMES = 8
FOREVER = 1000.0


class Stage:
    """Readers of one pack of eight frames, and both sides that they talk to."""

    def __init__(self, deadline: float = FOREVER) -> None:
        self.kernel, self.group = os.pipe()
        os.set_blocking(self.kernel, False)
        self.journal = Journal.create(256)
        self.lines: list[dict[str, Any]] = []
        self.readers = Readers(self.group, self.journal, deadline, QuietLog(self._line))
        self.pack = self.new_pack(b"p")
        self.epoll = select.epoll()
        self.outlets: list[Outlet] = []
        self.workers: list[Link] = []
        self.numbers: list[int] = []

    def _line(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    def new_pack(self, name: bytes) -> GuardedPack:
        offsets = list(range(0, FRAME * FRAMES, FRAME))
        frames = FrameMap.create(name * 32, FRAME * FRAMES, offsets, bytes([MISSING]) * FRAMES)
        return GuardedPack(frames.hex, os.memfd_create("data"), frames, (1, 2))

    def worker(self) -> Link:
        """A new worker: its end of the link."""
        ours, its = Link.pair()
        its.settimeout(10)
        self.workers.append(its)
        self.outlets.append(Outlet(ours, self.epoll))
        self.readers.set_worker(self.outlets[-1])
        return its

    def event(self, *frames: int, pid: int = 1) -> int:
        """A reader wants these neighbouring frames; the event's number."""
        number = os.open(os.devnull, os.O_RDONLY)
        self.numbers.append(number)
        event = Event(number, pid, frames[0] * FRAME + 1, (len(frames) - 1) * FRAME + 1)
        self.readers.add(event, self.pack, self.pack.frames.covering(event.offset, event.length))
        return number

    def ready(self, *frames: int, state: int = READY) -> None:
        for frame in frames:
            self.pack.frames.set(frame, state)

    def answers(self) -> list[tuple[int, bool]]:
        """What the kernel was told since the last time: number, allowed."""
        try:
            data = os.read(self.kernel, 65_536)
        except BlockingIOError:
            return []
        found = [fanotify_response.unpack_from(data, at) for at in range(0, len(data), fanotify_response.size)]
        assert {response for _, response in found} <= {FAN_ALLOW, FAN_DENY}
        return [(number, response == FAN_ALLOW) for number, response in found]

    def close(self) -> None:
        self.readers.close()
        for outlet in self.outlets:
            outlet.close()
        for worker in self.workers:
            worker.close()
        self.pack.close()
        self.journal.close()
        self.epoll.close()
        os.close(self.kernel)
        os.close(self.group)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.fixture
def hurried() -> Iterator[Stage]:
    """Readers whose time is over at once, and who fail for as long as the test takes."""
    made = Stage(deadline=0.0)
    yield made
    made.close()


def heard(worker: Link) -> list[Message]:
    """What a worker has been sent so far."""
    messages = []
    while select.select([worker], [], [], 0)[0]:
        received = worker.receive()
        assert received is not None
        messages.append(received[0])
    return messages


def asked(worker: Link) -> list[tuple[int, ...]]:
    return [tuple(range(m["first"], m["first"] + m["count"])) for m in heard(worker)]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False


def test_an_event_waits_until_its_frames_are_ready(stage: Stage) -> None:
    worker = stage.worker()
    number = stage.event(2, 3, pid=77)
    [want] = heard(worker)
    deadline = want.pop("deadline")
    assert want == {"want": 1, "pack": stage.pack.hex, "first": 2, "count": 2, "pid": 77}
    assert time.monotonic() < deadline <= time.monotonic() + FOREVER
    assert stage.journal.records() == {number: Record(77, 201, 101, deadline, b"p" * 32)}
    assert is_open(number), "the number must not be given to another event"
    stage.ready(2, 3)
    stage.readers.answered(1, None)
    assert stage.answers() == [(number, True)]
    assert stage.journal.records() == {}
    assert not is_open(number)
    assert len(stage.readers) == 0


def test_only_what_is_missing_is_asked_for_and_only_once(stage: Stage) -> None:
    worker = stage.worker()
    stage.ready(1, 4)
    stage.ready(5, state=UNVERIFIED)
    numbers = [stage.event(0, 1, 2, 3, 4, 5), stage.event(2, 3), stage.event(3, 4, 5, 6)]
    assert asked(worker) == [(0,), (2, 3), (5,), (6,)]
    stage.ready(2, 3)
    stage.readers.answered(2, None)
    assert stage.answers() == [(numbers[1], True)]
    stage.ready(0, 5, 6)
    for want in (1, 3, 4):
        stage.readers.answered(want, None)
    assert stage.answers() == [(numbers[0], True), (numbers[2], True)]
    assert asked(worker) == []


def test_an_event_whose_frames_came_meanwhile_is_allowed_without_asking(stage: Stage) -> None:
    worker = stage.worker()
    stage.ready(0)
    number = stage.event(0)
    assert stage.answers() == [(number, True)]
    assert asked(worker) == []


def test_got_is_believed_only_if_the_frame_map_says_so(stage: Stage) -> None:
    worker = stage.worker()
    number = stage.event(0)
    for want in (1, 2, 3):
        assert asked(worker) == [(0,)]
        assert stage.answers() == []
        stage.readers.answered(want, None)
    assert stage.answers() == [(number, False)]
    assert asked(worker) == []
    assert stage.lines[-1]["why"] == "the worker says that it is there, and it isn't"


def test_failure_denies_and_goes_on_denying_for_a_while(stage: Stage) -> None:
    worker = stage.worker()
    numbers = [stage.event(0, 1), stage.event(1), stage.event(2)]
    assert asked(worker) == [(0, 1), (2,)]
    stage.readers.answered(1, "no such blob")
    assert sorted(stage.answers()) == [(numbers[0], False), (numbers[1], False)]
    again = stage.event(1, 2)
    assert stage.answers() == [(again, False)], "the kernel's repetition of a read-ahead"
    stage.ready(1)
    later = stage.event(1)
    assert stage.answers() == [(later, True)], "it has come meanwhile"
    stage.pack.failed.update(dict.fromkeys(stage.pack.failed, time.monotonic()))
    late = stage.event(0)
    assert stage.answers() == []
    assert asked(worker) == [(0,)]
    stage.ready(0)
    stage.readers.answered(3, None)
    assert stage.answers() == [(late, True)]
    line = stage.lines[0]
    assert (line["event"], line["why"], line["pack"]) == ("denied", "no such blob", stage.pack.hex)


def test_failure_of_one_want_leaves_alone_who_waits_for_another(stage: Stage) -> None:
    worker = stage.worker()
    stage.ready(1)
    number = stage.event(0, 1, 2)
    assert asked(worker) == [(0,), (2,)]
    stage.ready(0)
    stage.readers.answered(1, "the store failed, the prefetcher didn't")
    assert stage.answers() == []
    stage.ready(2)
    stage.readers.answered(2, None)
    assert stage.answers() == [(number, True)]


def test_frames_that_are_lost_while_an_event_waits_are_asked_for_again(stage: Stage) -> None:
    worker = stage.worker()
    stage.ready(0)
    number = stage.event(0, 1)
    assert asked(worker) == [(1,)]
    stage.ready(0, state=MISSING)
    stage.ready(1)
    stage.readers.answered(1, None)
    assert stage.answers() == []
    assert asked(worker) == [(0,)]
    stage.ready(0)
    stage.readers.answered(2, None)
    assert stage.answers() == [(number, True)]


def test_who_has_no_time_left_is_denied(hurried: Stage) -> None:
    assert hurried.readers.patience() is None
    number = hurried.event(3)
    assert hurried.readers.patience() == 0.0
    hurried.readers.expire()
    assert hurried.answers() == [(number, False)]
    assert "there is no worker" in hurried.lines[-1]["why"]
    again = hurried.event(3)
    assert hurried.answers() == [(again, False)]
    assert hurried.readers.denied == 2


def test_at_the_deadline_the_frame_map_is_looked_at_once_more(hurried: Stage) -> None:
    number = hurried.event(3)
    hurried.ready(3)
    hurried.readers.expire()
    assert hurried.answers() == [(number, True)]


def test_who_came_later_is_asked_for_again_when_the_first_runs_out_of_time(hurried: Stage) -> None:
    worker = hurried.worker()
    readers = hurried.readers
    first = hurried.event(3)
    readers._deadline = FOREVER
    others = [hurried.event(3), hurried.event(2, 3)]
    assert asked(worker) == [(3,), (2,)]
    readers.expire()
    assert hurried.answers() == [(first, False)]
    [again] = heard(worker)
    assert (again["first"], again["count"]) == (3, 1)
    assert again["deadline"] > time.monotonic() + FOREVER / 2
    readers.answered(1, "the deadline has passed")
    assert hurried.answers() == [], "that was of the want before"
    hurried.ready(2, 3)
    readers.answered(3, None)
    assert sorted(hurried.answers()) == [(others[0], True), (others[1], True)]


def test_the_workers_timeout_is_not_everybodys(hurried: Stage) -> None:
    worker = hurried.worker()
    first = hurried.event(3)
    hurried.readers._deadline = FOREVER
    later = hurried.event(3)
    hurried.readers.answered(1, "the deadline has passed")
    assert hurried.answers() == [(first, False)]
    assert asked(worker) == [(3,), (3,)]
    hurried.ready(3)
    hurried.readers.answered(2, None)
    assert hurried.answers() == [(later, True)]


def test_deadlines_are_in_order_whoever_came_first(stage: Stage) -> None:
    """A predecessor's events are older than any new one, even if it had more patience."""
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    now = time.monotonic()
    stage.readers._deadline = 0.0
    records = {
        number: Record(1, 0, 1, now + after, b"p" * 32) for number, after in zip(numbers, (-1, 5, 50), strict=True)
    }
    stage.readers.adopt(records, numbers, {stage.pack.hex: stage.pack})
    stage.readers.expire()
    assert stage.answers() == [(number, False) for number in numbers]


def test_a_predecessors_events(stage: Stage) -> None:
    """Those that are ready are allowed, those of no pack denied; a number that is somebody else's stays open."""
    worker = stage.worker()
    stage.ready(0)
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    until = time.monotonic() + 5
    records = {
        numbers[0]: Record(1, 0, FRAME, until, b"p" * 32),
        numbers[1]: Record(1, FRAME, FRAME, until, b"p" * 32),
        numbers[2]: Record(1, 0, FRAME, until, b"x" * 32),
        numbers[3]: Record(1, FRAME, 1, until, b"p" * 32),
    }
    for number, record in records.items():
        stage.journal.put(number, record)
    stage.readers.adopt(records, numbers[:3], {stage.pack.hex: stage.pack})
    assert sorted(stage.answers()) == [(numbers[0], True), (numbers[2], False)]
    [want] = heard(worker)
    assert (want["first"], want["count"], want["deadline"]) == (1, 1, until)
    assert set(stage.journal.records()) == {numbers[1], numbers[3]}
    stage.ready(1)
    stage.readers.answered(1, None)
    assert sorted(stage.answers()) == [(numbers[1], True), (numbers[3], True)]
    assert [is_open(number) for number in numbers] == [False, False, False, True]
    os.close(numbers[3])


def test_a_new_worker_is_asked_for_everything_that_waits(stage: Stage) -> None:
    first = stage.worker()
    numbers = [stage.event(0, 1), stage.event(1), stage.event(5)]
    assert asked(first) == [(0, 1), (5,)]
    stage.readers.set_worker(None)
    numbers.append(stage.event(6))
    stage.ready(5)
    second = stage.worker()
    assert stage.answers() == [(numbers[2], True)], "it had come before the first one died"
    assert asked(second) == [(0, 1), (6,)]
    stage.readers.answered(1, "said by nobody who lives")
    stage.ready(0, 1, 6)
    assert stage.answers() == []
    for want in (3, 4):
        stage.readers.answered(want, None)
    assert sorted(stage.answers()) == [(numbers[0], True), (numbers[1], True), (numbers[3], True)]


def test_release_answers_all_that_wait(stage: Stage) -> None:
    worker = stage.worker()
    numbers = [stage.event(0), stage.event(1)]
    stage.ready(0)
    stage.readers.release(stage.pack)
    assert stage.answers() == [(numbers[0], True), (numbers[1], False)]
    stage.readers.answered(1, None)
    stage.readers.answered(2, "late")
    assert stage.answers() == []
    assert asked(worker) == [(0,), (1,)]


def test_a_worker_that_does_not_read_stops_nobody(stage: Stage) -> None:
    worker = stage.worker()
    outlet = stage.outlets[-1]
    for number in range(5000):
        outlet.send({"want": number, "why": "x" * 200})
    for number in range(2 * MOST_UNSENT):
        outlet.send({"stats": number}, droppable=True)
    [(fd, mask)] = stage.epoll.poll(0) or [(outlet.fd, 0)]
    assert (fd, mask) == (outlet.fd, 0), "no room, and nothing to read"
    got: list[int] = []
    while len(got) < 5000:
        got += [message["want"] for message in heard(worker)]
        for _, mask in stage.epoll.poll(0):
            assert mask == select.EPOLLOUT
            outlet.flush()
    assert got == list(range(5000)), "all wants, in order, and no other answers"
    assert stage.epoll.poll(0) == []


def test_what_is_sent_to_a_worker_that_is_gone_is_dropped(stage: Stage) -> None:
    worker = stage.worker()
    worker.close()
    number = stage.event(0)
    assert stage.answers() == []
    assert [mask & select.EPOLLIN for _, mask in stage.epoll.poll(0)] == [select.EPOLLIN]
    assert stage.outlets[-1].link.receive() is None
    stage.readers.set_worker(None)
    stage.ready(0)
    stage.worker()
    assert stage.answers() == [(number, True)]


def test_closing_leaves_the_journal(stage: Stage) -> None:
    number = stage.event(0)
    assert stage.readers.close() == [number]
    assert not is_open(number)
    assert list(stage.journal.records()) == [number]
    assert stage.answers() == []


def test_the_log_says_it_once_and_how_often_it_kept_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, object]] = []
    log = QuietLog(lambda event, **fields: lines.append({"event": event, **fields}))
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for pid in range(5):
        log("denied", pack="a", pid=pid)
    log("denied", pack="b", pid=9)
    now = 101.5
    log("denied", pack="a", pid=10)
    assert lines == [
        {"event": "denied", "level": "info", "pack": "a", "pid": 0},
        {"event": "denied", "level": "info", "pack": "b", "pid": 9},
        {"event": "denied", "level": "info", "pack": "a", "pid": 10, "unlogged": 4},
    ]


def test_a_log_that_fails_hurts_nobody() -> None:
    called = []

    def fail(event: str, **fields: object) -> None:
        called.append(event)
        raise OSError(28, "no space")

    QuietLog(fail)("something")
    assert called == ["something"]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [([], []), ([3], [range(3, 4)]), ([0, 1, 2, 5, 7, 8], [range(3), range(5, 6), range(7, 9)])],
)
def test_runs(numbers: list[int], expected: list[range]) -> None:
    assert list(runs(numbers)) == expected
