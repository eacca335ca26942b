"""Making fetched frames durable: in groups, since each group waits for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from layerstore.cache.packs import CachedPack
from layerstore.errors import ImgtoolError, NoSpaceError, UnavailableError
from prefetch.clock import Clock
from prefetch.mistakes import report_mistake

SYNC_BYTES = 32 << 20
"""Raw bytes that are written before they are made durable; a crash loses at most these, or the last second's."""
SYNC_SECONDS = 1.0


class Commits:
    """Calls :meth:`CachedPack.sync` in a thread of its own.

    A pack that can't be synced has lost the frames that it would have recorded; they are missing again.
    """

    def __init__(
        self,
        room: Callable[[int, str], int],
        failed: Callable[[CachedPack, ImgtoolError], None],
        idle: Callable[[], float | None],
        clock: Clock,
    ) -> None:
        """``idle`` is called when nothing was written for a while; it returns when it wants to be called again."""
        self._room = room
        self._failed = failed
        self._idle = idle
        self._clock = clock
        self._changed = threading.Condition()
        self._written: dict[CachedPack, int] = {}
        self._bytes = 0
        self._due: float | None = None
        self._errors: dict[CachedPack, ImgtoolError] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="fetch-sync", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wrote(self, pack: CachedPack, size: int) -> None:
        """``size`` bytes of frames were written to ``pack``."""
        with self._changed:
            self._written[pack] = self._written.get(pack, 0) + size
            full = self._bytes < SYNC_BYTES <= self._bytes + size
            self._bytes += size
            if self._due is None:
                self._due = self._clock.now() + SYNC_SECONDS
                self._changed.notify()
            elif full:
                self._changed.notify()

    def sync(self, pack: CachedPack) -> None:
        """Make durable what was written to ``pack`` until now.

        Raises:
            NoSpaceError: the disk is full; room has been made as far as possible, so that another try makes sense.
            ImgtoolError: what else :meth:`CachedPack.sync` raises.
        """
        with self._changed:
            size = self._written.pop(pack, 0)
            self._bytes -= size
        self._sync(pack, size)

    def error(self, pack: CachedPack) -> ImgtoolError | None:
        """Why the latest sync of ``pack`` failed; None if it didn't."""
        return self._errors.get(pack)

    def _sync(self, pack: CachedPack, size: int) -> None:
        with ExitStack() as stack:
            try:
                stack.enter_context(pack.busy())
            except UnavailableError:
                return  # evicted: there is nothing to keep
            try:
                pack.sync()
            except ImgtoolError as error:
                self._errors[pack] = error
                if isinstance(error, NoSpaceError):
                    self._room(size, pack.hex)
                raise
        self._errors.pop(pack, None)

    def _work(self) -> None:
        wake: float | None = None
        while True:
            with self._changed:
                while not self._closed and not self._is_due():
                    due = min((time for time in (self._due, wake) if time is not None), default=None)
                    if wake is not None and due == wake and self._clock.now() >= wake:
                        break
                    self._clock.wait(self._changed, due)
                group, self._written = self._written, {}
                self._bytes, self._due = 0, None
                closed = self._closed
            for pack, size in group.items():
                try:
                    self._sync(pack, size)
                except ImgtoolError as error:
                    self._failed(pack, error)
                except Exception:
                    report_mistake()
            if closed:
                return
            wake = self._idle()

    def _is_due(self) -> bool:
        return self._bytes >= SYNC_BYTES or (self._due is not None and self._clock.now() >= self._due)

    def close(self) -> None:
        """Make everything durable, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
