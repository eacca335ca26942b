"""Links over which a process sends without ever waiting for the other to read."""

from __future__ import annotations

import select
from collections import deque

from overlay.lazy.link import Link, Message

MOST_UNSENT = 1024
"""Messages that may wait for a process that doesn't read, of those that can be dropped."""


class Outlet:
    """A link in an epoll set, level-triggered; EPOLLOUT calls for :meth:`flush`, anything else for reading the link."""

    def __init__(self, link: Link, epoll: select.epoll) -> None:
        self.link = link
        self.fd = link.fileno()
        self._epoll = epoll
        self._unsent: deque[Message] = deque()
        self._blocked = self._gone = False
        link.setblocking(False)
        epoll.register(self.fd, select.EPOLLIN)

    def send(self, message: Message, *, droppable: bool = False) -> None:
        """Send it, now or when there is room. Without a receiver it is dropped: reading will say that he is gone."""
        if self._gone or (droppable and len(self._unsent) >= MOST_UNSENT):
            return
        self._unsent.append(message)
        if not self._blocked:
            self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        blocked = False
        try:
            while self._unsent:
                self.link.send(self._unsent[0])
                self._unsent.popleft()
        except BlockingIOError:
            blocked = True
        except OSError:
            self._gone = True
            self._unsent.clear()
        if blocked != self._blocked:
            self._blocked = blocked
            self._epoll.modify(self.fd, select.EPOLLIN | (select.EPOLLOUT if blocked else 0))

    def close(self) -> None:
        self._epoll.unregister(self.fd)
        self.link.close()
