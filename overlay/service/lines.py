"""An answer in lines of JSON: how it goes while it goes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

INTERVAL = 0.1
"""Seconds between two lines."""

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False).encode


def encode(document: object) -> bytes:
    """JSON in one line of ASCII."""
    return _encode(document).encode()


class ProgressLines:
    """A Progress that sends ``{"progress": {"step", "total", "done"}}`` from time to time, by a thread of its own.

    So whoever tells it something never waits for the one who reads. Without progress there is neither thread nor line.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._step = ""
        self._total: int | None = None
        self._done = 0
        self._changed = False
        self.failure: OSError | None = None
        """Why no more lines could be sent."""

    def start(self, step: str, total: int | None) -> None:
        with self._lock:
            self._step, self._total, self._done, self._changed = step, total, 0, True
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
                self._thread.start()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._changed = True

    def _run(self) -> None:
        while True:
            with self._lock:
                changed, self._changed = self._changed, False
                progress = {"step": self._step, "total": self._total, "done": self._done}
            try:
                if changed:
                    self._send({"progress": progress})
            except OSError as error:
                self.failure = error
                return
            if self._ended.wait(INTERVAL):
                return

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
