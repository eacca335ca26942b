"""Who waits for which frames, and what is read next: a value without threads, locks or time of its own.

A frame is in the backlog once, however many want it: *queued* by its priority, *resting* until its next attempt, or
being *read*. One that nobody wants any more is forgotten, except while it is being read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from threading import Thread

from layerstore.cache.format import Origin
from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError
from layerstore.pack.format import FRAME_SIZE
from prefetch.attempts import Attempts
from prefetch.plan import FRAMES_PER_READ
from prefetch.statistics import Priority, Tally

RAW_PER_READ = FRAMES_PER_READ * FRAME_SIZE
"""Bytes that one read brings at most, if it is more than one frame: packs of others may have larger frames."""
ROUNDS = 8
"""Rounds for those that have no deadline: ten seconds of pauses, and the time of the attempts."""
LATE_SECONDS = 1.0
"""A reader doesn't join a plan's read that has been under way for so long: one of its own may be faster."""
SLOWEST = 128 << 10
"""Bytes a second below which a link counts as one that doesn't answer; :mod:`layerstore.store.httpget` has it, too."""


class Want:
    """Somebody who waits for frames of one pack.

    Attributes:
        done: to be called once, when it is finished, with ``error``.
        deadline: by the fetcher's clock; None: as long as it takes.
        since: when it came.
        due: when it is needed, by the fetcher's clock: of the background, what is due first comes first.
        rounds: of attempts at a frame, after which it fails if it has no deadline.
        busy: keeps the pack from eviction, entered by whoever adds the want and left before ``done`` is called.
        left: the frames that are not there yet.
        tally: counts what was taken from stores for it.
        advance: told the compressed size of each of its frames that is there.
    """

    __slots__ = (
        "advance",
        "busy",
        "deadline",
        "done",
        "due",
        "error",
        "finished",
        "left",
        "pack",
        "priority",
        "rounds",
        "since",
        "tally",
    )

    def __init__(
        self,
        pack: CachedPack,
        done: Callable[[ImgtoolError | None], None],
        priority: Priority,
        deadline: float | None,
        since: float,
        *,
        due: float | None = None,
        rounds: int = ROUNDS,
        tally: Tally | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> None:
        self.pack = pack
        self.done = done
        self.priority = priority
        self.deadline = deadline
        self.since = since
        self.due = since if due is None else due
        self.rounds = rounds
        self.tally = tally
        self.advance = advance
        self.busy = pack.busy()
        self.left: set[Frame] = set()
        self.finished = False
        self.error: ImgtoolError | None = None


class Frame:
    """A frame of the backlog; ``queue`` is where it is queued, ``read`` what reads it, ``due`` that of its wants."""

    __slots__ = ("attempts", "due", "number", "pack", "priority", "queue", "read", "wants")

    def __init__(self, pack: CachedPack, number: int, priority: Priority, due: float) -> None:
        self.pack = pack
        self.number = number
        self.priority = priority
        self.due = due
        self.queue: Priority | None = None
        self.read: Read | None = None
        self.wants: list[Want] = []
        self.attempts: Attempts | None = None

    @property
    def alone(self) -> bool:
        return self.attempts is not None and self.attempts.alone


class Verify:
    """The way to a frame that is there and has to be hashed, and nothing else."""


VERIFY = Verify()

Way = Origin | Verify | None
"""How a frame is to be had: from a store, by verifying what is there, or (None) not at all: no origin is known."""


class Read:
    """Neighbouring frames of one pack that are had in one way, in one go.

    Attributes:
        started: when it was taken.
        arrived: whether the store has answered; what follows is the node's own work.
        given_up: nobody counts on it any more; its frames are somebody else's.
        urgency: the priority of the most urgent of its frames, and when the first of that priority is due.
        thread: carries it out.
    """

    __slots__ = ("arrived", "frames", "given_up", "pack", "priority", "started", "thread", "urgency", "way")

    def __init__(self, frames: list[Frame], way: Way, priority: Priority) -> None:
        self.pack = frames[0].pack
        self.frames = frames
        self.way = way
        self.priority = priority
        self.started = 0.0
        self.arrived = False
        self.given_up = False
        self.urgency = min((frame.priority, frame.due) for frame in frames)
        self.thread: Thread | None = None

    @property
    def numbers(self) -> range:
        return range(self.frames[0].number, self.frames[-1].number + 1)

    @property
    def expected(self) -> float:
        """When a link that is slow, but not too slow, has brought all of it: a read that gets on is not given up."""
        first, _ = self.pack.index.raw_range(self.numbers[0])
        last, length = self.pack.index.raw_range(self.numbers[-1])
        return self.started + (last + length - first) / SLOWEST

    @property
    def size(self) -> int:
        """Bytes that a store is asked for."""
        return self.pack.index.blob_range(self.numbers)[1] if isinstance(self.way, Origin) else 0


_Entry = tuple[float, int, Frame]
"""What comes first, then in order; the frame itself is never compared."""
_FIRST = float("-inf")
NO_LIMIT = float("inf")


class Backlog:
    """All frames that somebody waits for.

    Attributes:
        queued: how many are queued, by priority.
        resting: how many rest.
        waiting: how many wants are not finished.
    """

    def __init__(self) -> None:
        self.queued = [0, 0]
        self.resting = 0
        self.waiting = 0
        self._packs: dict[CachedPack, dict[int, Frame]] = {}
        # Heaps. Entries whose frame has left its queue are skipped when their turn comes.
        self._queues: tuple[list[_Entry], list[_Entry]] = ([], [])
        self._rest: list[tuple[float, int, Frame]] = []
        self._asleep: set[Frame] = set()
        self._order = count()

    def __iter__(self) -> Iterator[Frame]:
        for frames in self._packs.values():
            yield from frames.values()

    def get(self, pack: CachedPack, number: int) -> Frame | None:
        return self._packs.get(pack, {}).get(number)

    # --- wants

    def add(self, want: Want, numbers: Iterable[int], *, first: bool = False) -> None:
        """Let ``want`` wait for frames; ``first``: before what is queued with its priority."""
        self.waiting += 1
        frames = self._packs.setdefault(want.pack, {})
        fresh = []
        for number in numbers:
            frame = frames.get(number)
            if frame is None:
                frame = frames[number] = Frame(want.pack, number, want.priority, want.due)
                fresh.append(frame)
            elif self._hasten(frame, want):
                fresh.append(frame)
            if frame not in want.left:
                frame.wants.append(want)
                want.left.add(frame)
        for frame in reversed(fresh) if first else fresh:
            self.enter(frame, first=first)

    def _hasten(self, frame: Frame, want: Want) -> bool:
        """``want`` may be more urgent than all who wait for a frame; returns whether that is to be queued anew."""
        if frame.wants and (want.priority, want.due) >= (frame.priority, frame.due):
            return False
        demanded = want.priority < frame.priority
        frame.priority, frame.due = want.priority, want.due
        if frame.queue is not None:
            self._leave(frame)
            return True
        if demanded:
            frame.attempts = None  # what failed for a plan doesn't count against a reader
        if frame in self._asleep:
            if demanded:
                self._rouse(frame)
            return demanded
        read = frame.read
        if read is None:
            return False
        if demanded and not read.arrived and want.since - read.started >= LATE_SECONDS:
            frame.read = None
            return True
        read.urgency = min(read.urgency, (want.priority, want.due))
        return False

    def drop(self, want: Want) -> None:
        """``want`` is finished: its frames are no longer for it."""
        if want.finished:
            return
        want.finished = True
        self.waiting -= 1
        for frame in want.left:
            frame.wants.remove(want)
            if not frame.wants:
                if frame.read is None:
                    self._forget(frame)
                continue
            priority, due = min((each.priority, each.due) for each in frame.wants)
            if priority != frame.priority:
                frame.priority, frame.due = priority, due
                if frame.queue is not None:
                    self._leave(frame)
                    self.enter(frame)

    # --- frames

    def settle(self, frame: Frame) -> tuple[list[Want], list[Want]]:
        """``frame`` is there. Returns those who waited for it, and those of them who wait no more."""
        self._forget(frame)
        wants, frame.wants = frame.wants, []
        finished = []
        for want in wants:
            want.left.discard(frame)
            if not want.left:
                want.finished = True
                self.waiting -= 1
                finished.append(want)
        return wants, finished

    def fail(self, frame: Frame, error: ImgtoolError, *, rounds: float | None = None) -> list[Want]:
        """``frame`` can't be had; returns those who therefore wait no more.

        ``rounds``: can't be had in so many, which is enough for some of those who have no deadline.
        """
        failed = [want for want in frame.wants if rounds is None or (want.deadline is None and want.rounds <= rounds)]
        for want in failed:
            want.error = error
            self.drop(want)
        return failed

    def enter(self, frame: Frame, *, first: bool = False) -> None:
        """Queue a frame that is nowhere; ``first``: before all others of its priority."""
        frame.queue = frame.priority
        self.queued[frame.queue] += 1
        order = next(self._order)
        due = frame.due if frame.queue == Priority.BACKGROUND else 0.0
        entry = (_FIRST, -order, frame) if first else (due, order, frame)
        heapq.heappush(self._queues[frame.queue], entry)

    def rest(self, frame: Frame, until: float) -> None:
        """Queue a frame that is nowhere when its time has come."""
        self._asleep.add(frame)
        self.resting += 1
        heapq.heappush(self._rest, (until, next(self._order), frame))

    def wake(self, now: float) -> float | None:
        """Queue what has rested long enough; returns when the next one will have."""
        awake = []
        while self._rest and (self._rest[0][0] <= now or self._rest[0][2] not in self._asleep):
            frame = heapq.heappop(self._rest)[2]
            if frame in self._asleep:
                self._rouse(frame)
                awake.append(frame)
        for frame in reversed(awake):
            self.enter(frame, first=True)
        return self._rest[0][0] if self._rest else None

    # --- reads

    def take(self, way: Callable[[Frame], Way], *, background: float | None) -> Read | None:
        """The next read, with neighbours of its kind: demand in order of arrival, then background by when it is due.

        ``background``: bytes that a read of it may bring, if it is more than one frame; None if it has to wait.
        """
        for priority in Priority:
            most = NO_LIMIT if priority == Priority.DEMAND else background
            queue = self._queues[priority]
            while queue and most is not None:
                frame = heapq.heappop(queue)[2]
                if frame.queue == priority:
                    return self._read(frame, priority, way, most)
        return None

    def _read(self, frame: Frame, priority: Priority, way: Callable[[Frame], Way], most: float) -> Read:
        chosen = way(frame)
        frames = [frame]
        if not frame.alone:
            others = self._packs[frame.pack]
            index = frame.pack.index
            size = index.raw_range(frame.number)[1]
            compressed = index.compressed_size(frame.number)
            for step in (1, -1):
                number = frame.number + step
                while len(frames) < FRAMES_PER_READ:
                    other = others.get(number)
                    if other is None or other.queue != priority or other.alone:
                        break
                    size += index.raw_range(number)[1]
                    compressed += index.compressed_size(number)
                    there = way(other)
                    if size > RAW_PER_READ or compressed > most or (there is not chosen and there != chosen):
                        break
                    frames.append(other)
                    number += step
                if step == 1:
                    frames.reverse()
            frames.reverse()
        read = Read(frames, chosen, priority)
        for each in frames:
            self._leave(each)
            each.read = read
        return read

    # --- places

    def _leave(self, frame: Frame) -> None:
        assert frame.queue is not None
        self.queued[frame.queue] -= 1
        frame.queue = None

    def _rouse(self, frame: Frame) -> None:
        self._asleep.discard(frame)
        self.resting -= 1

    def _forget(self, frame: Frame) -> None:
        if frame.queue is not None:
            self._leave(frame)
        elif frame in self._asleep:
            self._rouse(frame)
        frames = self._packs[frame.pack]
        del frames[frame.number]
        if not frames:
            del self._packs[frame.pack]

    def forget(self, frame: Frame) -> None:
        """Nobody waits for this frame, which was being read, and nothing came of it."""
        self._forget(frame)
