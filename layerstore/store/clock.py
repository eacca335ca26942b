"""The store's own time: what its file system stamps on a file that is touched now.

On a shared file system that is the server's time, so hosts whose clocks are hours apart agree about leases and ages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from layerstore.store.failures import disk_errors

Clock = Callable[[], int]
"""Nanoseconds since 1970."""

NANOSECONDS = 1_000_000_000


def elapsed() -> float:
    """Seconds by a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class FileClock:
    """Tells the time by touching a file. Needs no space, so it works on a full disk."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self) -> int:
        with disk_errors("read the store's clock"):
            file = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.utime(file)  # no times given: the server sets its own
                return os.fstat(file).st_mtime_ns
            finally:
                os.close(file)
