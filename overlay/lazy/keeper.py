"""The keeper: answers every read of a guarded pack, at once if its frames are ready, else when they are, or in vain.

One thread, no files, no fetching: it reads events of the group, looks into frame maps, and asks the worker. Its hot
path is an event whose frames are ready. What can't be answered otherwise is denied, which readers see as EIO; nothing
is allowed without a look at the frame map.

**An event's number** is its name, so it has to mean one event only. The kernel takes the lowest descriptor that is
free, and here it stays open until the event is answered. What the keeper itself holds lies above
(:mod:`overlay.lazy.descriptors`). A successor takes the numbers that its predecessor left unanswered with /dev/null.

**What a killed keeper leaves**: events in the journal, with which its successor goes on; events that it had read and
not written down, which the successor denies by trying all numbers that there can be: the kernel repeats a read-ahead
that was denied, in a smaller range, as a new event; and events that it had not read, which are just read.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import stat
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from layerstore.cache.framemap import FrameMap
from layerstore.errors import ConflictError, ImgtoolError, MalformedError, printable
from overlay.lazy import fanotify
from overlay.lazy.descriptors import LowNumbers
from overlay.lazy.fanotify import Event
from overlay.lazy.journal import Journal
from overlay.lazy.link import Link, Message
from overlay.lazy.outlet import Outlet
from overlay.lazy.quietlog import Log, QuietLog
from overlay.lazy.readers import GuardedPack, Readers
from overlay.lazy.spinning import SpinningPoll

_RELEASED = 4096
"""Inodes remembered after their release, for events that were in the queue then."""
_SPARE = 64
"""Low numbers that something else in the process, such as the log, may come to take."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a keeper hands to whoever goes on: what it was given and told to guard, under new numbers.

    Attributes:
        group: with events outstanding, those that were read are in the journal.
        packs: data and frame map by the pack's hex.
    """

    group: int
    journal: int
    packs: dict[str, tuple[int, int]]


def run(
    group: int,
    journal: int,
    holder: Link,
    packs: Mapping[str, tuple[int, int]],
    *,
    deadline: float,
    log: Log,
) -> Kept:
    """Answer the events of ``group`` until the link to the holder ends.

    For a process of its own, with one thread. What a predecessor left is dealt with before anything is read. SIGTERM,
    SIGINT and SIGHUP are ignored meanwhile, the garbage collector knows nothing that was there before, and the soft
    limit on open files is the journal's capacity.

    Args:
        group: of :func:`overlay.lazy.fanotify.init`. All descriptors given are taken over and get new numbers.
        journal: of the group, a descriptor of a :class:`Journal`.
        holder: speaks, and is answered, as :mod:`overlay.lazy` says. It is closed at the end.
        packs: data and frame map of those that are guarded already.
        deadline: seconds that a reader waits at most, from when its event is read.
        log: whatever it raises is ignored. It must not wait for a reader of a guarded pack.

    Raises:
        MalformedError, UnsupportedError: ``journal`` isn't one, or is of another release; readers go on waiting.
    """
    opened = Journal(os.dup(journal))
    capacity = opened.capacity
    opened.close()
    gc.collect()  # what is about to close descriptors does it now
    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.getsignal(number) or signal.SIG_DFL)
            signal.signal(number, signal.SIG_IGN)
        numbers = stack.enter_context(LowNumbers(capacity))
        group = numbers.lift_if_possible(group)
        opened = Journal(numbers.lift_if_possible(journal))
        link = Link.adopt(numbers.copy(holder.fileno()))
        holder.close()
        gc.freeze()
        stack.callback(gc.unfreeze)
        keeper = _Keeper(group, opened, link, numbers, deadline, QuietLog(log))
        try:
            lift = numbers.lift_if_possible
            keeper.inherit({hex: (lift(data), lift(frames)) for hex, (data, frames) in packs.items()})
            keeper.serve()
        finally:
            kept = keeper.close()
        return kept


class _Keeper:
    """One run: the loop, the packs, the holder. What a message or an event may raise, the loop logs."""

    def __init__(
        self, group: int, journal: Journal, holder: Link, numbers: LowNumbers, deadline: float, log: QuietLog
    ) -> None:
        self._group = group
        self._journal = journal
        self._numbers = numbers
        self._log = log
        self._readers = Readers(group, journal, deadline, log)
        low = select.epoll()
        self._epoll = select.epoll.fromfd(numbers.copy(low.fileno()))
        low.close()
        self._epoll.register(group, select.EPOLLIN)
        self._poll = SpinningPoll(self._epoll)
        self._holder = Outlet(holder, self._epoll)
        self._worker: Outlet | None = None
        self._packs: dict[tuple[int, int], GuardedPack] = {}
        self._by_hex: dict[str, GuardedPack] = {}
        self._released: OrderedDict[tuple[int, int], bool] = OrderedDict()
        self._events = self._allowed = 0
        self._taken = _SPARE
        """Low numbers in use, besides one for each pack (its mmap has a copy of the descriptor) and for each event."""

    def inherit(self, packs: Mapping[str, tuple[int, int]]) -> None:
        """Guard ``packs``, and deal with the events that a predecessor read and didn't answer."""
        records = self._journal.records()
        owned = self._numbers.occupy_all(records)  # before anything else can take them
        for hex, fds in packs.items():
            try:
                self._guard(hex, *fds)
            except (OSError, ImgtoolError) as error:
                self._log("not guarded", level="error", pack=hex, why=str(error))
        self._deny_unknown(records)
        if records:
            self._log("took over", events=len(records))
        self._readers.adopt(records, owned, self._by_hex)
        self._taken += self._numbers.count() - len(self._packs) - len(self._readers)

    def _deny_unknown(self, known: Collection[int] | Readers) -> None:
        """Deny what may be outstanding and isn't known: nobody would ever answer it."""
        for number in range(self._journal.high):
            if number not in known and fanotify.respond(self._group, number, False):
                self._readers.denied += 1
                self._log("denied", why="was read and not written down", number=number)

    def close(self) -> Kept:
        """Close all but what is handed on."""
        self._readers.close()
        packs = {}
        for hex, pack in self._by_hex.items():
            packs[hex] = (pack.data_fd, self._numbers.copy(pack.frames.fd))
            pack.frames.close()
        journal = self._numbers.copy(self._journal.fd)
        self._journal.close()
        if self._worker is not None:
            self._worker.close()
        self._holder.close()
        self._epoll.close()
        return Kept(self._group, journal, packs)

    # --- the loop

    def serve(self) -> None:
        """Until the holder is gone."""
        while True:
            try:
                if not self._turn():
                    return
            except Exception as error:
                self._log("unexpected", level="error", error=f"{type(error).__name__}: {error}")
                time.sleep(0.01)  # leave the processor to others, should it come back at once

    def _turn(self) -> bool:
        """Wait for something to do, and do it; False when the holder is gone."""
        for fd, mask in self._poll(self._readers.patience()):
            if fd == self._group:
                self._read_events()
            elif fd == self._holder.fd:
                if mask & select.EPOLLOUT:
                    self._holder.flush()
                if mask & ~select.EPOLLOUT and not self._hear_holder():
                    return False
            elif self._worker is not None and fd == self._worker.fd:
                if mask & select.EPOLLOUT:
                    self._worker.flush()
                if mask & ~select.EPOLLOUT:
                    self._hear_worker()
        if self._readers:
            self._readers.expire()
        return True

    def _read_events(self) -> None:
        # Of the lowest numbers that are free, none of one batch is above the count of those taken, and the batch.
        high = self._taken + len(self._packs) + len(self._readers) + fanotify.BATCH
        if high > self._journal.high:
            self._journal.high = high + high // 8
        try:
            for event in fanotify.read(self._group):
                self._answer(event)
        except BlockingIOError:
            pass
        except MalformedError as error:
            self._log("unreadable events", level="error", error=str(error))
            self._deny_unknown(self._readers)
        except OSError as error:  # the kernel had no descriptor for one event, and has denied it
            self._readers.denied += 1
            self._log("denied", level="error", why=f"reading events: {error.strerror}")

    def _answer(self, event: Event) -> None:
        """Answer an event, or have it wait. Never raises."""
        number, pid, offset, length = event
        if number < 0:
            self._log("events were lost, and their reads allowed", level="error")
            return
        self._events += 1
        try:
            status = os.fstat(number)
            pack = self._packs.get((status.st_dev, status.st_ino))
            if pack is None:
                self._answer_late((status.st_dev, status.st_ino), event)
                return
            covers = pack.frames.covering(offset, length)
            pack.frames.touch(covers)
            if length < 0:
                self._readers.deny(number, "its range is not known", pack=pack.hex, pid=pid)
            elif pack.frames.is_ready(covers):
                fanotify.respond(self._group, number, True)
                os.close(number)
                self._allowed += 1
            else:
                self._readers.add(event, pack, covers)
        except Exception as error:
            self._log("unexpected", level="error", error=f"{type(error).__name__}: {error}")
            try:
                self._readers.deny(number, "unexpected", pid=pid)
            except Exception:
                pass  # it was answered, and its number closed

    def _answer_late(self, inode: tuple[int, int], event: Event) -> None:
        """An event of a pack that isn't guarded: it was in the queue when the pack was released."""
        complete = self._released.get(inode)
        if complete:
            self._readers.answer(event.number, True)
            self._allowed += 1
        else:
            why = "no such pack" if complete is None else "was released"
            self._readers.deny(event.number, why, inode=inode[1], pid=event.pid)

    # --- the worker

    def _hear_worker(self) -> None:
        assert self._worker is not None
        try:
            received = self._worker.link.receive()
        except BlockingIOError:
            return
        except MalformedError as error:
            self._log("unreadable message", level="error", sender="worker", error=str(error))
            return
        if received is None:
            self._set_worker(None)
            self._log("worker gone", level="warning", waiting=len(self._readers))
            return
        message, fds = received
        for fd in fds:
            os.close(fd)
        if type(number := message.get("got")) is int:
            self._readers.answered(number, None)
        elif type(number := message.get("failed")) is int:
            self._readers.answered(number, printable(str(message.get("why", "no reason given"))[:500]))
        elif type(number := message.get("stats")) is int:
            self._worker.send({"stats": number, **self._stats()}, droppable=True)
        else:
            self._log("unknown message", level="error", sender="worker", keys=_keys(message))

    def _stats(self) -> dict[str, int]:
        """Events since this keeper began: all, allowed at once, those that had to wait, denied; and waiting now."""
        return {
            "events": self._events,
            "allowed": self._allowed,
            "waited": self._readers.waited,
            "denied": self._readers.denied,
            "pending": len(self._readers),
            "packs": len(self._packs),
        }

    def _set_worker(self, worker: Outlet | None) -> None:
        before, self._worker = self._worker, worker
        if before is not None:
            before.close()
        self._readers.set_worker(worker)

    # --- the holder

    def _hear_holder(self) -> bool:
        """Handle one message; False when the holder is gone."""
        try:
            with self._numbers.exceeded():
                received = self._holder.link.receive()
        except BlockingIOError:
            return True
        except MalformedError as error:
            self._log("unreadable message", level="error", sender="holder", error=str(error))
            return True
        if received is None:
            return False
        message, fds = received
        try:
            self._obey(message, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _obey(self, message: Message, fds: list[int]) -> None:
        """Do what a message says. Descriptors that are taken over leave ``fds``."""
        if isinstance(hex := message.get("guard"), str):
            try:
                if len(fds) != 2:
                    raise MalformedError(f"{len(fds)} descriptors, where data and frame map belong")
                for at in range(2):
                    fds[at] = self._numbers.lift(fds[at])
                self._guard(hex, fds.pop(0), fds.pop(0))
            except (OSError, ImgtoolError) as error:
                self._log("not guarded", level="error", pack=printable(hex[:64]), why=str(error))
                self._holder.send({"unguarded": hex, "why": str(error)})
            else:
                self._holder.send({"guarded": hex})
        elif isinstance(hex := message.get("release"), str):
            if (pack := self._by_hex.get(hex)) is not None:
                self._retire(pack)
            self._holder.send({"released": hex})
        elif message.get("peer") == "worker" and len(fds) == 1:
            fds[0] = self._numbers.lift(fds[0])
            self._set_worker(Outlet(Link.adopt(fds.pop()), self._epoll))
            self._log("worker found", waiting=len(self._readers))
        else:
            self._log("unknown message", level="error", sender="holder", keys=_keys(message))

    def _guard(self, hex: str, data_fd: int, frames_fd: int) -> None:
        """Answer for a pack from now on. Both descriptors are taken over, and closed if that fails.

        Raises:
            MalformedError: not the data and the frame map of this pack.
            ConflictError: the data file is guarded as another pack's.
            OSError: it can't be marked.
        """
        with ExitStack() as undo:
            undo.callback(os.close, data_fd)
            try:
                frames = FrameMap(frames_fd)
            except BaseException:
                os.close(frames_fd)
                raise
            undo.callback(frames.close)
            status = os.fstat(data_fd)
            if frames.hex != hex:
                raise MalformedError(f"the frame map is that of pack {frames.hex}")
            if not stat.S_ISREG(status.st_mode):
                raise MalformedError("the data are in no regular file")
            inode = (status.st_dev, status.st_ino)
            known = self._packs.get(inode)
            if known is not None and known.hex != hex:
                raise ConflictError(f"the data file is guarded as that of pack {known.hex}")
            fanotify.mark(self._group, data_fd)
            undo.pop_all()
        self._released.pop(inode, None)
        if known is not None:
            known.close()
            known.data_fd, known.frames = data_fd, frames
            return
        before = self._by_hex.get(hex)
        if before is not None:  # it was thrown away and made anew; who still reads the old file must not get zeros
            self._retire(before, unmark=before.complete)
        self._packs[inode] = self._by_hex[hex] = GuardedPack(hex, data_fd, frames, inode)

    def _retire(self, pack: GuardedPack, *, unmark: bool = True) -> None:
        """Forget a pack: what waits is answered, and what is in the queue still will be."""
        self._readers.release(pack)
        if unmark:
            try:
                fanotify.unmark(self._group, pack.data_fd)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    self._log("mark not removed", level="error", pack=pack.hex, why=str(error))
        self._released[pack.inode] = pack.complete
        if len(self._released) > _RELEASED:
            self._released.popitem(last=False)
        del self._packs[pack.inode]
        del self._by_hex[pack.hex]
        pack.close()


def _keys(message: Message) -> str:
    return printable(" ".join(message)[:100])
