"""What front ends want on behalf of readers, handed to the fetcher."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError
from overlay.lazy.link import Link, Message
from prefetch.fetcher import Fetcher, Priority

MOST_FRAMES = 1 << 12
"""Frames of one want: a gigabyte, far more than any read of a kernel."""

_PATIENCE_MS = 1000
"""Milliseconds for a front end to take an answer: those who bring data must not wait for it for long."""

Observe = Callable[[int, CachedPack, range, float, ImgtoolError | None], None]
"""Pid of the reader, the pack, its frames, seconds until they were there (or weren't), and why they weren't."""


class _Front:
    """A front end, by its link. Any thread may send.

    What one that hangs doesn't take is dropped. It finds out what is there when its readers' time is over, at the
    latest: it believes the frame map, not us.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._sending = threading.Lock()
        self._hangs = False

    def send(self, message: Message) -> bool:
        """Whether it takes the message."""
        with self._sending:
            poll = select.poll()
            poll.register(self.link, select.POLLOUT)  # so much room that a message never waits
            self._hangs = not poll.poll(0 if self._hangs else _PATIENCE_MS)
            if self._hangs:
                return False
            try:
                self.link.send(message)
            except OSError:
                return False  # it has ended; its successor asks again
            return True


class Demand:
    """Answers the wants of all front ends. One thread for each link."""

    def __init__(self, fetcher: Fetcher, known: Callable[[str], CachedPack], observe: Observe) -> None:
        """``known`` finds an open pack by the hex of its digest, or raises ImgtoolError."""
        self._fetcher = fetcher
        self._known = known
        self._observe = observe
        self._lock = threading.Lock()
        self._fronts: dict[str, _Front] = {}
        self._asked = threading.Condition(self._lock)
        self._stats: dict[str, Message] = {}

    def attach(self, front: str, link: Link) -> None:
        """Serve a new link; the one that ``front`` had before is dead."""
        server = _Front(link)
        with self._lock:
            self._fronts[front] = server
        threading.Thread(target=self._serve, args=(front, server), name=f"demand-{front}", daemon=True).start()

    def detach(self, front: str) -> None:
        with self._lock:
            self._fronts.pop(front, None)

    def stats(self, front: str, *, patience: float = 0.5) -> Message:
        """The counters of a front end; empty if there is none, or it doesn't answer in ``patience`` seconds."""
        with self._asked:
            server = self._fronts.get(front)
            self._stats.pop(front, None)
        if server is None or not server.send({"stats": 0}):
            return {}
        with self._asked:
            self._asked.wait_for(lambda: front in self._stats, patience)
            return self._stats.get(front, {})

    def _serve(self, front: str, server: _Front) -> None:
        with server.link as link:
            while True:
                try:
                    received = link.receive()
                except ImgtoolError:
                    continue  # not ours; the front end denies what stays unanswered
                except OSError:
                    received = None
                if received is None:
                    return
                message, fds = received
                for fd in fds:
                    os.close(fd)
                if "stats" in message:
                    with self._asked:
                        self._stats[front] = message
                        self._asked.notify_all()
                elif "want" in message:
                    self._want(server, message)

    def _want(self, server: _Front, message: Message) -> None:
        number = message["want"]
        try:
            pack = self._known(str(message["pack"]))
            first, count = int(message["first"]), int(message["count"])
            if not 0 <= first < first + count <= len(pack.frames) or count > MOST_FRAMES:
                raise ValueError("no such frames")
            deadline, pid = float(message["deadline"]), int(message["pid"])
        except (ImgtoolError, KeyError, ValueError, TypeError) as error:
            server.send({"failed": number, "why": str(error)[:1000]})
            return
        frames = range(first, first + count)
        started = time.monotonic()

        def done(error: ImgtoolError | None) -> None:
            server.send({"got": number} if error is None else {"failed": number, "why": str(error)[:1000]})
            self._observe(pid, pack, frames, time.monotonic() - started, error)

        self._fetcher.want(pack, frames, done, priority=Priority.DEMAND, deadline=deadline)
