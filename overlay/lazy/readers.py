"""The readers that wait: their events, and what the worker has been asked for on their behalf.

An event waits for the frames that it covers. Those that are missing are **wanted**: one message to the worker for a run
of neighbours, however many events need them. When the worker answers, the frame map is looked at: an event of which
nothing is missing is allowed, another is denied or asked for again.

When an event is denied, its missing frames count as failed for FAILED_FOR: the kernel repeats a read-ahead that was
denied in a smaller range, and a reader must not wait twice for its deadline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layerstore.cache.framemap import READY, FrameMap
from overlay.lazy import fanotify
from overlay.lazy.fanotify import Event
from overlay.lazy.journal import Journal, Record
from overlay.lazy.outlet import Outlet
from overlay.lazy.quietlog import QuietLog

FAILED_FOR = 1.0
"""Seconds for which frames that could not be had in time are denied at once."""
_ASKS = 3
"""How often one event may ask for the same frames, in vain: against a worker that says "got" and hasn't."""
_TOO_LATE = 0.1
"""Seconds before its deadline in which an event isn't asked for again."""


@dataclass(slots=True, eq=False)
class GuardedPack:
    """A pack whose reads are answered, by the inode of its data file.

    Attributes:
        wants: what is asked for, by frame.
        failed: until when a frame is denied at once.
        waiting: its events that wait, by number.
    """

    hex: str
    data_fd: int
    frames: FrameMap
    inode: tuple[int, int]
    wants: dict[int, _Want] = field(default_factory=dict)
    failed: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, _Waiting] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.frames.states() == bytes([READY]) * len(self.frames)

    def has_failed(self, missing: Iterable[int], now: float) -> bool:
        """Whether one of these frames counts as failed still."""
        for number in missing:
            until = self.failed.get(number)
            if until is not None:
                if until > now:
                    return True
                del self.failed[number]
        return False

    def close(self) -> None:
        os.close(self.data_fd)
        self.frames.close()


@dataclass(slots=True, eq=False)
class _Waiting:
    """An event that waits for the frames ``covers``. ``owned``: its number is our descriptor, to be closed."""

    number: int
    pid: int
    pack: GuardedPack
    covers: range
    deadline: float
    owned: bool
    asks: int = 0
    wants: set[_Want] = field(default_factory=set)

    def missing(self) -> list[int]:
        return self.pack.frames.unready(self.covers)


@dataclass(slots=True, eq=False)
class _Want:
    """Neighbouring frames that the worker is asked for, and who needs one of them."""

    number: int
    pack: GuardedPack
    covers: range
    deadline: float
    waiting: dict[int, _Waiting] = field(default_factory=dict)


class Readers:
    """All readers of one group that wait. Whoever isn't allowed to go on is denied: counted, and said in the log."""

    def __init__(self, group: int, journal: Journal, deadline: float, log: QuietLog) -> None:
        """``deadline``: seconds that an event waits at most."""
        self._group = group
        self._journal = journal
        self._deadline = deadline
        self._log = log
        self._worker: Outlet | None = None
        self._waiting: dict[int, _Waiting] = {}
        """By number, in the order of their deadlines."""
        self._wants: dict[int, _Want] = {}
        self._last_want = 0
        self.waited = 0
        self.denied = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    # --- events come

    def add(self, event: Event, pack: GuardedPack, covers: range) -> None:
        """A new event, which needs frames that were not all ready a moment ago."""
        number, pid, offset, length = event
        now = time.monotonic()
        missing = pack.frames.unready(covers)
        if pack.has_failed(missing, now):
            self.deny(number, "failed a moment ago", pack=pack.hex, pid=pid, frame=missing[0])
            return
        until = now + self._deadline
        self._journal.put(number, Record(pid, offset, length, until, pack.frames.header.pack_sha256))
        waiting = _Waiting(number, pid, pack, covers, until, owned=True)
        self._waiting[number] = pack.waiting[number] = waiting
        self.waited += 1
        self._settle(waiting, missing, now)

    def adopt(self, records: Mapping[int, Record], owned: Collection[int], packs: Mapping[str, GuardedPack]) -> None:
        """A predecessor's events, those with the earliest deadlines first; nobody has been asked for them."""
        latest = time.monotonic() + self._deadline
        for number, record in records.items():
            pack = packs.get(record.pack_sha256.hex())
            if pack is None:
                self.deny(number, "no such pack", owned=number in owned, pid=record.pid)
                continue
            covers = pack.frames.covering(record.offset, record.length)
            until = record.deadline if record.deadline < latest else latest
            waiting = _Waiting(number, record.pid, pack, covers, until, number in owned)
            self._waiting[number] = pack.waiting[number] = waiting
        self._settle_all()

    # --- events are answered

    def patience(self) -> float | None:
        """Seconds until :meth:`expire` has something to do; None: nobody waits."""
        for waiting in self._waiting.values():
            return max(0.0, waiting.deadline - time.monotonic())
        return None

    def expire(self) -> None:
        """Deny those whose time is over."""
        now = time.monotonic()
        while self._waiting:
            waiting = next(iter(self._waiting.values()))
            if waiting.deadline > now:
                return
            why = "its deadline has passed" if self._worker else "its deadline has passed, and there is no worker"
            wants = [want for want in waiting.wants if want.deadline <= now]
            self._finish(waiting, waiting.missing(), why)
            for want in wants:  # those who came later have time left, and the worker has given this one up
                self.answered(want.number, why)

    def release(self, pack: GuardedPack) -> None:
        """Nobody will answer for this pack any more: allow what is ready, deny the rest."""
        for waiting in list(pack.waiting.values()):
            self._finish(waiting, waiting.missing(), "was released")
        for want in set(pack.wants.values()):
            self._wants.pop(want.number, None)

    def deny(self, number: int, why: str, *, owned: bool = True, **fields: object) -> None:
        """Deny an event, whether or not it waits."""
        waiting = self._waiting.get(number)
        if waiting is not None:
            self._forget(waiting)
        self.denied += 1
        try:
            self.answer(number, False, owned=owned)
        finally:
            self._log("denied", level="warning", why=why, **fields)

    def answer(self, number: int, allow: bool, *, owned: bool = True) -> None:
        """Answer an event, and only then let go of its number."""
        try:
            fanotify.respond(self._group, number, allow)
        finally:
            if number < self._journal.capacity:
                self._journal.clear(number)
            if owned:
                os.close(number)

    def _finish(self, waiting: _Waiting, missing: Sequence[int], why: str = "") -> None:
        """Allow an event if nothing is ``missing``, else deny it."""
        self._forget(waiting)
        if not missing:
            self.answer(waiting.number, True, owned=waiting.owned)
            return
        pack = waiting.pack
        pack.failed.update(dict.fromkeys(missing, time.monotonic() + FAILED_FOR))
        self.deny(waiting.number, why, owned=waiting.owned, pack=pack.hex, pid=waiting.pid, frame=missing[0])

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.number]
        waiting.pack.waiting.pop(waiting.number, None)
        for want in waiting.wants:
            want.waiting.pop(waiting.number, None)

    def close(self) -> list[int]:
        """Let go of all, unanswered: they are in the journal. The numbers that were ours and are closed now."""
        numbers = [waiting.number for waiting in self._waiting.values() if waiting.owned]
        for number in numbers:
            os.close(number)
        self._waiting.clear()
        return numbers

    # --- the worker

    def set_worker(self, worker: Outlet | None) -> None:
        """Another worker, or none: what the one before was asked for is asked again."""
        self._worker = worker
        for want in self._wants.values():
            want.pack.wants.clear()
        self._wants.clear()
        for waiting in self._waiting.values():
            waiting.wants.clear()
            waiting.asks = 0
        self._settle_all()

    def _settle_all(self) -> None:
        now = time.monotonic()
        for waiting in list(self._waiting.values()):
            self._settle(waiting, waiting.missing(), now)

    def _settle(self, waiting: _Waiting, missing: Sequence[int], now: float) -> None:
        """Allow an event, or ask for what is ``missing`` as far as nobody has."""
        if not missing:
            self._finish(waiting, missing)
            return
        if self._worker is None:
            return  # when one comes, it is asked
        waiting.asks += 1
        pack = waiting.pack
        unasked = []
        for frame in missing:
            want = pack.wants.get(frame)
            if want is None:
                unasked.append(frame)
            else:
                want.waiting[waiting.number] = waiting
                waiting.wants.add(want)
        for covers in runs(unasked):
            self._last_want = number = self._last_want + 1
            want = _Want(number, pack, covers, waiting.deadline, {waiting.number: waiting})
            self._wants[number] = want
            pack.wants.update(dict.fromkeys(covers, want))
            waiting.wants.add(want)
            first, count = covers.start, len(covers)
            message = {"want": number, "pack": pack.hex, "first": first, "count": count}
            self._worker.send(message | {"deadline": want.deadline, "pid": waiting.pid})

    def answered(self, number: int, why: str | None) -> None:
        """The worker has got what was wanted, it says, or ``why`` not."""
        want = self._wants.pop(number, None)
        if want is None:
            return  # nobody waits for it any more
        pack = want.pack
        for frame in want.covers:
            if pack.wants.get(frame) is want:
                del pack.wants[frame]
        now = time.monotonic()
        out_of_time = now >= want.deadline
        # Those with the most time first, so that what is asked anew is asked for as long as anybody can wait.
        for waiting in sorted(want.waiting.values(), key=lambda waiting: -waiting.deadline):
            waiting.wants.discard(want)
            missing = waiting.missing()
            concerned = any(frame in want.covers for frame in missing)
            if missing and not concerned and waiting.wants:
                continue  # it waits for others
            if why is not None and concerned and (not out_of_time or waiting.deadline - now < _TOO_LATE):
                self._finish(waiting, missing, why)
            elif missing and waiting.asks >= _ASKS:
                self._finish(waiting, missing, why or "the worker says that it is there, and it isn't")
            else:
                self._settle(waiting, missing, now)


def runs(numbers: Iterable[int]) -> Iterator[range]:
    """Ascending numbers as ranges of neighbours."""
    start = end = -1
    for number in numbers:
        if number != end:
            if end > start:
                yield range(start, end)
            start = number
        end = number + 1
    if end > start:
        yield range(start, end)
