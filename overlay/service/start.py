"""Starting the service: takes the run directory, makes what must outlive every process, and becomes the holder.

The holder (:mod:`overlay.lazy.holder`) is generic; what its processes do is decided here.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from functools import partial

from layerstore.errors import ConflictError, printable
from overlay.lazy.holder import SUCCESSION, Holder
from overlay.lazy.holdings import LOCK, Holdings, take_over
from overlay.lazy.link import Link
from overlay.lazy.rendezvous import FUSE, HOLDER, KEEPER, WORKER, connect
from overlay.privilege import require_root
from overlay.service.log import configure, descriptors, log
from overlay.service.notify import ServiceManager
from overlay.service.options import NodeOptions
from overlay.service.place import SOCKET, listen, make_run_directory, run_directory

_DESCRIPTORS = 1 << 20
"""Two for each guarded pack, one for each waiting reader; and the keeper's own lie above those of readers."""


_OOM_SCORE = {HOLDER: -900, KEEPER: -900, FUSE: -900, WORKER: -500}
"""When memory is short, the worker goes first: it can be replaced with nobody noticing."""
_KEEPER_NICE = -10
"""Readers wait for it, and it never works for long."""


class Roles:
    """What the holder's children do."""

    def __init__(self, root: str, directory: str, options: NodeOptions) -> None:
        self._root, self._directory, self._options = root, directory, options

    def begin(self, role: str) -> None:
        """Log as ``role``, and be called so by ps and top."""
        configure(role, to=self._options.log, format=self._options.log_format, level=self._options.log_level)
        _write("/proc/self/comm", f"imgtool-{role}")
        _write("/proc/self/oom_score_adj", str(_OOM_SCORE[role]))
        try:  # always, since a holder may be forked from a keeper
            os.setpriority(os.PRIO_PROCESS, 0, _KEEPER_NICE if role == KEEPER else 0)
        except OSError:
            pass

    def descriptors(self) -> tuple[int, ...]:
        return descriptors()

    def keeper(self, holdings: Holdings, link: Link) -> None:
        from overlay.lazy import keeper

        assert holdings.group is not None and holdings.journal is not None
        kept = keeper.run(
            holdings.group,
            holdings.journal,
            link,
            holdings.of(KEEPER),
            deadline=self._options.read_deadline,
            log=log,
        )
        holdings.group, holdings.journal, holdings.packs = kept.group, kept.journal, kept.packs
        holdings.fronts = {hex: {KEEPER} for hex in kept.packs}

    def worker(self, holdings: Holdings) -> None:
        from overlay.service import worker

        worker.run(self._root, self._directory, self._options, holdings, self._orphaned)

    def fuse(self, directory: str, link: Link) -> None:
        from overlay.lazy import fuse

        fuse.run(
            directory,
            link,
            deadline=self._options.read_deadline,
            log=log,
            successor=partial(connect, self._directory, FUSE, patience=SUCCESSION),
        )

    def _orphaned(self, holdings: Holdings) -> None:
        """Start a holder. Called in the worker, which has threads and can't just fork."""
        own = [holdings.lock, holdings.listening, holdings.group, holdings.journal]
        document = {
            "root": self._root,
            "options": self._options.to_json(),
            "own": own,
            "packs": [[hex, *pair, sorted(holdings.fronts[hex])] for hex, pair in holdings.packs.items()],
        }
        packs = [fd for pair in holdings.packs.values() for fd in pair]
        with open(os.memfd_create("imgtool-holdings"), "w+", encoding="ascii") as stream:  # too long for an argument
            json.dump(document, stream)
            stream.flush()
            subprocess.Popen(
                [sys.executable, "-m", "overlay.service.start", str(stream.fileno())],
                pass_fds=[fd for fd in [*own, *packs, stream.fileno()] if fd is not None],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )


def run(root: str, options: NodeOptions) -> None:
    """Be the node service of ``root``, until it is stopped.

    Raises:
        PermissionError_: not root.
        ConflictError: it runs already.
    """
    require_root()
    root = os.path.realpath(root)
    os.makedirs(root, 0o700, exist_ok=True)
    directory = make_run_directory(root)
    raise_descriptor_limit()
    roles = Roles(root, directory, options)
    roles.begin(HOLDER)
    manager = ServiceManager(options.notify_socket) if options.notify_socket else None
    holdings, found = _taken(root, directory, options)
    holder = Holder(directory, holdings, roles, log, manager)
    gc.freeze()  # children share these pages as long as nobody writes to them
    log("listening", root=root, socket=f"{directory}/{SOCKET}", fanotify=holdings.group is not None)
    holder.run(found=found)


def _taken(root: str, directory: str, options: NodeOptions) -> tuple[Holdings, bool]:
    """What is to be held, and whether keeper and worker may be alive."""
    lock = _locked(f"{directory}/{LOCK}")
    if lock is None:
        if options.notify_socket is None:
            raise ConflictError(
                f"a node service of {printable(root)} runs already; `imgtool node status` says how it is"
            )
        # The service manager starts us since its main process has died. A successor has kept readers safe meanwhile.
        log("taking over from a holder that nobody watches")
        holdings = take_over(directory)
        _forget(options, {"group", *holdings.packs})
        return holdings, True
    holdings = Holdings(lock, listen(directory).detach())
    stored: dict[str, list[int]] = {}
    for name, fd in options.listen_fds:
        stored.setdefault(name, []).append(fd)
    if len(stored.get("group", ())) == 2:
        holdings.group, holdings.journal = stored.pop("group")
        for hex, fds in stored.items():
            if len(fds) == 2:
                holdings.put(hex, KEEPER, (fds[0], fds[1]))
        log("found what the service manager kept", packs=len(holdings.packs))
    else:
        holdings.group, holdings.journal = _new_group(root)
    return holdings, False


def _forget(options: NodeOptions, held: Collection[str]) -> None:
    """Have the service manager let go of what was dropped while nobody could tell it so: it would keep the space."""
    manager = ServiceManager(options.notify_socket) if options.notify_socket else None
    for name, fd in options.listen_fds:
        os.close(fd)  # those that are held have been handed over
        if manager is not None and name not in held:
            manager.remove(name)


def _locked(path: str) -> int | None:
    """The lock of a run directory; None if somebody has it. A service that ends removes it while it holds it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(lock)
            return None
        os.close(lock)


def _new_group(root: str) -> tuple[int | None, int | None]:
    """A fanotify group and its journal, where lazy loading by fanotify works."""
    from overlay.lazy import fanotify
    from overlay.lazy.choice import fanotify_works
    from overlay.lazy.journal import Journal

    why = fanotify_works(root)
    if why is not None:
        log("no lazy loading by fanotify", why=why)
        return None, None
    return fanotify.init(), Journal.create().fd


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as stream:
            stream.write(text)
    except OSError:
        pass  # nice to have


def raise_descriptor_limit() -> None:
    with open("/proc/sys/fs/nr_open", encoding="ascii") as stream:
        most = min(int(stream.read()), _DESCRIPTORS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), max(hard, most)))
    except ValueError:  # without CAP_SYS_RESOURCE the hard limit stands
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _continue(arguments: Sequence[str]) -> None:
    """Be a holder that a worker started from what it held."""
    with open(int(arguments[0]), encoding="ascii") as stream:
        stream.seek(0)
        document = json.load(stream)
    holdings = Holdings(*document["own"])
    for hex, data, frames, fronts in document["packs"]:
        holdings.packs[hex] = (data, frames)
        holdings.fronts[hex] = set(fronts)
    options = NodeOptions.from_json(document["options"])
    root = document["root"]
    directory = run_directory(root)
    roles = Roles(root, directory, options)
    roles.begin(HOLDER)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        holder = Holder(directory, holdings, roles, log)
    except ConflictError:
        return  # the keeper lives, and was faster
    holder.run(found=True)


if __name__ == "__main__":
    _continue(sys.argv[1:])
