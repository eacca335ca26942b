"""A trace while it grows: reads are noted at once, and written a little later, many at a time.

Its lines are those of :mod:`prefetch.trace.format`, and a test says so. That module isn't imported here: a recorder has
to stand in a moment, and loading it takes longer than everything else.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import deque

from overlay.recording.accesses import MOST, Accesses

DELAY = 0.05
"""Seconds that a read may be noted and not written: what a recorder loses that is killed."""
_MOST_PENDING = 512

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, ensure_ascii=False).encode


class Partial:
    """Appends to ``path``, a trace's header so far, and holds a lock on it (flock), by which it is seen to grow.

    Times are given by the monotonic clock, in seconds.

    Any thread may :meth:`note`; the rest is one thread's. Where the file can't be written, the recording goes on in
    memory, and ``failure`` says why.
    """

    def __init__(self, path: str, began: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._began = began
        self._pending: deque[tuple[float, int, int, int, int, str]] = deque()
        self._due = 0.0
        self.accesses = Accesses()
        self.waits: list[tuple[int, int]] = []
        """From when to when a reader waited, microseconds since the recording began."""
        self.failure: str | None = None

    def note(self, now: float, layer: int, device: int, offset: int, length: int, comm: str) -> bool:
        """A read of ``length`` bytes, more than none. True: :meth:`flush` has nothing else to do yet."""
        pending = self._pending
        first = not pending
        if first:
            self._due = now + DELAY
        pending.append((now, layer, device, offset, length, comm))
        return first

    def patience(self, now: float, most: float) -> float:
        """Seconds until :meth:`flush` has something to do, ``most`` at most."""
        return min(most, max(0.0, self._due - now)) if self._pending else most

    def is_due(self, now: float) -> bool:
        return bool(self._pending) and (now >= self._due or len(self._pending) >= _MOST_PENDING)

    def wait(self, start: float, end: float) -> None:
        if len(self.waits) < MOST:
            wait = (self._since(start), self._since(end))
            self.waits.append(wait)
            self._write([_encode({"waited_from": wait[0], "waited_until": wait[1]})])

    def flush(self) -> None:
        """Write what has been noted."""
        lines = []
        pending, add = self._pending, self.accesses.add
        for _ in range(len(pending)):
            moment, layer, device, offset, length, comm = pending.popleft()
            for seen in add(self._since(moment), layer, device, offset, length, comm):
                fields: dict[str, object] = {
                    "at": seen.at,
                    "layer": layer,
                    "device": device,
                    "offset": seen.offset,
                    "length": seen.length,
                }
                if comm:
                    fields["comm"] = comm
                lines.append(_encode(fields))
        if lines:
            self._write(lines)

    def _write(self, lines: list[str]) -> None:
        if self.failure is not None:
            return  # a line after one that was cut would be damage
        data = "\n".join([*lines, ""]).encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.failure = error.strerror

    def _since(self, moment: float) -> int:
        return max(0, round((moment - self._began) * 1e6))

    def end(self, now: float) -> int:
        """Write the rest; how long the recording took, in microseconds."""
        self.flush()
        return self._since(now)

    def close(self) -> None:
        """Let the file go; once. Until then nobody removes it."""
        os.close(self._file)
