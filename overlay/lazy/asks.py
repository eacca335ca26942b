"""What the worker asks of front ends: one thing at a time for each pack and front end, answered in this order.

A front end that is started anew is asked again what it hasn't answered. A worker that ends isn't answered: its
successor asks anew, with numbers of its own.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from overlay.lazy.link import Message

Key = tuple[str, str]
"""Pack, by hex, and front end."""


@dataclass(eq=False)
class Ask:
    """To guard a pack, or to release it.

    Attributes:
        number: by which the worker wants to be answered; None when nobody does any more.
        message: for the front end.
        fds: data and frame map to guard it by, until they are among the holdings.
        again: it was guarded before.
    """

    number: int | None
    message: Message
    fds: tuple[int, ...] = ()
    again: bool = False

    @property
    def guards(self) -> bool:
        return "guard" in self.message

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = ()


class Asks:
    """Those that aren't answered. The first of each key is under way, or waits for its front end."""

    def __init__(self) -> None:
        self._queues: dict[Key, deque[Ask]] = {}

    def put(self, key: Key, ask: Ask) -> bool:
        """Whether it is the first."""
        queue = self._queues.setdefault(key, deque())
        queue.append(ask)
        return len(queue) == 1

    def first(self, key: Key) -> Ask | None:
        queue = self._queues.get(key)
        return queue[0] if queue else None

    def pop(self, key: Key) -> Ask:
        """Take the first away: it is answered."""
        queue = self._queues[key]
        ask = queue.popleft()
        if not queue:
            del self._queues[key]
        return ask

    def of(self, front: str) -> list[Key]:
        return [key for key in self._queues if key[1] == front]

    def disown(self) -> None:
        """The worker has ended, or asks everything again. What is under way stays so, for nobody."""
        for queue in self._queues.values():
            queue[0].number = None
            while len(queue) > 1:
                queue.pop().close()

    def close(self) -> None:
        for ask in self:
            ask.close()

    def __iter__(self) -> Iterator[Ask]:
        return (ask for queue in self._queues.values() for ask in queue)
