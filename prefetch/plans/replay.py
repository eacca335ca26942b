"""Replaying plans: their frames are fetched in the background, in the order in which they are due.

::

    Matched ─▶ Replay ── a want for each frame ─▶ Fetcher ─▶ frames in the cache
                 ▲                                   │
                 └────── there, or why not ◀─────────┘

Sandboxes that want the same share one replay. It ends when all of its frames are there or have failed, when nobody
wants it any more, or when the store fails it so often that it gives up: then readers ask for what is missing, as they
would have without a plan. Nothing that befalls a replay is an error for anybody else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError
from prefetch.backlog import Want
from prefetch.clock import Clock, MonotonicClock
from prefetch.fetcher import Fetcher
from prefetch.mistakes import report_mistake
from prefetch.plans.match import Matched, PlannedFrame
from prefetch.statistics import Fetched, Priority, Tally

WINDOW = 512
"""Frames that are wanted at a time, 128 MiB raw: neighbours are found among them, and they cost half a megabyte."""
ROUNDS = 4
"""Rounds of attempts at one frame, with a second of pauses: fewer than for those who can't do without."""
FAILURES = 8
"""Frames that fail one after the other, while none comes, before the rest is given up."""
PATIENCE = 30.0
"""Seconds in which nothing comes from any store before the rest is given up."""
GULP_SECONDS = 0.1
"""Where bandwidth is bounded, what it allows in this time is asked for at once, so that neighbours come together."""


class State(StrEnum):
    """Of a replay."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    GAVE_UP = "gave up"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """What has come of a replay so far.

    Attributes:
        planned: frames.
        brought: frames that it fetched.
        present: frames that were there, or that others fetched: readers who came first, or another replay.
        failed: frames that could not be had.
        left: frames that are still to come; or never will, if it has ended.
        late: frames among those brought for which a reader was waiting already.
        used: frames among those brought that a reader asked for afterwards. Readers of packs that are complete are not
            seen, nor those that a front end of an earlier release answers.
        requests, compressed, raw: what was taken from stores for it; bytes as they came, and as they are in the packs.
        seconds: from its start until now, or until it ended.
        error: the latest failure, or why it gave up.
    """

    state: State
    planned: int
    brought: int
    present: int
    failed: int
    left: int
    late: int
    used: int
    requests: int
    compressed: int
    raw: int
    seconds: float
    error: str | None


class Pace:
    """Bytes a second, for whoever shares it. Any thread may call."""

    def __init__(self, bandwidth: int) -> None:
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free = 0.0

    @property
    def gulp(self) -> int:
        """Bytes that are taken at a time."""
        return int(self._bandwidth * GULP_SECONDS)

    def reserve(self, size: int, now: float) -> float:
        """When so many bytes may be asked for."""
        with self._lock:
            start = max(self._free, now)
            self._free = start + size / self._bandwidth
            return start

    def give_back(self, size: int) -> None:
        """So many bytes that were reserved are not asked for."""
        with self._lock:
            self._free -= size / self._bandwidth


class Replay:
    """One replay: a thread that lives as long as there is something to fetch. Any thread may call."""

    def __init__(
        self,
        fetcher: Fetcher,
        fetches: Sequence[PlannedFrame],
        *,
        pace: Pace | None = None,
        patience: float = PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._fetches = fetches
        self._pace = pace
        self._patience = patience
        self._clock = clock or MonotonicClock()
        self._changed = threading.Condition()
        """Guards everything below."""
        self._thread: threading.Thread | None = None
        self._state = State.WAITING if fetches else State.DONE
        self._started = self._ended = self._clock.now()
        self._wants: set[Want] = set()
        self._settled = 0
        """Told when no more than so many are left."""
        self._brought: dict[CachedPack, list[int]] = {}
        """Frames that came before anybody asked for them."""
        self._used: dict[CachedPack, int] = {}
        self._came = self._late = self._present = self._failed = self._in_a_row = 0
        self._fetched = Fetched()
        self._error: str | None = None

    # --- for those who want it

    def start(self) -> None:
        """Begin; once it has begun, or ended, nothing."""
        with self._changed:
            if self._state is not State.WAITING:
                return
            self._state = State.RUNNING
            self._started = self._clock.now()
            self._thread = threading.Thread(target=self._serve, name="replay", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:
                self._thread = None
                self._end(State.GAVE_UP, str(error))

    def stop(self) -> None:
        """Want nothing more. What is under way still comes; returns at once or nearly so."""
        with self._changed:
            self._end(State.STOPPED)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended: all is there, or failed, or was given up. False: not in ``timeout`` seconds."""
        with self._changed:
            until = None if timeout is None else self._clock.now() + timeout
            while self.active and (until is None or self._clock.now() < until):
                self._clock.wait(self._changed, until)
            return not self.active

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return self._state in (State.WAITING, State.RUNNING)

    @property
    def state(self) -> State:
        return self._state

    def stats(self) -> ReplayStats:
        with self._changed:
            for pack, numbers in self._brought.items():
                with suppress(ImgtoolError):  # it was evicted since
                    self._used[pack] = pack.touched(numbers)
            return ReplayStats(
                state=self._state,
                planned=len(self._fetches),
                brought=self._came,
                present=self._present,
                failed=self._failed,
                left=len(self._fetches) - self._came - self._present - self._failed,
                late=self._late,
                used=sum(self._used.values()),
                requests=self._fetched.requests,
                compressed=self._fetched.compressed,
                raw=self._fetched.raw,
                seconds=(self._clock.now() if self._state is State.RUNNING else self._ended) - self._started,
                error=self._error,
            )

    # --- its thread

    def _serve(self) -> None:
        try:
            with ExitStack() as stack:
                evicted = set()
                for pack in dict.fromkeys(planned.pack for planned in self._fetches):
                    try:
                        stack.enter_context(pack.busy())
                    except ImgtoolError:
                        evicted.add(pack)
                self._fetch([planned for planned in self._fetches if planned.pack not in evicted])
                with self._changed:
                    self._failed += sum(planned.pack in evicted for planned in self._fetches)
                    self._end(State.DONE)
        except ImgtoolError as error:
            with self._changed:
                self._end(State.GAVE_UP, str(error))
        except Exception:
            report_mistake()
        finally:
            with self._changed:
                self._end(State.GAVE_UP)
            self._abandon()

    def _fetch(self, fetches: Sequence[PlannedFrame]) -> None:
        for gulp, size in self._gulps(fetches):
            if self._pace is not None and not self._rest(self._pace.reserve(size, self._clock.now())):
                self._pace.give_back(size)
                return
            for planned in gulp:
                if not self._settle(WINDOW - 1):
                    return
                self._want(planned)
        self._settle(0)

    def _gulps(self, fetches: Sequence[PlannedFrame]) -> Iterator[tuple[list[PlannedFrame], int]]:
        """What is asked for at once, with its bytes: one frame after the other, where nothing bounds the bandwidth."""
        gulp: list[PlannedFrame] = []
        size = 0
        for planned in fetches:
            if not planned.pack.unready([planned.number]):
                with self._changed:
                    self._present += 1
                continue
            gulp.append(planned)
            size += planned.pack.index.compressed_size(planned.number)
            if self._pace is None or size >= self._pace.gulp:
                yield gulp, size
                gulp, size = [], 0
        if gulp:
            yield gulp, size

    def _want(self, planned: PlannedFrame) -> None:
        now = self._clock.now()
        tally = Tally()
        want = Want(
            planned.pack,
            lambda error: self._done(want, planned, tally, error),
            Priority.BACKGROUND,
            None,
            now,
            due=self._started + planned.due / 1e6,
            rounds=ROUNDS,
            tally=tally,
        )
        with self._changed:  # whoever abandons what is wanted finds it either not there, or submitted
            if self._state is State.RUNNING:
                self._wants.add(want)
                self._fetcher.submit(want, [planned.number])

    def _done(self, want: Want, planned: PlannedFrame, tally: Tally, error: ImgtoolError | None) -> None:
        with self._changed:
            self._wants.discard(want)
            self._fetched += tally.total()
            if error is not None:
                self._failed += 1
                self._in_a_row += 1
                self._error = str(error)
                if self._in_a_row >= FAILURES:
                    self._end(State.GAVE_UP)
            elif not tally.frames:
                self._present += 1
            else:
                self._in_a_row = 0
                self._came += 1
                if self._is_late(planned):
                    self._late += 1
                else:
                    self._brought.setdefault(planned.pack, []).append(planned.number)
            if not self.active:
                self._abandon()  # before more of it fails
            elif len(self._wants) <= self._settled:
                self._changed.notify_all()

    def _abandon(self) -> None:
        with self._changed:
            wants, self._wants = self._wants, set()
            self._fetcher.abandon(list(wants))

    def _is_late(self, planned: PlannedFrame) -> bool:
        try:
            return planned.pack.touched([planned.number]) == 1
        except ImgtoolError:
            return False  # the cache is being closed

    def _settle(self, most: int) -> bool:
        """Wait until no more than ``most`` frames are wanted; False if it has ended before."""
        with self._changed:
            self._settled = most
            came, silent = -1, self._clock.now()
            while self._state is State.RUNNING and len(self._wants) > most:
                now, before, came = self._clock.now(), came, self._arrivals()
                if came != before:
                    silent = now
                elif now >= silent + self._patience:
                    self._end(State.GAVE_UP, f"nothing has come for {self._patience:g} s")
                    break
                self._clock.wait(self._changed, silent + self._patience)
            return self._state is State.RUNNING

    def _arrivals(self) -> int:
        """Bytes that have come for anybody. What waits because others come first is not given up."""
        stats = self._fetcher.stats()
        return stats.demand.compressed + stats.background.compressed

    def _rest(self, until: float) -> bool:
        """Wait for a time; False if it has ended before."""
        with self._changed:
            while self._state is State.RUNNING and self._clock.now() < until:
                self._clock.wait(self._changed, until)
            return self._state is State.RUNNING

    def _end(self, state: State, error: str | None = None) -> None:
        if not self.active:
            return
        self._state = state
        self._ended = self._clock.now()
        self._error = error or self._error
        self._changed.notify_all()


_Frames = tuple[PlannedFrame, ...]


class Replays:
    """The replays of a node, and whose they are. Any thread may call."""

    def __init__(
        self,
        fetcher: Fetcher,
        *,
        bandwidth: int | None = None,
        patience: float = PATIENCE,
        clock: Clock | None = None,
    ) -> None:
        """``bandwidth``: bytes a second that all replays together ask stores for; no bound if not given."""
        self._fetcher = fetcher
        self._pace = Pace(bandwidth) if bandwidth else None
        self._patience = patience
        self._clock = clock
        self._lock = threading.Lock()
        self._shared: dict[_Frames, Replay] = {}
        self._users: dict[str, list[tuple[_Frames, Replay]]] = {}
        self._closed = False

    def join(self, user: str, matched: Matched) -> Replay:
        """The replay of these frames, begun, for ``user`` besides the others; one may have several."""
        with self._lock:
            key = matched.fetches
            replay = self._shared.get(key)
            if replay is None or replay.state in (State.GAVE_UP, State.STOPPED):
                replay = Replay(self._fetcher, key, pace=self._pace, patience=self._patience, clock=self._clock)
                self._shared[key] = replay
            if self._closed:
                replay.stop()
            self._users.setdefault(user, []).append((key, replay))
        replay.start()
        return replay

    def leave(self, user: str) -> None:
        """``user`` is gone: what nobody else wants is stopped."""
        with self._lock:
            joined = self._users.pop(user, [])
            wanted = {replay for others in self._users.values() for _, replay in others}
            left = {replay: key for key, replay in joined if replay not in wanted}
            for replay, key in left.items():
                if self._shared.get(key) is replay:
                    del self._shared[key]
        for replay in left:
            replay.stop()

    def of(self, user: str) -> list[Replay]:
        """The replays that ``user`` has joined, in that order."""
        with self._lock:
            return [replay for _, replay in self._users.get(user, [])]

    def all(self) -> list[Replay]:
        """Those that somebody has joined and not left, each once."""
        with self._lock:
            return list({replay: None for joined in self._users.values() for _, replay in joined})

    def close(self) -> None:
        """Stop all, and all that are joined later."""
        with self._lock:
            self._closed = True
        for replay in self.all():
            replay.stop()
