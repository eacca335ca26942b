"""The ways to see reads, as a recorder has them in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

TRACEPOINTS, EVENTS, PASSTHROUGH = WAYS = ("tracepoints", "events", "passthrough")
"""In the order in which they are tried."""

Note = Callable[[float, int, int, int, int, str], bool]
"""``note(when, layer, device, offset, length, program)``; ``when`` by the monotonic clock, in seconds. True: it is the
first since the last ones were written."""


class Mounted(NamedTuple):
    """A layer that has been mounted: its number, where, and a descriptor of a copy of the mount."""

    layer: int
    path: str
    copy: int


class NotHereError(Exception):
    """This way can't be gone here, or not for these files; why, in a line."""


class Way(Protocol):
    """How reads are seen.

    Attributes:
        name: one of WAYS.
        due: when :meth:`hear` wants to be called at the latest, by the monotonic clock.
        lost: reads that are known to be missing.
    """

    name: str
    due: float
    lost: int

    def filenos(self) -> list[int]:
        """Descriptors; when one is readable, :meth:`hear` has something to do."""
        ...

    def hear(self) -> None: ...

    def mounted(self, mounts: Sequence[Mounted]) -> None:
        """The layers are mounted. Descriptors are the way's own from now on."""
        ...

    def in_use(self) -> bool:
        """Whether anything may still be read through it."""
        ...

    def stop(self) -> None:
        """See no more, without harm to readers. Repeatable."""
        ...

    def close(self) -> None:
        """End all of it. Who still depends on it gets EIO."""
        ...


def close_copies(mounts: Sequence[Mounted]) -> None:
    """For whoever doesn't need them."""
    for mount in mounts:
        os.close(mount.copy)
