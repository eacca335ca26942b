"""What is done when: reads under way, deadlines, and what becomes of failures. Also counts it all.

A value without threads, locks or time of its own, as the backlog is: the fetcher holds its lock around every call.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from threading import Thread

from layerstore.cache.format import Origin
from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError, UnavailableError
from prefetch.attempts import Attempts
from prefetch.backlog import Backlog, Frame, Read, Want, Way
from prefetch.share import QUIET_SECONDS, Share
from prefetch.statistics import FetchStats, Priority, Tally

NEVER = float("inf")


class Schedule:
    """The backlog, and the reads that work it off.

    Attributes:
        next_event: no later than when :meth:`overdue` or :meth:`wake` next have something to do.
        local: reads whose answer is being verified and written.
        stuck: threads in reads that were given up.
    """

    def __init__(self, way: Callable[[Frame], Way], *, background: int) -> None:
        """``way`` says how a frame is to be had now; ``background``: reads of that priority at a time."""
        self._way = way
        self._background_most = background
        self._backlog = Backlog()
        self._share = Share()
        self._reads: dict[Read, None] = {}
        self._background = 0
        self._asking = 0
        """Background reads that the store has not answered."""
        self._demanded = -NEVER
        self._deadlines: list[tuple[float, int, Want]] = []
        self._order = count()
        self.next_event = NEVER
        self.local = 0
        self.stuck: set[Thread] = set()
        self._taken = {Priority.DEMAND: Tally(), Priority.BACKGROUND: Tally()}
        self._retries = self._failures = self._stalled = self._coalesced = self._verified = 0
        self._demand_waits, self._demand_seconds = 0, 0.0

    # --- wants

    def add(self, want: Want, numbers: Iterable[int], *, first: bool = False) -> None:
        """Let ``want`` wait; ``first``: before others of its priority."""
        self._backlog.add(want, numbers, first=first)
        if want.deadline is None:
            return
        if len(self._deadlines) > 1000 + 4 * self._backlog.waiting:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (want.deadline, next(self._order), want))
        self.next_event = min(self.next_event, want.deadline)

    def is_planned(self, pack: CachedPack, number: int) -> bool:
        """Whether a plan waits for a frame."""
        frame = self._backlog.get(pack, number)
        return frame is not None and any(want.tally is not None for want in frame.wants)

    def drop(self, want: Want) -> None:
        """Nobody waits for ``want`` any more."""
        self._backlog.drop(want)

    def end(self, error: ImgtoolError, *, reading: bool) -> list[Want]:
        """Fail those who wait for frames that are not being read (``reading``: for any); returns them."""
        frames = [frame for frame in self._backlog if reading or frame.read is None]
        return self._finished([want for frame in frames for want in self._backlog.fail(frame, error)], 0.0)

    def end_endless(self, error: ImgtoolError, now: float) -> list[Want]:
        """Fail those who have no deadline; returns them."""
        frames = list(self._backlog)
        return self._finished(
            [want for frame in frames for want in self._backlog.fail(frame, error, rounds=NEVER)], now
        )

    def overdue(self, now: float) -> list[Want]:
        """Fail those whose deadline has passed; returns them."""
        late = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finished):
            want = heapq.heappop(self._deadlines)[2]
            if not want.finished:
                what = f"{name_frames(frame.number for frame in want.left)} of pack {want.pack.digest}"
                want.error = UnavailableError(f"{what} did not come in time: {_why(want, now)}")
                self._backlog.drop(want)
                late.append(want)
        self.next_event = self._deadlines[0][0] if self._deadlines else NEVER
        return self._finished(late, now)

    def wake(self, now: float) -> None:
        """Queue what has rested long enough. To be called after :meth:`overdue`."""
        rested = self._backlog.wake(now)
        if rested is not None:
            self.next_event = min(self.next_event, rested)

    def _finished(self, wants: list[Want], now: float) -> list[Want]:
        for want in wants:
            self._failures += want.error is not None
            if want.priority == Priority.DEMAND:
                self._demand_waits += 1
                self._demand_seconds += max(0.0, now - want.since)
        return wants

    # --- reads

    def has_work(self, now: float) -> bool:
        """Whether another thread would find something to read."""
        demand, background = self._backlog.queued
        return demand > 0 or (background > 0 and self._room(now) is not None)

    def _room(self, now: float) -> float | None:
        """Bytes that a background read may ask for; None: it has to wait. One at a time may go on, whatever comes."""
        if self._background >= self._background_most:
            return None
        return self._share.part if self._share.has_room or not self._asking else None

    def start(self, thread: Thread, now: float) -> Read | None:
        """The next read, which ``thread`` is to carry out; None if there is none."""
        read = self._backlog.take(self._way, background=self._room(now))
        if read is None:
            return None
        read.thread, read.started = thread, now
        self._reads[read] = None
        if read.priority == Priority.BACKGROUND:
            self._background += 1
            self._asking += 1
        else:
            self._demanded = now
        if isinstance(read.way, Origin):
            self._share.started(read.size)
            self._taken[read.priority].requests += 1
            self._coalesced += len(read.frames) - 1
            if (tally := _payer(read.frames[0], read).tally) is not None:
                tally.requests += 1
        return read

    def arrived(self, read: Read, size: int, now: float) -> None:
        """The store has answered with ``size`` bytes."""
        if not read.given_up:
            self._answered(read)
            if isinstance(read.way, Origin):
                beside = now - self._demanded < QUIET_SECONDS
                self._share.arrived(read.size, now - read.started, beside=beside)
        read.arrived = True
        self.local += 1
        self._taken[read.priority].compressed += size

    def there(
        self, read: Read, number: int, raw: int, compressed: int, now: float
    ) -> tuple[Sequence[Want], Sequence[Want]]:
        """A frame may be read. Returns those who waited for it, and those of them who wait no more."""
        if raw:
            self._taken[read.priority].raw += raw
            self._taken[read.priority].frames += 1
        frame = self._backlog.get(read.pack, number)
        if frame is None:
            return (), ()
        if not raw:
            self._verified += 1
        elif frame.wants and (tally := _payer(frame, read).tally) is not None:
            tally.compressed += compressed
            tally.raw += raw
            tally.frames += 1
        wants, finished = self._backlog.settle(frame)
        return wants, self._finished(finished, now)

    def again(self, read: Read, frames: Sequence[Frame]) -> None:
        """Read these frames once more, before others."""
        for frame in self._take_back(read, frames):
            self._backlog.enter(frame, first=True)

    def refused(self, read: Read, frames: Sequence[Frame], error: ImgtoolError, now: float) -> list[Want]:
        """These frames did not come. Try again, now or later, or fail; returns those who wait no more."""
        origin = read.way if isinstance(read.way, Origin) else None
        chance = random.random()
        failed = []
        for frame in self._take_back(read, frames):
            attempts = frame.attempts = frame.attempts or Attempts()
            pause = attempts.failed(origin, error, frame.pack.origins, chance)
            if pause is None:
                what = f"frame {frame.number} of pack {frame.pack.digest}"
                failed += self._backlog.fail(frame, attempts.verdict(what, frame.pack.index.sha256(frame.number)))
                continue
            failed += self._backlog.fail(frame, error, rounds=attempts.rounds)
            if not frame.wants:
                continue
            self._retries += 1
            if pause:
                self._backlog.rest(frame, now + pause)
                self.next_event = min(self.next_event, now + pause)
            else:
                self._backlog.enter(frame, first=True)
        return self._finished(failed, now)

    def lost(self, read: Read, frames: Sequence[Frame], error: ImgtoolError, now: float) -> list[Want]:
        """These frames can't be had; returns those who therefore wait no more."""
        returned = self._take_back(read, frames)
        return self._finished([want for frame in returned for want in self._backlog.fail(frame, error)], now)

    def finish(self, read: Read, now: float) -> None:
        """The thread of ``read`` is done with it."""
        if read.given_up:
            assert read.thread is not None
            self.stuck.discard(read.thread)
        else:
            self._leave(read, now)
            self.again(read, read.frames)
        if read.arrived:
            self.local -= 1

    def due(self, since: float) -> float:
        """When the first of the reads that the store has not answered should have been; ``since`` if that is before."""
        return min(since, min((read.expected for read in self._reads if not read.arrived), default=since))

    def give_up(self, before: float, now: float) -> list[Read]:
        """Reads that should have been answered ``before``: they no longer count. Their frames are to be refused."""
        late = [read for read in self._reads if not read.arrived and read.expected <= before]
        for read in late:
            self._leave(read, now)
            assert read.thread is not None
            self.stuck.add(read.thread)
            self._stalled += 1
        return late

    def under_way(self) -> set[Thread]:
        """The threads of reads that nobody has given up."""
        return {read.thread for read in self._reads if read.thread is not None}

    def _leave(self, read: Read, now: float) -> None:
        del self._reads[read]
        if read.priority == Priority.BACKGROUND:
            self._background -= 1
        else:
            self._demanded = now
        if not read.arrived:
            self._answered(read)
            if isinstance(read.way, Origin):
                self._share.lost(read.size)

    def _answered(self, read: Read) -> None:
        if read.priority == Priority.BACKGROUND:
            self._asking -= 1

    def _take_back(self, read: Read, frames: Sequence[Frame]) -> list[Frame]:
        """Those of the frames that depend on ``read`` and are still wanted, last first; now they are nowhere."""
        returned = []
        for frame in reversed(frames):
            if frame.read is read and self._backlog.get(frame.pack, frame.number) is frame:
                frame.read = None
                if frame.wants:
                    returned.append(frame)
                else:
                    self._backlog.forget(frame)
        return returned

    def stats(self, threads: int) -> FetchStats:
        return FetchStats(
            demand=self._taken[Priority.DEMAND].total(),
            background=self._taken[Priority.BACKGROUND].total(),
            queued_demand=self._backlog.queued[Priority.DEMAND],
            queued_background=self._backlog.queued[Priority.BACKGROUND],
            resting=self._backlog.resting,
            in_flight=len(self._reads),
            waiting=self._backlog.waiting,
            threads=threads,
            retries=self._retries,
            failures=self._failures,
            stalled=self._stalled,
            coalesced=self._coalesced,
            verified=self._verified,
            demand_waits=self._demand_waits,
            demand_seconds=self._demand_seconds,
        )


def _payer(frame: Frame, read: Read) -> Want:
    """For whom a frame is read: the first who waits with the priority that the read began with."""
    return next((want for want in frame.wants if want.priority == read.priority), frame.wants[0])


def _why(want: Want, now: float) -> str:
    """Why a want is not finished, as far as can be told."""
    for frame in want.left:
        if frame.attempts is not None and frame.attempts.last is not None:
            return str(frame.attempts.last)
    for frame in want.left:
        if frame.read is not None and not frame.read.arrived:
            return f"{place(frame.read)} has not answered for {now - frame.read.started:.1f} s"
    return "other reads come first"


def place(read: Read) -> str:
    """Where a read is made, for messages."""
    return read.way.location if isinstance(read.way, Origin) else "this node"


def name_frames(numbers: Iterable[int]) -> str:
    """Frames, for messages: short, however many there are."""
    listed = sorted(numbers)
    return f"frame {listed[0]}" if len(listed) == 1 else f"{len(listed)} frames from {listed[0]} on"
