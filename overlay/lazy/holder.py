"""The holder: keeps open what must not close, and restarts what ends. It decides nothing and reads no data.

It is the process that ``node run`` starts. Keeper, worker and FUSE server are forked from it, so they are born with
all that it holds; what is added later reaches it and the others as messages. Each of them connects to ``holder.sock``
of the run directory, and again when a holder has died: whoever finds that nobody listens there any more starts a new
one from what it holds itself, the keeper first, the worker if the keeper is gone, too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from layerstore.errors import ConflictError, ImgtoolError, UnavailableError
from overlay.lazy.asks import Ask, Asks, Key
from overlay.lazy.holdings import LOCK, Holdings, close_others
from overlay.lazy.link import Link, Message
from overlay.lazy.member import Member
from overlay.lazy.rendezvous import FUSE, HOLDER, KEEPER, LOCK_OF, SOCKET, SOON, WORKER, Entrance, alone, connect

Log = Callable[..., None]

_RESTARTS = "restarts.json"
_BACKOFF = (0.0, 0.1, 0.5, 2.0, 5.0)
"""Seconds before a process that keeps ending is started again, by how often it has."""
_AGAIN = 0.5
"""Seconds until a process is started that could not be started."""
_UNFIT = 3
"""Exit code of a process that an error of ours kept from its work: it would do so again."""
_STEADY = 3.0
"""Seconds after which a process hasn't ended because of how it began."""
SUCCESSION = 10.0
"""Seconds in which there is a successor of a holder, whoever starts it."""
_MOMENT = 0.3
"""Seconds that a keeper waits for a holder before it starts one. Nobody answers readers meanwhile."""


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


class Holder:
    """One run of the holder: first, or successor of one that died.

    It waits for nobody, and nothing that goes wrong ends it: what it holds would be closed, and readers get zeros.
    """

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
        self._members: dict[str, Member] = {}
        self._strangers: set[Link] = set()
        self._failures: dict[str, int] = {}
        self._restarts = self._read_restarts()
        self._due: dict[str, float] = {}
        """When a process is started; when that FUSE server is given up that may be alive."""
        self._worked = bool(holdings.packs)
        """Whether there has been a worker: somebody may be waiting for the next one."""
        self._asks = Asks()
        self._waiting_for_fuse: list[int] = []
        self._fuse_directory = ""
        """Of the server that serves."""
        self._ending = False
        self._stop_asked = False
        self._alone, self._entrance = self._begin()
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def _begin(self) -> tuple[int, Entrance]:
        """The lock of holders, and the socket."""
        predecessor = self._holdings.predecessor
        if predecessor is None:
            return alone(self._directory, HOLDER, patience=SOON / 2), Entrance(self._directory)
        self._holdings.predecessor = None
        entrance = Entrance(self._directory)  # before it goes: at no time does anybody find that nobody listens
        try:
            with predecessor:
                predecessor.send({"taken": True})
            return alone(self._directory, HOLDER, patience=SOON), entrance
        except OSError as error:
            raise ConflictError("the running holder has waited no longer") from error

    def run(self, *, found: bool = False) -> None:
        """Until the worker says that the mounts are gone. ``found``: the others may be alive, let them come first.

        Raises:
            UnavailableError: no worker could be started; the log says why.
        """
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        self._register_entrance()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda mask: self._signals())
        self._start_later(SOON if found else 0.0)
        if found:
            self._worked = True
            self._count_restart(HOLDER)
            self._due[FUSE] = time.monotonic() + SOON
        self._attempt(self._keep_all)
        while not self._ending:
            for key, mask in self._selector.select(self._patience()):
                self._attempt(key.data, mask)
            self._attempt(self._start_due)
        self._end()
        if not self._worked:
            raise UnavailableError("the node service can't be started: its log says why")

    def _attempt(self, call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except Exception as error:
            self._log("unexpected", level="error", error=f"{type(error).__name__}: {error}")
            time.sleep(0.1)  # should it come back at once
            self._start_later(_AGAIN)

    # --- processes

    def _start_later(self, seconds: float) -> None:
        """Those that have to run, and neither do nor are about to."""
        for role in (WORKER, KEEPER) if self._holdings.group is not None else (WORKER,):
            if role not in self._members:
                self._due.setdefault(role, time.monotonic() + seconds)

    def _patience(self) -> float | None:
        if not self._due:
            return None
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _start_due(self) -> None:
        now = time.monotonic()
        for role in [role for role, at in self._due.items() if at <= now]:
            del self._due[role]
            if role in self._members:
                continue
            if role != FUSE:
                self._start(role)
            elif self._asks.of(FUSE) or self._waiting_for_fuse or _has_mount_points(f"{self._directory}/packs"):
                self._lose_fuse("the FUSE server ended")

    def _start(self, role: str, directory: str = "") -> None:
        """Start a process; ``directory`` is where a FUSE server is to serve."""
        if not self._entrance.is_found():  # whoever wanted to take over has died of it
            self._listen_again()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            self._not_started(role, error)
            return
        if pid == 0:
            self._become(role, directory)
        try:
            self._add(role, pid)
        except OSError as error:  # no descriptors: one that can't be watched is worse than none
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._not_started(role, error)
            return
        self._log("started", role=role, pid=pid)

    def _not_started(self, role: str, error: OSError) -> None:
        self._log("not started", level="error", role=role, error=str(error))
        if role == FUSE:
            self._lose_fuse(f"a FUSE server can't be started: {error.strerror}")
        else:
            self._start_later(_AGAIN)

    def _become(self, role: str, directory: str) -> None:
        """The child: let go of what is the holder's alone, and play the role. Doesn't return."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # they are for the holder, also Ctrl-C: it asks the worker
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._let_go()
            self._holdings.narrow(role)
            self._roles.begin(role)
            play(role, self._directory, self._holdings, self._roles, self._log, directory)
            code = 0
        except BaseException as error:
            self._log("ended by an error", level="error", role=role, error=f"{type(error).__name__}: {error}")
            if isinstance(error, ImgtoolError):
                code = _UNFIT
        finally:
            os._exit(code)

    def _let_go(self) -> None:
        self._selector.close()
        self._entrance.close()
        for link in self._strangers:
            link.close()
        for fd in (self._alone, self._wake, self._wake_write):
            os.close(fd)
        for member in self._members.values():
            member.let_go()
        self._asks.close()

    def _add(self, role: str, pid: int) -> Member:
        member = self._members[role] = Member(role, pid, self._selector, self._gone, self._receive)
        return member

    def _gone(self, member: Member) -> None:
        """A process has ended: forget it, and start it again unless everything ends."""
        code = member.close()
        role = member.role
        if self._members.get(role) is not member:
            return  # another one was there before it
        del self._members[role]
        if role == FUSE:
            self._log("ended", level="warning", role=role, pid=member.pid)
            self._lose_fuse("the FUSE server ended")
            return
        if role == WORKER:
            self._asks.disown()
            self._waiting_for_fuse.clear()
            if code == _UNFIT and not self._worked:
                self._log("a worker can't be started, and nobody waits for one", level="error")
                self._ending = True
                return
        failures = 1 if time.monotonic() - member.started > _STEADY else self._failures.get(role, 0) + 1
        self._failures[role] = failures
        pause = _BACKOFF[min(failures, len(_BACKOFF)) - 1]
        self._log("ended", level="warning", role=role, pid=member.pid, again_in=pause)
        self._count_restart(role)
        self._start_later(pause)
        self._start_due()

    def _lose_fuse(self, why: str) -> None:
        """Its mounts can't be served again: the worker has a new one started, elsewhere, when it needs it."""
        self._count_restart(FUSE)
        self._fuse_directory = ""
        for key in self._asks.of(FUSE):
            while (ask := self._asks.first(key)) is not None:
                self._settle(key, why if ask.guards else None, go_on=False)
        for hex in self._holdings.of(FUSE):
            self._drop(hex, FUSE)
        self._answer_fuse(why)
        self._tell_worker({"lost": FUSE})

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

    def _register_entrance(self) -> None:
        self._selector.register(self._entrance, selectors.EVENT_READ, lambda mask: self._accept())

    def _listen_again(self) -> None:
        entrance = Entrance(self._directory)
        self._selector.unregister(self._entrance)
        self._entrance.close()
        self._entrance = entrance
        self._register_entrance()

    def _accept(self) -> None:
        link = self._entrance.accept()
        if link is not None:
            self._strangers.add(link)
            self._selector.register(link, selectors.EVENT_READ, lambda mask: self._greet(link))

    def _greet(self, link: Link) -> None:
        """Hear who it is that has connected."""
        self._selector.unregister(link)
        self._strangers.discard(link)
        message: Message = {}
        try:
            message, fds = link.receive() or ({}, [])
            for fd in fds:
                os.close(fd)
        except (ImgtoolError, OSError):
            pass
        role, pid = message.get("hello"), message.get("pid")
        if role == HOLDER:
            self._hand_over(link)
        elif role in (KEEPER, WORKER, FUSE) and isinstance(pid, int):
            self._welcome(role, pid, link)
        else:
            link.close()

    def _welcome(self, role: str, pid: int, link: Link) -> None:
        """Whoever says hello is it: one keeper at a time gets that far, and one worker, by locks of theirs."""
        member = before = self._members.get(role)
        if member is None or member.pid != pid:
            if before is not None and role == FUSE:
                self._log("refused", level="warning", role=role, pid=pid, why=f"{before.pid} is it")
                with link:
                    link.send({"end": True})
                return
            try:
                member = self._add(role, pid)
            except ProcessLookupError:
                link.close()
                return
            self._log("found", role=role, pid=pid)
            if before is not None:
                before.kill()  # without the lock of its role it would have ended by itself, unless it hangs
            if role == WORKER and self._keeping is not None:  # it has said so to the one before us
                self._keeping.tell(READY="1")
        self._due.pop(role, None)
        member.attach(link)
        if role == WORKER:
            self._worked = True
            self._asks.disown()  # it asks again
            self._waiting_for_fuse.clear()
            if self._stop_asked:
                member.send({"stop": True})
            for front in (KEEPER, FUSE):
                self._introduce(front)
        else:
            for key in self._asks.of(role):
                self._advance(key)
            self._introduce(role)

    def _introduce(self, front: str) -> None:
        """A new link between a front end and the worker, once both are there."""
        one, other = self._members.get(front), self._members.get(WORKER)
        if one is None or other is None or not one.is_attached or not other.is_attached:
            return
        first, second = Link.pair()
        with first, second:
            one.send({"peer": WORKER}, (first.fileno(),))
            other.send({"peer": front}, (second.fileno(),))

    def _tell_worker(self, message: Message) -> None:
        worker = self._members.get(WORKER)
        if worker is not None:
            worker.send(message)  # else its successor asks again

    def _receive(self, member: Member, message: Message, fds: list[int]) -> None:
        try:
            if self._members.get(member.role) is not member:
                return
            if member.role == WORKER:
                self._from_worker(message, fds)
            else:
                self._from_front(member, message, fds)
        except (KeyError, TypeError, ValueError) as error:
            self._log("wrong message", level="error", role=member.role, error=f"{type(error).__name__}: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _from_worker(self, message: Message, fds: list[int]) -> None:
        """Do what the worker wants. Descriptors that are kept leave ``fds``."""
        if "hold" in message:
            number, hex, front = int(message["hold"]), str(message["pack"]), str(message["with"])
            data, frames = fds
            fds.clear()
            self._ask((hex, front), Ask(number, {"guard": hex}, (data, frames)))
        elif "drop" in message:
            number, hex, front = int(message["drop"]), str(message["pack"]), str(message["with"])
            self._ask((hex, front), Ask(number, {"release": hex}))
        elif "start" in message:
            self._waiting_for_fuse.append(int(message["start"]))
            self._due.pop(FUSE, None)
            if FUSE not in self._members:
                self._start(FUSE, str(message["directory"]))
            elif self._fuse_directory:
                self._answer_fuse(None)
        elif "status" in message:
            pids = {HOLDER: os.getpid(), **{role: member.pid for role, member in self._members.items()}}
            self._tell_worker({"done": message["status"], "pids": pids, "restarts": self._restarts})
        elif "stopped" in message:
            self._tell_worker({"done": message["stopped"]})
            self._ending = True

    def _ask(self, key: Key, ask: Ask) -> None:
        if self._asks.put(key, ask):
            self._advance(key)

    def _advance(self, key: Key) -> None:
        """Have the front end do what is asked of it first, as soon as it is there."""
        hex, front = key
        ask = self._asks.first(key)
        if ask is None:
            return
        if ask.fds:
            data, frames = ask.fds
            ask.fds, ask.again = (), hex in self._holdings.of(front)
            others = self._holdings.put(hex, front, (data, frames))
            if self._keeping is not None:
                if others:
                    self._keeping.remove(hex)
                self._keeping.store(hex, [data, frames])
        member = self._members.get(front)
        if member is not None:
            member.send(ask.message, self._holdings.packs[hex] if ask.guards else ())
        elif front == FUSE and FUSE not in self._due:
            self._settle(key, "no FUSE server runs" if ask.guards else None)
            self._tell_worker({"lost": FUSE})

    def _settle(self, key: Key, why: str | None, *, go_on: bool = True) -> None:
        """The front end has done what was asked first, or says ``why`` not; on to what is asked next."""
        ask = self._asks.pop(key)
        ask.close()
        if not ask.guards or (why is not None and not ask.again):
            self._drop(*key)
        if ask.number is not None:
            self._tell_worker({"done": ask.number} if why is None else {"failed": ask.number, "why": why})
        if go_on:
            self._advance(key)

    def _from_front(self, front: Member, message: Message, fds: list[int]) -> None:
        if "mounted" in message:
            self._fuse_directory = str(message["directory"])
            self._answer_fuse(None)
            return
        if "has" in message:  # of a holder before us
            hex = str(message["has"])
            data, frames = fds
            if hex not in self._holdings.of(front.role):  # else it may be an old one
                fds.clear()
                self._holdings.put(hex, front.role, (data, frames))
            return
        kind = next(kind for kind in ("guarded", "unguarded", "released", "") if kind in message or not kind)
        key = str(message[kind]), front.role
        ask = self._asks.first(key)
        if ask is not None and ask.guards == (kind != "released"):
            self._settle(key, str(message.get("why", "refused")) if kind == "unguarded" else None)

    def _answer_fuse(self, why: str | None) -> None:
        """Whoever waits for a FUSE server: it serves, or ``why`` not."""
        for number in self._waiting_for_fuse:
            done: Message = {"done": number, "directory": self._fuse_directory}
            self._tell_worker(done if why is None else {"failed": number, "why": why})
        self._waiting_for_fuse.clear()

    def _drop(self, hex: str, front: str) -> None:
        if self._holdings.drop(hex, front) and self._keeping is not None:
            self._keeping.remove(hex)

    # --- the end, and successors

    def _signals(self) -> None:
        numbers = os.read(self._wake, 4096)
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            self._log("asked to stop", again=self._stop_asked)
            self._stop_asked = True
            if self._keeping is not None:
                self._keeping.tell(STOPPING="1")
            self._tell_worker({"stop": True})  # else when it says hello

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
        try:
            with link:
                if self._holdings.hand_over(link, SOON):
                    self._log("handed over")
                    os._exit(0)
        except (OSError, ImgtoolError) as error:
            self._log("handing over failed", level="error", error=str(error))
        if not self._entrance.is_found():  # it has taken the name before it died
            self._listen_again()

    def _end(self) -> None:
        """The mounts are gone: nobody has to answer anybody any more."""
        self._log("ending")
        for role, patience in ((FUSE, 5.0), (KEEPER, 0.0), (WORKER, 10.0)):
            member = self._members.get(role)
            if member is None:
                continue
            if role == FUSE:
                member.send({"end": True})
            member.wait(patience)
            member.kill()
            member.wait(5.0)
        if self._keeping is not None:
            for name in ["group", *self._holdings.packs]:
                self._keeping.remove(name)
        locks = [LOCK_OF.format(role) for role in (HOLDER, KEEPER)]
        for name in (SOCKET, *locks, _RESTARTS, "node.sock", LOCK):  # this last: then another one may begin
            try:
                os.unlink(f"{self._directory}/{name}")
            except FileNotFoundError:
                pass
        for name in ("packs", ""):
            try:
                os.rmdir(f"{self._directory}/{name}")
            except OSError:
                pass  # not there, or not only ours: that of the default root has those of the others in it


def _has_mount_points(directory: str) -> bool:
    try:
        return bool(os.listdir(directory))
    except FileNotFoundError:
        return False


def _goes_on(run_directory: str, lock: int) -> bool:
    """Whether no holder has ended everything, perhaps one that hadn't heard of us yet."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(f"{run_directory}/{LOCK}"))
    except FileNotFoundError:
        return False


def play(role: str, run_directory: str, holdings: Holdings, roles: Roles, log: Log, directory: str = "") -> None:
    """Be keeper, worker or FUSE server, until that is over.

    Raises:
        ConflictError: there is a keeper, that of a holder before. Two of them would answer each other's events, since
            an event is known by the number that it has in the process which has read it.
    """
    if role == WORKER:
        roles.worker(holdings)
        return
    if role == KEEPER:
        alone(run_directory, KEEPER)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # holders that it starts end when they like
    while _goes_on(run_directory, holdings.lock):
        link = connect(run_directory, role, patience=_MOMENT)
        if link is None:
            if role == FUSE:
                return
            log("the holder is gone", level="warning", by=role)
            try:
                succeed(run_directory, holdings, roles, log)
            except OSError as error:  # no memory, or too many processes: that passes
                log("no holder started", level="error", error=str(error))
            continue
        with link:
            if role == FUSE:
                roles.fuse(directory, link)
                return
            roles.keeper(holdings, link)


def succeed(run_directory: str, holdings: Holdings, roles: Roles, log: Log) -> None:
    """Fork a new holder from what this process holds. Only from a process with a single thread. Raises OSError."""
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
