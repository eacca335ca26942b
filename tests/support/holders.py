"""A holder in a process of its own, whose children do next to nothing, and tell what they do.

The test is the worker: it connects as one, or has a Custody. All descendants are its children's children, so that
none is lost sight of.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from layerstore.cache.framemap import MISSING, FrameMap
from overlay.lazy import holder as holder_module
from overlay.lazy.holder import Holder
from overlay.lazy.holdings import Holdings, take_over
from overlay.lazy.link import Link, Message
from overlay.lazy.rendezvous import FUSE, HOLDER, KEEPER, WORKER, connect
from support.keepers import until

PR_SET_CHILD_SUBREAPER = 36
"""<linux/prctl.h>"""
ROLES = (HOLDER, KEEPER, WORKER, FUSE)


def be_called(role: str) -> None:
    """By ps, and :meth:`Holders.processes`."""
    Path("/proc/self/comm").write_text(f"stub-{role}")


def descendants(pid: int) -> Iterator[tuple[int, int]]:
    """Processes below this one, each with its parent."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in children:
            yield child, pid
            yield from descendants(child)


class Notes:
    """What processes say, one line each, in a file; and what they are told, by files that exist or not."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / "notes"
        self.fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self.fd)

    def add(self, *words: object) -> None:
        os.write(self.fd, (" ".join(map(str, words)) + "\n").encode())

    def lines(self, beginning: str = "") -> list[str]:
        return [line for line in self._path.read_text().splitlines() if line.startswith(beginning)]

    def let(self, what: str, *, so: bool = True) -> None:
        path = self._directory / what
        if so:
            path.touch()
        else:
            path.unlink(missing_ok=True)

    def has(self, what: str) -> bool:
        return (self._directory / what).exists()

    def wait_while(self, what: str) -> None:
        while self.has(what):
            time.sleep(0.005)


class Parts:
    """The roles. A keeper guards by noting it; ``keeper waits`` and ``keeper refuses`` are what it can be told."""

    def __init__(self, notes: Notes, run_directory: str) -> None:
        self._notes = notes
        self._run_directory = run_directory

    def begin(self, role: str) -> None:
        be_called(role)
        if role == HOLDER and self._notes.has("successors are slow"):
            time.sleep(1.0)

    def descriptors(self) -> tuple[int, ...]:
        return (self._notes.fd,)

    def keeper(self, holdings: Holdings, link: Link) -> None:
        self._notes.add("keeper", os.getpid(), *sorted(holdings.of(KEEPER)))
        packs = self._guard(KEEPER, link, holdings.of(KEEPER))
        holdings.packs, holdings.fronts = packs, {hex: {KEEPER} for hex in packs}

    def fuse(self, directory: str, link: Link) -> None:
        self._notes.wait_while("fuse waits")
        if self._notes.has("fuse fails"):
            return
        os.makedirs(directory)
        link.send({"mounted": True, "directory": directory})
        self._guard(FUSE, link, {})
        os.rmdir(directory)

    def worker(self, holdings: Holdings) -> None:
        self._notes.add("worker", os.getpid(), *sorted(holdings.packs))
        if self._notes.has("workers fail"):
            return
        while self._notes.has("workers say hello"):
            link = connect(self._run_directory, WORKER, patience=20.0)
            assert link is not None
            with link:
                while link.receive() is not None:
                    pass
        signal.pause()

    def _guard(self, role: str, link: Link, packs: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        while (received := link.receive()) is not None:
            message, fds = received
            self._notes.wait_while(f"{role} waits")
            if "guard" in message and self._notes.has(f"{role} refuses"):
                link.send({"unguarded": message["guard"], "why": "told so"})
            elif "guard" in message:
                for fd in packs.get(message["guard"], ()):
                    os.close(fd)
                packs[message["guard"]] = fds[0], fds[1]
                fds = []
                self._notes.add("guarded", role, message["guard"])
                link.send({"guarded": message["guard"]})
            elif "release" in message:
                for fd in packs.pop(message["release"], ()):
                    os.close(fd)
                self._notes.add("released", role, message["release"])
                link.send({"released": message["release"]})
            elif "end" in message:
                return packs
            for fd in fds:
                os.close(fd)
        return packs


class Store:
    """In place of systemd: notes what it is given."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def store(self, name: str, fds: Sequence[int]) -> None:
        self._notes.add("store", name, *(os.fstat(fd).st_ino for fd in fds))

    def remove(self, name: str) -> None:
        self._notes.add("remove", name)

    def tell(self, **fields: str) -> None:
        self._notes.add("tell", *(f"{name}={value}" for name, value in fields.items()))


class Pack:
    """A pack to be guarded: a file and a frame map."""

    def __init__(self, directory: Path, number: int) -> None:
        raw = number.to_bytes(32, "big")
        self.hex = raw.hex()
        path = directory / f"pack-{number}-{time.monotonic_ns()}"
        path.write_bytes(bytes(4096))
        self.data = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.frames = FrameMap.create(raw, 4096, [0], bytes([MISSING]))

    @property
    def fds(self) -> tuple[int, int]:
        return self.data, self.frames.fd

    def close(self) -> None:
        os.close(self.data)
        self.frames.close()


class Holders:
    """The run directory of a node, its holder, and the others. ``with`` ends all of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "run"
        self.directory.mkdir()
        self.notes = Notes(directory)
        self.parts = Parts(self.notes, str(self.directory))
        self.packs: list[Pack] = []
        self._path = directory
        assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        self.holdings = Holdings(lock, *(os.memfd_create(name) for name in ("listening", "group", "journal")))

    def log(self, event: str, /, **fields: object) -> None:
        self.notes.add("log", event, *(f"{name}={value}" for name, value in fields.items()))

    def start(
        self,
        before: Callable[[], object] = lambda: None,
        *,
        found: bool = False,
        taking_over: bool = False,
        stored: bool = False,
        patient: bool = False,
    ) -> int:
        """Fork a holder; ``before`` is called in it first. Its pid, once it listens."""

        def run() -> None:
            if not patient:
                holder_module._BACKOFF = (0.0,)  # type: ignore[assignment]
            be_called(HOLDER)
            before()
            holdings = take_over(str(self.directory)) if taking_over else self.holdings
            store = Store(self.notes) if stored else None
            holder = Holder(str(self.directory), holdings, self.parts, self.log, store)
            self.notes.add("holder", os.getpid())
            holder.run(found=found or taking_over)

        pid = self.fork(run)
        until(lambda: f"holder {pid}" in self.notes.lines("holder"), "it listens")
        return pid

    def fork(self, run: Callable[[], object]) -> int:
        """A child of the test's, in a session of its own."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            run()
            code = 0
        except BaseException as error:
            self.notes.add("error", f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)

    def pack(self, number: int = 1) -> Pack:
        self.packs.append(Pack(self._path, number))
        return self.packs[-1]

    def connect(self) -> Talk:
        """Be the worker."""
        link = connect(str(self.directory), WORKER)
        assert link is not None
        return Talk(link)

    def as_worker(self, work: Callable[[Talk], object]) -> None:
        """Be a worker in a process that ends, so that the holder starts one of its own."""

        def run() -> None:
            with self.connect() as talk:
                work(talk)

        _, status = os.waitpid(self.fork(run), 0)
        assert status == 0, self.notes.lines("error")

    def settle(self) -> None:
        """Until keeper and worker have said hello."""
        keeper = self.pid(KEEPER)
        until(lambda: any(line.split()[1] == str(keeper) for line in self.notes.lines("keeper")), "it works")

    # --- processes

    def processes(self) -> dict[str, list[int]]:
        """Those that run, by role; with "zombies" the children of others that nobody reaps."""
        found: dict[str, list[int]] = {role: [] for role in (*ROLES, "zombies")}
        for pid, parent in descendants(os.getpid()):
            try:
                text = Path(f"/proc/{pid}/stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            name = text[text.index("(") + 1 : text.rindex(")")]
            if text.rpartition(")")[2].split()[0] == "Z":
                if parent != os.getpid():
                    found["zombies"].append(pid)
            elif name.startswith("stub-"):
                found[name[5:]].append(pid)
        return found

    def pid(self, role: str) -> int:
        """The one that runs, once there is one alone."""
        until(lambda: len(self.processes()[role]) == 1, f"one {role} runs")
        return self.processes()[role][0]

    def descriptors(self, pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def kill(self, *roles: str) -> None:
        """All of them at once; returns when they are gone."""
        pids = [self.pid(role) for role in roles]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not set(pids) & {pid for each in self.processes().values() for pid in each}, "they have ended")
        self.reap()

    def reap(self) -> None:
        """Those whose parents have ended are ours."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def limit_descriptors(self, pid: int, most: int) -> None:
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, hard))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()
        self.notes.close()
        for pack in self.packs:
            pack.close()
        for fd in (self.holdings.lock, self.holdings.listening, self.holdings.group, self.holdings.journal):
            assert fd is not None
            os.close(fd)
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def end_all(self) -> None:
        """End whatever runs. It may be called once more."""
        for name in ("keeper waits", "fuse waits", "keeper refuses", "fuse refuses", "successors are slow"):
            self.notes.let(name, so=False)

        def ended() -> bool:
            found = self.processes()
            pids = [pid for role in ROLES for pid in found[role]]
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            self.reap()
            return not pids

        until(ended, "everything has ended")
        self.reap()


class Talk:
    """The worker's end of its link to the holder."""

    def __init__(self, link: Link) -> None:
        self.link = link
        link.settimeout(20)

    def send(self, message: Message, pack: Pack | None = None) -> None:
        self.link.send(message, () if pack is None else pack.fds)

    def hear(self, *kinds: str) -> dict[str, Any]:
        """The next message that has one of these keys; new links are closed."""
        while (received := self.link.receive()) is not None:
            message, fds = received
            for fd in fds:
                os.close(fd)
            if set(message) & set(kinds or ("done", "failed")):
                return message
        raise AssertionError("the holder has ended")

    def ask(self, message: Message, pack: Pack | None = None) -> dict[str, Any]:
        self.send(message, pack)
        return self.hear()

    def hold(self, number: int, pack: Pack, front: str = KEEPER) -> dict[str, Any]:
        return self.ask({"hold": number, "pack": pack.hex, "with": front}, pack)

    def drop(self, number: int, pack: Pack, front: str = KEEPER) -> dict[str, Any]:
        return self.ask({"drop": number, "pack": pack.hex, "with": front})

    def is_silent(self) -> bool:
        """Nothing but new links comes for a moment; what else does is an error of the test."""
        self.link.settimeout(0.3)
        try:
            return self.hear("done", "failed", "lost", "stop") is None
        except TimeoutError:
            return True
        finally:
            self.link.settimeout(20)

    def close(self) -> None:
        self.link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
