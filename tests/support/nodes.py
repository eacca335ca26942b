"""A real node service in processes of its own, killed as one likes; nothing of it is left at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from layerstore.errors import ImgtoolError
from overlay import mountinfo
from overlay.lazy.choice import fanotify_works
from overlay.mountapi import MNT_DETACH, umount
from overlay.service.client import Client
from overlay.service.place import run_directory
from support.tools import need_root

TOP = Path(__file__).parents[2]
PATIENCE = 30.0
"""Seconds for anything that takes a moment: a test that waits so long has failed."""


def eventually(condition: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
    """Wait until it holds; the test fails when it doesn't in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds} seconds: {what}"
        time.sleep(0.01)


class NodeService:
    """``imgtool node run`` for ``root``. A context manager: it starts it, and stops or kills it."""

    def __init__(self, root: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
        need_root()
        self.environment = {**os.environ, **(environment or {})}
        self.root = root
        self.run_directory = run_directory(root)
        self.log = Path(root) / "service.log"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._pids: set[int] = set()
        self._has_keeper = fanotify_works(root) is None

    def start(self) -> Client:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "imgtool", "node", "run", "--root", self.root, "--log-format", "text"]
        Path(self.root).mkdir(parents=True, exist_ok=True)
        if self._process is not None:
            self._process.wait(PATIENCE)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._options],
                cwd=TOP,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        process = self._process
        eventually(lambda: process.poll() is not None or self._answers(), "the service answers")
        assert process.poll() is None, self.log.read_text()
        return self.client()

    def client(self) -> Client:
        return Client(self.root)

    def pids(self) -> dict[str, int]:
        """Of all processes, as the service knows them; waits while one is missing.

        To kill the last one that holds the fanotify group is another matter: see :meth:`kill_all`.
        """
        found: dict[str, int] = {}

        def asked() -> bool:
            with contextlib.suppress(ImgtoolError), self.client() as client:
                found.clear()
                found.update({role: int(pid) for role, pid in client.status().raw["pids"].items()})
            return found.keys() >= {"holder", "worker"} and ("keeper" in found or not self._has_keeper)

        eventually(asked, "somebody answers")
        self._pids.update(found.values())
        return found

    def kill(self, *roles: str) -> list[str]:
        """Kill some of its processes, as nearly at the same moment as it goes; those that there were."""
        pids = self.pids()
        found = [role for role in roles if role in pids]
        for role in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[role], signal.SIGKILL)
        self._reap()
        return found

    def kill_all(self) -> None:
        """All at the same moment, so that nobody holds anything any more."""
        pids = set(self.pids().values())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(_alive(pid) for pid in pids), "all processes end")
        self._reap()

    def processes(self) -> list[int]:
        """Everything that runs for this root: whoever has its run directory's lock open."""
        lock = f"{self.run_directory}/lock"
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_open(pid, lock)]

    def mounts(self) -> list[bytes]:
        """What is mounted for it, packs included."""
        listed = mountinfo.read()
        return [
            mount.target
            for place in (os.path.realpath(self.root), self.run_directory)
            for mount in mountinfo.below(place, listed)
        ]

    def stop(self, *, force: bool = False) -> None:
        with self.client() as client:
            client.stop(force=force)
        self.wait()

    def wait(self) -> None:
        eventually(lambda: self._reap() or not self.processes(), "its processes end")
        if self._process is not None:
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.status()
            return True
        except ImgtoolError:
            return False

    def _reap(self) -> bool:
        if self._process is not None:
            self._process.poll()
        return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in [*self.processes(), *(pid for pid in self._pids if _is_ours(pid))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for target in sorted(self.mounts(), reverse=True):
            umount(target, MNT_DETACH)


@contextlib.contextmanager
def node_service(root: str, *options: str) -> Iterator[tuple[NodeService, Client]]:
    with NodeService(root, *options) as service, service.client() as client:
        yield service, client


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_ours(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
            return stream.read().startswith("imgtool")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _has_open(pid: int, path: str) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") == path for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False
