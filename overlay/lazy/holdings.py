"""What outlives the processes of a node: descriptors, and how they go from one holder to the next."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field

from layerstore.errors import ConflictError, UnavailableError
from overlay.lazy.link import Link
from overlay.lazy.rendezvous import FUSE, HOLDER, KEEPER, SOON, WORKER, connect

LOCK = "lock"
"""The lock of the run directory: whoever has it open is of the node."""


@dataclass
class Holdings:
    """Descriptors that outlive the process that made them.

    Attributes:
        lock: the lock of the run directory; whoever has a copy keeps it.
        listening: the API's socket.
        group: the fanotify group; None where lazy loading doesn't go by fanotify.
        journal: its unanswered events.
        packs: data and frame map of each guarded pack, by hex.
        fronts: who guards each pack: keeper, fuse.
        predecessor: the holder that has handed these over, and waits to hear that it may go.
    """

    lock: int
    listening: int
    group: int | None = None
    journal: int | None = None
    packs: dict[str, tuple[int, int]] = field(default_factory=dict)
    fronts: dict[str, set[str]] = field(default_factory=dict)
    predecessor: Link | None = None

    def of(self, front: str) -> dict[str, tuple[int, int]]:
        return {hex: fds for hex, fds in self.packs.items() if front in self.fronts[hex]}

    def put(self, hex: str, front: str, fds: tuple[int, int]) -> bool:
        """Keep ``fds`` in place of those that there were; whether those were of other files.

        A pack may have been thrown away and made anew, and a new worker may have made a new frame map.
        """
        known = self.packs.get(hex)
        others = known is not None and not all(map(os.path.sameopenfile, known, fds))
        for fd in known or ():
            os.close(fd)
        self.packs[hex] = fds
        self.fronts.setdefault(hex, set()).add(front)
        return others

    def drop(self, hex: str, front: str) -> bool:
        """Whether nobody guards the pack any more, and it has been closed."""
        fronts = self.fronts.get(hex, set())
        fronts.discard(front)
        if fronts or hex not in self.packs:
            return False
        del self.fronts[hex]
        for fd in self.packs.pop(hex):
            os.close(fd)
        return True

    def hand_over(self, link: Link, patience: float) -> bool:
        """Give all of it to another process; whether that holds it now, and listens."""
        own = [fd for fd in (self.lock, self.listening, self.group, self.journal) if fd is not None]
        link.settimeout(patience)
        link.send({"own": len(own), "packs": len(self.packs)}, own)
        for hex, fds in self.packs.items():
            link.send({"pack": hex, "fronts": sorted(self.fronts[hex])}, fds)
        return link.receive() is not None

    def narrow(self, role: str) -> None:
        """In a child: close what its role has no use for, so that it neither counts as open nor keeps its space."""
        kept = self.packs if role == WORKER else self.of(KEEPER) if role == KEEPER else {}
        for hex in self.packs.keys() - kept.keys():
            for fd in self.packs.pop(hex):
                os.close(fd)
            del self.fronts[hex]
        if role == FUSE:
            for other in (self.group, self.journal):
                if other is not None:
                    os.close(other)
            self.group = self.journal = None


def take_over(run_directory: str) -> Holdings:
    """What a holder that runs without being watched holds. It goes when a new one, of these holdings, listens.

    Raises:
        ConflictError: a node service runs and doesn't hand over.
    """
    link = connect(run_directory, HOLDER)
    if link is None:
        raise ConflictError(f"a node service holds {run_directory}, and nobody answers there; try again")
    link.settimeout(SOON)
    with ExitStack() as stack:
        stack.enter_context(link)
        try:
            head = link.receive()
            if head is None:
                raise UnavailableError("the running node service doesn't hand over")
            (lock, listening, *events) = head[1]
            group, journal = events if events else (None, None)
            holdings = Holdings(lock, listening, group, journal, predecessor=link)
            for _ in range(int(head[0]["packs"])):
                received = link.receive()
                if received is None:
                    raise UnavailableError("the running node service ended while it handed over")
                message, (data, frames) = received
                for front in message["fronts"]:
                    holdings.packs[message["pack"]] = (data, frames)
                    holdings.fronts.setdefault(message["pack"], set()).add(front)
        except (OSError, ValueError, KeyError) as error:
            raise UnavailableError(f"the running node service doesn't hand over: {error}") from error
        stack.pop_all()
    return holdings


def close_others(keep: set[int | None]) -> None:
    """Close all descriptors but the standard ones and ``keep``: events and links of the process we were forked from."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass
