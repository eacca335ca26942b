"""Fetching: one queue of wanted frames for the whole process, and the threads that bring them.

::

    want ─▶ Backlog ──take──▶ thread: Reader ─▶ Origins: store ─▶ verify ─▶ CachedPack.write ─▶ done
               ▲ ▲                      │                                        └▶ Commits ─▶ CachedPack.sync
               │ └── again, or later ◀──┘
            monitor: deadlines, stalled reads, pauses

One lock guards the backlog and all counters. It is held for microseconds: never around I/O, ``done`` or an observer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from layerstore.cache.format import Origin
from layerstore.cache.framemap import MISSING
from layerstore.cache.packs import CachedPack
from layerstore.errors import CorruptError, ImgtoolError, UnavailableError
from layerstore.progress import SILENT, Progress
from layerstore.store.protocol import Store
from prefetch.backlog import VERIFY, Frame, Read, Want, Way
from prefetch.clock import Clock, MonotonicClock
from prefetch.commits import Commits
from prefetch.mistakes import report_mistake
from prefetch.origins import Origins
from prefetch.plan import PackFetch
from prefetch.readahead import ReadAhead
from prefetch.reading import Reader
from prefetch.running import PlanRun
from prefetch.schedule import Schedule, name_frames, place
from prefetch.statistics import UNOBSERVED, Fetched, FetchStats, Observer, Priority

__all__ = ["FetchStats", "Fetched", "Fetcher", "Observer", "Priority"]

THREADS = 16
"""Reads at a time. Over a link of 20 ms, eight leave two processors idle for a third of a planned start."""
THREADS_FACTOR = 4
"""Threads that may exist for each that works: the others are stuck in reads that were given up."""
CLOSE_SECONDS = 1.0
"""So long :meth:`Fetcher.close` waits for stores to answer."""
_AWAKE = float("-inf")


class Fetcher:
    """Brings frames into packs of the cache, each once, however many want it. Any thread may call."""

    def __init__(
        self,
        stores: Callable[[str], Store],
        room: Callable[[int, str], int],
        *,
        threads: int = THREADS,
        attempt_timeout: float = 10.0,
        observer: Observer = UNOBSERVED,
        ahead: ReadAhead | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start nothing yet: threads come with the first work.

        Args:
            stores: the store at a location, open; called often, by any thread.
            room: makes room on the disk for so many bytes of the pack with this hex; returns the bytes freed.
            threads: reads at a time. Background has at most three quarters of them, and no more under way than
                :mod:`prefetch.share` says.
            attempt_timeout: seconds after which a store's answer is no longer waited for.
            observer: told of every read.
            ahead: what to read besides what is demanded; nothing if not given.
            clock: what deadlines are measured by; CLOCK_MONOTONIC if not given.
        """
        self._threads = threads
        self._timeout = attempt_timeout
        self._observer = observer
        self._ahead = ahead
        self._clock = clock or MonotonicClock()
        self._origins = Origins(stores, self._clock, patience=attempt_timeout / 2)
        self._commits = Commits(room, self._not_durable, self._origins.close_idle, self._clock)
        self._reader = Reader(self._origins, room, self)

        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._timer = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._schedule = Schedule(self._way, background=max(1, threads - max(1, threads // 4)))
        self._alive: set[threading.Thread] = set()
        self._idle = 0
        self._starved: float | None = None
        self._monitor: threading.Thread | None = None
        self._until = _AWAKE  # when the monitor looks next
        self._closing = self._closed = False

    # --- for those who want frames

    def want(
        self,
        pack: CachedPack,
        numbers: Iterable[int],
        done: Callable[[ImgtoolError | None], None],
        *,
        priority: Priority = Priority.DEMAND,
        deadline: float | None = None,
    ) -> None:
        """Bring frames. Returns at once.

        ``done`` is called once, by any thread, perhaps before this returns: with None when all frames may be read, or
        with an error, at the latest shortly after ``deadline``. It must not block. The errors are

        * CorruptError: a frame is wrong wherever it can be had;
        * NotFoundError: no store has the pack;
        * NoSpaceError: the disk is full, and no room could be made;
        * UnavailableError: the deadline has passed, or (without one) all attempts have failed; or the pack was evicted,
          or the fetcher closed;
        * and what else stores raise.
        """
        now = self._clock.now()
        if self._ahead is None or priority != Priority.DEMAND:
            self.submit(Want(pack, done, priority, deadline, now), numbers)
            return
        demanded = list(numbers)
        with self._lock:
            # What a plan is about to bring says nothing of what is around it.
            surprising = [number for number in demanded if not self._schedule.is_planned(pack, number)]
        self.submit(Want(pack, done, priority, deadline, now), demanded)
        if surprising:
            with self._lock:
                around = self._ahead.around(pack, surprising)
            if around:
                self.submit(Want(pack, _nobody, Priority.BACKGROUND, deadline, now), around, first=True)

    def run(self, plan: Sequence[PackFetch], *, progress: Progress = SILENT) -> Fetched:
        """Fetch a plan in the background, and return when it is there and durable.

        Returns:
            what was taken from stores for it; what others fetched meanwhile is counted for them.

        Raises:
            ImgtoolError: as for :meth:`want`; what was fetched before stays.
        """
        if not plan:
            return Fetched()
        run = PlanRun(plan, self.submit, self.abandon, 2 * self._threads)
        return run.run(self._commits, progress, self._clock.now)

    def stats(self) -> FetchStats:
        with self._lock:
            return self._schedule.stats(len(self._alive))

    def close(self) -> None:
        """End: what is queued is answered with an error, what was fetched is made durable.

        Stores get a second to answer what they have been asked; an answer that comes later is not used.
        """
        error = UnavailableError("fetching has ended")
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._idle = 0
            self._work.notify_all()
            unread = self._schedule.end(error, reading=False)
        self._answer(unread)
        with self._lock:
            until = self._clock.now() + CLOSE_SECONDS
            while self._schedule.local or (self._schedule.under_way() and self._clock.now() < until):
                self._clock.wait(self._ended, None if self._schedule.local else until)
            self._closed = True
            self._timer.notify()
            left = self._schedule.end(error, reading=True)
            # Those that a store has not answered end when it does, and change nothing any more.
            threads = self._alive - self._schedule.stuck - self._schedule.under_way()
            monitor = self._monitor
        self._answer(left)
        for thread in threads:
            thread.join()
        if monitor is not None:
            monitor.join()
            self._commits.close()
        self._origins.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- wants

    def submit(self, want: Want, numbers: Iterable[int], *, first: bool = False) -> None:
        """As :meth:`want`; ``first``: before others of its priority."""
        try:
            want.busy.__enter__()
        except ImgtoolError as error:
            want.error = error
            self._call(want)
            return
        try:
            with self._lock:
                missing = want.pack.unready(numbers)
                if missing and self._closing:
                    want.error = UnavailableError("fetching has ended")
                elif missing and want.deadline is not None and want.deadline <= self._clock.now():
                    text = f"{name_frames(missing)} of pack {want.pack.digest}: no time left to fetch"
                    want.error = UnavailableError(text)
                elif missing:
                    self._start_monitor()
                    self._schedule.add(want, missing, first=first)
                    self._stir()
                    return
                want.finished = True
        except BaseException:
            want.busy.__exit__(None, None, None)
            raise
        self._answer([want])

    def abandon(self, wants: Sequence[Want]) -> None:
        """Nobody waits for these any more; ``done`` is not called."""
        with self._lock:
            dropped = [want for want in wants if not want.finished]
            for want in dropped:
                self._schedule.drop(want)
        for want in dropped:
            want.busy.__exit__(None, None, None)

    def _answer(self, wants: Sequence[Want]) -> None:
        for want in wants:
            want.busy.__exit__(None, None, None)
            self._call(want)

    def _call(self, want: Want) -> None:
        try:
            want.done(want.error)
        except Exception:
            report_mistake()

    # --- threads

    def _stir(self) -> None:
        """After a change: let the monitor look earlier, and one more thread look for work, if there is reason to."""
        if self._schedule.next_event < self._until:
            self._timer.notify()
        if self._closing or not self._schedule.has_work(self._clock.now()):
            return
        if self._idle:
            self._idle -= 1
            self._work.notify()  # it wakes the next, if there is more
        elif self._usable() < self._threads and len(self._alive) < THREADS_FACTOR * self._threads:
            thread = threading.Thread(target=self._serve, name="fetch", daemon=True)
            self._alive.add(thread)
            try:
                thread.start()
            except RuntimeError:
                self._alive.discard(thread)  # the system has no more; those that are busy will look

    def _usable(self) -> int:
        return len(self._alive) - len(self._schedule.stuck)

    def _serve(self) -> None:
        read = None
        while True:
            with self._lock:
                if read is not None:
                    self._schedule.finish(read, self._clock.now())
                    if self._closing:
                        self._ended.notify_all()
                read = self._next()
                if read is None:
                    return
            try:
                self._reader.carry_out(read)
            except Exception as error:
                report_mistake()
                self.lost(read, read.frames, UnavailableError(f"fetch pack {read.pack.digest}: {error!r}"))

    def _next(self) -> Read | None:
        """The next read of this thread; None if it should end."""
        own = threading.current_thread()
        while not self._closing and self._usable() <= self._threads:
            read = self._schedule.start(own, self._clock.now())
            if read is not None:
                self._stir()
                return read
            self._idle += 1
            self._work.wait()
        self._alive.discard(own)
        return None

    def _way(self, frame: Frame) -> Way:
        if frame.pack.frames.state(frame.number) != MISSING:
            return VERIFY
        return self._origins.choose(frame.pack.origins, frame.attempts)

    # --- what comes of reads (see Outcome)

    def arrived(self, read: Read, size: int) -> bool:
        with self._lock:
            if not self._closed:
                self._schedule.arrived(read, size, self._clock.now())
                self._stir()
            return not self._closed

    def there(self, read: Read, number: int, raw: int, compressed: int) -> None:
        with self._lock:
            wants, finished = self._schedule.there(read, number, raw, compressed, self._clock.now())
        for want in wants:
            if want.advance is not None:
                want.advance(compressed)
        self._answer(finished)
        if raw:
            self._commits.wrote(read.pack, raw)

    def brought(self, read: Read, numbers: Sequence[int], size: int) -> None:
        seconds = self._clock.now() - read.started
        try:
            self._observer.fetched(read.pack, numbers, read.priority, seconds, size)
        except Exception:
            report_mistake()

    def unfit(self, read: Read, frame: Frame) -> None:
        with self._lock:
            self._schedule.again(read, [frame])
        error = CorruptError(f"cached frame {frame.number} of pack {read.pack.digest} is not what was fetched")
        self._failed(read.pack, [frame], error)

    def refused(self, read: Read, frames: Sequence[Frame], error: ImgtoolError) -> None:
        with self._lock:
            if read.given_up:
                return  # somebody else is at it
            finished = self._schedule.refused(read, frames, error, self._clock.now())
            self._stir()
        self._failed(read.pack, frames, error)
        self._answer(finished)

    def lost(self, read: Read, frames: Sequence[Frame], error: ImgtoolError) -> None:
        with self._lock:
            finished = self._schedule.lost(read, frames, error, self._clock.now())
        self._failed(read.pack, frames, error)
        self._answer(finished)

    def _failed(self, pack: CachedPack, frames: Sequence[Frame], error: ImgtoolError) -> None:
        try:
            self._observer.failed(pack, [frame.number for frame in frames], error)
        except Exception:
            report_mistake()

    def _not_durable(self, pack: CachedPack, error: ImgtoolError) -> None:
        self._failed(pack, (), error)

    # --- the monitor

    def _start_monitor(self) -> None:
        if self._monitor is None:
            self._monitor = threading.Thread(target=self._watch, name="fetch-monitor", daemon=True)
            self._monitor.start()
            self._commits.start()

    def _watch(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = self._clock.now()
                finished = self._schedule.overdue(now)
                stalled = self._give_up(now, finished)
                self._schedule.wake(now)
                self._starve(now, finished)
                self._stir()
                if not finished and not stalled:
                    # A read that begins later is not due before that.
                    due = self._schedule.due(now) + self._timeout
                    self._until = min(due, self._schedule.next_event)
                    self._clock.wait(self._timer, self._until)
                    self._until = _AWAKE
                    continue
            self._answer(finished)
            for read, error in stalled:
                self._failed(read.pack, read.frames, error)

    def _give_up(self, now: float, finished: list[Want]) -> list[tuple[Read, ImgtoolError]]:
        """No longer count on reads that the store doesn't answer: their frames are tried again."""
        stalled: list[tuple[Read, ImgtoolError]] = []
        for read in self._schedule.give_up(now - self._timeout, now):
            error = UnavailableError(f"{place(read)} did not answer within {self._timeout:g} s")
            if isinstance(read.way, Origin):
                self._origins.stalled(read.way)
            finished += self._schedule.refused(read, read.frames, error, now)
            read.given_up = True
            stalled.append((read, error))
        return stalled

    def _starve(self, now: float, finished: list[Want]) -> None:
        """Those without a deadline would wait for ever if all threads there may be are stuck."""
        if self._usable() > 0 or len(self._alive) < THREADS_FACTOR * self._threads:
            self._starved = None
        elif self._starved is None:
            self._starved = now
        elif now >= self._starved + self._timeout:
            error = UnavailableError(f"all {len(self._alive)} threads wait for stores that don't answer")
            finished += self._schedule.end_endless(error, now)


def _nobody(error: ImgtoolError | None) -> None:
    """Nobody waits for what is read ahead."""
