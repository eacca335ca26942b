"""What front ends want on behalf of readers, handed to the fetcher."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError
from overlay.lazy.link import Link, Message
from prefetch.fetcher import Fetcher, Priority

MOST_FRAMES = 1 << 12
"""Frames of one want: a gigabyte, far more than any read of a kernel."""

Observe = Callable[[int, CachedPack, range, float, ImgtoolError | None], None]
"""Pid of the reader, the pack, its frames, seconds until they were there (or weren't), and why they weren't."""


class Demand:
    """Answers the wants of all front ends. One thread for each link."""

    def __init__(self, fetcher: Fetcher, known: Callable[[str], CachedPack], observe: Observe) -> None:
        """``known`` finds an open pack by the hex of its digest, or raises ImgtoolError."""
        self._fetcher = fetcher
        self._known = known
        self._observe = observe
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._asked = threading.Condition(self._lock)
        self._stats: dict[str, Message] = {}

    def attach(self, front: str, link: Link) -> None:
        """Serve a new link; the one that ``front`` had before is dead."""
        with self._lock:
            self._links[front] = link
        threading.Thread(target=self._serve, args=(front, link), name=f"demand-{front}", daemon=True).start()

    def detach(self, front: str) -> None:
        with self._lock:
            self._links.pop(front, None)

    def stats(self, front: str, *, patience: float = 0.5) -> Message:
        """The counters of a front end; empty if there is none, or it doesn't answer in ``patience`` seconds."""
        with self._asked:
            link = self._links.get(front)
            if link is None:
                return {}
            self._stats.pop(front, None)
            try:
                link.send({"stats": 0})
            except OSError:
                return {}
            self._asked.wait_for(lambda: front in self._stats, patience)
            return self._stats.get(front, {})

    def _serve(self, front: str, link: Link) -> None:
        with link:
            while True:
                try:
                    received = link.receive()
                except (ImgtoolError, OSError):
                    continue  # not ours; the front end denies what stays unanswered
                if received is None:
                    return
                message, fds = received
                for fd in map(Link.adopt, fds):
                    fd.close()
                if "stats" in message:
                    with self._asked:
                        self._stats[front] = message
                        self._asked.notify_all()
                elif "want" in message:
                    self._want(link, message)

    def _want(self, link: Link, message: Message) -> None:
        number = message["want"]
        try:
            pack = self._known(str(message["pack"]))
            first, count = int(message["first"]), int(message["count"])
            if not 0 <= first < first + count <= len(pack.frames) or count > MOST_FRAMES:
                raise ValueError("no such frames")
            deadline, pid = float(message["deadline"]), int(message["pid"])
        except (ImgtoolError, KeyError, ValueError, TypeError) as error:
            _answer(link, {"failed": number, "why": str(error)})
            return
        frames = range(first, first + count)
        started = time.monotonic()

        def done(error: ImgtoolError | None) -> None:
            _answer(link, {"got": number} if error is None else {"failed": number, "why": str(error)[:1000]})
            self._observe(pid, pack, frames, time.monotonic() - started, error)

        self._fetcher.want(pack, frames, done, priority=Priority.DEMAND, deadline=deadline)


def _answer(link: Link, message: dict[str, Any]) -> None:
    try:
        link.send(message)
    except OSError:
        pass  # the front end has ended; its successor asks again
