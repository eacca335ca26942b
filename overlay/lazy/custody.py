"""The worker's side of the holder: what it gives into its care, and what it hears from it."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from layerstore.errors import ImgtoolError, UnavailableError
from overlay.lazy.holder import Log
from overlay.lazy.link import Link, Message
from overlay.lazy.rendezvous import WORKER, connect

PATIENCE = 20.0
"""Seconds until a request to the holder is given up: a keeper is started anew in far less."""
_ORPHANED = 1.0
"""Seconds without any holder after which the worker starts one. A keeper would have done it by then."""
_GLANCE = 2.0
"""Seconds for what is only to be shown."""
_PAUSE = 0.02
"""Seconds between two looks at a holder that takes no messages, or ends conversations."""


class _Pending:
    """A request that isn't answered. ``sent``: over the link that there is."""

    def __init__(self, message: Message, fds: tuple[int, ...]) -> None:
        self.message = message
        self.fds = fds
        self.sent = False
        self.answered = threading.Event()
        self.answer: Message = {}


class Custody:
    """The link to the holder, kept alive over its deaths. Requests may come from any thread.

    Nothing here waits for a holder that hangs for longer than a request's patience.
    """

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
            on_peer: a new link to a front end; must not wait for the holder.
            on_lost: a front end whose mounts are dead. In a thread of its own, so it may make requests.
            on_stop: the holder was told to end. In a thread of its own, too.
            orphaned: start a new holder, since keeper and holder are gone.
            log: for what goes wrong here.
        """
        self._directory = run_directory
        self._on_peer, self._on_lost, self._on_stop, self._orphaned = on_peer, on_lost, on_stop, orphaned
        self._log = log
        self._lock = threading.Lock()
        """Guards everything below, and sending."""
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

    def start_fuse(self, directory: str) -> str:
        """Have a FUSE server serve ``directory``, unless one serves another; the directory that is served.

        Raises:
            UnavailableError: it doesn't start.
        """
        return str(self._request({"start": 0, "service": "fuse", "directory": directory})["directory"])

    def status(self) -> Message:
        """``pids`` and ``restarts`` by process.

        Raises:
            UnavailableError: there is no holder just now.
        """
        return self._request({"status": 0}, patience=_GLANCE)

    def stopped(self) -> None:
        """Say that nothing of ours is mounted lazily any more: everything may end.

        Raises:
            UnavailableError: no holder has heard it, so that another worker will be started.
        """
        self._request({"stopped": 0})
        self._closed = True

    def _request(self, message: Message, fds: tuple[int, ...] = (), *, patience: float = PATIENCE) -> Message:
        until = time.monotonic() + patience
        kind = next(iter(message))
        pending = _Pending(message, fds)
        with self._lock:
            self._number += 1
            number = message[kind] = self._number
            self._pending[number] = pending
            self._send(pending)
        try:
            while not pending.answered.wait(until - time.monotonic() if pending.sent else _PAUSE):
                if time.monotonic() >= until:
                    raise UnavailableError(f"the node's holder doesn't answer ({kind}); see `imgtool node status`")
                with self._lock:
                    self._send(pending)
        finally:
            with self._lock:
                del self._pending[number]
        if "failed" in pending.answer:
            raise UnavailableError(f"{kind}: {pending.answer.get('why', 'refused')}")
        return pending.answer

    def _send(self, pending: _Pending) -> None:
        """Unless it has been, or can't be now. The lock is held."""
        if self._link is not None and not pending.sent:
            try:
                self._link.send(pending.message, pending.fds)
                pending.sent = True
            except OSError:
                pass  # it takes no more at present; or it has ended, and its successor is asked

    def _listen(self) -> None:
        while not self._closed:
            self._attempt(self._meet)
            time.sleep(_PAUSE)

    def _meet(self) -> None:
        """Find the holder, and talk to it until it ends."""
        link = connect(self._directory, WORKER, patience=_ORPHANED)
        if link is not None:
            self._converse(link)
        elif not self._closed:
            self._log("no holder and no keeper", level="error")
            self._orphaned()

    def _converse(self, link: Link) -> None:
        """Until the holder ends."""
        link.setblocking(False)
        with self._lock:
            self._link = link
            for pending in self._pending.values():
                pending.sent = False
                self._send(pending)
        try:
            poll = select.poll()
            poll.register(link, select.POLLIN)
            while True:
                poll.poll()
                try:
                    received = link.receive()
                except BlockingIOError:
                    continue
                except ImgtoolError as error:
                    self._log("unreadable message of the holder", level="error", error=str(error))
                    continue
                if received is None:
                    return
                self._heed(*received)
        finally:
            with self._lock:
                self._link = None
                link.close()

    def _heed(self, message: Message, fds: list[int]) -> None:
        if "peer" in message and len(fds) == 1:
            self._attempt(self._on_peer, str(message["peer"]), Link.adopt(fds.pop()))
        elif "lost" in message:
            self._aside(self._on_lost, str(message["lost"]))
        elif "stop" in message:
            self._aside(self._on_stop)
        else:
            self._answered(message)
        for fd in fds:
            os.close(fd)

    def _aside(self, call: Callable[..., None], *arguments: str) -> None:
        threading.Thread(target=self._attempt, args=(call, *arguments), name="custody-aside", daemon=True).start()

    def _attempt(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._log("unexpected", level="error", error=f"{type(error).__name__}: {error}")

    def _answered(self, message: Message) -> None:
        number: Any = message.get("done", message.get("failed"))
        with self._lock:
            pending = self._pending.get(number)
        if pending is not None:
            pending.answer = message
            pending.answered.set()
