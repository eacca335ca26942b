"""Names of the programs that read."""

from __future__ import annotations

import math

from layerstore.errors import printable

_SOON, _LATE = 0.001, 0.064
"""Seconds after which a process is looked at again: a young one is about to execute something else."""
_MOST = 4096


class Programs:
    """Names by process: what was said of them, else what /proc has. To look costs some 15 µs, so it is done rarely."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, float, float]] = {}

    def executes(self, pid: int, name: str) -> None:
        """It is called so from now on."""
        self._known[pid] = (name, math.inf, _LATE)

    def forks(self, parent: int, child: int) -> None:
        """The child is called as its parent, until it executes something."""
        if (known := self._known.get(parent)) is not None:
            self._known[child] = known

    def ends(self, pid: int) -> None:
        self._known.pop(pid, None)

    def name(self, pid: int, now: float) -> str:
        """The name of a process, as /proc has it at most 64 ms ago; empty if it was never seen alive.

        ``now`` is the monotonic clock in seconds.
        """
        known = self._known.get(pid)
        if known is not None and now < known[1]:
            return known[0]
        try:
            with open(f"/proc/{pid}/comm", "rb", buffering=0) as stream:
                name = printable(stream.read(64).rstrip(b"\n"))
        except OSError:  # it has ended
            name = known[0] if known is not None else ""
        if len(self._known) >= _MOST:
            self._known.clear()
        pause = min(known[2] * 2, _LATE) if known is not None and known[0] == name else _SOON
        self._known[pid] = (name, now + pause, pause)
        return name
