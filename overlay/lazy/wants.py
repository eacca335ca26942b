"""Frames that readers wait for, asked of the worker once each, whoever the worker is at the moment."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, takewhile

from layerstore.errors import MalformedError, printable
from overlay.lazy.link import Link, Message

Log = Callable[..., None]
"""Called with what happened, and fields as keywords; ``level`` is one of them."""

FAILED_FOR = 1.0
"""Seconds for which a frame that failed fails at once.

The kernel retries a failed readahead page by page, and the file system above does the same once more: without this a
reader would wait for several deadlines. Short, so that reading works again soon after the store does.

For as long, a reader that failed is still in the same read: EROFS asks one pack after the other for a readahead that
lies on several.
"""


class _Want:
    """Neighbouring frames of one pack that were asked for together. ``done`` is set once, after ``came``."""

    __slots__ = ("came", "deadline", "done", "frames", "number", "pack", "pid")

    def __init__(self, number: int, pack: str, frames: range, deadline: float, pid: int) -> None:
        self.number = number
        self.pack = pack
        self.frames = frames
        self.deadline = deadline
        self.pid = pid
        self.done = threading.Event()
        self.came = False

    def message(self) -> Message:
        first, length = self.frames.start, len(self.frames)
        message = {"want": self.number, "pack": self.pack, "first": first, "count": length}
        return message | {"deadline": self.deadline, "pid": self.pid}


class Wants:
    """What is asked and not answered. Readers call :meth:`wait`, one other thread all the rest."""

    def __init__(self, deadline: float, wake: Callable[[], None], log: Log) -> None:
        """``deadline`` is in seconds from a want to its failure; ``wake`` says that :meth:`flush` has something to do.

        Without a worker, wants stay until their deadline: its successor may come before.
        """
        self._deadline = deadline
        self._wake = wake
        self._log = log
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._outstanding: dict[int, _Want] = {}
        self._by_frame: dict[tuple[str, int], _Want] = {}
        self._failed: dict[tuple[str, int], float] = {}  # until when, the first to end first
        self._readers: dict[int, tuple[float, float]] = {}  # pid → began, until when; the first to end first
        self._unsent: deque[_Want] = deque()
        self._link: Link | None = None
        self._closed = False
        self.asked = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._outstanding)

    def wait(self, pack: str, frames: Iterable[int], pid: int) -> bool:
        """Wait until the worker has brought all these frames, on behalf of the thread ``pid``; ascending numbers.

        Returns:
            False when one of them failed, now or a moment ago, or did not come before its deadline. Whether they may
            be read, either way, is what the frame map says.
        """
        now = time.monotonic()
        with self._lock:
            began = self._began(pid, now)
            until = began + self._deadline
            wants = self._join(pack, list(frames), now, pid) if now < until else None
            if wants is None:
                return False
            sent = self._send()
        if not sent:
            self._wake()
        for want in wants:
            if not want.done.wait(min(want.deadline, until) - time.monotonic()):
                self._give_up(want)
            if not want.came:
                self._remember(pid, began)
                return False
        return True

    def _began(self, pid: int, now: float) -> float:
        """When the read began that this thread is in; it may have failed in parts already."""
        began, until = self._readers.get(pid, (now, 0.0))
        return began if now < until else now

    def _remember(self, pid: int, began: float) -> None:
        """A read of this thread failed. Nobody knows on whose behalf the kernel's own threads read (pid 0)."""
        now = time.monotonic()
        with self._lock:
            self._readers.pop(pid, None)
            if pid:
                self._readers[pid] = (began, now + FAILED_FOR)
            for key in [key for key, _ in takewhile(lambda item: item[1][1] <= now, self._readers.items())]:
                del self._readers[key]

    def _join(self, pack: str, frames: list[int], now: float, pid: int) -> list[_Want] | None:
        """The wants that will bring the frames, new ones where there is none; None if there is no hope."""
        if self._closed or any(self._failed.get((pack, number), 0.0) > now for number in frames):
            return None
        for number in frames:
            want = self._by_frame.get((pack, number))
            if want is not None and want.deadline <= now:  # nobody waits for it any more, so it says nothing about now
                self._settle(want)
        wants = dict.fromkeys(want for number in frames if (want := self._by_frame.get((pack, number))))
        for run in _runs(number for number in frames if (pack, number) not in self._by_frame):
            want = _Want(next(self._numbers), pack, run, now + self._deadline, pid)
            self._outstanding[want.number] = want
            self._by_frame.update(((pack, number), want) for number in run)
            self._unsent.append(want)
            self.asked += 1
            wants[want] = None
        return list(wants)

    def attach(self, link: Link | None) -> None:
        """From now on there is this worker, or none. All that is outstanding is asked again."""
        with self._lock:
            if link is not None:
                link.setblocking(False)  # a worker that doesn't read must not hold a reader beyond its deadline
            self._link = link
            self._unsent = deque(self._outstanding.values())
            self._send()

    def flush(self) -> bool:
        """Send what could not be sent; False if the worker still takes no more."""
        with self._lock:
            return self._send()

    def _send(self) -> bool:
        while self._unsent and self._link is not None:
            want = self._unsent[0]
            if not want.done.is_set():
                try:
                    self._link.send(want.message())
                except BlockingIOError:
                    return False
                except OSError:  # it has ended; its successor gets everything
                    return True
            self._unsent.popleft()
        return True

    def answer(self, message: Message) -> None:
        """Take a ``got`` or ``failed`` of the worker; those that come too late are nothing.

        Raises:
            MalformedError: it is neither.
        """
        came = "got" in message
        number = message.get("got" if came else "failed")
        if type(number) is not int:
            raise MalformedError(f"not an answer of the worker: {printable(str(message)[:200])}")
        with self._lock:
            want = self._outstanding.get(number)
            if want is None:
                return
            self._settle(want, came=came, failed=not came)
        if not came:
            self._tell(want, str(message.get("why", "no reason given")))

    def _give_up(self, want: _Want) -> None:
        """A reader's time is over; if the want's is, too, nobody waits for it any longer."""
        with self._lock:
            if want.done.is_set() or time.monotonic() < want.deadline:
                return
            self._settle(want, failed=True)
        self._tell(want, f"not there within {self._deadline:g} seconds")

    def _tell(self, want: _Want, why: str) -> None:
        frames = f"{want.frames.start}+{len(want.frames)}"
        self._log("reading failed", level="error", pack=want.pack, frames=frames, pid=want.pid, why=printable(why))

    def _settle(self, want: _Want, *, came: bool = False, failed: bool = False) -> None:
        del self._outstanding[want.number]
        now = time.monotonic()
        for number in want.frames:
            key = (want.pack, number)
            del self._by_frame[key]
            self._failed.pop(key, None)
            if failed:
                self._failed[key] = now + FAILED_FOR
        self.failed += failed
        for key in [key for key, until in takewhile(lambda item: item[1] <= now, self._failed.items())]:
            del self._failed[key]
        want.came = came
        want.done.set()

    def close(self) -> None:
        """Everything outstanding, and all that comes later, fails."""
        with self._lock:
            self._closed = True
            self._link = None
            self._unsent.clear()
            for want in list(self._outstanding.values()):
                self._settle(want)


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Ascending numbers as ranges of neighbours."""
    run = range(0)
    for number in numbers:
        if number == run.stop and run:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
