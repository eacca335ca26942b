"""Members: the processes of a node as their holder sees them."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

from overlay.lazy.link import Link, Message

MOST_UNSENT = 4096
"""Messages that wait for a process which doesn't read. One that takes none of so many is ended: it hangs."""

Received = Callable[["Member", Message, list[int]], None]
"""A message and its descriptors, which are the callee's."""


class Member:
    """One process: when it ends, what it says, and what it is told, for which nobody ever waits.

    Attributes:
        role: keeper, worker or fuse.
        pid: its number.
        started: on CLOCK_MONOTONIC, or when it was met.
    """

    def __init__(
        self,
        role: str,
        pid: int,
        selector: selectors.BaseSelector,
        ended: Callable[[Member], None],
        received: Received,
    ) -> None:
        """Watch a process; whoever runs ``selector`` calls the data of its keys with what is ready.

        Raises:
            OSError: ESRCH, it has ended; EMFILE.
        """
        self.role = role
        self.pid = pid
        self.started = time.monotonic()
        self._pidfd = os.pidfd_open(pid)
        self._selector = selector
        self._received = received
        self._link: Link | None = None
        self._unsent: deque[tuple[Message, tuple[int, ...]]] = deque()
        selector.register(self._pidfd, selectors.EVENT_READ, lambda mask: ended(self))

    @property
    def is_attached(self) -> bool:
        """Whether it has said hello, and is there still as far as is known."""
        return self._link is not None

    def attach(self, link: Link) -> None:
        """Talk over this link from now on: it has said hello, perhaps once more."""
        self._detach()
        link.setblocking(False)
        self._link = link
        self._selector.register(link, selectors.EVENT_READ, lambda mask: self._ready(link, mask))

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Now or when it reads. What is for one that hasn't said hello, or ends, is dropped: it is told anew then."""
        if self._link is None:
            return
        if not self._unsent:
            try:
                self._link.send(message, fds)
                return
            except BlockingIOError:
                self._selector.modify(
                    self._link, selectors.EVENT_READ | selectors.EVENT_WRITE, self._selector.get_key(self._link).data
                )
            except OSError:
                return  # it is ending, which its pidfd says next
        self._unsent.append((message, tuple(map(os.dup, fds))))
        if len(self._unsent) > MOST_UNSENT:
            self.kill()

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, seconds: float) -> None:
        """Until it has ended, if it does in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pidfd, selectors.EVENT_READ)
            selector.select(seconds)

    def close(self) -> int:
        """Watch it no longer, and reap it. Its exit code, or minus its signal; 0 for a child of somebody else."""
        self._detach()
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        try:
            _, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            return 0  # a former holder's child
        return os.waitstatus_to_exitcode(status)

    def let_go(self) -> None:
        """Close the descriptors in a child, which has no selector any more."""
        for fd in [self._pidfd, *(fd for _, fds in self._unsent for fd in fds)]:
            os.close(fd)
        if self._link is not None:
            self._link.close()

    def _detach(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()

    def _ready(self, link: Link, mask: int) -> None:
        if link is not self._link:
            return  # it was replaced since it was found ready
        if mask & selectors.EVENT_WRITE:
            self._flush(link)
        if mask & selectors.EVENT_READ:
            try:
                found = link.receive()
            except BlockingIOError:
                return
            except OSError:
                found = None
            if found is None:
                self._detach()
            else:
                self._received(self, *found)

    def _flush(self, link: Link) -> None:
        try:
            while self._unsent:
                message, fds = self._unsent[0]
                link.send(message, fds)
                self._unsent.popleft()
                for fd in fds:
                    os.close(fd)
        except BlockingIOError:
            return
        except OSError:
            return  # as in send
        self._selector.modify(link, selectors.EVENT_READ, self._selector.get_key(link).data)
