"""The holder: keeps open what must not close, and restarts what ends. It decides nothing and reads no data.

It is the process that ``node run`` starts. Keeper, worker and FUSE server are forked from it, so they are born with
all that it holds; what is added later reaches it and the others as messages. Each of them connects to ``holder.sock``
of the run directory, and again when a holder has died: whoever finds that nobody listens there any more starts a new
one from what it holds itself, the keeper first, the worker if the keeper is gone, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layerstore.errors import ConflictError, ImgtoolError, UnavailableError
from overlay.lazy.link import Link, Message

Log = Callable[..., None]

HOLDER, KEEPER, WORKER, FUSE = "holder", "keeper", "worker", "fuse"
LOCK = "lock"
_SOCKET = "holder.sock"
_ALONE = "holder.lock"
_RESTARTS = "restarts.json"
_BACKOFF = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Seconds before a process that keeps ending is started again."""
_UNFIT = 3
"""Exit code of a process that an error of ours kept from its work: it would do so again."""
_STEADY = 30.0
"""Seconds after which a process counts as running well."""
_SOON = 2.0
"""Seconds in which processes that are alive have to say hello to a new holder."""
SUCCESSION = 10.0
"""Seconds in which there is a successor of a holder, whoever starts it."""
_MOMENT = 0.3
"""Seconds that a keeper waits for a holder before it starts one. Nobody answers readers meanwhile."""


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
    """

    lock: int
    listening: int
    group: int | None = None
    journal: int | None = None
    packs: dict[str, tuple[int, int]] = field(default_factory=dict)
    fronts: dict[str, set[str]] = field(default_factory=dict)

    def of(self, front: str) -> dict[str, tuple[int, int]]:
        return {hex: fds for hex, fds in self.packs.items() if front in self.fronts[hex]}

    def put(self, hex: str, front: str, fds: tuple[int, int]) -> None:
        """Keep ``fds``, in place of those of a pack of that name that has been thrown away and made anew."""
        known = self.packs.get(hex)
        if known is not None and os.path.sameopenfile(known[0], fds[0]):
            known, fds = fds, known
        for fd in known or ():
            os.close(fd)
        self.packs[hex] = fds
        self.fronts.setdefault(hex, set()).add(front)

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


class Roles(Protocol):
    """What the forked processes do. Each returns when its time is over."""

    def begin(self, role: str) -> None:
        """Called first in every process: its name, and its log."""
        ...

    def descriptors(self) -> Sequence[int]:
        """Of the log: they stay open when everything else is closed."""
        ...

    def keeper(self, holdings: Holdings, link: Link) -> None:
        """Answer events until the holder ends; then ``holdings`` has what is guarded, and the process nothing else."""
        ...

    def worker(self, holdings: Holdings) -> None: ...
    def fuse(self, directory: str, link: Link) -> None: ...


class Keeping(Protocol):
    """A further holder outside, as systemd's file descriptor store."""

    def store(self, name: str, fds: Sequence[int]) -> object: ...
    def remove(self, name: str) -> object: ...
    def tell(self, **fields: str) -> object: ...


@dataclass
class _Member:
    """A process of the node, and the link to it once it has said hello."""

    role: str
    pid: int
    pidfd: int
    started: float
    link: Link | None = None
    serves: bool = False


def connect(run_directory: str, role: str, *, patience: float = _SOON) -> Link | None:
    """Say hello to the holder; None if nobody listens in ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"{run_directory}/{_SOCKET}")
            link = Link(connection)
            link.send({"hello": role, "pid": os.getpid()})
            return link
        except (ConnectionError, FileNotFoundError, BlockingIOError):
            connection.close()
        if time.monotonic() >= until:
            return None
        time.sleep(0.02)


@dataclass
class _Request:
    """What the worker asked a front end for, and hasn't been answered: by which numbers, and in which words."""

    numbers: list[int]
    message: Message


class Holder:
    """One run of the holder: first, or successor of one that died."""

    def __init__(
        self, run_directory: str, holdings: Holdings, roles: Roles, log: Log, keeping: Keeping | None = None
    ) -> None:
        """Become the holder.

        Raises:
            ConflictError: there is one. Several who find it dead may start a successor; with two of them there would
                be two keepers, and an event's number would mean two events.
        """
        self._directory = run_directory
        self._holdings = holdings
        self._roles = roles
        self._log = log
        self._keeping = keeping
        self._selector = selectors.DefaultSelector()
        self._members: dict[str, _Member] = {}
        self._restarts = self._read_restarts()
        self._failures: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._worked = bool(holdings.packs)
        """Whether there has been a worker: somebody may be waiting for the next one."""
        self._requests: dict[tuple[str, str], _Request] = {}
        self._fuse_directory = ""
        self._ending = False
        self._stop_asked = False
        self._alone = _only_holder(f"{run_directory}/{_ALONE}")
        self._control = self._listen()
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self, *, found: bool = False) -> None:
        """Until the worker says that the mounts are gone. ``found``: the others may be alive, let them come first.

        Raises:
            UnavailableError: no worker could be started; the log says why.
        """
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._selector.register(self._control, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._signals)
        if found:
            self._count_restart(HOLDER)
        grace = _SOON if found else 0.0
        now = time.monotonic()
        self._due = {WORKER: now + grace}
        if self._holdings.group is not None:
            self._due[KEEPER] = now + grace
        self._keep_all()
        try:
            while not self._ending:
                for key, _ in self._selector.select(self._patience()):
                    key.data()
                self._start_due()
        finally:
            self._end()
        if not self._worked:
            raise UnavailableError("the node service can't be started: its log says why")

    # --- processes

    def _patience(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _start_due(self) -> None:
        now = time.monotonic()
        for role in [role for role, at in self._due.items() if at <= now]:
            del self._due[role]
            if role not in self._members and not self._ending:
                self._start(role)

    def _start(self, role: str) -> None:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._become(role)
        self._add(_Member(role, pid, os.pidfd_open(pid), started))
        self._log("started", role=role, pid=pid)

    def _become(self, role: str) -> None:
        """The child: let go of what is the holder's alone, and play the role. Doesn't return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (
                signal.SIGTERM,
                signal.SIGINT,
            ):  # a terminal's Ctrl-C is for the holder, which asks the worker
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._let_go()
            self._roles.begin(role)
            play(role, self._directory, self._holdings, self._roles, self._log, self._fuse_directory)
            code = 0
        except BaseException as error:
            self._log("ended by an error", level="error", role=role, error=f"{type(error).__name__}: {error}")
            if isinstance(error, ImgtoolError):
                code = _UNFIT
        finally:
            os._exit(code)

    def _let_go(self) -> None:
        self._selector.close()
        self._control.close()
        os.close(self._alone)
        os.close(self._wake)
        os.close(self._wake_write)
        for member in self._members.values():
            os.close(member.pidfd)
            if member.link is not None:
                member.link.close()

    def _add(self, member: _Member) -> None:
        self._members[member.role] = member
        self._selector.register(member.pidfd, selectors.EVENT_READ, lambda: self._gone(member))

    def _gone(self, member: _Member) -> None:
        """A process has ended: forget it, and start it again unless everything ends."""
        self._selector.unregister(member.pidfd)
        os.close(member.pidfd)
        if member.link is not None:
            self._selector.unregister(member.link)
            member.link.close()
        if self._members.get(member.role) is not member:
            return
        del self._members[member.role]
        status = 0
        try:
            _, status = os.waitpid(member.pid, os.WNOHANG)
        except ChildProcessError:
            pass  # a former holder's child
        if self._ending:
            return
        if member.role == WORKER and os.waitstatus_to_exitcode(status) == _UNFIT and not self._worked:
            self._log("a worker can't be started, and nobody waits for one", level="error")
            self._ending = True
            return
        now = time.monotonic()
        failures = 0 if now - member.started > _STEADY else self._failures.get(member.role, 0) + 1
        self._failures[member.role] = failures
        pause = _BACKOFF[min(failures, len(_BACKOFF) - 1)] if failures > 1 else 0.0
        self._log("ended", level="warning", role=member.role, pid=member.pid, again_in=pause)
        if member.role == FUSE:
            self._lose_fuse()
            return
        self._count_restart(member.role)
        self._due[member.role] = now + pause
        self._start_due()

    def _lose_fuse(self) -> None:
        """Its mounts can't be served again: the worker has a new one started, elsewhere, when it needs it."""
        self._count_restart(FUSE)
        self._fuse_directory = ""
        for hex in self._holdings.of(FUSE):
            self._drop(hex, FUSE)
        for key in [key for key in self._requests if key[1] == FUSE]:
            self._answer(key, "the FUSE server ended")
        worker = self._members.get(WORKER)
        if worker is not None:
            self._send(worker, {"lost": FUSE})

    def _read_restarts(self) -> dict[str, int]:
        """How often each process has been started again, by all holders together."""
        none = {HOLDER: 0, KEEPER: 0, WORKER: 0, FUSE: 0}
        try:
            with open(f"{self._directory}/{_RESTARTS}", encoding="ascii") as stream:
                found = json.load(stream)
            return {role: int(found[role]) for role in none}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return none

    def _count_restart(self, role: str) -> None:
        self._restarts[role] += 1
        try:
            with open(f"{self._directory}/{_RESTARTS}", "w", encoding="ascii") as stream:
                json.dump(self._restarts, stream)
        except OSError as error:
            self._log("restarts not counted", level="warning", error=str(error))

    # --- messages

    def _listen(self) -> socket.socket:
        path = f"{self._directory}/{_SOCKET}"
        new = f"{path}.{os.getpid()}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listening.bind(new)
            os.chmod(new, 0o600)
            listening.listen(16)
            os.rename(new, path)  # from now on everybody comes here
        except BaseException:
            listening.close()
            raise
        return listening

    def _accept(self) -> None:
        connection, _ = self._control.accept()
        link = Link(connection)
        link.settimeout(_SOON)
        try:
            received = link.receive()
        except (ImgtoolError, OSError):
            received = None
        if received is None:
            link.close()
            return
        link.settimeout(None)
        message, fds = received
        for fd in fds:
            os.close(fd)
        role, pid = message.get("hello"), message.get("pid")
        if role == HOLDER:
            self._hand_over(link)
        elif role in (KEEPER, WORKER, FUSE) and isinstance(pid, int):
            self._welcome(role, pid, link)
        else:
            link.close()

    def _welcome(self, role: str, pid: int, link: Link) -> None:
        member = self._members.get(role)
        if member is not None and member.pid != pid:
            self._log("refused", level="warning", role=role, pid=pid, why=f"{member.pid} is it")
            link.close()
            return
        if member is None:
            try:
                member = _Member(role, pid, os.pidfd_open(pid), time.monotonic())
            except ProcessLookupError:
                link.close()
                return
            self._add(member)
            self._due.pop(role, None)
        if member.link is not None:
            self._selector.unregister(member.link)
            member.link.close()
        member.link = link
        self._worked = self._worked or role == WORKER
        self._selector.register(link, selectors.EVENT_READ, lambda: self._receive(member))
        if role == WORKER:
            for front in (KEEPER, FUSE):
                self._introduce(front)
        else:
            for (hex, front), request in self._requests.items():  # it was born with the others
                if front == role and hex:
                    self._send(member, request.message, self._holdings.packs[hex] if "guard" in request.message else ())
            self._introduce(role)

    def _introduce(self, front: str) -> None:
        """A new link between a front end and the worker, once both are there."""
        one, other = self._members.get(front), self._members.get(WORKER)
        if one is None or other is None or one.link is None or other.link is None:
            return
        first, second = Link.pair()
        with first, second:
            self._send(one, {"peer": WORKER}, (first.fileno(),))
            self._send(other, {"peer": front}, (second.fileno(),))

    def _send(self, member: _Member, message: Message, fds: tuple[int, ...] = ()) -> None:
        if member.link is None:
            return
        try:
            member.link.send(message, fds)
        except OSError:
            pass  # it is ending; its pidfd says so next

    def _receive(self, member: _Member) -> None:
        assert member.link is not None
        try:
            received = member.link.receive()
        except (ImgtoolError, OSError) as error:
            self._log("unreadable message", level="error", role=member.role, error=str(error))
            return
        if received is None:
            self._selector.unregister(member.link)
            member.link.close()
            member.link = None
            return
        message, fds = received
        kept = False
        try:
            if member.role == WORKER:
                kept = self._from_worker(member, message, fds)
            else:
                self._from_front(member, message)
        except (KeyError, TypeError, ValueError) as error:
            self._log("wrong message", level="error", role=member.role, error=f"{type(error).__name__}: {error}")
        finally:
            if not kept:
                for fd in fds:
                    os.close(fd)

    def _from_worker(self, worker: _Member, message: Message, fds: list[int]) -> bool:
        """Whether ``fds`` are kept."""
        if "hold" in message:
            number, hex, front = int(message["hold"]), str(message["pack"]), str(message["with"])
            data, frames = fds
            self._holdings.put(hex, front, (data, frames))
            if self._keeping is not None:
                self._keeping.store(hex, list(self._holdings.packs[hex]))
            self._ask(number, hex, front, {"guard": hex}, self._holdings.packs[hex])
            return True
        if "drop" in message:
            self._ask(int(message["drop"]), str(message["pack"]), str(message["with"]), {"release": message["pack"]})
        elif "start" in message:
            if FUSE not in self._members:
                self._fuse_directory = str(message["directory"])
                self._start(FUSE)
            self._requests.setdefault(("", FUSE), _Request([], message)).numbers.append(int(message["start"]))
            if self._members[FUSE].serves:
                self._answer(("", FUSE), None)
        elif "status" in message:
            pids = {role: member.pid for role, member in self._members.items()}
            self._send(
                worker,
                {"done": message["status"], "pids": {HOLDER: os.getpid(), **pids}, "restarts": self._restarts},
            )
        elif "stopped" in message:
            self._ending = True
        return False

    def _ask(self, number: int, hex: str, front: str, message: Message, fds: tuple[int, ...] = ()) -> None:
        request = self._requests.setdefault((hex, front), _Request([], message))
        request.numbers.append(number)
        request.message = message
        member = self._members.get(front)
        if member is not None:
            self._send(member, message, fds)
        elif front == FUSE:
            self._drop(hex, front)
            self._answer((hex, front), None if "release" in message else "no FUSE server runs")

    def _from_front(self, front: _Member, message: Message) -> None:
        if "mounted" in message:
            front.serves = True
            self._fuse_directory = str(message.get("directory", self._fuse_directory))
            self._answer(("", FUSE), None)
            return
        why: str | None = None
        if "guarded" in message:
            hex = str(message["guarded"])
        elif "released" in message:
            hex = str(message["released"])
            self._drop(hex, front.role)
        else:
            hex = str(message["unguarded"])
            why = str(message.get("why", "refused"))
            self._drop(hex, front.role)
        self._answer((hex, front.role), why)

    def _answer(self, key: tuple[str, str], why: str | None) -> None:
        request = self._requests.pop(key, None)
        worker = self._members.get(WORKER)
        if request is None or worker is None:
            return  # a successor of the worker asks again
        for number in request.numbers:
            self._send(worker, {"done": number} if why is None else {"failed": number, "why": why})

    def _drop(self, hex: str, front: str) -> None:
        if self._holdings.drop(hex, front) and self._keeping is not None:
            self._keeping.remove(hex)

    # --- the end, and successors

    def _signals(self) -> None:
        numbers = os.read(self._wake, 4096)
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            worker = self._members.get(WORKER)
            self._log("asked to stop", again=self._stop_asked)
            if self._keeping is not None:
                self._keeping.tell(STOPPING="1")
            if worker is not None:
                self._send(worker, {"stop": True})
            self._stop_asked = True

    def _keep_all(self) -> None:
        if self._keeping is None:
            return
        held = self._holdings
        if held.group is not None and held.journal is not None:
            self._keeping.store("group", [held.group, held.journal])
        for hex, fds in held.packs.items():
            self._keeping.store(hex, list(fds))

    def _hand_over(self, link: Link) -> None:
        """Another process, which systemd watches, wants to be the holder: give it everything and go."""
        held = self._holdings
        own = [fd for fd in (held.lock, held.listening, held.group, held.journal) if fd is not None]
        try:
            link.send({"own": len(own), "packs": len(held.packs)}, own)
            for hex, fds in held.packs.items():
                link.send({"pack": hex, "fronts": sorted(held.fronts[hex])}, fds)
            link.settimeout(_SOON)
            if link.receive() is None:
                return
        except (OSError, ImgtoolError) as error:
            self._log("handing over failed", level="error", error=str(error))
            return
        finally:
            link.close()
        self._log("handed over")
        os._exit(0)

    def _end(self) -> None:
        """The mounts are gone: nobody has to answer anybody any more."""
        self._log("ending")
        for role in (FUSE, KEEPER, WORKER):
            member = self._members.get(role)
            if member is None:
                continue
            if role == WORKER:
                _wait_for(member.pidfd, 10.0)
            if role == FUSE:
                self._send(member, {"end": True})
                _wait_for(member.pidfd, 5.0)
            try:
                signal.pidfd_send_signal(member.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            _wait_for(member.pidfd, 5.0)
        if self._keeping is not None:
            for name in ["group", *self._holdings.packs]:
                self._keeping.remove(name)
        for name in (_SOCKET, _ALONE, _RESTARTS, "node.sock", LOCK):  # the lock last: then another one may begin
            try:
                os.unlink(f"{self._directory}/{name}")
            except FileNotFoundError:
                pass
        for name in ("packs", ""):
            try:
                os.rmdir(f"{self._directory}/{name}")
            except OSError:
                pass  # not there, or not only ours: that of the default root has those of the others in it


def _only_holder(path: str) -> int:
    """Take the lock that holders have one after the other; a predecessor that is ending gets a moment.

    It is a lock of the process (POSIX), which children and heirs of its descriptors don't share.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _SOON / 2
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                os.close(fd)
                raise ConflictError("another process is the holder already") from None
            time.sleep(0.02)


def _wait_for(pidfd: int, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        selector.select(seconds)


def play(role: str, run_directory: str, holdings: Holdings, roles: Roles, log: Log, directory: str = "") -> None:
    """Be keeper, worker or FUSE server, until that is over."""
    if role == WORKER:
        roles.worker(holdings)
        return
    while True:
        link = connect(run_directory, role, patience=_MOMENT)
        if link is None:
            if role == FUSE:
                return
            log("the holder is gone", level="warning", by=role)
            succeed(run_directory, holdings, roles, log)
            continue
        with link:
            if role == FUSE:
                roles.fuse(directory, link)
                return
            roles.keeper(holdings, link)


def succeed(run_directory: str, holdings: Holdings, roles: Roles, log: Log) -> None:
    """Fork a new holder from what this process holds. Only from a process with a single thread."""
    if os.fork():
        return
    code = 1
    try:
        os.setsid()
        roles.begin(HOLDER)
        keep = {holdings.lock, holdings.listening, holdings.group, holdings.journal, *roles.descriptors()}
        keep.update(fd for fds in holdings.packs.values() for fd in fds)
        close_others(keep)
        Holder(run_directory, holdings, roles, log).run(found=True)
        code = 0
    except ConflictError:
        code = 0  # somebody was faster
    except BaseException as error:
        log("ended by an error", level="error", role=HOLDER, error=f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)


def close_others(keep: set[int | None]) -> None:
    """Close all descriptors but the standard ones and ``keep``: events and links of the process we were forked from."""
    for fd in _open_descriptors():
        if fd > 2 and fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass


def _open_descriptors() -> Iterator[int]:
    yield from [int(name) for name in os.listdir("/proc/self/fd")]


def take_over(run_directory: str) -> Holdings:
    """Become the holder in place of one that runs without being watched.

    Raises:
        ConflictError: a node service runs and doesn't hand over.
    """
    link = connect(run_directory, HOLDER)
    if link is None:
        raise ConflictError(f"a node service holds {run_directory}, and nobody answers there; try again")
    link.settimeout(_SOON)
    with link:
        try:
            head = link.receive()
            if head is None:
                raise UnavailableError("the running node service doesn't hand over")
            (lock, listening, *events) = head[1]
            group, journal = events if events else (None, None)
            holdings = Holdings(lock, listening, group, journal)
            for _ in range(int(head[0]["packs"])):
                received = link.receive()
                if received is None:
                    raise UnavailableError("the running node service ended while it handed over")
                message, (data, frames) = received
                for front in message["fronts"]:
                    holdings.packs[message["pack"]] = (data, frames)
                    holdings.fronts.setdefault(message["pack"], set()).add(front)
            link.send({"taken": True})
        except (OSError, ValueError, KeyError) as error:
            raise UnavailableError(f"the running node service doesn't hand over: {error}") from error
    return holdings
