"""A keeper in a process of its own, with a holder's and a worker's side that tests are in charge of."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from overlay.lazy import fanotify, keeper
from overlay.lazy.journal import CAPACITY, Journal
from overlay.lazy.link import Link, Message
from support.lazy_images import SparsePack

PATIENCE = 20.0
"""Seconds after which something that should have happened never will."""


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.005)


def open_descriptors() -> set[int]:
    """Of this process."""
    with os.scandir("/proc/self/fd") as entries:
        listed = {int(entry.name): os.readlink(entry.path) for entry in entries}
    return {fd for fd, target in listed.items() if target != f"/proc/{os.getpid()}/fd"}


class Keeper:
    """Group and journal, and the keeper's process, which can be killed and started again.

    ``with`` ends it, and whoever still reads gets whatever there is.
    """

    def __init__(self, directory: Path, *, deadline: float = 10.0, capacity: int = CAPACITY) -> None:
        self.group = fanotify.init()
        self.journal = Journal.create(capacity)
        self.deadline = deadline
        self.pid = 0
        self._log = directory / "keeper.log"
        self._log.touch()

    def start(self, packs: Iterable[SparsePack] = ()) -> Self:
        """Fork a keeper that inherits ``packs``. It has a second holder to turn to when the first one ends."""
        given = {pack.hex: pack.descriptors for pack in packs}
        first, second = Link.pair(), Link.pair()
        gc.collect()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._be_keeper((first[1], second[1]), given)
                code = 0
            finally:
                os._exit(code)
        for pair in (first, second):
            pair[0].settimeout(PATIENCE)
            pair[1].close()
        self.holder, self._next_holder = first[0], second[0]
        return self

    def _be_keeper(self, holders: Sequence[Link], packs: dict[str, tuple[int, int]]) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 2)
        mine = {0, 1, 2, self.group, self.journal.fd, *(fd for pair in packs.values() for fd in pair)}
        for fd in open_descriptors() - mine - {holder.fileno() for holder in holders}:
            os.close(fd)

        def line(event: str, **fields: object) -> None:
            os.write(2, json.dumps({"event": event, **fields}).encode() + b"\n")

        group, journal = self.group, self.journal.fd
        for holder in holders:
            kept = keeper.run(group, journal, holder, packs, deadline=self.deadline, log=line)
            group, journal, packs = kept.group, kept.journal, kept.packs
            line("ended", packs=sorted(packs), open=sorted(open_descriptors()))

    def end_holder(self) -> None:
        """From now on the second one is the holder."""
        self.holder.close()
        self.holder = self._next_holder

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines of all keepers so far, or those with this event."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]

    def tell(self, message: Message, fds: Sequence[int] = ()) -> Message:
        """Send a message of the holder, and return the answer."""
        self.holder.send(message, fds)
        received = self.holder.receive()
        assert received is not None
        assert received[1] == []
        return received[0]

    def guard(self, pack: SparsePack) -> None:
        assert self.tell({"guard": pack.hex}, pack.descriptors) == {"guarded": pack.hex}

    def release(self, pack: SparsePack) -> None:
        assert self.tell({"release": pack.hex}) == {"released": pack.hex}

    def connect(self) -> Link:
        """The worker's end of a new link."""
        ours, its = Link.pair()
        with its:
            self.holder.send({"peer": "worker"}, [its.fileno()])
        ours.settimeout(PATIENCE)
        return ours

    def stats(self, link: Link) -> Message:
        """Ask over a link that nobody else reads. Wants that come with the answer are lost."""
        link.send({"stats": 1})
        while (received := link.receive()) is not None:
            if received[0].pop("stats", None) == 1:
                return received[0]
        raise AssertionError("no answer")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
            self.holder.close()
            self._next_holder.close()

    def wait(self) -> int:
        """Its exit status, once both holders are gone."""
        self.holder.close()
        self._next_holder.close()
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.journal.close()
        os.close(self.group)


class Worker:
    """Answers wants in a thread. By default it fills the frames."""

    def __init__(
        self, link: Link, packs: Iterable[SparsePack], answer: Callable[[Message], Message | None] | None = None
    ) -> None:
        """``answer`` makes the answer to a want, or None for none at all; it may wait."""
        self._link = link
        self._packs = {pack.hex: pack for pack in packs}
        self._answer = answer or self.fill
        self._closed = False
        self.wants: list[Message] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        link.settimeout(None)
        self._thread.start()

    def fill(self, want: Message) -> Message:
        """Write what is wanted, say that it is there."""
        self._packs[want["pack"]].fill(range(want["first"], want["first"] + want["count"]))
        return {"got": want["want"]}

    def _serve(self) -> None:
        while (received := self._link.receive()) is not None:
            message, fds = received
            assert fds == []
            self.wants.append(message)
            answer = self._answer(message)
            if answer is not None:
                try:
                    self._link.send(answer)
                except (BrokenPipeError, ConnectionResetError):
                    return

    def close(self) -> None:
        """End as a worker that is killed does. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        with socket.socket(fileno=os.dup(self._link.fileno())) as connection:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                assert error.errno == errno.ENOTCONN
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_READ = """
import mmap, os, sys
path, offset, length, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
fd = os.open(path, os.O_RDONLY)
if how == "mmap":
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        os.write(1, b"r")
        data = memory[offset : offset + length]
else:
    os.write(1, b"r")
    try:
        data = b""
        while len(data) < length and (part := os.pread(fd, length - len(data), offset + len(data))):
            data += part
    except OSError as error:
        sys.exit(error.errno)
with os.fdopen(1, "wb") as out:
    out.write(data)
"""


class Reader:
    """A process that reads a range of a file. Each has its own, since one that waits can be ended by SIGKILL alone."""

    def __init__(self, path: Path, offset: int = 0, length: int | None = None, *, how: str = "read") -> None:
        length = path.stat().st_size - offset if length is None else length
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _READ, str(path), str(offset), str(length), how],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            bufsize=0,
        )
        self.pid = self._process.pid
        self._is_reading = False

    def reading(self) -> Self:
        """Return when it is about to read."""
        assert self._process.stdout is not None
        if not self._is_reading:
            assert self._process.stdout.read(1) == b"r"
            self._is_reading = True
        return self

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def outcome(self, patience: float = PATIENCE) -> bytes | int:
        """What it read, or the errno of what went wrong; -SIGBUS, -SIGKILL, if that ended it."""
        self.reading()
        try:
            data, _ = self._process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError("the reader is stuck") from None
        return self._process.returncode or data

    def kill(self) -> None:
        """SIGKILL; returns when it is gone. Whoever has its outcome needs none."""
        self._process.kill()
        self._process.wait(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
