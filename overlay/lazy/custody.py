"""The worker's side of the holder: what it gives into its care, and what it hears from it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from layerstore.errors import ImgtoolError, UnavailableError
from overlay.lazy.holder import WORKER, Log, connect
from overlay.lazy.link import Link, Message

PATIENCE = 20.0
"""Seconds until a request to the holder is given up: a keeper is started anew in far less."""
_ORPHANED = 1.0
"""Seconds without any holder after which the worker starts one. A keeper would have done it by then."""
_GLANCE = 2.0
"""Seconds for what is only to be shown."""


class _Pending:
    def __init__(self, message: Message, fds: tuple[int, ...]) -> None:
        self.message = message
        self.fds = fds
        self.answered = threading.Event()
        self.answer: Message = {}


class Custody:
    """The link to the holder, kept alive over its deaths. Requests may come from any thread."""

    def __init__(
        self,
        run_directory: str,
        *,
        on_peer: Callable[[str, Link], None],
        on_lost: Callable[[str], None],
        on_stop: Callable[[], None],
        orphaned: Callable[[], None],
        log: Log,
    ) -> None:
        """Connect, and listen in a thread of its own.

        Args:
            run_directory: where the holder listens.
            on_peer: a new link to a front end.
            on_lost: a front end whose mounts are dead.
            on_stop: the holder was told to end.
            orphaned: start a new holder, since keeper and holder are gone.
            log: for what goes wrong here.
        """
        self._directory = run_directory
        self._on_peer, self._on_lost, self._on_stop, self._orphaned = on_peer, on_lost, on_stop, orphaned
        self._log = log
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[int, _Pending] = {}
        self._link: Link | None = None
        self._closed = False
        threading.Thread(target=self._listen, name="custody", daemon=True).start()

    def hold(self, hex: str, front: str, data: int, frames: int) -> None:
        """Have ``front`` guard a pack from now on, and everybody keep its descriptors.

        Raises:
            UnavailableError: it can't be guarded, so nothing may be mounted over it.
        """
        self._request({"hold": 0, "pack": hex, "with": front}, (data, frames))

    def drop(self, hex: str, front: str) -> None:
        """Have ``front`` forget a pack: it is complete, or nothing is mounted over it."""
        self._request({"drop": 0, "pack": hex, "with": front})

    def start_fuse(self, directory: str) -> None:
        """Have a FUSE server serve ``directory``.

        Raises:
            UnavailableError: it doesn't start.
        """
        self._request({"start": 0, "service": "fuse", "directory": directory})

    def status(self) -> Message:
        """``pids`` and ``restarts`` by process.

        Raises:
            UnavailableError: there is no holder just now.
        """
        return self._request({"status": 0}, patience=_GLANCE)

    def stopped(self) -> None:
        """Say that nothing of ours is mounted lazily any more: everything may end."""
        with self._lock:
            self._closed = True
            if self._link is not None:
                self._link.send({"stopped": True})

    def _request(self, message: Message, fds: tuple[int, ...] = (), *, patience: float = PATIENCE) -> Message:
        pending = _Pending(message, fds)
        with self._lock:
            self._number += 1
            number = self._number
            kind = next(iter(message))
            message[kind] = number
            self._pending[number] = pending
            self._send(pending)
        try:
            if not pending.answered.wait(patience):
                raise UnavailableError(f"the node's holder doesn't answer ({kind}); see `imgtool node status`")
        finally:
            with self._lock:
                del self._pending[number]
        if "failed" in pending.answer:
            raise UnavailableError(f"{kind}: {pending.answer.get('why', 'refused')}")
        return pending.answer

    def _send(self, pending: _Pending) -> None:
        if self._link is not None:
            try:
                self._link.send(pending.message, pending.fds)
            except OSError:
                pass  # it is sent again to the next holder

    def _listen(self) -> None:
        while not self._closed:
            link = connect(self._directory, WORKER, patience=_ORPHANED)
            if link is None:
                self._log("no holder and no keeper", level="error")
                self._orphaned()
                continue
            with self._lock:
                self._link = link
                for pending in self._pending.values():
                    self._send(pending)
            self._converse(link)
            with self._lock:
                self._link = None
            link.close()

    def _converse(self, link: Link) -> None:
        while True:
            try:
                received = link.receive()
            except (ImgtoolError, OSError) as error:
                self._log("unreadable message of the holder", level="error", error=str(error))
                continue
            if received is None:
                return
            message, fds = received
            if "peer" in message and len(fds) == 1:
                self._on_peer(str(message["peer"]), Link.adopt(fds[0]))
                continue
            for link_fd in map(Link.adopt, fds):
                link_fd.close()
            if "lost" in message:
                self._on_lost(str(message["lost"]))
            elif "stop" in message:
                self._on_stop()
            else:
                self._answered(message)

    def _answered(self, message: Message) -> None:
        number: Any = message.get("done", message.get("failed"))
        with self._lock:
            pending = self._pending.get(number)
        if pending is not None:
            pending.answer = message
            pending.answered.set()
