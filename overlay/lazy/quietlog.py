"""A log for a process that must not be stopped by what it logs, or by how often."""

from __future__ import annotations

import time
from collections.abc import Callable

QUIET = 1.0
"""Seconds between two lines of one kind about one pack."""
_MOST_KINDS = 1000

Log = Callable[..., None]
"""``log(event, level=…, **fields)``."""


class QuietLog:
    """Passes lines on, one of a kind and pack in a moment: readers that try again must not fill the disk.

    The next one after those that were left out says in ``unlogged`` how many they were. Nothing is ever raised.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._until: dict[tuple[str, object], float] = {}
        self._unlogged: dict[tuple[str, object], int] = {}

    def __call__(self, event: str, *, level: str = "info", **fields: object) -> None:
        now = time.monotonic()
        key = (event, fields.get("pack"))
        if self._until.get(key, 0.0) > now:
            self._unlogged[key] = self._unlogged.get(key, 0) + 1
            return
        if len(self._until) >= _MOST_KINDS:
            self._until.clear()
            self._unlogged.clear()
        self._until[key] = now + QUIET
        if unlogged := self._unlogged.pop(key, 0):
            fields["unlogged"] = unlogged
        try:
            self._log(event, level=level, **fields)
        except Exception:
            pass  # a full disk, a log that is gone
