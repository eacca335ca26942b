"""A FUSE server in a process of its own, with the test as its holder, and a worker whose answers the test decides."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerstore.errors import UnsupportedError
from overlay import mountinfo
from overlay.lazy import fuse
from overlay.lazy.link import Link, Message
from overlay.mountapi import MNT_DETACH, umount
from support.lazy_images import SparsePack
from support.tools import CHECKOUT, lacking, need_root

PATIENCE = 20.0
"""Seconds within which anything that has to happen happens."""

_PROGRAM = """
import sys
from overlay.lazy import fuse
from overlay.lazy.link import Link
def log(*what, **fields): print(*what, fields, file=sys.stderr, flush=True)
fuse.run(sys.argv[1], Link.adopt(int(sys.argv[2])), deadline=float(sys.argv[3]), log=log)
"""

Decide = Callable[[Message], str]


def need_fuse() -> None:
    """End the test unless this machine can serve FUSE."""
    need_root()
    if not Path("/dev/fuse").exists():
        lacking("this kernel has no FUSE (/dev/fuse)")
    try:
        fuse.find_library()
    except UnsupportedError as error:
        lacking(f"{error} (scripts/setup test)")


def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition, with a bound."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Worker:
    """The worker's end of a link. For each want, ``decide`` says what becomes of it.

    ``fill``: bring the frames and say so; ``fail``; ``hold``: answer with :meth:`let_go`; ``lie``: say so and bring
    nothing; anything else: never answer.
    """

    def __init__(self, link: Link, packs: Iterable[SparsePack], decide: Decide = lambda want: "fill") -> None:
        self.link = link
        self.decide = decide
        self.wants: list[Message] = []
        self.held: list[Message] = []
        self.other: list[Message] = []
        self._packs = {pack.hex: pack for pack in packs}
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while received := self.link.receive():
            message, fds = received
            assert not fds
            if "want" not in message:
                self.other.append(message)
                continue
            decision = self.decide(message)
            if decision == "hold":
                self.held.append(message)
            self.wants.append(message)
            if decision == "fill":
                self.fill(message)
            elif decision == "fail":
                self._say({"failed": message["want"], "why": "the test says so"})
            elif decision == "lie":
                self._say({"got": message["want"]})

    def fill(self, want: Message) -> None:
        self._packs[want["pack"]].fill(range(want["first"], want["first"] + want["count"]))
        self._say({"got": want["want"]})

    def _say(self, message: Message) -> None:
        try:
            self.link.send(message)
        except OSError:  # this worker is dying
            pass

    def let_go(self) -> None:
        while self.held:
            self.fill(self.held.pop(0))

    def close(self) -> None:
        """End the link as a process that dies does."""
        self.link._socket.shutdown(2)
        self._thread.join(PATIENCE)
        self.link.close()


class Server:
    """The process, and the holder's end of its link."""

    def __init__(self, directory: Path, *, deadline: float = PATIENCE) -> None:
        self.directory = directory
        self.holder, other = Link.pair()
        self.holder.settimeout(PATIENCE)
        self.workers: list[Worker] = []
        self.errors = directory.with_name(directory.name + ".log")
        with other, self.errors.open("ab") as errors:
            arguments = [sys.executable, "-c", _PROGRAM, str(directory), str(other.fileno()), str(deadline)]
            self.process = subprocess.Popen(arguments, pass_fds=[other.fileno()], cwd=CHECKOUT, stderr=errors)

    def started(self) -> Server:
        assert self.hear()["mounted"] is True, self.said()
        return self

    def said(self) -> str:
        """What it has logged and printed."""
        return self.errors.read_text()

    def hear(self) -> Message | None:
        received = self.holder.receive()
        return received[0] if received else None

    def ask(self, message: Message, fds: Iterable[int] = ()) -> Message | None:
        self.holder.send(message, list(fds))
        return self.hear()

    def guard(self, pack: SparsePack) -> Path:
        assert self.ask({"guard": pack.hex}, pack.descriptors) == {"guarded": pack.hex}, self.said()
        return self.directory / pack.hex

    def worker(self, packs: Iterable[SparsePack], decide: Decide = lambda want: "fill") -> Worker:
        """A new worker, in place of any before."""
        mine, its = Link.pair()
        with its:
            self.holder.send({"peer": "worker"}, [its.fileno()])
        worker = Worker(mine, packs, decide)
        self.workers.append(worker)
        return worker

    def stats(self) -> Message:
        """Its counters, asked for through the newest worker."""
        worker = self.workers[-1]
        seen = len(worker.other)
        worker.link.send({"stats": seen})
        until(lambda: len(worker.other) > seen)
        return worker.other[-1]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Have it end in order; its exit status."""
        self.holder.send({"end": True})
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        """End the process if it lives, however, and take its mount away."""
        if self.process.poll() is None:
            self.kill()
            for mount in mountinfo.below(str(self.directory), mountinfo.read()):
                umount(mount.target, MNT_DETACH)
        self.holder.close()
        for worker in self.workers:
            if worker.link.fileno() >= 0:
                worker.close()


@contextmanager
def fuse_server(directory: Path, *, deadline: float = PATIENCE) -> Iterator[Server]:
    """A server that has mounted ``directory``. If it lives in the end, it is told to end, and must do that well."""
    need_fuse()
    server = Server(directory, deadline=deadline)
    try:
        yield server.started()
        if server.process.poll() is None:
            assert server.end() == 0, server.said()
    finally:
        server.close()
